"""A running stream: the query, the path of a batch into the tables, failures and restarts. Read `batch.py` first."""
