"""What a user declares: topics, tables, rules, slices, truths, archives. Read `topic.py` and `table.py` first."""
