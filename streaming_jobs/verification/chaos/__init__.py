"""The kill loop: real streams on a real broker, killed repeatedly and verified meanwhile. Read `kill_loop.py` first."""
