"""The folder `<state>/<stream>`: record, checkpoint, savepoints, lease, status. Read `stream_record.py` first."""
