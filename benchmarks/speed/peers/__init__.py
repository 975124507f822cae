"""The peers that are written in Python, each a program of its own."""
