"""The timeline of a stream: batches, deploys, sessions, recoveries and savepoints. Read `timeline.py` first.

`batches.py` reads the ledger file, `marks.py` everything else; `bins.py` and `plot.py` draw, `page.py` writes the file.
"""
