"""The redrive of a stream of windows: the slices that the records or quarantined rows belong to are rebuilt.

The row of a window is made of all of its records, so no row is added for one of them. A record with event time t is in
rows whose column of slices is within `reach` of t: that span is rebuilt from the topic, or its archive, by the code of
today, once the watermark has passed its windows. Until then the state has them, and writes them without the record.
A quarantined row is the row of a window and names no record: its slice is that of its own value.

A rebuild makes the rows of a span anew, so one that is repeated after a kill changes nothing.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, date, datetime, timedelta
from functools import cache, partial
from typing import Any, Generic, TypeVar

from reprocessing.redrive.run import Made
from reprocessing.redrive.selection import SetAside
from reprocessing.slices.base import column_kind, passed_watermark
from reprocessing.slices.rebuild import CheckedLetters, SliceReport, Tools, rebuild, slice_offsets
from reprocessing.slices.spans import DAY, MOST_DAYS, Lost, TimeSpan, borders, each_slice
from streaming_jobs.declare.slices import slice_range
from streaming_jobs.errors import RecourseError
from streaming_jobs.ledger.entry import Txn
from streaming_jobs.ledger.positions import OffsetRange
from streaming_jobs.runtime.code_version import loaded_code
from streaming_jobs.runtime.sliceable import Sliceable, sliceable
from streaming_jobs.settings import Settings
from streaming_jobs.sinks.redriven import Place
from streaming_jobs.state.slice_requests import SliceRequests
from streaming_jobs.state.stream_record import StreamRecord
from streaming_jobs.stream import Stream

_STEP = timedelta(minutes=1)
"""Spans begin and end at whole minutes."""


def sliced_tables(stream: Stream, only: str = "") -> list[Sliceable]:
    """The tables of a stream, or one of them, whose slices can be rebuilt; raises UsageError if one has none."""
    return [sliceable(stream, sink.name) for sink in stream.sinks.values() if only in ("", sink.name)]


Key = TypeVar("Key", bound=Hashable)
"""What was set aside: the place of a record, or the number of a row."""


@dataclass
class Windows(Generic[Key]):
    """The slices that were rebuilt, and the reasons why some of what was set aside is left as it is.

    `open`: the left ones whose windows the state still has.
    """

    slices: list[SliceReport] = field(default_factory=list)
    left: dict[Key, str] = field(default_factory=dict)
    open: set[Key] = field(default_factory=set)


def rebuild_windows(
    tools: Tools,
    record: StreamRecord,
    tables: Sequence[Sliceable],
    made: Made,
    places: Collection[Place],
    dead: Collection[Place],
    *,
    dry_run: bool,
) -> Windows[Place]:
    """Rebuild the slices of the records that the code of today takes; the other ones are `dead`.

    Which records are left is settled for all tables before the first rebuild: a record is in all of them, or in none.
    """
    found, watermark = Windows[Place](), passed_watermark(tools.settings, record)
    wanted: list[tuple[Sliceable, dict[Place, TimeSpan]]] = []
    for table in tables:
        times = {place: at for place, at in made.times[table.event_time].items() if place not in dead}
        unread = (place for place in places if place not in times and place not in dead)
        found.left |= dict.fromkeys(unread, "the code of today has not read it")
        wanted.append((table, closed(table, column_kind(tools.settings, table), times, watermark, found)))
    planned: list[tuple[Sliceable, _Parts[Place]]] = []
    for table, spans in wanted:
        fitting = {place: span for place, span in spans.items() if place not in found.left}
        for parts, offsets in _fitting(tools, table, fitting, found):
            found.left |= _unread(table, parts, offsets)
            planned.append((table, parts))
    accepted = {place for place in places if place not in dead and place not in found.left}
    letters = CheckedLetters({place[1:] for place in accepted}, {place[1:] for place in dead})
    for table, planned_parts in planned:
        if parts := _only(accepted, planned_parts):
            report = rebuild(tools, table, *borders(table, list(parts)), dry_run=dry_run, letters=letters)
            found.slices.append(report)
            found.left |= _unread(table, parts, report.offsets)
    return found


def set_aside_again(settings: Settings, record: StreamRecord, table: Sliceable, rows: Sequence[SetAside]) -> set[int]:
    """The numbers of quarantined rows of slices that the code of today has rebuilt since: it sets them aside itself."""
    kind, code = column_kind(settings, table), loaded_code(table.stream, settings.flows).hash
    rebuilt = [
        (TimeSpan(*(datetime.fromtimestamp(at, UTC) for at in (each.begin, each.end))), each.ledger.txn)
        for each in SliceRequests.of(settings, table.stream.name).history()
        if each.table == table.table.name and each.state in ("committed", "unchanged")
        if each.ledger.generation == record.generation and each.ledger.code.hash == code
    ]

    @cache
    def newest(value: Any) -> Txn:
        """The batch up to which a slice with rows of this value was rebuilt last."""
        span = span_of_value(table, kind, value)
        return max((at for slice_span, at in rebuilt if slice_span.has(span)), default=Txn(0, -1))

    return {
        number
        for number, row in enumerate(rows)
        if (value := row.values.get(table.slices.column)) is not None
        and Txn(row.values["_generation"], row.values["_batch"]) <= newest(value)
    }


def rebuild_rows(
    tools: Tools, record: StreamRecord, table: Sliceable, values: Sequence[Any], *, dry_run: bool
) -> Windows[int]:
    """Rebuild the slices of quarantined rows; `values` are theirs of the column of slices, a row's number its key.

    If the rebuild of a slice fails, and one before it has not, the rest is left.
    """
    found, watermark = Windows[int](), passed_watermark(tools.settings, record)
    kind, column, spans = column_kind(tools.settings, table), table.slices.column, dict[int, TimeSpan]()
    for number, value in enumerate(values):
        if value is None:
            found.left[number] = f"its {column} is null, so the slice that it belongs to is not known"
        elif _is_closed(table, number, span := span_of_value(table, kind, value), watermark, found):
            spans[number] = span
    planned = list(_fitting(tools, table, spans, found))
    for at, (parts, _) in enumerate(planned):
        try:
            found.slices.append(rebuild(tools, table, *borders(table, list(parts)), dry_run=dry_run))
        except RecourseError as error:
            if not found.slices:
                raise
            rest = (number for left, _ in planned[at:] for numbers in left.values() for number in numbers)
            found.left |= dict.fromkeys(rest, f"the rebuild of its slice, or of one before it, failed: {error.found}")
            break
    return found


def closed(
    made: Sliceable, kind: str, times: Mapping[Place, datetime | None], watermark: datetime, found: Windows[Place]
) -> dict[Place, TimeSpan]:
    """The spans of records whose windows are all written; `found` gets the other records. `kind`: the column's type."""
    spans = {}
    for place, at in times.items():
        if at is None:
            found.left[place] = f"its {made.event_time} is null, so the slices that it belongs to are not known"
            continue
        if _is_closed(made, place, span := span_of(made, kind, at), watermark, found):
            spans[place] = span
    return spans


