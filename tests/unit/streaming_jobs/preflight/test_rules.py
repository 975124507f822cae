"""Preflight's verdicts, each on a snapshot taken after something happened to checkpoint, tables or topic.

The tables below read: what had happened, the snapshot after it, what the finding says, and the next step.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from streaming_jobs.ledger.entry import LedgerEntry, Txn
from streaming_jobs.ledger.positions import OffsetRange
from streaming_jobs.preflight.rules import check_start
from streaming_jobs.preflight.snapshot import CheckpointSnapshot, StreamSnapshot
from streaming_jobs.state.stream_record import Accepted, BoundTable, Generation
from tests.support.worlds import (
    ASIDE,
    DEAD_LETTERS,
    DELETES,
    PRIMARY,
    RECORDS,
    SECONDARY,
    TOPIC,
    checkpoint_world,
    crashed,
    crashed_first,
    ends,
    entry,
    foreign,
    fresh,
    opened,
    quarantining,
    record,
    remembering,
    settled,
    topic_world,
    with_table,
    with_topic,
)

DAY_MS = 86_400_000


def fence(generation: int, plan: str) -> LedgerEntry:
    return replace(entry(-1), kind="fence", generation=generation, plan=plan)


def without_letters_in_ledger(snapshot: StreamSnapshot) -> StreamSnapshot:
    """As written before the dead letters' table was made."""
    primary = next(t.entry for t in snapshot.tables if t.name == PRIMARY)
    assert primary is not None
    listed = {name: version for name, version in primary.txns.items() if name != DEAD_LETTERS}
    return with_table(snapshot, PRIMARY, entry=replace(primary, txns=listed))


SOUND = {
    "the first start": fresh(),
    "stopped before the first record came": opened(),
    "a clean restart after the first batch": settled(0),
    "a clean restart": settled(7),
    "a record saved and no table made": replace(fresh(), record=record(tables=(), topics=())),
    "killed in the first batch before any table had it": crashed_first(secondary=-1, primary=-1),
    "killed in the first batch after a secondary table had it": crashed_first(secondary=0, primary=-1),
    "killed in the first batch after all tables had it": with_table(
        crashed_first(secondary=0, primary=0), DEAD_LETTERS, txn=Txn(1, 0)
    ),
    "killed before any table had the batch": crashed(8, secondary=7, primary=7),
    "killed after a secondary table had it": crashed(8, secondary=8, primary=7),
    "killed between the tables' commits and commits/N": crashed(8, secondary=8, primary=8),
    "killed after a secondary table that had no rows in it": with_table(
        crashed(8, secondary=7, primary=8),
        PRIMARY,
        entry=entry(8, txns={SECONDARY: Txn(1, 7).version, DEAD_LETTERS: Txn(1, 0).version}),
    ),
    "dead letters came in the batch that was under way": with_table(
        crashed(8, secondary=8, primary=7), DEAD_LETTERS, txn=Txn(1, 8)
    ),
    "files rewritten by hand with the same rows": settled(7),  # OPTIMIZE changes no data: no foreign commit is listed
    "a foreign commit that a person accepted": replace(
        with_table(settled(7), PRIMARY, foreign=(foreign(12, "DELETE"),)),
        record=record(accepted=(Accepted(PRIMARY, 12, "the wrong rows of May", 1.7e9),)),
    ),
    "the topic was truncated up to the position": with_topic(settled(7), earliest=ends(7)[TOPIC]),
    "the topic was truncated inside a batch that the tables have already": with_topic(
        crashed(8, secondary=8, primary=8), earliest={0: 85, 1: 40}
    ),
    "a partition is new in the batch under way": with_topic(
        replace(
            crashed(8, secondary=7, primary=7),
            checkpoint=replace(checkpoint_world(8, 7), ends={7: ends(7), 8: {TOPIC: {**ends(8)[TOPIC], 2: 9}}}),
        ),
        earliest={0: 0, 1: 0, 2: 0},
        latest={0: RECORDS, 1: RECORDS, 2: 9},
    ),
    "everything was read": with_topic(settled(7), latest=ends(7)[TOPIC]),
    "the topic grew a partition": with_topic(
        settled(7), earliest={0: 0, 1: 0, 2: 0}, latest={0: RECORDS, 1: RECORDS, 2: 9}
    ),
    "another topic is declared before the first batch": with_topic(opened(), name="others"),
    "a topic that keeps records for ever": with_topic(settled(7), retention_ms=-1),
    "a topic that keeps records for twenty years": with_topic(settled(7), retention_ms=20 * 365 * DAY_MS),
    "the newest entry was published by a recovery": with_table(
        settled(7), PRIMARY, entry=replace(entry(7), kind="publish", plan="p1")
    ),
}


