"""What pytest loads wherever this package is installed: the fixtures for tests of streams. Read `fixtures.py`."""
