"""Whether an output is right: row rules, suites, the gate before a publish. Nothing is in here yet."""