SOUND |= {
    "deletes are remembered from now on": remembering(settled(7), None, listed=False, bound=False),
    "killed after the table that remembers deletes was made": remembering(
        settled(7), Txn(1, -1), listed=False, bound=False
    ),
    "no batch has listed the table that remembers deletes": remembering(
        settled(7), Txn(1, -1), listed=False, bound=True
    ),
    "deletes were remembered some batches ago": remembering(settled(7), Txn(1, 5), listed=True, bound=True),
    "killed between what is remembered and the table": remembering(
        crashed(8, secondary=8, primary=7), Txn(1, 8), listed=False, bound=True
    ),
    "rows are set aside from now on": quarantining(settled(7), None, listed=False, bound=False),
    "killed after the quarantine was made": quarantining(settled(7), Txn(1, -1), listed=False, bound=False),
    "rows were set aside some batches ago": quarantining(settled(7), Txn(1, 5), listed=True, bound=True),
    "killed between the quarantine and the table": quarantining(
        crashed(8, secondary=8, primary=7), Txn(1, 8), listed=False, bound=True
    ),
}


@pytest.mark.parametrize("snapshot", SOUND.values(), ids=SOUND.keys())
def test_a_start_is_allowed_after(snapshot: StreamSnapshot) -> None:
    assert check_start(snapshot) == []


Verdict = tuple[StreamSnapshot, str, str]
"""The snapshot, what is found in it, and the next step."""

