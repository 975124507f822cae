"""Where bytes lie: files, locks, objects of a store, and locations that are either. Read `locations.py` first."""
