"""Event times from other fields than timestamps: a number of seconds since 1970, or a function of several fields.

    KafkaTopic("quakes", value=Json(QUAKE), event_time=EpochMillis("time"), lateness="1 hour")

The time is a further column of the source, `event_time` unless `column` names it otherwise. It is made in Arrow while
records are decoded, so that every reader of the topic has the same time and the same verdict.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from streaming_jobs.declare.columns import SOURCE_COLUMN
from streaming_jobs.declare.format import (
    Block,
    BlockReader,
    DeclaredFormat,
    Format,
    HeaderFrame,
    Refusal,
    RegistryFormat,
    Schemas,
    checked_fields,
    record_batch,
    with_null_rows,
)
from streaming_jobs.declare.names import (
    check_event_time,
    checked_names,
    cluster_of,
    in_cluster,
    is_topic_name,
    kafka_name,
)
from streaming_jobs.errors import FunctionRaised, UsageError
from streaming_jobs.text.durations import parse_duration
from streaming_jobs.text.spelling import instead

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql.types import StructType


OUT_OF_RANGE = "event_time_out_of_range"
"""The reason of a refusal: the time is not in the years 1 to 9999."""

_EARLIEST, _LATEST = -62_135_596_800_000_000, 253_402_300_799_999_999
_NUMBERS = ("byte", "short", "integer", "long", "float", "double")


@dataclass(frozen=True)
class _Epoch:
    """A field that counts from 1970-01-01 UTC; null where the field is null."""

    field: str
    column: str = "event_time"
    micros: ClassVar[int]

    @property
    def fields(self) -> tuple[str, ...]:
        return (self.field,)

    def check(self, source: str, schema: StructType) -> None:
        """Raise UsageError if the field is none of numbers."""
        _check_fields(source, self.fields, schema)
        kind = schema[self.field].dataType
        if kind.typeName() not in _NUMBERS:
            raise UsageError(
                f"{source}: {self} is of a field that is {kind.simpleString()}, not a number",
                "name a field of whole numbers or doubles, or write a ComputedTime",
            )

    def of(self, fields: Sequence[pa.Array]) -> pa.Array:
        """Microseconds since 1970; a value out of range becomes the largest number."""
        import numpy as np
        import pyarrow as pa
        import pyarrow.compute as pc

        (numbers,) = fields
        known = np.asarray(pc.is_valid(numbers))
        largest = np.iinfo(np.int64).max
        if pa.types.is_floating(numbers.type):
            with np.errstate(over="ignore"):
                exact = np.asarray(pc.fill_null(numbers, 0)).astype(np.float64) * self.micros
            fits = (exact >= _EARLIEST) & (exact <= _LATEST)
            micros = np.where(fits, exact, 0).round().astype(np.int64)
        else:
            whole = np.asarray(pc.fill_null(numbers, 0)).astype(np.int64)
            fits = (whole >= _EARLIEST // self.micros) & (whole <= _LATEST // self.micros)
            micros = np.where(fits, whole, 0) * self.micros
        return pa.array(np.where(fits, micros, largest), pa.int64(), mask=~known)

    def __str__(self) -> str:
        return f"{type(self).__name__}('{self.field}')"


class EpochSeconds(_Epoch):
    """A field of seconds since 1970-01-01 UTC."""

    micros = 1_000_000


class EpochMillis(_Epoch):
    """A field of milliseconds since 1970-01-01 UTC."""

    micros = 1_000


class EpochMicros(_Epoch):
    """A field of microseconds since 1970-01-01 UTC."""

    micros = 1


@dataclass(frozen=True)
class ComputedTime:
    """The time that `function` makes of the fields after which its parameters are named.

    It gets Arrow arrays and returns one of timestamps, as long as they are; a time without a zone is UTC. It has to
    give the same times whenever it is called. Fields of refused records are null.
    """

    function: Callable[..., Any]
    column: str = "event_time"

    @property
    def fields(self) -> tuple[str, ...]:
        return tuple(inspect.signature(self.function).parameters)

    def check(self, source: str, schema: StructType) -> None:
        """Raise UsageError for anything but a function, or a parameter that is not named after a field."""
        if not inspect.isfunction(self.function):
            raise UsageError(f"{source}: ComputedTime is given {self.function!r}, not a function", "write a function")
        if not self.fields:
            raise UsageError(f"{source}: {self} takes no field", "name its parameters after fields of the records")
        _check_fields(source, self.fields, schema)

    def of(self, fields: Sequence[pa.Array]) -> pa.Array:
        """Microseconds since 1970; raises FunctionRaised if the function fails, or returns something else."""
        import pyarrow as pa
        import pyarrow.compute as pc

        try:
            made = self.function(*fields)
        except Exception as error:
            words = " ".join(f"{type(error).__name__}: {error}".split())[:300]
            raise FunctionRaised(f"{self} raised {words}", "correct the function of the event time") from error
        if isinstance(made, pa.ChunkedArray):
            made = made.combine_chunks()
        if not isinstance(made, pa.Array) or not pa.types.is_timestamp(made.type) or len(made) != len(fields[0]):
            kind = f"{len(made)} x {made.type}" if isinstance(made, pa.Array) else type(made).__name__
            raise FunctionRaised(
                f"{self} returned {kind}, not an Arrow array of {len(fields[0])} timestamps",
                "return one timestamp per record: pyarrow.compute.cast(..., pyarrow.timestamp('us', 'UTC'))",
            )
        return pc.cast(pc.cast(made, pa.timestamp("us", made.type.tz), safe=False), pa.int64())

    def __str__(self) -> str:
        code = self.function.__code__
        return f"the event time's function {self.function.__name__} ({code.co_filename}:{code.co_firstlineno})"


@dataclass(frozen=True)
class RecordTimestamp:
    """The record's own timestamp: when it was produced or, with LogAppendTime, appended; null where Kafka has none.

    Records that another cluster or a replay wrote again have other timestamps, unless the writer keeps them.
    """

    column: str = "event_time"
    fields: ClassVar[tuple[str, ...]] = ()

    def check(self, source: str, schema: StructType) -> None:
        """Every record has a timestamp, whatever its fields."""

    def __str__(self) -> str:
        return "the record's timestamp"


EventTime = EpochSeconds | EpochMillis | EpochMicros | ComputedTime | RecordTimestamp
"""How a source's event time is made."""


