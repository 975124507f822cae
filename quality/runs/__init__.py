"""One run of a suite: its sample, its table checks, its first failing batch, its page. Read `runner.py`."""
