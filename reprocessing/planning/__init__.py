"""From a request to a plan: targets, history, bad rows, and where a replay starts. Read `planner.py` first.

planner.py        from requests to a plan
targets.py        targets become offsets, and the end of a batch
offsets_text.py   offsets as people write them
history.py        the batches of a stream, over all of its generations
snapshot.py       a stream as planning finds it
offline.py        the same where no broker answers
first_bad_row.py  the batch that made the first bad row, and the code that wrote it
conditions.py     questions about rows, in SQL
replay_start.py   where a replay starts: a savepoint, or the very start
"""
