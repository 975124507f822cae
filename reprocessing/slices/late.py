"""The days of a table that lack late records, and their rebuild. Read `late_days`; docs/late.md is the page.

The stream keeps records that came too late for a window in `<table>_late`, with the days whose slices lack them. A day
has a late record once a slice that covers the day was rebuilt from a range of offsets with the record in it. The
outcomes of slices, which stay beside the stream's state, say so: no mark has to be written, and none can be lost.

A recovery puts rows back as they were before slices. So slices of an earlier generation do not count: their days are
rebuilt once more, and where nothing differs nothing is committed.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, date, datetime
from functools import partial
from typing import Any, Literal

import pyarrow as pa
import pyarrow.compute as pc

from reprocessing.slices.base import passed_watermark
from reprocessing.slices.rebuild import SliceReport, Tools, note_lost, rebuild
from reprocessing.slices.spans import DAY, MOST_DAYS, Lost, TimeSpan, each_slice
from streaming_jobs.declare.slices import SliceRange, slice_range
from streaming_jobs.errors import UsageError
from streaming_jobs.platform.table_rows import dataset
from streaming_jobs.runtime.sliceable import Sliceable, sliceable
from streaming_jobs.settings import Settings
from streaming_jobs.sinks.tables import late_tables, open_table
from streaming_jobs.state import stream_record
from streaming_jobs.state.slice_requests import SliceCommitRequest, SliceRequests
from streaming_jobs.state.stream_record import StreamRecord
from streaming_jobs.stream import Stream
from streaming_jobs.text.spelling import instead

State = Literal["to rebuild", "open", "lost"]


@dataclass(frozen=True)
class LateDay:
    """A day, in the calendar of the slices, that lacks late records.

    `first` and `last` are the least and the greatest event time of the records. An `open` day is rebuilt once the
    watermark has passed its windows; of a `lost` day `why` says which records are gone.
    """

    day: date
    records: int
    first: datetime
    last: datetime
    state: State
    why: str = ""


def kept_late(stream: Stream, table: str | None = None) -> list[Sliceable]:
    """The tables of a stream whose late records are kept, or the named one; raises UsageError if that keeps none."""
    names = list(stream.late_tables)
    if table is not None and table not in names:
        next_step = instead(table, names) if names else "declare late_rows='keep' of its DeltaTable"
        raise UsageError(f"table {table} of stream {stream.name} keeps no late records", next_step)
    return [sliceable(stream, name) for name in names if table in (None, name)]


def late_days(settings: Settings, made: Sliceable) -> list[LateDay]:
    """The days that lack late records, in their order. Reads files alone."""
    record = stream_record.load(settings, made.stream.name)
    kept = open_table(settings, late_tables(made.stream)[made.table.name], made.stream.name)
    if record is None or kept is None:
        return []
    read, lost = _read_by_day(settings, made, record)
    source = dataset(kept.readable(), settings.tables / kept.name)
    rows = source.to_table(columns=["partition", "offset", "event_time", "days"], filter=unanswered(made, read))
    lacking = _without_slice(_by_day(rows), read)
    watermark, reach = passed_watermark(settings, record), made.slices.distance
    figures = lacking.group_by("day").aggregate([("offset", "count"), ("event_time", "min"), ("event_time", "max")])
    found = []
    for row in sorted(figures.to_pylist(), key=lambda row: row["day"]):
        day, times = row["day"], (row["event_time_min"], row["event_time_max"])
        first, last = (at.replace(tzinfo=UTC) for at in times)
        state: State = "lost" if day in lost else "to rebuild"
        if _slice(made, day).end + reach > watermark:
            state = "open"
        found.append(LateDay(day, row["offset_count"], first, last, state, lost.get(day, "")))
    return found


def unanswered(made: Sliceable, read: Mapping[date, Mapping[int, int]]) -> pc.Expression:
    """False for records that no day lacks, as far as event time, partition and offset say: their files are not read.

    The days of a record are within `reach` of its event time. So if slices of days in a row have read a partition to
    the same offset, these days have each record before it, unless it is within `reach` of their first or last border.
    """
    found, reach = pc.scalar(True), made.slices.distance
    first: date | None = None
    for day in sorted(read):
        first = first or day
        if read.get(day + DAY) == read[day]:
            continue
        begin, end = _slice(made, first).begin + reach, _slice(made, day).end - reach
        later, of = pc.scalar(True), pc.field("partition")
        for partition, offset in read[day].items():  # Arrow compares files' statistics by neither `!=` nor a negation
            later = later & ((of < partition) | (of > partition) | (pc.field("offset") >= offset))
        if begin < end:
            found = found & ((pc.field("event_time") < begin) | (pc.field("event_time") >= end) | later)
        first = None
    return found


def _by_day(rows: pa.Table) -> pa.Table:
    """A row for each record and day that lacks it."""
    days = pc.list_flatten(rows["days"])
    return rows.drop_columns(["days"]).take(pc.list_parent_indices(rows["days"])).append_column("day", days)


def _read_by_day(
    settings: Settings, made: Sliceable, record: StreamRecord
) -> tuple[dict[date, dict[int, int]], dict[date, str]]:
    """By day and partition the offset up to which a rebuilt slice has read the topic, and why days are lost."""
    read: dict[date, dict[int, int]] = defaultdict(dict)
    lost: dict[date, str] = {}
    for request in SliceRequests.of(settings, made.stream.name).history():
        entry = request.ledger
        if request.table != made.table.name or entry.generation != record.generation:
            continue
        if request.state == "failed":
            lost |= dict.fromkeys(_whole_days(made, request), request.reason)
        for day in _whole_days(made, request) if request.state in ("committed", "unchanged") else ():
            lost.pop(day, None)
            for partition, end in (each for offsets in entry.offsets for each in offsets.end.items()):
                read[day][partition] = max(end, read[day].get(partition, 0))
    return read, lost


def _whole_days(made: Sliceable, request: SliceCommitRequest) -> Iterator[date]:
    """The days of the calendar that lie within a rebuilt slice."""
    begin, end = (datetime.fromtimestamp(at, UTC) for at in (request.begin, request.end))
    day = begin.astimezone(made.slices.calendar).date()
    while (chosen := _slice(made, day)).end <= end:
        if chosen.begin >= begin:
            yield day
        day += DAY


def _without_slice(rows: pa.Table, read: dict[date, dict[int, int]]) -> pa.Table:
    """The rows of days of which no slice has read the record."""
    known: list[dict[str, Any]] = [
        {"day": day, "partition": partition, "read": end}
        for day, ends in read.items()
        for partition, end in ends.items()
    ]
    schema = pa.schema([("day", pa.date32()), ("partition", pa.int32()), ("read", pa.int64())])
    joined = rows.join(pa.Table.from_pylist(known, schema), ["day", "partition"])
    return joined.filter(pc.fill_null(pc.greater_equal(joined["offset"], joined["read"]), fill_value=True))


def _slice(made: Sliceable, day: date) -> SliceRange:
    return slice_range(made.slices, "timestamp", day.isoformat(), None)


@dataclass(frozen=True)
class LateReport:
    """What a run has rebuilt of one table, and the days that still lack late records."""

    table: str
    slices: tuple[SliceReport, ...]
    left: tuple[LateDay, ...]

    def days(self, state: State) -> list[date]:
        """The days that are left in a state."""
        return [each.day for each in self.left if each.state == state]


def rebuild_late(tools: Tools, made: Sliceable, *, most: int = MOST_DAYS) -> LateReport:
    """Rebuild the first of the closed days that lack late records, at most so many; days in a row are one slice.

    A day whose records are gone is noted as lost, and the other ones are rebuilt; any other error is raised.
    """
    reports = []
    days = [each.day for each in late_days(tools.settings, made) if each.state == "to rebuild"]
    due = (TimeSpan.of(_slice(made, day)) for day in days)
    for spans, outcome in each_slice(made, due, partial(rebuild, tools, made), most=most):
        if isinstance(outcome, Lost):
            day = spans[0].begin.astimezone(made.slices.calendar).date().isoformat()
            tools.tell(f"{day} of table {made.table.name} cannot be rebuilt: {outcome.why}")
            note_lost(tools.settings, made, day, outcome.why)
        else:
            reports.append(outcome)
    return LateReport(made.table.name, tuple(reports), tuple(late_days(tools.settings, made)))
