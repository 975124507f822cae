"""Which spans of a table the records of windows belong to, which of them are closed, and what is refused."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reprocessing.redrive import windows as module
from reprocessing.redrive.redrive import checked
from reprocessing.redrive.refusals import refused_rows
from reprocessing.redrive.run import Made
from reprocessing.redrive.windows import (
    DAY,
    Windows,
    closed,
    pieces,
    rebuild_rows,
    rebuild_windows,
    set_aside_again,
    span_of,
)
from reprocessing.slices.rebuild import CheckedLetters, Tools
from reprocessing.slices.spans import MOST_DAYS, TimeSpan
from streaming_jobs import DeltaTable, Holds, Stream
from streaming_jobs.declare.slices import Slices, slice_range
from streaming_jobs.errors import FunctionRaised, OffsetsLost, UsageError
from streaming_jobs.ledger.entry import CodeVersion, LedgerEntry
from streaming_jobs.ledger.positions import OffsetRange
from streaming_jobs.runtime.code_version import loaded_code
from streaming_jobs.runtime.sliceable import Sliceable, sliceable
from streaming_jobs.sinks.redriven import Place
from streaming_jobs.state.change_requests import State
from streaming_jobs.state.slice_requests import SliceCommitRequest
from tests.support.days import BEGIN, TOPIC_ID, Days, declared
from tests.unit.reprocessing.redrive.test_selection import aside

HOURLY = Slices("at", reach="1 hour", zone="America/New_York")


def at(hours: float) -> datetime:
    return BEGIN + timedelta(hours=hours)


def made(slices: Slices = HOURLY) -> Sliceable:
    return sliceable(declared(slices))


def place(offset: int) -> Place:
    return "days", 0, offset


def test_a_record_belongs_to_the_span_that_its_rows_may_have() -> None:
    assert span_of(made(), "timestamp", at(10.5)) == TimeSpan(at(9.5), at(11.5) + timedelta(minutes=1))
    assert span_of(made(Slices("at")), "timestamp", at(10.5)) == TimeSpan(at(10.5), at(10.5) + timedelta(minutes=1))
    midnight = datetime(2013, 3, 2, 5, tzinfo=UTC)
    of_day = TimeSpan(midnight - DAY, midnight)
    assert span_of(made(), "date", midnight - timedelta(hours=2)) == of_day
    assert span_of(made(), "date", midnight - timedelta(hours=1)) == TimeSpan(of_day.begin, midnight + DAY)
    assert span_of(made(), "date", midnight + timedelta(minutes=59)) == TimeSpan(of_day.begin, midnight + DAY)


def test_a_record_waits_until_the_watermark_has_passed_its_windows() -> None:
    times = {place(1): at(10), place(2): at(10.5), place(3): None}
    closes = at(12) + timedelta(minutes=1)
    found = Windows()
    assert set(closed(made(), "timestamp", times, closes, found)) == {place(1)}
    assert found.open == {place(2)} and set(found.left) == {place(2), place(3)}
    assert "open until the watermark, now 2013-03-01 12:01:00Z" in found.left[place(2)]
    assert "2013-03-01 12:31:00Z" in found.left[place(2)] and "null" in found.left[place(3)]
    assert not closed(made(), "timestamp", times, closes - timedelta(seconds=1), Windows())


@given(st.sets(st.integers(0, 20_000), max_size=60), st.sampled_from([("timestamp", "1 hour"), ("date", "3 hours")]))
def test_each_span_is_within_the_piece_that_begins_last_before_it(minutes: set[int], of: tuple[str, str]) -> None:
    spans = [span_of(made(Slices("at", reach=of[1])), of[0], BEGIN + timedelta(minutes=each)) for each in minutes]
    parts = pieces(spans)
    assert parts == sorted(parts) and len(parts) <= len(set(spans))
    for span in spans:
        assert [part for part in parts if part.begin <= span.begin][-1].has(span)
    assert all(part.end - part.begin <= DAY or part in spans for part in parts)


class TableSlices:
    """Slices of tables: those that begin on a `lost` day of a table are refused, the other ones read the offsets."""

    def __init__(self, lost: Collection[tuple[str, int]] = (), first: int = 0, end: int = 1000) -> None:
        self.lost, self.read = lost, OffsetRange("days", TOPIC_ID, {0: first}, {0: end})
        self.rebuilt: dict[str, list[CheckedLetters]] = {}
        self.borders: list[tuple[str, ...]] = []

    def offsets(self, _: Tools, table: Sliceable, *border: str) -> OffsetRange:
        assert not self.rebuilt, "which records fit is known before the first rebuild"
        begin = slice_range(table.slices, "timestamp", *border).begin
        if (table.table.name, (begin - BEGIN).days) in self.lost:
            raise OffsetsLost("offsets are gone")
        return self.read

    def rebuild(self, _: Tools, table: Sliceable, *__: str, letters: CheckedLetters, dry_run: bool) -> Any:
        assert not dry_run
        self.rebuilt.setdefault(table.table.name, []).append(letters)
        return SimpleNamespace(offsets=self.read)

    def rebuild_rows(self, _: Tools, __: Sliceable, *border: str, dry_run: bool) -> Any:
        assert not dry_run
        self.borders.append(border)
        return SimpleNamespace(offsets=self.read)


def rebuilt_by(
    monkeypatch: pytest.MonkeyPatch,
    life: Days,
    times: Mapping[int, datetime],
    slices: TableSlices,
    dead: Collection[int] = (),
    unread: Collection[int] = (),
) -> dict[int, str]:
    """By offset the reasons why records are left, on a stream whose watermark is at the end of time."""
    monkeypatch.setattr(module, "slice_offsets", slices.offsets)
    monkeypatch.setattr(module, "rebuild", slices.rebuild)
    monkeypatch.setattr(module, "passed_watermark", lambda *_: at(10_000))
    monkeypatch.setattr(module, "column_kind", lambda *_: "timestamp")
    of_code = Made(times={"at": {place(offset): each for offset, each in times.items()}})
    tools = Tools(life.settings, None, "", None)  # type: ignore[arg-type]
    tables = [sliceable(life.stream, sink.name) for sink in life.stream.sinks.values()]
    places, others = [place(each) for each in (*times, *dead, *unread)], {place(each) for each in dead}
    found = rebuild_windows(tools, life.record, tables, of_code, places, others, dry_run=False)
    assert len(found.slices) == sum(map(len, slices.rebuilt.values()))
    return {offset: why for (_, _, offset), why in found.left.items()}


def test_records_that_no_rebuild_reads_are_left_with_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Day 0 reads an offset range, day 3 is lost, and a slice every third day from then on is one too many."""
    times = {1: at(1), 9: at(2), 1000: at(3), 20: at(72), 40: at(1)}
    times |= {100 + number: at(72 * (2 + number)) for number in range(MOST_DAYS)}
    slices = TableSlices({("days", 3)}, first=2, end=1000)
    left = rebuilt_by(monkeypatch, Days.of(tmp_path, 3), times, slices, dead={40}, unread={50})
    assert set(left) == {1, 1000, 20, 100 + MOST_DAYS - 1, 50}
    assert "has not read it" in left[50] and "has not read it" in left[1] and "has not read it" in left[1000]
    assert "offsets are gone" in left[20] and "run it again" in left[100 + MOST_DAYS - 1]
    fitting = {9, *(100 + number for number in range(MOST_DAYS - 1))}
    assert slices.rebuilt == {"days": [CheckedLetters({(0, each) for each in fitting}, {(0, 40)})] * MOST_DAYS}


