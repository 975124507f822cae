"""From a request to a plan: targets, history, bad rows, and where a replay starts. Read `planner.py` first.

planner.py        from requests to a plan
targets.py        from a target to offsets, and to the end of a batch
offsets_text.py   offsets in text form
history.py        the batches of a stream, over all of its generations
snapshot.py       the state of a stream at planning
offline.py        the same without a broker
until.py          the end of a bounded recovery
sliceable.py      tables of which a slice can be rebuilt alone
slices_instead.py the command that rebuilds slices in place of a bounded recovery
first_bad_row.py  the batch that made the first bad row, and the code that wrote it
conditions.py     SQL conditions on rows
replay_start.py   the start of a replay: a savepoint, or the very start
"""