REFUSED: dict[str, Verdict] = {
    # checkpoint against tables
    "the checkpoint was deleted": (
        replace(settled(7), checkpoint=CheckpointSnapshot()),
        f"table {PRIMARY} has batch 7, the checkpoint has no batch: the checkpoint is missing or an old copy",
        "put the checkpoint folder back",
    ),
    "an old copy of the checkpoint was put back": (
        replace(settled(7), checkpoint=checkpoint_world(4, 4)),
        f"table {PRIMARY} has batch 7, the checkpoint has batch 4: the checkpoint is missing or an old copy",
        "put the checkpoint folder back",
    ),
    "an old copy of the checkpoint, taken inside a batch, was put back": (
        replace(settled(7), checkpoint=checkpoint_world(5, 4)),
        f"table {PRIMARY} has batch 7, the checkpoint has batch 4",
        "put the checkpoint folder back",
    ),
    "the whole state folder was put back from an old copy": (
        replace(settled(7), record=None, checkpoint=CheckpointSnapshot()),
        f"table {PRIMARY} holds rows of stream parity up to g0001 batch 7, but the stream's record is gone",
        "put the checkpoint folder back",
    ),
    "the record and the tables were moved away and the checkpoint was not": (
        replace(fresh(), checkpoint=checkpoint_world(7, 7)),
        "the checkpoint of stream parity is at batch 7, but its record is gone",
        "put the checkpoint folder back",
    ),
    "the table was put back from an old copy": (
        with_table(settled(7), PRIMARY, txn=Txn(1, 5), entry=entry(5)),
        f"table {PRIMARY} has batch 5, the checkpoint has batch 7: the table was put back to an older version",
        "put the table back",
    ),
    "the table lost all its batches": (
        with_table(settled(7), PRIMARY, txn=Txn(1, -1), entry=None),
        f"table {PRIMARY} has no batch, the checkpoint has batch 7",
        "put the table back",
    ),
    "the checkpoint is from another copy, at the same batch": (
        with_table(
            settled(7),
            PRIMARY,
            entry=entry(7, offsets=(OffsetRange(TOPIC, "id", ends(6)[TOPIC], {0: 99, 1: 44}),)),
        ),
        "checkpoint and table do not come from the same copy",
        "put the checkpoint folder back",
    ),
    # secondary tables
    "a secondary table was put back from an old copy": (
        with_table(settled(7), SECONDARY, txn=Txn(1, 6), entry=entry(6, SECONDARY)),
        f"table {SECONDARY} is at g0001 batch 6, but table {PRIMARY} says it should be at g0001 batch 7",
        f"put table {SECONDARY} back",
    ),
    "a secondary table is further than the primary without a batch under way": (
        with_table(settled(7), SECONDARY, txn=Txn(1, 8), entry=entry(8, SECONDARY)),
        f"table {SECONDARY} is at g0001 batch 8, but table {PRIMARY} says it should be at g0001 batch 7",
        f"put table {SECONDARY} back",
    ),
    "a secondary table lost the batch under way that the primary has": (
        crashed(8, secondary=7, primary=8),
        f"table {SECONDARY} is at g0001 batch 7, but table {PRIMARY} says it should be at g0001 batch 8",
        f"put table {SECONDARY} back",
    ),
    "a secondary table has the batch under way, of which the primary knows that it had no rows": (
        with_table(
            crashed(8, secondary=8, primary=8),
            PRIMARY,
            entry=entry(8, txns={SECONDARY: Txn(1, 7).version, DEAD_LETTERS: Txn(1, 0).version}),
        ),
        f"table {SECONDARY} is at g0001 batch 8, but table {PRIMARY} says it should be at g0001 batch 7",
        f"put table {SECONDARY} back",
    ),
    "a secondary table is two batches ahead of the batch under way": (
        crashed(8, secondary=9, primary=7),
        f"table {SECONDARY} is at g0001 batch 9",
        f"put table {SECONDARY} back",
    ),
    "a secondary table lost all its batches": (
        with_table(settled(7), SECONDARY, txn=None, entry=None),
        f"table {SECONDARY} is at no batch, but table {PRIMARY} says it should be at g0001 batch 7",
        f"put table {SECONDARY} back",
    ),
    "a secondary table has rows that no batch of the primary lists": (
        without_letters_in_ledger(settled(7)),
        f"table {DEAD_LETTERS} is at g0001 batch 0, but table {PRIMARY} says it should be at no batch",
        f"put table {DEAD_LETTERS} back",
    ),
    # rows that somebody else changed
    "the table was restored by hand, which keeps its transaction": (
        with_table(settled(7), PRIMARY, foreign=(foreign(12, "RESTORE"),)),
        f"version 12 of table {PRIMARY} (RESTORE) changed rows and was not written by stream parity",
        f"recourse streams accept parity --table {PRIMARY} --version 12",
    ),
    "rows were deleted by hand": (
        with_table(settled(7), SECONDARY, foreign=(foreign(9, "DELETE"),)),
        f"version 9 of table {SECONDARY} (DELETE) changed rows",
        f"recourse streams accept parity --table {SECONDARY} --version 9",
    ),
    "somebody appended rows": (
        with_table(settled(7), PRIMARY, foreign=(foreign(9, "WRITE"),)),
        f"version 9 of table {PRIMARY} (WRITE) changed rows",
        "recourse streams accept",
    ),
    "a commit without an operation changed rows": (
        with_table(settled(7), PRIMARY, foreign=(foreign(9, ""),)),
        "(unknown operation) changed rows",
        "recourse streams accept",
    ),
    "another version than the accepted one changed rows": (
        replace(
            with_table(settled(7), PRIMARY, foreign=(foreign(13, "DELETE"),)),
            record=record(accepted=(Accepted(PRIMARY, 12, "why", 1.7e9),)),
        ),
        "version 13",
        "--version 13",
    ),
    "the accepted version is of another table": (
        replace(
            with_table(settled(7), PRIMARY, foreign=(foreign(12, "DELETE"),)),
            record=record(accepted=(Accepted(SECONDARY, 12, "why", 1.7e9),)),
        ),
        "version 12",
        "--version 12",
    ),
    "the table's log was cut off after the newest entry": (
        with_table(settled(7), PRIMARY, log_reaches_entry=False),
        f"the log of table {PRIMARY} no longer shows what happened since the stream's last batch",
        "put the table back from a copy that still has its log",
    ),
    # which tables
    "the table is gone": (
        with_table(settled(7), SECONDARY, table_id=None, owner=None, txn=None, entry=None),
        f"table {SECONDARY} is gone",
        "put it back from a copy",
    ),
    "another table lies under the name": (
        with_table(settled(7), SECONDARY, table_id="another"),
        f"table {SECONDARY} is another table than the one stream parity filled",
        "put it back",
    ),
    "the table belongs to another stream": (
        with_table(fresh(), PRIMARY, table_id="theirs", owner="orders"),
        f"table {PRIMARY} belongs to stream orders, so stream parity may not write it",
        "name another table",
    ),
    "the table was made by somebody else": (
        with_table(fresh(), PRIMARY, table_id="theirs"),
        f"table {PRIMARY} was not made by Recourse",
        "name another table",
    ),
    "a sink was taken out of the declaration": (
        replace(settled(7), tables=tuple(t for t in settled(7).tables if t.name != SECONDARY)),
        f"stream parity no longer writes table {SECONDARY}",
        "declare the sink again",
    ),
    "a sink was added to the declaration": (
        replace(settled(7), record=record(tables=tuple(t for t in record().tables if t.name != DEAD_LETTERS))),
        f"stream parity would begin to write table {DEAD_LETTERS} after its first start",
        "declare it as a sink of a new stream",
    ),
    "what is remembered of deletes was put back to an older version": (
        with_table(remembering(settled(7), Txn(1, 6), listed=True, bound=True), DELETES, txn=Txn(1, 5)),
        f"table {DELETES} is at",
        f"put table {DELETES} back",
    ),
    "what is remembered of deletes is gone": (
        remembering(settled(7), None, listed=False, bound=True),
        f"table {DELETES} is gone",
        "put it back from a copy",
    ),
    "a table no longer says in which order its deletes count": (
        replace(settled(7), record=record(tables=(*record().tables, BoundTable(DELETES, "kept", "deletes")))),
        f"stream parity no longer writes table {DELETES}",
        "declare order_by and delete_when of its sink again",
    ),
    "the quarantine was put back to an older version": (
        with_table(quarantining(settled(7), Txn(1, 6), listed=True, bound=True), ASIDE, txn=Txn(1, 5)),
        f"table {ASIDE} is at",
        f"put table {ASIDE} back",
    ),
    "the last rule that sets rows aside was taken out": (
        replace(settled(7), record=record(tables=(*record().tables, BoundTable(ASIDE, "kept", "quarantine")))),
        f"stream parity no longer writes table {ASIDE}",
        "one that sets no row aside is Holds('true', on_fail='quarantine')",
    ),
    "late records are kept no longer": (
        replace(settled(7), record=record(tables=(*record().tables, BoundTable(f"{PRIMARY}_late", "kept", "late")))),
        f"stream parity no longer writes table {PRIMARY}_late",
        "declare late_rows='keep' of its sink again",
    ),
    # generations
    "a recovery has fenced the table and is not done": (
        with_table(settled(7), PRIMARY, txn=Txn(2, -1), entry=fence(2, "r17")),
        f"table {PRIMARY} is fenced by the recovery plan r17",
        "recourse recover resume r17",
    ),
    "the table is in a newer generation than the state": (
        with_table(settled(7), PRIMARY, txn=Txn(2, 9), entry=replace(entry(9), generation=2)),
        f"table {PRIMARY} is in generation 2, the stream's state in 1: the state folder is an old copy",
        "put the checkpoint folder back",
    ),
    # the topic
    "a topic was renamed in the declaration": (
        with_topic(settled(7), name="others"),
        f"stream parity no longer reads topic {TOPIC}",
        "declare it again, or make it a new stream",
    ),
    "a topic was taken out of the declaration": (
        replace(settled(7), topics=()),
        f"stream parity no longer reads topic {TOPIC}",
        "declare it again, or make it a new stream",
    ),
    "a topic was added to the declaration": (
        replace(settled(7), topics=(*settled(7).topics, topic_world(name="others"))),
        "stream parity would begin to read topic others after its first batch",
        "make it a new stream",
    ),
}

