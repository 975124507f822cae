"""Operations on tables and state: staging, replay, audit, publish, or continuing without them. Read `publish.py` first.

context.py       a recovery that is being carried out, and one of its streams
staging.py       the folders and staging tables of a replay
replay.py        an ordinary session on them
replay_end.py    the moment of the replay that is compared: the end of the published tables
bounded.py       the end of a bounded recovery: later rows are added to the rebuilt ones
audit.py         the difference between rebuilt and published rows
audit_checks.py  the checks that rebuilt rows have to pass
publish.py       fence, and the one commit per table that replaces the rows
reopen.py        continuing without a replay: abort, and skipping ahead
"""
