"""The rules by which checkpoint, tables and topics must agree before every start.

`check_start` is pure: it takes a `StreamSnapshot` (`snapshot.py`) and returns findings. `StartFinding`
says which severities forbid a start: starting would lose, double or mix rows.
The rules:

1. The generation in stream.json is the one in the tables, and no table is behind a fence.
2. The primary table's last batch is the checkpoint's last committed batch, or its last planned one
   (a crash between the table's commit and Spark's); its offsets are the checkpoint's.
3. Every secondary table has the batch that the primary's newest entry lists for it, or the last planned batch.
4. No other writer has changed the rows of a table since our newest entry, unless a person accepted the change.
5. The topics are exactly those that the stream began with, and they still have all records from the stream's
   position on. No recovery that left the stream out has declared void a record that the stream has read.
6. The stream still has the tables that it began with; remembered deletes, quarantines and late records may begin later.
7. The topics that it writes are where the primary table says (`topic_rules.py`).
"""

from __future__ import annotations

from collections.abc import Iterator

from streaming_jobs.ledger.entry import Txn
from streaming_jobs.ledger.positions import ends_of
from streaming_jobs.preflight.findings import StartFinding
from streaming_jobs.preflight.postgres_rules import postgres_tables
from streaming_jobs.preflight.snapshot import StreamSnapshot, TableSnapshot, restore_checkpoint
from streaming_jobs.preflight.topic_rules import topic_findings, topic_sinks
from streaming_jobs.sinks.stored import LATE
from streaming_jobs.text import commands

_DECLARE_AGAIN = {
    "deletes": "declare order_by and delete_when of its sink again: they hold for the table's whole life",
    "quarantine": "declare a rule with on_fail='quarantine' for its table again; one that sets no row aside is "
    "Holds('true', on_fail='quarantine')",
    "late": "declare late_rows='keep' of its sink again: the table has records that no slice may have yet",
}


def check_start(snapshot: StreamSnapshot) -> list[StartFinding]:
    """All findings about a snapshot; an empty list means that the stream may start."""
    return [
        *_unrecorded(snapshot),
        *other_tables(snapshot),
        *_generations(snapshot),
        *_positions(snapshot),
        *_foreign(snapshot),
        *topic_findings(snapshot),
        *topic_sinks(snapshot),
        *postgres_tables(snapshot),
    ]


def _unrecorded(snapshot: StreamSnapshot) -> Iterator[StartFinding]:
    if snapshot.record is not None:
        return
    if snapshot.checkpoint.planned is not None:
        yield StartFinding(
            "refuse",
            f"the checkpoint of stream {snapshot.stream} is at batch {snapshot.checkpoint.planned}, "
            "but its record is gone",
            _restore(snapshot),
        )
    for table in snapshot.tables:
        if table.txn is not None and table.owner == snapshot.stream:  # else an adoption that was undone
            yield StartFinding(
                "refuse",
                f"table {table.name} holds rows of stream {snapshot.stream} up to {table.txn}, "
                "but the stream's record is gone",
                _restore(snapshot),
            )


def other_tables(snapshot: StreamSnapshot) -> Iterator[StartFinding]:
    """Findings for other tables than the record's, and for tables of other streams."""
    for table in snapshot.tables:
        if table.table_id is not None and table.owner != snapshot.stream:
            whose = f"belongs to stream {table.owner}" if table.owner else "was not made by Recourse"
            renamed = f"if {table.owner} was renamed, keep its name: @stream(name='{table.owner}', ...); otherwise "
            yield StartFinding(
                "refuse",
                f"table {table.name} {whose}, so stream {snapshot.stream} may not write it",
                f"{renamed if table.owner else ''}name another table in the stream's sink, or move that table away",
            )
    if snapshot.record is None or not snapshot.record.tables:
        return
    now = {t.name: t.role for t in snapshot.tables}
    before = {t.name: t.role for t in snapshot.record.tables}
    for name in sorted(before.keys() - now.keys()):
        again = _DECLARE_AGAIN.get(before[name], "declare the sink again")
        yield StartFinding("refuse", f"stream {snapshot.stream} no longer writes table {name}", again)
    for name in sorted(now.keys() - before.keys()):
        if now[name] in LATE:
            continue
        yield StartFinding(
            "refuse",
            f"stream {snapshot.stream} would begin to write table {name} after its first start",
            "declare it as a sink of a new stream, which reads the topic from its start",
        )
    for table in snapshot.tables:
        bound = snapshot.record.table(table.name)
        if bound is None:
            continue
        if table.table_id is None:
            yield StartFinding(
                "refuse",
                f"table {table.name} is gone",
                f"put it back from a copy; or {snapshot.start_over}",
            )
        elif bound.table_id and table.table_id != bound.table_id:
            yield StartFinding(
                "refuse",
                f"table {table.name} is another table than the one stream {snapshot.stream} filled",
                "put it back",
            )


