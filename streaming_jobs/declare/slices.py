"""The declaration that an output table can be rebuilt slice by slice, such as day by day: an option of its sink.

    DeltaTable("airport_hours", ..., slices=Slices("window_start", reach="1 hour", zone="America/New_York"))

A slice is a range of one column: the rows with `column` in [from, to). It is made from the records whose event time is
in [from - reach, to + reach). So every row has to depend on records within `reach` of its column's value, and on no
other ones. `reprocessing/slices` rebuilds them; docs/slices.md has the rules.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, date, datetime, time, timedelta
from typing import TYPE_CHECKING, Any
from zoneinfo import ZoneInfo

from streaming_jobs.errors import UsageError
from streaming_jobs.text import commands
from streaming_jobs.text.durations import parse_duration
from streaming_jobs.text.spelling import instead, nearest_zone

if TYPE_CHECKING:
    from pyspark.sql.types import StructType

COLUMN_TYPES = ("date", "timestamp", "timestamp_ntz")
"""Types that the column of slices may have."""


@dataclass(frozen=True)
class Slices:
    """The column of a table's slices, and how far from its value the records of a row may lie in event time.

    `reach` is at least the length of the stream's windows, and zero for a row made of one record. `event_time` is the
    field of the records, if the topic declares none. `zone` is the calendar's time zone: a day begins at its midnight.
    `first_day` is the first day that Dagster offers.
    """

    column: str
    reach: str = "0 seconds"
    event_time: str | None = None
    zone: str = "UTC"
    first_day: str = "2020-01-01"

    def __post_init__(self) -> None:
        if self.distance < timedelta(0):
            raise UsageError(f"slices of {self.column}: reach is {self.reach}", "name a time, such as '1 hour'")
        try:
            date.fromisoformat(self.first_day)
        except ValueError as error:
            raise UsageError(f"slices of {self.column}: '{self.first_day}' is not a day", "write 2013-01-01") from error
        try:
            ZoneInfo(self.zone)
        except (KeyError, ValueError, OSError) as error:
            raise UsageError(
                f"slices of {self.column}: '{self.zone}' is not a time zone", nearest_zone(self.zone)
            ) from error

    @property
    def distance(self) -> timedelta:
        """`reach` as a duration."""
        return parse_duration(self.reach, f"slices of {self.column}: reach")

    @property
    def calendar(self) -> ZoneInfo:
        """The time zone of its days."""
        return ZoneInfo(self.zone)


def check_slices(table: str, slices: Slices | None, schema: StructType | None, *, upsert: bool) -> None:
    """Raise UsageError for slices that the table cannot have."""
    if slices is None:
        return
    if upsert:
        raise UsageError(
            f"table {table}: slices of an upsert cannot be rebuilt: its rows depend on records of any time",
            f"leave slices out; `{commands.plan('STREAM')}` rebuilds such a table as a whole",
        )
    if schema is None:
        return
    kinds = {field.name: field.dataType.typeName() for field in schema.fields}
    if slices.column not in kinds:
        raise UsageError(
            f"table {table}: '{slices.column}' is not a column of its schema (slices)", instead(slices.column, kinds)
        )
    if kinds[slices.column] not in COLUMN_TYPES:
        raise UsageError(
            f"table {table}: the column of its slices, {slices.column}, is a {kinds[slices.column]}",
            "name a column of dates or timestamps",
        )


@dataclass(frozen=True)
class SliceRange:
    """A slice: the rows with `column` in [begin, end). Both are in UTC, of a column of dates midnights in `zone`."""

    column: str
    kind: str
    begin: datetime
    end: datetime
    zone: str = "UTC"

    @property
    def bounds(self) -> tuple[Any, Any]:
        """Begin and end as values of the column: dates, or times with or without a zone."""
        if self.kind == "date":
            zone = ZoneInfo(self.zone)
            return self.begin.astimezone(zone).date(), self.end.astimezone(zone).date()
        if self.kind == "timestamp_ntz":
            return self.begin.replace(tzinfo=None), self.end.replace(tzinfo=None)
        return self.begin, self.end

    @property
    def words(self) -> str:
        """The range in words, as the column has it."""
        low, high = (bound.isoformat() for bound in self.bounds)
        return f"{self.column} from {low} to {high}"


def slice_range(slices: Slices, kind: str, begin: str, end: str | None) -> SliceRange:
    """The slice between two days or times as a person writes them, local ones in the calendar's zone.

    Without an end, the day of `begin`. Raises UsageError for anything else than a date or a time, for a time of a
    column of dates, and for an empty range.
    """
    first, day = _instant(slices, begin)
    if end is None and not day:
        raise UsageError(f"the slice begins at the time {begin} and has no end", "name it: --to")
    if end is None:
        last, day_too = begin_of(date.fromisoformat(begin) + timedelta(days=1), slices.calendar), True
    else:
        last, day_too = _instant(slices, end)
    if kind == "date" and not (day and day_too):
        raise UsageError(f"column {slices.column} has dates, and {begin} or {end} is a time", "name days: 2013-03-01")
    if last <= first:
        raise UsageError(f"the slice from {begin} to {end} is empty", "--to is the first day after the slice")
    return SliceRange(slices.column, kind, first, last, slices.zone)


def _instant(slices: Slices, text: str) -> tuple[datetime, bool]:
    """A day's midnight or a time, in UTC; and True for a day."""
    try:
        return begin_of(date.fromisoformat(text), slices.calendar), True
    except ValueError:
        pass
    try:
        at = datetime.fromisoformat(text)
    except ValueError as error:
        raise UsageError(f"'{text}' is not a day or a time", "write 2013-03-01 or 2013-03-01T05:00") from error
    return at.replace(tzinfo=at.tzinfo or slices.calendar).astimezone(UTC), False


def begin_of(day: date, zone: ZoneInfo) -> datetime:
    """The first moment of a day, in UTC: its midnight, or the change of the clocks that skips this midnight."""
    return datetime.combine(day, time(), zone).astimezone(UTC)