def _is_closed(made: Sliceable, key: Key, span: TimeSpan, watermark: datetime, found: Windows[Key]) -> bool:
    if (closes := span.end + made.slices.distance) <= watermark:
        return True
    found.open.add(key)
    found.left[key] = (
        f"its windows are open until the watermark, now {watermark:%Y-%m-%d %H:%M:%S}Z, has passed "
        f"{closes:%Y-%m-%d %H:%M:%S}Z: redrive it after that"
    )
    return False


def span_of(made: Sliceable, kind: str, at: datetime) -> TimeSpan:
    """The span of the column that rows of a record with this event time may have."""
    first, last = at - made.slices.distance, at + made.slices.distance
    if kind == "date":
        return _days_between(made, *(each.astimezone(made.slices.calendar).date() for each in (first, last)))
    return _minutes_between(first, last)


def span_of_value(made: Sliceable, kind: str, value: Any) -> TimeSpan:
    """The span of a value of the column of slices: a date, or a time, without a zone in UTC."""
    if kind == "date":
        return _days_between(made, value, value)
    at = value.replace(tzinfo=value.tzinfo or UTC).astimezone(UTC)
    return _minutes_between(at, at)


def _days_between(made: Sliceable, first: date, last: date) -> TimeSpan:
    return TimeSpan.of(slice_range(made.slices, "date", first.isoformat(), (last + DAY).isoformat()))


def _minutes_between(first: datetime, last: datetime) -> TimeSpan:
    low_minute = first.replace(second=0, microsecond=0)
    return TimeSpan(low_minute, last.replace(second=0, microsecond=0) + _STEP)


def pieces(spans: Iterable[TimeSpan]) -> list[TimeSpan]:
    """Spans that cover these, the overlapping and the near ones joined as long as they are no longer than a day."""
    found: list[TimeSpan] = []
    for span in sorted(set(spans)):
        if found and max(found[-1].end, span.end) - found[-1].begin <= DAY:
            found[-1] = TimeSpan(found[-1].begin, max(found[-1].end, span.end))
        elif not found or not found[-1].has(span):
            found.append(span)
    return found


_Parts = dict[TimeSpan, list[Key]]
"""The spans of one slice, in their order, and what was set aside that belongs to each."""


def _fitting(
    tools: Tools, made: Sliceable, spans: Mapping[Key, TimeSpan], found: Windows[Key]
) -> Iterator[tuple[_Parts[Key], OffsetRange]]:
    """Yields the slices that this run can rebuild, with the offsets that they are made from.

    `found` gets what was set aside of the other ones. Needs no Spark.
    """
    parts = pieces(spans.values())
    begins = [part.begin for part in parts]
    of_part: _Parts[Key] = {}
    for place, span in spans.items():
        of_part.setdefault(parts[bisect_right(begins, span.begin) - 1], []).append(place)
    for group, offsets in each_slice(made, parts, partial(slice_offsets, tools, made), gap=DAY):
        fitting = {part: of_part.pop(part, []) for part in group}
        if isinstance(offsets, Lost):
            why = f"its slice of table {made.table.name} is lost: {offsets.why}"
            found.left |= {place: why for places in fitting.values() for place in places}
        else:
            yield fitting, offsets
    rest = (place for places in of_part.values() for place in places)
    found.left |= dict.fromkeys(rest, f"one run rebuilds {MOST_DAYS} days of table {made.table.name}: run it again")


def _only(accepted: Collection[Place], parts: _Parts[Place]) -> _Parts[Place]:
    """The spans of accepted records, with these."""
    kept = {part: [place for place in places if place in accepted] for part, places in parts.items()}
    return {part: places for part, places in kept.items() if places}


def _unread(made: Sliceable, parts: _Parts[Place], read: OffsetRange) -> dict[Place, str]:
    return {
        place: f"the rebuild of its slice of table {made.table.name} has not read it: run it again"
        for places in parts.values()
        for place in places
        if not read.start.get(place[1], 0) <= place[2] < read.end.get(place[1], 0)
    }