def _generations(snapshot: StreamSnapshot) -> Iterator[StartFinding]:
    if snapshot.record is None:
        return
    current = snapshot.record.generation
    for table in snapshot.tables:
        if table.txn is None:
            continue
        if table.entry is not None and table.entry.kind == "fence":
            yield StartFinding(
                "refuse",
                f"table {table.name} is fenced by the recovery plan {table.entry.plan}",
                f"finish it: {commands.resume(str(table.entry.plan))}; or give it up: "
                f"{commands.abort(str(table.entry.plan))}",
            )
        elif table.entry is not None and table.entry.kind == "publish" and table.txn.generation > current:
            yield StartFinding(
                "refuse",
                f"the recovery plan {table.entry.plan} has published table {table.name} and is not finished",
                f"finish it: {commands.resume(str(table.entry.plan))}",
            )
        elif table.txn.generation > current:
            yield StartFinding(
                "refuse",
                f"table {table.name} is in generation {table.txn.generation}, the stream's state in {current}: "
                "the state folder is an old copy",
                _restore(snapshot),
            )


def _positions(snapshot: StreamSnapshot) -> Iterator[StartFinding]:
    if snapshot.record is None:
        return
    primary = next(t for t in snapshot.tables if t.role == "primary")
    at = _batch(primary, snapshot.record.generation)
    planned, committed = snapshot.checkpoint.planned, snapshot.checkpoint.committed
    done = -1 if committed is None else committed
    if at not in {done, -1 if planned is None else planned}:
        yield StartFinding("refuse", _disagreement(primary.name, at, done), _remedy(snapshot, at, done))
        return
    if primary.entry is not None and at >= 0 and at in snapshot.checkpoint.ends:
        ledger = ends_of(primary.entry.offsets)
        spark = {topic: dict(ends) for topic, ends in snapshot.checkpoint.ends[at].items()}
        if primary.entry.txn.batch == at and ledger != spark:
            yield StartFinding(
                "refuse",
                f"batch {at} ends at {spark} in the checkpoint and at {ledger} in table {primary.name}: "
                "checkpoint and table do not come from the same copy",
                _restore(snapshot),
            )
    listed = primary.entry.txns if primary.entry else {}
    for table in snapshot.tables:
        if table.role == "primary":
            continue
        expected = Txn.of(listed[table.name]) if table.name in listed else None
        # No batch of the primary has listed the table yet: it may have been made, but has no batch.
        made = expected is None and table.txn == Txn(snapshot.record.generation, -1)
        in_flight = planned is not None and planned > done and at < planned
        if table.txn == expected or made or (in_flight and table.txn == Txn(snapshot.record.generation, planned or 0)):
            continue
        yield StartFinding(
            "refuse",
            f"table {table.name} is at {table.txn or 'no batch'}, but table {primary.name} says it should be at "
            f"{expected or 'no batch'}",
            f"put table {table.name} back to the newest version that it had, or restore all of the stream's tables "
            "and its checkpoint from one copy",
        )


def _batch(table: TableSnapshot, generation: int) -> int:
    return table.txn.batch if table.txn is not None and table.txn.generation == generation else -1


def _disagreement(table: str, at: int, done: int) -> str:
    in_table = f"batch {at}" if at >= 0 else "no batch"
    checkpoint = f"batch {done}" if done >= 0 else "no batch"
    older = "the table was put back to an older version" if at < done else "the checkpoint is missing or an old copy"
    return f"table {table} has {in_table}, the checkpoint has {checkpoint}: {older}"


def _remedy(snapshot: StreamSnapshot, at: int, done: int) -> str:
    if at < done:
        return (
            "put the table back to the version that it had (its log has it), or the checkpoint to a copy of that time"
        )
    return _restore(snapshot)


def _restore(snapshot: StreamSnapshot) -> str:
    return restore_checkpoint(snapshot.stream, snapshot.folders)


def _foreign(snapshot: StreamSnapshot) -> Iterator[StartFinding]:
    accepted = snapshot.record.accepts if snapshot.record else lambda _: frozenset[int]()
    for table in snapshot.tables:
        if table.table_id is not None and table.owner != snapshot.stream:
            continue  # reported once by `other_tables`; every commit in it is foreign
        for commit in table.foreign:
            if commit.version in accepted(table.name):
                continue
            yield StartFinding(
                "refuse",
                f"version {commit.version} of table {table.name} ({commit.operation or 'unknown operation'}) changed "
                f"rows and was not written by stream {snapshot.stream}",
                f"undo it, or if it is right: {commands.accept(snapshot.stream, table.name, commit.version)}",
            )
        if not table.log_reaches_entry:
            yield StartFinding(
                "refuse",
                f"the log of table {table.name} no longer shows what happened since the stream's last batch",
                "put the table back from a copy that still has its log",
            )
