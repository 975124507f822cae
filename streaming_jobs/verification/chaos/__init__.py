"""Real streams on a real broker, killed again and again, and verified all the while. Read `kill_loop.py` first."""