@dataclass(frozen=True)
class TimedFormat(DeclaredFormat):
    """A format whose records have their event time as a further column, the last one."""

    format: Format
    time: EventTime

    @property
    def schema(self) -> StructType:
        """The fields of the format, and the time."""
        from pyspark.sql.types import StructField, StructType, TimestampType  # here: declared without Spark

        inner = self.format.schema
        made = isinstance(self.time, ComputedTime | RecordTimestamp)
        optional = made or any(inner[name].nullable for name in self.time.fields)
        return StructType([*inner.fields, StructField(self.time.column, TimestampType(), optional)])

    @property
    def reasons(self) -> frozenset[str]:
        return frozenset({*self.format.reasons, OUT_OF_RANGE})

    def reader(self, fields: Sequence[str] | None = None) -> TimedReader:
        """A reader; the verdict on the time is made whichever fields are built."""
        wanted = checked_fields(self.schema, fields)
        names = [name for name in self.format.schema.fieldNames() if name in wanted or name in self.time.fields]
        built = [name for name in self.schema.fieldNames() if name in wanted]
        return TimedReader(self.format.reader(names), names, self.time, built)


@dataclass(frozen=True)
class TimedReader:
    """Adds the time to what `reader` makes of `names`, and keeps the columns in `built`.

    Values have no timestamp: the column of a RecordTimestamp is null, until whoever has the records fills it.
    """

    reader: BlockReader
    names: Sequence[str]
    time: EventTime
    built: Sequence[str]

    def read(self, values: Sequence[bytes | None]) -> Block:
        """Decode the values; a time that is out of range refuses its record."""
        import numpy as np
        import pyarrow as pa
        import pyarrow.compute as pc

        block = self.reader.read(values)
        columns: dict[str, pa.Array] = dict(zip(self.names, block.columns.columns, strict=True))
        if isinstance(self.time, RecordTimestamp):
            micros = pa.nulls(len(values), pa.int64())
        else:
            micros = self.time.of([columns[name] for name in self.time.fields])
        outside = np.asarray(pc.fill_null(pc.or_(pc.less(micros, _EARLIEST), pc.greater(micros, _LATEST)), False))
        refused = dict(block.refused)
        for row in (int(row) for row in np.flatnonzero(outside) if int(row) not in refused):
            refused[row] = Refusal(OUT_OF_RANGE, f"{self._words(columns, row)} is no time in the years 1 to 9999")
        micros = pc.if_else(outside, None, micros)  # the cast refuses them
        columns[self.time.column] = pc.cast(micros, pa.timestamp("us", "UTC"))
        rows = record_batch(len(values), {name: columns[name] for name in self.built})
        return Block(with_null_rows(rows, np.flatnonzero(outside)), refused)

    def _words(self, columns: dict[str, pa.Array], row: int) -> str:
        made_of = ", ".join(f"{name} = {columns[name][row]}" for name in self.time.fields)
        return f"'{self.time.column}' of {made_of}"


def _check_fields(source: str, fields: Sequence[str], schema: StructType) -> None:
    names = schema.fieldNames()
    for field in fields:
        if field not in names:
            raise UsageError(f"{source}: event_time: '{field}' is not a field of its value", instead(field, names))


MAX_AHEAD = "1 day"
"""The longest time by which an event time may be after its record's timestamp, if a topic declares nothing else."""

_MADE = (
    "write event_time=EpochMillis('{0}') (or EpochSeconds, EpochMicros) if it counts from 1970, else "
    "event_time=ComputedTime(function of fields), or RecordTimestamp() for Kafka's own; TimestampType is for texts "
    "such as 2026-11-21T08:00:00Z"
)


