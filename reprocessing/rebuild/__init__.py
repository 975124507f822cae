"""The work on tables and state: staging, replay, audit, publish, or going on without them. Read `publish.py` first.

context.py       a recovery that is carried out, and one of its streams
staging.py       the folders and staging tables that a replay works on
replay.py        an ordinary session on them
replay_end.py    the moment of the replay that is compared: where the published tables end
audit.py         the difference between rebuilt and published rows
audit_checks.py  the checks that rebuilt rows have to pass
publish.py       fence, and the one commit per table that replaces the rows
reopen.py        going on without a replay: abort, and skipping ahead
"""
