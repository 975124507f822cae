"""Proof that the tables hold every record exactly once, with a verifier that shares no code with what writes them.

Open `verifier.py` first: it reads tables and topics, and nothing of the streams' own state. `version_reader.py`
does the same for every version of a table while the streams run, and `chaos/` kills them meanwhile.
"""
