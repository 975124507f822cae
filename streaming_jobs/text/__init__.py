"""Text for people and engines: names, durations, SQL, SVG, advised commands. Read `spelling.py` first."""
