"""What preflight says of the tables of PostgreSQL that a stream writes."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest

from streaming_jobs.ledger.entry import LedgerEntry, Txn
from streaming_jobs.preflight.rules import check_start
from streaming_jobs.preflight.snapshot import PostgresSnapshot, StreamSnapshot
from tests.support.worlds import PRIMARY, STREAM, fresh, settled, with_table
from tests.unit.streaming_jobs.preflight.test_topic_sinks import BEHIND_OR_LEVEL

NAME, TABLE = "postgres:orders", "orders"


def marker(batch: int, generation: int = 1) -> LedgerEntry:
    return LedgerEntry("batch", STREAM, NAME, generation, batch)


def writing(snapshot: StreamSnapshot, at: LedgerEntry | None, listed: Txn | None, **changes: Any) -> StreamSnapshot:
    """The snapshot of a stream that writes such a table too: its ledger's row, and what the primary's entry lists."""
    owner = None if at is None else STREAM
    sink = replace(PostgresSnapshot(NAME, TABLE, at is not None, at, owner), **changes)
    made = replace(snapshot, postgres_tables=(sink,), external_known=True)
    newest = next(t.entry for t in made.tables if t.name == PRIMARY)
    if newest is None or listed is None:
        return made
    return with_table(made, PRIMARY, entry=replace(newest, txns={**newest.txns, NAME: listed.version}))


@pytest.mark.parametrize(("snapshot", "at", "listed"), BEHIND_OR_LEVEL)
def test_a_ledger_where_it_should_be_lets_the_stream_start(
    snapshot: StreamSnapshot, at: int | None, listed: Txn | None
) -> None:
    assert check_start(writing(snapshot, None if at is None else marker(at), listed)) == []


@pytest.mark.parametrize(
    ("snapshot", "text"),
    [
        (writing(settled(7), marker(7), Txn(1, 7), owner="other"), "belongs to stream other"),
        (writing(settled(7), marker(5), Txn(1, 7)), "is at g0001 batch 5, .* should be at g0001 batch 7"),
        (writing(settled(7), marker(9), Txn(1, 7)), "is at g0001 batch 9"),
        (writing(settled(7), marker(7, 2), Txn(1, 7)), "in generation 2, the stream's state in 1"),
        (writing(settled(7), None, Txn(1, 7)), "recourse_ledger has no row of the PostgreSQL table orders"),
        (writing(settled(7), None, None), "has no row"),
        (writing(settled(7), marker(7), Txn(1, 7), exists=False), "table orders is gone"),
        (writing(fresh(), marker(3), None), "the stream's record is gone"),
        (replace(writing(settled(7), marker(7), Txn(1, 7)), postgres_tables=()), "no longer writes the PostgreSQL"),
    ],
)  # fmt: skip
def test_a_table_that_does_not_belong_to_the_state_is_refused_with_a_way_out(
    snapshot: StreamSnapshot, text: str
) -> None:

    (finding,) = check_start(snapshot)
    assert (finding.severity, re.search(text, finding.found) is not None) == ("refuse", True), finding.found
    assert finding.next_step


def test_a_replay_looks_at_no_table() -> None:
    gone = replace(writing(settled(7), marker(7), Txn(1, 7)), postgres_tables=(), external_known=False)
    assert check_start(gone) == []
