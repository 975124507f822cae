"""Puts streams right: plan, rebuild beside the old output, check, publish. Read `plan.py` first.

history.py    what the stream has done, batch by batch, over all of its generations
targets.py    where to rewind to: from a time, offsets, a savepoint, a bad row ... to the end of one batch
first_bad_row.py  the batch that made the first bad row, and the code that wrote it
conditions.py what people ask of rows, in SQL, and what is wrong with a condition
snapshot.py   a stream as planning finds it
offline.py    the same where no broker answers
plan.py       the frozen plan of one or more streams, and what planning saw of each
plan_file.py  plans on disk
planner.py    from requests to a plan
replay_start.py  where a replay starts: a savepoint, or the very start
explainer.py  the plan in words, read off the stages
stages/       what applying a plan does, one small class per stage; executor and explainer walk the same list
staging.py    the folders and staging tables that a replay works on
replay.py     an ordinary session on them
replay_end.py the moment of the replay that is compared: where the published tables end
audit.py      rules, and the difference between rebuilt and published rows
publish.py    fence, and the one commit per table that replaces the rows
reopen.py     going on without a replay: abort, and skipping ahead
executor.py   apply, resume and abort; the journal says how far it came
undo.py       the plan that takes a published one back
report.py     the outcome, as a page
"""
