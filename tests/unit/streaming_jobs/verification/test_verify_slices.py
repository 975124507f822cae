"""The verifier on tables of which slices were rebuilt: nothing wrong is told, and what is wrong still is."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from deltalake import DeltaTable

from streaming_jobs.ledger.entry import CodeVersion, LedgerEntry
from streaming_jobs.runtime.slice_commits import carry_out
from streaming_jobs.sinks.delta.log import noted
from streaming_jobs.sinks.tables import open_tables
from streaming_jobs.verification.subject import Comparison, StreamTable, Subject
from streaming_jobs.verification.topic import CommittedPartition, CommittedTopic
from streaming_jobs.verification.verification import subject_of
from streaming_jobs.verification.verifier import StreamVerdict, verify
from tests.support.days import HOURS, TOPIC_ID, Days, declared
from tests.unit.reprocessing.slices.test_late import LateDays

pytestmark = pytest.mark.slow

BATCHES = 5


@pytest.fixture
def life(tmp_path: Path) -> Days:
    return Days.of(tmp_path, BATCHES)


def judged(life: Days) -> StreamVerdict:
    subject = Subject("days", "days", "days", tables=(StreamTable("days", "written", ()),))
    content = CommittedPartition(0, HOURS * BATCHES, np.arange(HOURS * BATCHES))
    topics = {"days": CommittedTopic("days", TOPIC_ID, {0: content})}
    return verify((subject,), life.settings.tables, topics, state=life.settings.state).streams[0]


def row_counts(verdict: StreamVerdict) -> Comparison:
    return next(one for one in verdict.comparisons if one.what == "row counts")


def rebuild(life: Days, name: str, day: int, **entry: Any) -> None:
    request = life.rebuilt(name, day, 77)
    life.requests.ask(replace(request, entry=replace(request.ledger, **entry).encode()))
    carry_out(life.requests, open_tables(life.settings, life.stream))


def test_a_rebuilt_slice_is_no_fault_and_its_rows_are_counted(life: Days) -> None:
    rebuild(life, "a", 2)
    rebuild(life, "b", 9)  # a day that had no rows
    verdict = judged(life)
    assert not verdict.faults and not verdict.lost and not verdict.doubled
    assert row_counts(verdict).verdict == "ok" and "with 2 rebuilt slices" in row_counts(verdict).text


def test_rows_that_no_slice_explains_are_wrong(life: Days) -> None:
    rebuild(life, "a", 2)
    entry = LedgerEntry("slice", "days", "days", 1, 0, plan="b")
    DeltaTable(life.sink().path).delete("n = 3", commit_properties=noted(entry))
    assert row_counts(judged(life)).verdict == "wrong"


def test_while_a_slice_waits_or_after_a_recovery_rows_are_not_counted(life: Days) -> None:
    life.requests.ask(life.rebuilt("a", 2, 77))
    assert row_counts(judged(life)).verdict == "not compared"
    carry_out(life.requests, open_tables(life.settings, life.stream))
    assert row_counts(judged(life)).verdict == "ok"
    path = life.requests.folder / "a.json"
    value = json.loads(path.read_text())
    older = replace(LedgerEntry.decode(value["entry"]) or life.entry(0), generation=7)
    path.write_text(json.dumps({**value, "entry": older.encode()}))
    assert "before a recovery" in row_counts(judged(life)).text


def test_a_slice_that_moves_the_stream_s_position_is_a_fault(life: Days) -> None:
    rebuild(life, "a", 2)
    log = life.sink().path / "_delta_log"
    newest = max(log.glob("*.json"))
    txn = {"txn": {"appId": "recourse:days:days", "version": 1 << 32 | 9, "lastUpdated": 1}}
    newest.write_text(newest.read_text().rstrip() + "\n" + json.dumps(txn) + "\n")
    assert any("under an entry of kind slice" in str(fault) for fault in judged(life).faults)


def test_slices_of_other_code_are_told_where_records_are_compared(life: Days) -> None:
    from streaming_jobs.verification.state_evidence import by_other_code, rebuilt_slices

    rebuild(life, "a", 2, code=CodeVersion("a", "1"))
    assert not by_other_code(list(rebuilt_slices(life.requests.folder)), {"a"})
    rebuild(life, "b", 3, code=CodeVersion("b", "1"))
    assert by_other_code(list(rebuilt_slices(life.requests.folder)), {"a"})


class CountedLate(LateDays):
    """Batch 3 says that it has kept two late records."""

    def entry(self, batch: int, generation: int = 1) -> LedgerEntry:
        late = {"late": 2, "late:days": 2} if batch == 3 else {}
        made = super().entry(batch, generation)
        return replace(made, rows={**made.rows, **late})


@pytest.mark.parametrize(("offsets", "verdict"), [((80, 81), "ok"), ((80,), "wrong"), ((), "wrong")])
def test_kept_late_records_are_as_many_as_the_entries_say(
    tmp_path: Path, offsets: tuple[int, ...], verdict: str
) -> None:
    stream = declared(late_rows="keep")
    life = CountedLate.of(tmp_path, BATCHES, stream)
    assert isinstance(life, CountedLate)
    if offsets:
        life.keep(3, *((offset, [1]) for offset in offsets))
    tables = tuple(table for table in subject_of(stream).tables if table.name == "days_late")
    subject = Subject("days", "days", "days", tables=tables)
    content = CommittedPartition(0, HOURS * BATCHES, np.arange(HOURS * BATCHES))
    topics = {"days": CommittedTopic("days", TOPIC_ID, {0: content})}
    judged = verify((subject,), life.settings.tables, topics, state=life.settings.state).streams[0]
    assert row_counts(judged).verdict == verdict, row_counts(judged).text
