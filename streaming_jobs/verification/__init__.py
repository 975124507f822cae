"""Proof that the tables hold every record exactly once, with a verifier that shares no code with what writes them.

Open `verifier.py` first: it reads tables, topics and the record of each stream. `chaos/` kills streams, and
reads every version of their tables meanwhile.
"""