def test_a_record_that_one_table_has_to_leave_is_put_into_no_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    life = Days.of(tmp_path, 1)
    life.stream = replace(life.stream, sinks={**life.stream.sinks, "other": DeltaTable("other", slices=Slices("at"))})
    slices = TableSlices({("other", 3)})
    left = rebuilt_by(monkeypatch, life, {1: at(1), 20: at(72), 30: at(73)}, slices)
    assert set(left) == {20, 30} and "table other is lost" in left[20]
    assert slices.rebuilt == {name: [CheckedLetters({(0, 1)})] for name in ("days", "other")}


def test_the_slices_of_quarantined_rows_are_those_of_their_values(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slices = TableSlices({("days", 3)})
    monkeypatch.setattr(module, "slice_offsets", slices.offsets)
    monkeypatch.setattr(module, "rebuild", slices.rebuild_rows)
    monkeypatch.setattr(module, "passed_watermark", lambda *_: at(1000))
    monkeypatch.setattr(module, "column_kind", lambda *_: "timestamp")
    life = Days.of(tmp_path, 1)
    tools = Tools(life.settings, None, "", None)  # type: ignore[arg-type]
    values = [at(1), None, at(1), at(72), at(2.5).replace(tzinfo=None), at(1000)]
    found = rebuild_rows(tools, life.record, sliceable(life.stream, "days"), values, dry_run=False)
    assert slices.borders == [("2013-03-01T01:00:00+00:00", "2013-03-01T02:31:00+00:00")]
    assert "null" in found.left[1] and "offsets are gone" in found.left[3] and "windows are open" in found.left[5]
    assert set(found.left) == {1, 3, 5} and found.open == {5} and len(found.slices) == 1


def test_rows_that_the_code_of_today_has_set_aside_itself_are_not_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of another code, of an earlier generation, of a later batch, of another slice, or without a value: tried."""
    monkeypatch.setattr(module, "column_kind", lambda *_: "timestamp")
    life = Days.of(tmp_path, 1)
    table, code = sliceable(life.stream, "days"), loaded_code(life.stream, life.settings.flows)

    def known(state: State = "committed", *, by: CodeVersion = code, generation: int = 1) -> set[int]:
        entry = LedgerEntry("slice", "days", "days", generation, 4, code=by, plan="a").encode()
        begin, end = at(1).timestamp(), at(2).timestamp()
        life.requests.end(SliceCommitRequest("a", "days", "days", entry, {}, 0.0, begin=begin, end=end).ended(state))
        values = [(at(1), 1, 4), (at(1.5), 1, 5), (at(2), 1, 4), (None, 1, 4)]
        rows = [replace(aside(None), values={"at": v, "_generation": g, "_batch": b}) for v, g, b in values]
        return set_aside_again(life.settings, life.record, table, rows)

    assert known() == known("unchanged") == {0}
    assert not known("outdated") and not known(by=CodeVersion("other", "1")) and not known(generation=2)


def test_rows_behind_a_rebuild_that_fails_are_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    slices = TableSlices()

    def rebuild(tools: Tools, table: Sliceable, *border: str, **options: Any) -> Any:
        if border[0].startswith(failing):
            raise FunctionRaised("a record raises", "correct it", "a function")
        return slices.rebuild_rows(tools, table, *border, **options)

    monkeypatch.setattr(module, "slice_offsets", slices.offsets)
    monkeypatch.setattr(module, "rebuild", rebuild)
    monkeypatch.setattr(module, "passed_watermark", lambda *_: at(1000))
    monkeypatch.setattr(module, "column_kind", lambda *_: "timestamp")
    life = Days.of(tmp_path, 1)
    tools, table = Tools(life.settings, None, "", None), sliceable(life.stream, "days")  # type: ignore[arg-type]
    values = [at(1), at(72), at(144)]
    failing = f"{at(72):%Y-%m-%d}"
    found = rebuild_rows(tools, life.record, table, values, dry_run=False)
    assert set(found.left) == {1, 2} and "a record raises" in found.left[1]
    assert len(found.slices) == 1
    failing = f"{at(1):%Y-%m-%d}"
    with pytest.raises(FunctionRaised):
        rebuild_rows(tools, life.record, table, values, dry_run=False)


def test_a_slice_reads_letters_that_are_good_now_and_leaves_out_those_that_raise_now() -> None:
    letters = dict.fromkeys([(0, 1), (0, 2)])
    assert set(CheckedLetters().aside(letters)) == {(0, 1), (0, 2)}
    assert set(CheckedLetters({(0, 1)}, {(0, 3)}).aside(letters)) == {(0, 2), (0, 3)}


def test_dead_letters_need_slices_of_all_tables_and_quarantined_rows_those_of_theirs(tmp_path: Path) -> None:
    life = Days.of(tmp_path, 1)
    life.save(replace(life.record, state_fingerprint={"aggregate": "sum"}))
    rules = {name: [Holds("n > 0", on_fail="quarantine")] for name in ("days", "other")}
    two = replace(life.stream, sinks={**life.stream.sinks, "other": DeltaTable("other")}, rules=rules)
    assert checked(life.settings, life.stream, "dead letters").stream == "days"
    assert checked(life.settings, two, "quarantine", table="days").stream == "days"
    with pytest.raises(UsageError, match="keeps state.*table other declares no slices") as refused:
        checked(life.settings, two, "quarantine", table="other")
    assert "recourse recover plan days" in refused.value.next_step
    with pytest.raises(UsageError, match="keeps state.*table other declares no slices") as refused:
        checked(life.settings, two, "dead letters")
    assert "recourse recover plan days --to-batch" in refused.value.next_step


def test_rows_of_windows_that_were_refused_are_left_with_the_command() -> None:
    stream: Stream = replace(declared(HOURLY), rules={"days": [Holds("n > 0")]})
    of_record, of_row = aside(("days", 0, 1)), aside(None, "partition_value")
    ((row, why),) = refused_rows(stream, [of_record, of_row], of_windows=True)
    assert row is of_row and "row of a window" in why and "recourse recover plan days" in why