UNKNOWN: dict[str, Verdict] = {
    "the topic was deleted": (
        with_topic(settled(7), topic_id=None, earliest={}, latest={}),
        f"topic {TOPIC}, which stream parity has read, does not exist",
        "check that kafka.bootstrap_servers names the right cluster",
    ),
}

LOST: dict[str, Verdict] = {
    "the topic was made anew with more records than the position": (
        with_topic(settled(7), topic_id="new"),
        f"topic {TOPIC} was deleted and made anew: everything after offsets 0:80, 1:40 of the old topic",
        "on the new topic, start the stream over: move its state folder",
    ),
    "the topic was made anew with fewer records than the position": (
        with_topic(settled(7), topic_id="new", latest={0: 3, 1: 0}),
        "was deleted and made anew",
        "on the new topic, start the stream over: move its state folder",
    ),
    "the topic was made anew before the first batch": (
        with_topic(opened(), topic_id="new"),
        "everything after offsets 0:0, 1:0 of the old topic",
        "on the new topic, start the stream over: move its state folder",
    ),
    "the topic was truncated past the position": (
        with_topic(settled(7), earliest={0: 95, 1: 0}),
        f"offsets 80 to 94 of topic {TOPIC}, partition 0, are gone (15 records never read)",
        "bring them back from a copy of the topic",
    ),
    "the topic was truncated inside the batch under way": (
        with_topic(crashed(8, secondary=7, primary=7), earliest={0: 81, 1: 0}),
        f"offsets 80 to 80 of topic {TOPIC}, partition 0, are gone (1 record never read)",
        "bring them back from a copy of the topic",
    ),
    "the topic was truncated past a batch that the tables have already": (
        with_topic(crashed(8, secondary=8, primary=8), earliest={0: 91, 1: 0}),
        f"offsets 90 to 90 of topic {TOPIC}, partition 0, are gone",
        "bring them back from a copy of the topic",
    ),
    "a partition that is new in the batch under way is gone": (
        replace(
            crashed(8, secondary=7, primary=7),
            checkpoint=replace(checkpoint_world(8, 7), ends={7: ends(7), 8: {TOPIC: {**ends(8)[TOPIC], 2: 9}}}),
        ),
        f"partition 2 of topic {TOPIC} is gone",
        "start the stream over",
    ),
    "the topic ends before the position": (
        with_topic(settled(7), latest={0: 75, 1: RECORDS}),
        f"topic {TOPIC}, partition 0, ends at offset 75, the stream is at 80: offsets 75 to 79 are gone",
        "put the topic back",
    ),
    "the topic ends inside the batch under way": (
        with_topic(crashed(8, secondary=7, primary=7), latest={0: 85, 1: RECORDS}),
        f"topic {TOPIC}, partition 0, ends at offset 85, the stream is at 90: offsets 85 to 89 are gone",
        "put the topic back",
    ),
    "a partition is gone": (
        with_topic(settled(7), earliest={0: 0}, latest={0: RECORDS}),
        f"partition 1 of topic {TOPIC} is gone",
        "start the stream over",
    ),
}

