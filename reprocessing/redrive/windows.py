"""The redrive of a stream of windows: the slices that the records belong to are rebuilt with them.

The row of a window is made of all of its records, so no row is added for one of them. A record with event time t is in
rows whose column of slices is within `reach` of t: that span is rebuilt from the topic, or its archive, by the code of
today, once the watermark has passed its windows. Until then the state has them, and writes them without the record.

A rebuild makes the rows of a span anew, so one that is repeated after a kill changes nothing.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from functools import partial

from reprocessing.redrive.run import Made
from reprocessing.slices.rebuild import (
    CheckedLetters,
    SliceReport,
    Tools,
    column_kind,
    passed_watermark,
    rebuild,
    slice_offsets,
)
from reprocessing.slices.spans import DAY, MOST_DAYS, Lost, TimeSpan, borders, each_slice
from streaming_jobs.declare.slices import slice_range
from streaming_jobs.ledger.positions import OffsetRange
from streaming_jobs.runtime.sliceable import Sliceable, sliceable
from streaming_jobs.sinks.redriven import Place
from streaming_jobs.state.stream_record import StreamRecord
from streaming_jobs.stream import Stream

_STEP = timedelta(minutes=1)
"""Spans begin and end at whole minutes."""


def sliced_tables(stream: Stream) -> list[Sliceable]:
    """The tables of a stream of which slices can be rebuilt; raises UsageError if one of them has none."""
    return [sliceable(stream, sink.name) for sink in stream.sinks.values()]


@dataclass
class Windows:
    """The slices that were rebuilt, and by place the reasons why records are left as they are.

    `open`: the left records whose windows the state still has.
    """

    slices: list[SliceReport] = field(default_factory=list)
    left: dict[Place, str] = field(default_factory=dict)
    open: set[Place] = field(default_factory=set)


def rebuild_windows(
    tools: Tools,
    record: StreamRecord,
    tables: Sequence[Sliceable],
    made: Made,
    places: Collection[Place],
    dead: Collection[Place],
    *,
    dry_run: bool,
) -> Windows:
    """Rebuild the slices of the records that the code of today takes; the other ones are `dead`.

    Which records are left is settled for all tables before the first rebuild: a record is in all of them, or in none.
    """
    found, watermark = Windows(), passed_watermark(tools.settings, record)
    wanted: list[tuple[Sliceable, dict[Place, TimeSpan]]] = []
    for table in tables:
        times = {place: at for place, at in made.times[table.event_time].items() if place not in dead}
        unread = (place for place in places if place not in times and place not in dead)
        found.left |= dict.fromkeys(unread, "the code of today has not read it")
        wanted.append((table, closed(table, column_kind(tools.settings, table), times, watermark, found)))
    planned = [
        (table, list(_fitting(tools, table, {p: s for p, s in spans.items() if p not in found.left}, found)))
        for table, spans in wanted
    ]
    accepted = {place for place in places if place not in dead and place not in found.left}
    letters = CheckedLetters({place[1:] for place in accepted}, {place[1:] for place in dead})
    for table, slices in planned:
        for parts in (_only(accepted, each) for each in slices):
            if parts:
                report = rebuild(tools, table, *borders(table, list(parts)), dry_run=dry_run, letters=letters)
                found.slices.append(report)
                found.left |= _unread(table, parts, report.offsets)
    return found


def closed(
    made: Sliceable, kind: str, times: Mapping[Place, datetime | None], watermark: datetime, found: Windows
) -> dict[Place, TimeSpan]:
    """The spans of records whose windows are all written; `found` gets the other records. `kind`: the column's type."""
    spans = {}
    for place, at in times.items():
        if at is None:
            found.left[place] = f"its {made.event_time} is null, so the slices that it belongs to are not known"
            continue
        span = span_of(made, kind, at)
        if (closes := span.end + made.slices.distance) > watermark:
            found.open.add(place)
            found.left[place] = (
                f"its windows are open until the watermark, now {watermark:%Y-%m-%d %H:%M:%S}Z, has passed "
                f"{closes:%Y-%m-%d %H:%M:%S}Z: redrive it after that"
            )
        else:
            spans[place] = span
    return spans


def span_of(made: Sliceable, kind: str, at: datetime) -> TimeSpan:
    """The span of the column that rows of a record with this event time may have."""
    first, last = at - made.slices.distance, at + made.slices.distance
    if kind == "date":
        low, high = (each.astimezone(made.slices.calendar).date() for each in (first, last))
        return TimeSpan.of(slice_range(made.slices, kind, low.isoformat(), (high + DAY).isoformat()))
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


_Parts = dict[TimeSpan, list[Place]]
"""The spans of one slice, in their order, and the records that belong to each."""


def _fitting(tools: Tools, made: Sliceable, spans: Mapping[Place, TimeSpan], found: Windows) -> Iterator[_Parts]:
    """Yields the slices that this run can rebuild; `found` gets the records of the other ones. Needs no Spark."""
    parts = pieces(spans.values())
    begins = [part.begin for part in parts]
    of_part: _Parts = {}
    for place, span in spans.items():
        of_part.setdefault(parts[bisect_right(begins, span.begin) - 1], []).append(place)
    for group, offsets in each_slice(made, parts, partial(slice_offsets, tools, made), gap=DAY):
        fitting = {part: of_part.pop(part, []) for part in group}
        if isinstance(offsets, Lost):
            why = f"its slice of table {made.table.name} is lost: {offsets.why}"
            found.left |= {place: why for places in fitting.values() for place in places}
        else:
            found.left |= _unread(made, fitting, offsets)
            yield fitting
    rest = (place for places in of_part.values() for place in places)
    found.left |= dict.fromkeys(rest, f"one run rebuilds {MOST_DAYS} days of table {made.table.name}: run it again")


def _only(accepted: Collection[Place], parts: _Parts) -> _Parts:
    """The spans of accepted records, with these."""
    kept = {part: [place for place in places if place in accepted] for part, places in parts.items()}
    return {part: places for part, places in kept.items() if places}


def _unread(made: Sliceable, parts: _Parts, read: OffsetRange) -> dict[Place, str]:
    return {
        place: f"the rebuild of its slice of table {made.table.name} has not read it: run it again"
        for places in parts.values()
        for place in places
        if not read.start.get(place[1], 0) <= place[2] < read.end.get(place[1], 0)
    }
