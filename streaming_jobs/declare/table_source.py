"""The declaration of a Delta table as a source of a stream: its new rows, version by version.

    @stream(source=DeltaSource("flights_clean"), sink=DeltaTable("delays", schema=DELAYS))
    def delays(flights: DataFrame) -> DataFrame: ...

A position in the table is a version: `{"flights_clean": {0: 41}}` means that the versions below 41 are read. A range of
versions gives the rows that the batches of the stream that writes the table added in them; a range that begins at 0
gives all rows that the table has at its end. docs/table_source.md has the contract.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING

from streaming_jobs.declare.columns import SOURCE_COLUMN
from streaming_jobs.declare.names import check_event_time, checked_name, checked_names, checked_schema
from streaming_jobs.errors import UsageError
from streaming_jobs.text.durations import parse_duration

if TYPE_CHECKING:
    from pyspark.sql.types import StructType


_MADE = "let the stream that writes the table add a column of timestamps, such as F.timestamp_millis('{0}')"


@dataclass(frozen=True)
class DeltaSource:
    """A Delta table below `tables` as a source; only rows may be added to it.

    The function sees the columns of `schema`, and the struct `_source` (topic: the table's name; partition: 0; offset:
    the version; timestamp: the time of the version's commit; key: null; tombstone: false). `schema` may be left out if
    one of our streams writes the table with a declared schema; columns that it does not have are not read. `event_time`
    and `lateness` are those of `KafkaTopic`. A row whose event time is more than `max_ahead` after the time of its
    commit is a dead letter (`event_time_ahead`); None: no such bound. `idle_after` is that of `KafkaTopic`.
    """

    name: str
    schema: StructType | None = None
    event_time: str | None = None
    lateness: str | None = None
    max_ahead: str | None = None
    idle_after: str | None = None
    description: str = ""
    owners: Sequence[str] = ()

    def __post_init__(self) -> None:
        checked_name("table", self.name)
        object.__setattr__(self, "schema", checked_schema(f"table {self.name}", self.schema))
        if (self.event_time is None) != (self.lateness is None):
            raise UsageError(f"table {self.name}: event_time and lateness go together", "set both, or neither")
        if self.idle_after is not None and self.event_time is None:
            raise UsageError(
                f"table {self.name}: idle_after is of the event time, and there is none", "set event_time and lateness"
            )
        object.__setattr__(self, "owners", checked_names(f"table {self.name}", "owners", self.owners))
        for option in ("lateness", "max_ahead", "idle_after"):
            if (duration := getattr(self, option)) is not None:
                parse_duration(duration, f"table {self.name}: {option}")
        if self.event_time is not None and not isinstance(self.event_time, str):
            raise UsageError(f"table {self.name}: event_time is {self.event_time!r}, not a column", _MADE.format("..."))
        if self.schema is None:
            return
        fields = self.schema.fieldNames()
        if self.event_time is not None:
            check_event_time(f"table {self.name}", self.event_time, self.schema, "column of its schema", _MADE)
        if SOURCE_COLUMN in fields:
            raise UsageError(
                f"table {self.name}: the column name {SOURCE_COLUMN} is taken", "leave the column out of the schema"
            )

    @property
    def columns(self) -> StructType:
        """The declared columns; raises UsageError if neither the source nor the table's writer declares any."""
        if self.schema is None:
            raise UsageError(
                f"the columns of table {self.name} are not known: no stream here declares a schema for it",
                "give the source its schema: DeltaSource(..., schema=...)",
            )
        return self.schema

    @property
    def time_column(self) -> str | None:
        return self.event_time

    @property
    def delay(self) -> timedelta | None:
        return parse_duration(self.lateness) if self.lateness else None

    @property
    def ahead(self) -> timedelta | None:
        """The longest time by which an event time may be after the commit of its row; None: no bound."""
        return parse_duration(self.max_ahead) if self.event_time and self.max_ahead else None
