"""A stream's files in `<state>/<stream>`: record, checkpoint, savepoints, lease, status. See `stream_record.py`."""