WARNED: dict[str, Verdict] = {
    "the topic keeps records for a week by their own time": (
        with_topic(settled(7), retention_ms=7 * DAY_MS),
        f"topic {TOPIC} keeps records for 7 days counted from the time each record carries",
        "set retention.ms=-1",
    ),
    "the topic keeps nothing": (
        with_topic(fresh(), retention_ms=0),
        f"topic {TOPIC} keeps records for 0 ms",
        "set retention.ms=-1",
    ),
}


VERDICTS = {
    name: (severity, *verdict)
    for severity, verdicts in {"refuse": REFUSED, "unknown": UNKNOWN, "lost": LOST, "warn": WARNED}.items()
    for name, verdict in verdicts.items()
}


@pytest.mark.parametrize(("severity", "snapshot", "expected", "step"), VERDICTS.values(), ids=VERDICTS)
def test_preflight_says_what_it_found_when(severity: str, snapshot: StreamSnapshot, expected: str, step: str) -> None:
    findings = check_start(snapshot)
    assert any(f.severity == severity and expected in f.found and step in f.next_step for f in findings), findings
    assert {f.severity for f in findings} == {severity}
    assert all(f.found and f.next_step for f in findings)


def test_a_second_generation_counts_its_batches_anew() -> None:
    second = record(generations=(Generation(1, 1.0, "first start"), Generation(2, 2.0, "recovery r1")))
    snapshot = replace(with_topic(opened()), record=second)
    for table in snapshot.tables:
        newest = replace(entry(99), kind="publish", generation=2, batch=-1, txns={}) if table.name == PRIMARY else None
        snapshot = with_table(snapshot, table.name, txn=Txn(2, -1), entry=newest)
    assert check_start(snapshot) == []
    assert check_start(replace(snapshot, checkpoint=checkpoint_world(0, 0))) != []
