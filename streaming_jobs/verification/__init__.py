"""Proof that the tables hold every record exactly once, by a verifier that shares no code with the writers.

Open `verifier.py` first: it reads tables, topics and the record of each stream. `chaos/` kills streams, and
reads every version of their tables meanwhile.
"""
