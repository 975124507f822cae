"""The declaration of a Kafka topic as a source of a stream."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Literal

from streaming_jobs.columns import SOURCE_COLUMN
from streaming_jobs.declared_names import check_event_time, checked_names
from streaming_jobs.durations import parse_duration
from streaming_jobs.errors import UsageError
from streaming_jobs.event_times import EventTime, TimedFormat
from streaming_jobs.spelling import instead

if TYPE_CHECKING:
    from streaming_jobs.record_format import Format

MAX_AHEAD = "1 day"
"""The longest time by which an event time may be after its record's timestamp, if a topic declares nothing else."""

_MADE = (
    "write event_time=EpochMillis('{0}') (or EpochSeconds, EpochMicros) if it counts from 1970, else "
    "event_time=ComputedTime(function of fields); TimestampType is for texts such as 2026-11-21T08:00:00Z"
)
_TOPIC = re.compile(r"[A-Za-z0-9._-]{1,249}")


@dataclass(frozen=True)
class KafkaTopic:
    """A Kafka topic as a source.

    The function sees the fields of `value` as columns, and the struct `_source` (topic, partition, offset,
    timestamp, key, tombstone; headers if `headers` is set; CreateTime, LogAppendTime or NoTimestampType if
    `timestamp_type` is set). With `event_time`, a field of timestamps or a column that is made (`event_times.py`), the
    frame has a watermark of `lateness` on it. A record whose event time is more than `max_ahead` after its Kafka
    timestamp is then a dead letter (`event_time_ahead`), since it would move the watermark past all other records;
    None: no such bound. A null event time does not move the watermark; windows leave its row out. A record with a null
    value is a dead letter, or, with `tombstones="keep"`, a row whose fields are all null and whose `_source.tombstone`
    is true. Only committed records are read.
    """

    name: str
    value: Format
    event_time: str | EventTime | None = None
    lateness: str | None = None
    max_ahead: str | None = MAX_AHEAD
    tombstones: Literal["dead_letter", "keep"] = "dead_letter"
    headers: bool = False
    timestamp_type: bool = False
    description: str = ""
    owners: Sequence[str] = ()

    def __post_init__(self) -> None:
        if not _TOPIC.fullmatch(self.name) or self.name in (".", ".."):
            raise UsageError(f"'{self.name}' is not a topic name", "use letters, digits, '.', '_' and '-'")
        if isinstance(self.value, type) or not hasattr(self.value, "schema"):  # a StructType, a dict, a class
            raise UsageError(
                f"topic {self.name}: value={self.value!r:.100} is no format", f"write value={_as_format(self.value)}"
            )
        if (self.event_time is None) != (self.lateness is None):
            raise UsageError(f"topic {self.name}: event_time and lateness go together", "set both, or neither")
        if self.tombstones not in (allowed := ("dead_letter", "keep")):
            raise UsageError(f"topic {self.name}: tombstones='{self.tombstones}'", instead(self.tombstones, allowed))
        object.__setattr__(self, "owners", checked_names(f"topic {self.name}", "owners", self.owners))
        for option in ("lateness", "max_ahead"):
            if (duration := getattr(self, option)) is not None:
                parse_duration(duration, f"topic {self.name}: {option}")
        self._check_event_time(f"topic {self.name}")
        if SOURCE_COLUMN in self.records.schema.fieldNames():
            raise UsageError(f"topic {self.name}: the field name {SOURCE_COLUMN} is taken", "rename the field")

    def _check_event_time(self, what: str) -> None:
        names = self.value.schema.fieldNames()
        if isinstance(self.event_time, EventTime):
            self.event_time.check(what, self.value.schema)
            if self.event_time.column.lower() in (name.lower() for name in names):
                raise UsageError(
                    f"{what}: its value has a field '{self.event_time.column}' already",
                    "name the column of the event time otherwise: column='...'",
                )
        elif self.event_time is not None and not isinstance(self.event_time, str):
            raise UsageError(f"{what}: event_time is {self.event_time!r}, not a field", _MADE.format("..."))
        elif self.event_time is not None:
            check_event_time(what, self.event_time, self.value.schema, "field of its value", _MADE)

    @property
    def records(self) -> Format:
        """The format of the records as the function sees them: `value`, with the event time where it is made."""
        return TimedFormat(self.value, self.event_time) if isinstance(self.event_time, EventTime) else self.value

    @property
    def time_column(self) -> str | None:
        """The column of the event time."""
        return self.event_time.column if isinstance(self.event_time, EventTime) else self.event_time

    @property
    def delay(self) -> timedelta | None:
        """The declared watermark delay."""
        return parse_duration(self.lateness) if self.lateness else None

    @property
    def ahead(self) -> timedelta | None:
        """The longest time by which an event time may be after its record's timestamp; None: no bound."""
        return parse_duration(self.max_ahead) if self.event_time and self.max_ahead else None


def _as_format(value: object) -> str:
    if isinstance(value, type):
        return f"{value.__name__}(...)"
    return "Json(...) around the schema, Text() or Raw()"
