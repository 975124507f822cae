"""Tables of PostgreSQL as sinks: a batch's rows and its ledger entry in one transaction. Read `output.py` first."""
