"""Which days of a table lack late records, and which of them a run rebuilds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from datetime import date, datetime, timedelta
from pathlib import Path

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from reprocessing.slices import late as late_module
from reprocessing.slices.base import OffsetsSkipped
from reprocessing.slices.late import LateDay, kept_late, late_days, rebuild_late, unanswered
from reprocessing.slices.rebuild import Tools
from streaming_jobs.declare.slices import Slices
from streaming_jobs.errors import LeaseBusy, OffsetsLost, RecourseError, UsageError
from streaming_jobs.ledger.entry import LedgerEntry
from streaming_jobs.ledger.positions import OffsetRange
from streaming_jobs.platform.table_rows import dataset
from streaming_jobs.runtime.sliceable import sliceable
from streaming_jobs.sinks.tables import open_tables
from streaming_jobs.state.change_requests import State
from streaming_jobs.state.slice_requests import SliceCommitRequest
from streaming_jobs.state.stream_record import Generation
from tests.support.days import BEGIN, TOPIC_ID, Days, declared, range_of
from tests.support.stream_on_disk import append, lay_offsets

ROWS = pa.schema(
    [
        ("partition", pa.int32()),
        ("offset", pa.int64()),
        ("event_time", pa.timestamp("us", "UTC")),
        ("days", pa.list_(pa.date32())),
    ]
)


class LateDays(Days):
    """The watermark of each batch is the end of its day."""

    def plan(self, batch: int, *, generation: int = 1) -> None:
        at = BEGIN + timedelta(days=batch + 1)
        folder, ms = self.checkpoint(generation).folder, int(at.timestamp() * 1000)
        lay_offsets(folder, batch, self.ends(batch), starts=self.ends(-1), watermark=ms)

    def keep(self, batch: int, *records: tuple[int, Sequence[int]]) -> None:
        """Late records of a batch: the offset of each, and the days that lack it, by their numbers."""
        values = [
            {"partition": 0, "offset": offset, "event_time": of_day(days[0], 9), "days": [day(each) for each in days]}
            for offset, days in records
        ]
        rows = pa.Table.from_pylist(values, ROWS)
        append(self.stored("days_late"), rows, replace(self.entry(batch), table="days_late"))

    def slice(self, name: str, first: int, to: int, end: int, state: State = "committed", generation: int = 1) -> None:
        """A rebuilt slice of the days from one number up to another one, which has read up to an offset."""
        chosen = range_of(first, to)
        read = OffsetRange("days", TOPIC_ID, {0: 0}, {0: end})
        entry = LedgerEntry("slice", "days", "days", generation, 0, (read,), {"before": 1, "after": 1}, plan=name)
        begin, after = chosen.begin.timestamp(), chosen.end.timestamp()
        asked = SliceCommitRequest(name, "days", "days", entry.encode(), {}, 0.0, begin=begin, end=after)
        self.requests.end(asked.ended(state))

    @property
    def lacking(self) -> dict[int, int]:
        """The days that lack late records, by their numbers, and how many each."""
        found = late_days(self.settings, sliceable(self.stream))
        return {(each.day - BEGIN.date()).days: each.records for each in found}


def day(number: int) -> date:
    return BEGIN.date() + timedelta(days=number)


def of_day(number: int, hour: int) -> datetime:
    return BEGIN + timedelta(days=number, hours=hour)


@pytest.fixture
def life(tmp_path: Path) -> LateDays:
    made = LateDays.of(tmp_path, 5, declared(late_rows="keep"))
    assert isinstance(made, LateDays)
    made.keep(3, (80, [1]), (81, [1, 2]))
    made.keep(4, (100, [2]), (110, [4]))
    return made


def test_a_day_is_named_with_its_records_and_whether_it_can_be_rebuilt(life: LateDays) -> None:
    first, second, open_day = late_days(life.settings, sliceable(life.stream))
    assert first == LateDay(day(1), 2, of_day(1, 9), of_day(1, 9), "to rebuild")
    assert (second.day, second.records, second.first, second.last) == (day(2), 2, of_day(1, 9), of_day(2, 9))
    assert (open_day.day, open_day.state) == (day(4), "to rebuild"), "the watermark is at its end"
    reaching = replace(life.stream, sinks=declared(Slices("at", reach="1 second"), late_rows="keep").sinks)
    states = [each.state for each in late_days(life.settings, sliceable(reaching))]
    assert states == ["to rebuild", "to rebuild", "open"]


def test_a_day_is_complete_once_a_slice_has_read_its_late_records(life: LateDays) -> None:
    assert life.lacking == {1: 2, 2: 2, 4: 1}
    life.slice("a", 1, 3, end=81)
    assert life.lacking == {1: 1, 2: 2, 4: 1}, "the record at offset 81 was not read"
    life.slice("b", 1, 3, end=100, state="unchanged")
    assert life.lacking == {2: 1, 4: 1}
    life.slice("c", 2, 3, end=82)
    assert life.lacking == {2: 1, 4: 1}, "an older slice that ended later"
    life.slice("d", 0, 9, end=111)
    assert life.lacking == {}
    life.keep(5, (120, [2]))
    assert life.lacking == {2: 1}, "a record that came after the slice"


def test_files_whose_records_are_all_answered_are_not_read(life: LateDays) -> None:
    """One file has late records of days 1 and 2, offsets 80 and 81, the other one of days 2 and 4, to offset 110."""
    made = sliceable(life.stream)
    files = dataset(life.stored("days_late").readable(), life.settings.tables / "days_late")

    def opened(read: dict[int, dict[int, int]]) -> list[int]:
        """The offsets that are read."""
        condition = unanswered(made, {day(number): ends for number, ends in read.items()})
        found = files.to_table(columns=["offset"], filter=condition)["offset"].to_pylist()
        assert len(list(files.get_fragments(filter=condition))) == len({offset // 100 for offset in found})
        return sorted(found)

    assert opened({}) == opened({3: {0: 111}}) == opened({1: {1: 111}}) == [80, 81, 100, 110]
    assert opened({1: {0: 82}}) == [100, 110]
    assert opened({1: {0: 81}, 2: {0: 111}}) == [81, 110]
    assert opened({number: {0: 111} for number in range(1, 5)}) == []


@given(
    st.lists(st.tuples(st.integers(0, 9), st.integers(0, 1), st.integers(0, 30), st.integers(-70, 70)), max_size=40),
    st.dictionaries(st.integers(-1, 11), st.dictionaries(st.integers(0, 1), st.sampled_from([10, 20, 31])), max_size=9),
)
def test_no_record_that_a_day_lacks_is_left_out(
    records: list[tuple[int, int, int, int]], read: dict[int, dict[int, int]]
) -> None:
    """Records near the border of a day belong to the day before, too, within the reach of an hour."""
    made, reach = sliceable(declared(Slices("at", reach="1 hour"), late_rows="keep")), timedelta(hours=1)
    values = []
    for number, partition, offset, minutes in records:
        at = BEGIN + timedelta(days=number, minutes=minutes)
        near = sorted({(each - BEGIN).days for each in (at - reach, at, at + reach - timedelta(microseconds=1))})
        values.append({"partition": partition, "offset": offset, "event_time": at, "days": [day(n) for n in near]})
    rows, by_day = pa.Table.from_pylist(values, ROWS), {day(number): ends for number, ends in read.items()}
    left = rows.filter(unanswered(made, by_day)).to_pylist()
    for value in values:
        lacks = any(value["offset"] >= by_day.get(each, {}).get(value["partition"], 0) for each in value["days"])
        assert value in left or not lacks


@pytest.mark.parametrize("state", ["failed", "expired", "outdated"])
def test_a_slice_that_was_not_committed_completes_no_day(life: LateDays, state: State) -> None:
    life.slice("a", 0, 9, end=111, state=state)
    assert life.lacking == {1: 2, 2: 2, 4: 1}


def test_part_of_a_day_and_another_table_complete_no_day(life: LateDays) -> None:
    life.slice("a", 1, 2, end=111)
    asked = life.requests.outcome("a")
    assert asked is not None and 1 not in life.lacking
    life.requests.end(replace(asked, end=asked.end - 1))
    assert life.lacking == {1: 2, 2: 2, 4: 1}
    life.requests.end(replace(asked, begin=asked.begin + 1))
    assert life.lacking == {1: 2, 2: 2, 4: 1}
    life.requests.end(replace(asked, table="nights"))
    assert life.lacking == {1: 2, 2: 2, 4: 1}


def test_after_a_recovery_the_slices_from_before_it_do_not_count(life: LateDays) -> None:
    """A savepoint that is older than a slice has put the rows back as they were."""
    life.slice("a", 0, 9, end=111)
    assert life.lacking == {}
    history = Generation(2, 0.0, "recovery", from_generation=1, from_batch=4)
    life.save(replace(life.record, generations=(*life.record.generations, history)))
    assert life.lacking == {1: 2, 2: 2, 4: 1}
    life.slice("b", 0, 9, end=111, generation=2)
    assert life.lacking == {}


def test_a_stream_that_has_kept_none_lacks_none(tmp_path: Path) -> None:
    stream = declared(late_rows="keep")
    assert LateDays.of(tmp_path / "new", 1, stream).lacking == {}  # type: ignore[attr-defined]
    never = LateDays.of(tmp_path / "never", 1)
    assert "days_late" not in open_tables(never.settings, stream)
    assert late_days(never.settings, sliceable(stream)) == []


class Rebuilds:
    """Rebuilds ranges of days that begin on a day or later; earlier ones are refused."""

    def __init__(self, life: LateDays, since: int, error: RecourseError) -> None:
        self.life, self.since, self.error, self.asked = life, day(since), error, list[tuple[str, str]]()

    def __call__(self, _: Tools, __: object, begin: str, end: str, **___: object) -> str:
        if date.fromisoformat(begin) < self.since:
            raise self.error
        self.asked.append((begin, end))
        first, to = ((date.fromisoformat(each) - day(0)).days for each in (begin, end))
        self.life.slice(begin, first, to, end=10_000)
        return begin


@pytest.mark.parametrize("gone", [OffsetsLost("they are gone"), OffsetsSkipped("they were skipped")])
def test_days_whose_records_are_gone_are_lost_and_hold_no_other_day_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gone: RecourseError
) -> None:
    life = LateDays.of(tmp_path, 12, declared(late_rows="keep"))
    assert isinstance(life, LateDays)
    life.keep(11, *((200 + number, [number]) for number in range(9)))
    rebuilds, said = Rebuilds(life, 3, gone), list[str]()
    monkeypatch.setattr(late_module, "rebuild", rebuilds)
    tools = Tools(life.settings, None, "", None, said.append)  # type: ignore[arg-type]
    report = rebuild_late(tools, sliceable(life.stream))
    assert report.days("lost") == [day(0), day(1), day(2)] and len(report.left) == 3
    assert report.left[0].why == gone.found and len(said) == 3
    rebuilt = sorted(number for begin, end in rebuilds.asked for number in range(int(begin[-2:]), int(end[-2:])))
    assert rebuilt == [4, 5, 6, 7, 8, 9], "March 4 to 9, each once"
    rebuilds.asked.clear()
    assert not rebuild_late(tools, sliceable(life.stream)).slices, "lost days are not tried again"
    life.slice("z", 0, 1, end=10_000)
    assert rebuild_late(tools, sliceable(life.stream)).days("lost") == [day(1), day(2)], "a person has rebuilt a day"
    life.keep(12, (20_000, [0]))
    states = [each.state for each in late_days(life.settings, sliceable(life.stream))]
    assert states == ["to rebuild", "lost", "lost"], "a record that came after that"


def test_an_error_that_may_pass_ends_the_run_and_marks_no_day(life: LateDays, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(late_module, "rebuild", Rebuilds(life, 9, LeaseBusy("another slice", "wait")))
    with pytest.raises(LeaseBusy):
        rebuild_late(Tools(life.settings, None, "", None), sliceable(life.stream))  # type: ignore[arg-type]
    assert all(each.state == "to rebuild" for each in late_days(life.settings, sliceable(life.stream)))


def test_a_table_that_keeps_no_late_records_is_refused_by_name() -> None:
    assert [made.table.name for made in kept_late(declared(late_rows="keep"))] == ["days"]
    assert kept_late(declared()) == []
    with pytest.raises(UsageError, match="table nights of stream days keeps no late records"):
        kept_late(declared(late_rows="keep"), "nights")
    with pytest.raises(UsageError, match="declare late_rows='keep'"):
        kept_late(declared(), "days")
