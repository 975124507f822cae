"""Streams whose tables can be rebuilt slice by slice: each row depends on records near it in event time, and no other.

That holds for rows made of one record, and for windows of event time. Everything else is refused with the reason: an
upsert and a running total depend on all records before, a deduplication on the order of arrival, a join on a
second topic.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta

from streaming_jobs.declare.slices import Slices
from streaming_jobs.declare.table import DeclaredTable
from streaming_jobs.errors import UsageError
from streaming_jobs.runtime.spark_plan import EventWindows, batch_traits_of
from streaming_jobs.stream import KafkaTopic, Stream
from streaming_jobs.text import commands
from streaming_jobs.text.durations import format_duration


@dataclass(frozen=True)
class Sliceable:
    """A table that can be sliced: its declaration, the stream's topic by its parameter, and the event time's field."""

    stream: Stream
    sink: str
    table: DeclaredTable
    slices: Slices
    parameter: str
    topic: KafkaTopic
    event_time: str
    required: bool
    """True if no record is without an event time, so that records can be left out by it."""


def sliceable(stream: Stream, table: str | None = None) -> Sliceable:
    """The table of a stream to slice; raises UsageError with the reason if it cannot be."""
    sink, declared, slices = _declared(stream, table)
    if len(stream.sources) > 1:
        raise UsageError(
            f"stream {stream.name} joins topics {', '.join(t.name for t in stream.sources.values())}: which records "
            "a row depends on is not bounded",
            f"rebuild the whole table: {commands.plan(stream.name, to_earliest=True)}",
        )
    if stream.lookups:
        raise UsageError(
            f"stream {stream.name} looks up table {next(iter(stream.lookups.values())).name}: its rows are of several "
            "versions of that table, and a slice is made of its records in one batch",
            f"rebuild the whole table: {commands.plan(stream.name, to_earliest=True)}",
        )
    (parameter, topic), *_ = stream.sources.items()
    if not isinstance(topic, KafkaTopic):
        raise UsageError(
            f"stream {stream.name} reads table {topic.name}: slices are rebuilt from the records of a topic",
            f"rebuild the whole table: {commands.plan(stream.name, to_earliest=True)}",
        )
    event_time = slices.event_time or topic.time_column
    if event_time is None:
        raise UsageError(
            f"topic {topic.name} declares no event time, so nothing says which records a slice is made from",
            f"name the field: Slices({slices.column!r}, event_time=...)",
        )
    fields = {field.name: field for field in topic.records.schema.fields}
    if event_time not in fields or fields[event_time].dataType.typeName() not in ("timestamp", "timestamp_ntz", "date"):
        raise UsageError(
            f"'{event_time}' is not a field of dates or times of topic {topic.name}", "correct the slices' event_time"
        )
    if fields[event_time].dataType.typeName() != "timestamp" and slices.zone != "UTC":
        raise UsageError(
            f"'{event_time}' of topic {topic.name} is a {fields[event_time].dataType.typeName()}, which has no time "
            f"zone: it is not known which of its records belong to a day of {slices.zone}",
            "slice by days of UTC, or give the records a timestamp",
        )
    if unique := [r for r in stream.rules_of(declared.name).unique if r[1].on_fail in ("drop", "quarantine")]:
        raise UsageError(
            f"rule {unique[0][1].name} of table {declared.name} takes rows out by the batch that they came in, and a "
            "slice has other batches",
            "let that rule warn, or rebuild the whole table",
        )
    return Sliceable(
        stream, sink, declared, slices, parameter, topic, event_time, required=not fields[event_time].nullable
    )


def slices_of(declared: DeclaredTable) -> Slices | None:
    """The declared slices of a table; tables of other stores have none."""
    found = getattr(declared, "slices", None)
    return found if isinstance(found, Slices) else None


def tables_with_slices(stream: Stream) -> list[str]:
    return [sink.name for sink in stream.sinks.values() if slices_of(sink) is not None]


def check_plan(made: Sliceable, plan: str) -> tuple[EventWindows, ...]:
    """The plan's windows of event time; raises UsageError for a plan whose rows depend on any records.

    `plan` is Spark's analysed plan of the function on batch frames.
    """
    traits, stream = batch_traits_of(plan), made.stream.name
    if traits.reads > 1:
        raise _dependent(stream, "joins its topic with itself")
    if traits.session_windows:
        raise _dependent(stream, "has session windows, whose length has no bound")
    if traits.unwindowed_aggregate:
        raise _dependent(stream, "adds records up without a window of event time")
    if traits.others:
        raise _dependent(stream, f"has an operator whose rows may depend on any record ({', '.join(traits.others)})")
    found = tuple(each for each in traits.windows if each is not None)
    if len(found) < len(traits.windows):
        raise _dependent(stream, "has windows whose length its plan does not show")
    windows = timedelta(microseconds=sum(each.length for each in found))  # windows of windows add up
    if windows > made.slices.distance:
        raise UsageError(
            f"the windows of stream {stream} are {format_duration(windows)} long, the slices of table "
            f"{made.table.name} reach {made.slices.reach}: windows at their borders would be half empty",
            f"declare Slices({made.slices.column!r}, reach='{format_duration(windows)}', ...)",
        )
    return found


def _declared(stream: Stream, table: str | None) -> tuple[str, DeclaredTable, Slices]:
    with_slices = {
        sink.name: (name, sink, found) for name, sink in stream.sinks.items() if (found := slices_of(sink)) is not None
    }
    if table is None and len(with_slices) == 1:
        return next(iter(with_slices.values()))
    if table in with_slices:
        return with_slices[table]
    names = [sink.name for sink in stream.sinks.values()]
    if table is not None and table not in names:
        raise UsageError(f"stream {stream.name} has no table {table}", f"its tables are {', '.join(names)}")
    if table is None and with_slices:
        raise UsageError(
            f"stream {stream.name} has several tables with slices", f"name one: --table {next(iter(with_slices))}"
        )
    which = next(sink for sink in stream.sinks.values() if table in (None, sink.name))
    if which.mode == "upsert":
        raise UsageError(
            f"table {which.name} is an upsert: its rows depend on records of any time, so no slice can be rebuilt",
            f"rebuild the whole table: {commands.plan(stream.name, to_earliest=True)}",
        )
    raise UsageError(
        f"table {which.name} declares no slices", "declare them: DeltaTable(..., slices=Slices(column, reach=...))"
    )


def _dependent(stream: str, reason: str) -> UsageError:
    return UsageError(
        f"stream {stream} {reason}, so a slice of its table cannot be rebuilt alone",
        f"rebuild the whole table: {commands.plan(stream, to_earliest=True)}",
    )
