"""A running stream: the query, one batch's way into the tables, failures and restarts. Read `batch.py` first."""
