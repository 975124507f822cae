"""Child processes: started, awaited, ended, and ended with us; which process a pid meant. Read `child.py` first."""
