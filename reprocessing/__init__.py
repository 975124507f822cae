"""How a stream is put right: choose where to rewind to, plan it, rebuild beside the old output, check, publish.

history.py   what the stream has done, batch by batch, over all of its generations
targets.py   where to rewind to: from a time, offsets, a savepoint, a bad row ... to the end of one batch
plan.py      the frozen plan and what it saw
planner.py   from a target to a plan
stages.py    what applying a plan does, one small class a stage; the explainer reads the same list
executor.py  apply, resume, abort; the journal says how far it came
"""
