"""Rows with a verdict, divided in the driver's memory; and the counts that a batch leaves in its ledger entry."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pytest

from streaming_jobs.declare.rules import Between, NotNull, RowRules, Unique
from streaming_jobs.errors import LedgerConflict, RuleBroken
from streaming_jobs.ledger.entry import DROPPED, QUARANTINED, CodeVersion, LedgerEntry, taken_out
from streaming_jobs.runtime.batch_entries import BatchCounts, own_entry, refuse_other_rows
from streaming_jobs.sinks.base import RuleOutcome
from streaming_jobs.sinks.row_rules import BROKEN_COLUMN, RuleEvaluation, evaluate, outcome, refuse, set_aside
from streaming_jobs.state.status import Totals
from streaming_jobs.testing.tables import MemoryTable, MemoryWrite

RULES = RowRules(
    (NotNull("k", on_fail="quarantine"), Between("n", 0, 9, on_fail="drop"), Between("n", 0, 5, name="small"))
)


def rows(*verdicts: int, **columns: list[Any]) -> pa.Table:
    numbers = {"n": list(range(len(verdicts)))}
    return pa.table({**numbers, **columns, BROKEN_COLUMN: pa.array(verdicts, pa.int64())})


def divided(table: pa.Table, rules: RowRules = RULES, exempt: str = "") -> tuple[RuleEvaluation, dict[str, int]]:
    """The rows by what happens to them, and how many break each rule."""
    made = evaluate(table, rules, exempt)
    if made.failing is not None:
        refuse("t", rules, made.failing, made.numbers, ["n"])
    return made, dict(outcome(rules, made.numbers, made.dropped).broken)


def test_rows_without_a_breach_cost_no_copy_and_each_other_goes_one_way_and_is_counted() -> None:
    table = pa.table({"n": [1]})
    assert divided(table)[0].written is table
    made, broken = divided(rows(0, 0))
    assert made.written.column_names == ["n"] and (made.quarantined, made.dropped, broken) == (None, 0, {})
    made, broken = divided(rows(0, 1, 2, 3, 4, 7))
    assert made.written["n"].to_pylist() == [0, 4] and made.dropped == 1
    assert made.quarantined is not None and made.quarantined["n"].to_pylist() == [1, 3, 5]
    assert broken == {"k_not_null": 3, "n_between": 3, "small": 2}


def test_a_rule_that_stops_the_stream_comes_before_all_others() -> None:
    stopping = RowRules((NotNull("k", on_fail="fail"), Between("n", 0, 9, on_fail="quarantine", name="range")))
    with pytest.raises(RuleBroken, match=r"2 rows break k_not_null \(n 1; n 2\)"):
        divided(rows(2, 3, 1), stopping)


@pytest.mark.parametrize(
    ("k", "doubled"), [([1, 1, 2], [0, 1]), ([1, None, None], []), ([1, 2, 3], []), ([1, 1, 1], [0, 1, 2])]
)
def test_unique_breaks_every_row_of_a_value_that_comes_twice(k: list[int | None], doubled: list[int]) -> None:
    made, broken = divided(rows(0, 0, 0, k=k), RowRules((Unique("k", on_fail="quarantine"),)))
    aside = made.quarantined["n"].to_pylist() if made.quarantined is not None else []
    assert aside == doubled and broken == ({"k_unique": len(doubled)} if doubled else {})


def test_deletes_are_no_rows_for_unique() -> None:
    table = rows(0, 0, 0, k=[1, 1, 1], gone=[True, False, False])
    made, _ = divided(table, RowRules((Unique("k", on_fail="drop"),)), "gone")
    assert made.written["n"].to_pylist() == [0] and made.dropped == 2


def test_a_row_that_is_set_aside_says_why_where_and_when() -> None:
    rules = RowRules((NotNull("k", on_fail="quarantine"), Between("n", 0, 9, on_fail="quarantine"), NotNull("n")))
    place = [pa.array(["t", None]), pa.array([3, None], pa.int64()), pa.array([7, None], pa.int64())]
    aside = set_aside(rows(5, 3), rules, (2, 41), place)
    assert aside.column_names == ["n", "_rules", "_reason", "_topic", "_partition", "_offset", "_generation", "_batch"]
    assert [tuple(row.values()) for row in aside.to_pylist()] == [
        (0, ["k_not_null"], "k is null", "t", 3, 7, 2, 41),
        (1, ["k_not_null", "n_between"], "k is null; n is not between 0 and 9", None, None, None, 2, 41),
    ]


def test_the_counts_of_a_batch_are_in_its_entry_and_in_the_totals_and_old_entries_are_read() -> None:
    table = MemoryTable("t")
    pending = MemoryWrite(table, pa.table({"n": [1, 2]}), outcome=RuleOutcome({"a": 3, "b": 1}, dropped=2))
    empty = LedgerEntry("batch", "s", "t", 1, 4)
    counts = BatchCounts()
    counts.of_write("t", "written", pending)
    counts.of_commit(f"{QUARANTINED}t", LedgerEntry("batch", "s", "q", 1, 4, rows={"written": 5}))
    assert counts.rows == {"written": 2, f"{DROPPED}t": 2, f"{QUARANTINED}t": 5}
    entry = own_entry(empty, "t", pending)
    assert (entry.rows, entry.rules) == ({"written": 2, f"{DROPPED}t": 2}, {"t": {"a": 3, "b": 1}})
    again = LedgerEntry.decode(entry.encode())
    assert again is not None and again.rules == entry.rules
    old = LedgerEntry.decode(empty.encode())
    assert old is not None and old.rules == {} and "rules" not in empty.encode()
    whole = LedgerEntry("batch", "s", "t", 1, 4, rows=counts.rows, rules=counts.rules)
    totals = Totals(0.0).plus(whole, 9.0).plus(LedgerEntry("batch", "s", "t", 1, 5, rules={"t": {"a": 1}}), 11.0)
    assert (totals.quarantined, totals.dropped) == (5, 2) and taken_out(whole.rows, DROPPED) == 2
    assert totals.broken == {"t.a": 4, "t.b": 1} and totals.broken_at == {"t.a": 11.0, "t.b": 9.0}
    assert Totals.of({"since": 1.0, "generation": 1, "batch": 2}) is not None, "a status of before there were rules"


def test_a_secondary_table_that_has_the_batch_already_gives_its_own_counts() -> None:
    counts = BatchCounts()
    done = LedgerEntry("batch", "s", "odds", 1, 4, rows={"written": 7, f"{DROPPED}odds": 1}, rules={"odds": {"a": 1}})
    counts.of_commit("odds", done)
    assert (counts.rows, counts.rules) == ({"odds": 7, f"{DROPPED}odds": 1}, {"odds": {"a": 1}})


def test_a_quarantine_that_other_code_left_with_other_rows_is_refused() -> None:
    batch = LedgerEntry("batch", "s", "t", 1, 4, code=CodeVersion("b", "1"))
    done = LedgerEntry("batch", "s", "t_quarantine", 1, 4, rows={"written": 1}, code=CodeVersion("a", "1"))
    one = MemoryWrite(MemoryTable("t_quarantine"), pa.table({"n": [1]}))
    refuse_other_rows(done, one, batch)
    refuse_other_rows(None, one, batch)
    with pytest.raises(LedgerConflict, match="has 1 rows of g0001 batch 4, by code a; by code b they are 0") as refused:
        refuse_other_rows(done, None, batch)
    assert "recover plan s --to-batch 3" in refused.value.next_step