@dataclass(frozen=True)
class KafkaTopic:
    """A Kafka topic as a source.

    The function sees the fields of `value` as columns, and the struct `_source` (topic, partition, offset,
    timestamp, key, tombstone; headers if `headers` is set; CreateTime, LogAppendTime or NoTimestampType if
    `timestamp_type` is set). With `event_time`, a field of timestamps or a column that is made (see above), the
    frame has a watermark of `lateness` on it. A record whose event time is more than `max_ahead` after its Kafka
    timestamp is then a dead letter (`event_time_ahead`), since it would move the watermark past all other records;
    None: no such bound. A null event time does not move the watermark; windows leave its row out. Windows and joins of
    several sources wait for the slowest one, but not for one that has had no record for `idle_after`: its next records
    may be late. A record with a null value is a dead letter, or, with `tombstones="keep"`, a row whose fields are all
    null and whose `_source.tombstone` is true. Only committed records are read.

    `cluster` is a name in the settings `kafka.clusters`, for a topic outside of the default cluster. Everywhere else
    the topic's name is `orders@eu` then, and `KafkaTopic("orders@eu", ...)` is the same declaration.
    """

    name: str
    value: Format
    event_time: str | EventTime | None = None
    lateness: str | None = None
    max_ahead: str | None = MAX_AHEAD
    idle_after: str | None = None
    tombstones: Literal["dead_letter", "keep"] = "dead_letter"
    headers: bool = False
    timestamp_type: bool = False
    description: str = ""
    owners: Sequence[str] = ()
    cluster: str = ""

    def __post_init__(self) -> None:
        self._complete_name()
        is_format = hasattr(self.value, "schema") and hasattr(self.value, "reader")
        if isinstance(self.value, type) or not is_format:  # a StructType, a dict, a class
            text = repr(self.value)
            shown = text if len(text) <= 100 else f"{text[:97]}..."
            raise UsageError(f"topic {self.name}: value={shown} is no format", f"write value={_as_format(self.value)}")
        if (self.event_time is None) != (self.lateness is None):
            raise UsageError(f"topic {self.name}: event_time and lateness go together", "set both, or neither")
        if self.idle_after is not None and self.event_time is None:
            raise UsageError(
                f"topic {self.name}: idle_after is of the event time, and there is none", "set event_time and lateness"
            )
        if self.tombstones not in (allowed := ("dead_letter", "keep")):
            raise UsageError(f"topic {self.name}: tombstones='{self.tombstones}'", instead(self.tombstones, allowed))
        object.__setattr__(self, "owners", checked_names(f"topic {self.name}", "owners", self.owners))
        for option in ("lateness", "max_ahead", "idle_after"):
            if (duration := getattr(self, option)) is not None:
                parse_duration(duration, f"topic {self.name}: {option}")
        self._check_event_time(f"topic {self.name}")
        if SOURCE_COLUMN in self.records.schema.fieldNames():
            raise UsageError(f"topic {self.name}: the field name {SOURCE_COLUMN} is taken", "rename the field")

    def _complete_name(self) -> None:
        """Make name and cluster agree, however they were given."""
        named = cluster_of(self.name)
        if self.cluster and named not in ("", self.cluster):
            raise UsageError(f"topic {self.name} has cluster='{self.cluster}'", "name one cluster")
        whole = self.name if named else in_cluster(self.name, self.cluster)
        if not is_topic_name(whole):
            raise UsageError(
                f"'{whole}' is not a topic name",
                "use letters, digits, '.', '_' and '-'; after an '@', the name of a cluster in kafka.clusters",
            )
        object.__setattr__(self, "name", whole)
        object.__setattr__(self, "cluster", cluster_of(whole))

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

    def bound(self, schemas: Schemas) -> KafkaTopic:
        """The topic with a format that has its schemas at hand; itself for a format that needs no registry."""
        if not isinstance(self.value, RegistryFormat):
            return self
        return replace(self, value=self.value.bound(schemas, kafka_name(self.name)))

    @property
    def header_frame(self) -> HeaderFrame | None:
        """How the format reads headers; None: it reads none."""
        return getattr(self.value, "header_frame", None)

    @property
    def time_column(self) -> str | None:
        return self.event_time.column if isinstance(self.event_time, EventTime) else self.event_time

    @property
    def delay(self) -> timedelta | None:
        return parse_duration(self.lateness) if self.lateness else None

    @property
    def ahead(self) -> timedelta | None:
        """The longest time by which an event time may be after its record's timestamp; None: no bound."""
        return parse_duration(self.max_ahead) if self.event_time and self.max_ahead else None


def _as_format(value: object) -> str:
    if isinstance(value, type):
        return f"{value.__name__}(...)"
    return "Json(...) or Csv(...) around the schema, Avro(schema), Protobuf(message), Text() or Raw()"
