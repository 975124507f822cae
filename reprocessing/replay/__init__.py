"""One replay beside the stream: shared by recoveries, previews and slices. Read `session.py` first."""
