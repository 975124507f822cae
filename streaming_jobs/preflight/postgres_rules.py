"""The rules by which the tables of PostgreSQL that a stream writes must agree with its checkpoint and primary table.

1. A table belongs to this stream, by its row in the ledger.
2. Table and row are there, once the stream has begun: without the row a batch may be written twice.
3. The row is at the batch that the primary's newest entry lists for the table, or at the planned batch: a database that
   was put back from an older copy lacks rows.
4. The stream still writes the tables that it began with.
"""

from __future__ import annotations

from collections.abc import Iterator

from streaming_jobs.declare.postgres_table import LEDGER_TABLE, POSTGRES_SINK
from streaming_jobs.preflight.findings import StartFinding
from streaming_jobs.preflight.snapshot import PostgresSnapshot, StreamSnapshot
from streaming_jobs.preflight.topic_rules import is_possible, listed_at


def postgres_tables(snapshot: StreamSnapshot) -> Iterator[StartFinding]:
    """Findings about the tables of PostgreSQL."""
    for table in snapshot.postgres_tables:
        yield from _table(table, snapshot)
    if snapshot.external_known:
        yield from _no_longer_written(snapshot)


def _table(table: PostgresSnapshot, snapshot: StreamSnapshot) -> Iterator[StartFinding]:
    name, stream, record = table.table, snapshot.stream, snapshot.record
    at = None if table.marker is None else table.marker.txn
    if table.owner is not None and table.owner != stream:
        yield _refuse(
            f"the PostgreSQL table {name} belongs to stream {table.owner}, says {LEDGER_TABLE}",
            f"give stream {stream} a table of its own",
        )
    elif record is None:
        if at is not None and at.batch >= 0:
            yield _refuse(
                f"the PostgreSQL table {name} has rows of stream {stream} up to {at}, but the stream's record is gone",
                f"put the state folder and the tables back from the newest copy; or {write_again(snapshot, table)}",
            )
    elif at is None:
        if snapshot.checkpoint.planned is not None or listed_at(snapshot, table.name) is not None:
            began = listed_at(snapshot, table.name) is not None
            yield _refuse(
                f"{LEDGER_TABLE} has no row of the PostgreSQL table {name}: nobody knows which batches of stream "
                f"{stream} it has",
                f"put the table and its ledger back from one copy; or {write_again(snapshot, table)}"
                if began
                else "declare the table as a sink of a new stream; or take it out of the declaration",
            )
    elif not table.exists and at.batch >= 0:
        yield _refuse(
            f"the PostgreSQL table {name} is gone, and {LEDGER_TABLE} has it at {at}",
            f"put the table back from the newest copy; or {write_again(snapshot, table)}",
        )
    elif at.generation > record.generation:
        yield _refuse(
            f"the PostgreSQL table {name} is in generation {at.generation}, the stream's state in "
            f"{record.generation}: the state folder is an old copy",
            "put the state folder back from the newest copy",
        )
    elif not is_possible(at, expected := listed_at(snapshot, table.name), record.generation, snapshot.checkpoint):
        yield _refuse(
            f"the PostgreSQL table {name} is at {at}, and the stream's primary table says it should be at "
            f"{expected or 'no batch'}",
            f"put database, tables and state back that belong together; or {write_again(snapshot, table)}",
        )


def _no_longer_written(snapshot: StreamSnapshot) -> Iterator[StartFinding]:
    primary = next((t for t in snapshot.tables if t.role == "primary"), None)
    listed = primary.entry.txns if primary is not None and primary.entry is not None else {}
    for name in sorted(listed.keys() - {table.name for table in snapshot.postgres_tables}):
        if name.startswith(POSTGRES_SINK):
            yield _refuse(
                f"stream {snapshot.stream} no longer writes the PostgreSQL table {name.removeprefix(POSTGRES_SINK)}",
                "declare the sink again as it was, or make it a new stream",
            )


def write_again(snapshot: StreamSnapshot, table: PostgresSnapshot) -> str:
    """The ways to write all rows of a table once more, with their cost."""
    return (
        "declare a new stream with a new table, which reads the topic from its beginning; or rename the table "
        f"{table.table} away, delete its row from {LEDGER_TABLE}, and {snapshot.start_over}"
    )


def _refuse(found: str, next_step: str) -> StartFinding:
    return StartFinding("refuse", found, next_step)
