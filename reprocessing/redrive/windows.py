"""The redrive of a stream of windows: the slices that the records belong to are rebuilt with them.

The row of a window is made of all of its records, so no row is added for one of them. A record with event time t is in
rows whose column of slices is within `reach` of t: that span is rebuilt from the topic, or its archive, by the code of
today, once the watermark has passed its windows. Until then the state has them, and writes them without the record.

A rebuild makes the rows of a span anew, so one that is repeated after a kill changes nothing.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta

from reprocessing.redrive.run import Made
from reprocessing.slices.rebuild import Judged, SliceReport, Tools, column_kind, passed_watermark
from reprocessing.slices.spans import DAY, MOST_DAYS, Lost, Span, rebuild_spans
from streaming_jobs.declare.slices import slice_range
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
    """Rebuild the slices of the records that the code of today takes; the other ones are `dead`."""
    found, watermark = Windows(), passed_watermark(tools.settings, record)
    wanted: list[tuple[Sliceable, dict[Place, Span]]] = []
    for table in tables:
        times = {place: at for place, at in made.times[table.event_time].items() if place not in dead}
        unread = (place for place in places if place not in times and place not in dead)
        found.left |= dict.fromkeys(unread, "the code of today has not read it")
        wanted.append((table, closed(table, column_kind(tools.settings, table), times, watermark, found)))
    for table, spans in wanted:
        spans = {place: span for place, span in spans.items() if place not in found.left}
        judged = Judged({place[1:] for place in spans}, {place[1:] for place in dead})
        _rebuild(tools, table, spans, judged, found, dry_run=dry_run)
    return found


def closed(
    made: Sliceable, kind: str, times: Mapping[Place, datetime | None], watermark: datetime, found: Windows
) -> dict[Place, Span]:
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


def span_of(made: Sliceable, kind: str, at: datetime) -> Span:
    """The span of the column that rows of a record with this event time may have."""
    first, last = at - made.slices.distance, at + made.slices.distance
    if kind == "date":
        low, high = (each.astimezone(made.slices.calendar).date() for each in (first, last))
        return Span.of(slice_range(made.slices, kind, low.isoformat(), (high + DAY).isoformat()))
    low_minute = first.replace(second=0, microsecond=0)
    return Span(low_minute, last.replace(second=0, microsecond=0) + _STEP)


def pieces(spans: Iterable[Span]) -> list[Span]:
    """Spans that cover these, the overlapping and the near ones joined as long as they are no longer than a day."""
    found: list[Span] = []
    for span in sorted(set(spans)):
        if found and max(found[-1].end, span.end) - found[-1].begin <= DAY:
            found[-1] = Span(found[-1].begin, max(found[-1].end, span.end))
        elif not found or not found[-1].has(span):
            found.append(span)
    return found


def _rebuild(
    tools: Tools, made: Sliceable, spans: Mapping[Place, Span], judged: Judged, found: Windows, *, dry_run: bool
) -> None:
    parts = pieces(spans.values())
    begins = [part.begin for part in parts]
    of_part: dict[Span, list[Place]] = {}
    for place, span in spans.items():
        of_part.setdefault(parts[bisect_right(begins, span.begin) - 1], []).append(place)
    for group, outcome in rebuild_spans(tools, made, parts, gap=DAY, judged=judged, dry_run=dry_run):
        places = [place for part in group for place in of_part.pop(part, ())]
        if isinstance(outcome, Lost):
            found.left |= dict.fromkeys(places, f"its slice of table {made.table.name} is lost: {outcome.why}")
            continue
        found.slices.append(outcome)
        read = outcome.offsets
        found.left |= {
            place: f"the rebuild of its slice of table {made.table.name} has not read it: run it again"
            for place in places
            if not read.start.get(place[1], 0) <= place[2] < read.end.get(place[1], 0)
        }
    rest = (place for places in of_part.values() for place in places)
    found.left |= dict.fromkeys(rest, f"one run rebuilds {MOST_DAYS} days of table {made.table.name}: run it again")
