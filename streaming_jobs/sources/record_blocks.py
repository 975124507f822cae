"""Records of a topic as Arrow record batches: position, key and headers, the decoded value, and the verdict on it.

The verdict is made here once, for every reader: a good record has its fields in `_record`; a refused one has a reason.
The bound on an event time ahead is measured against the record's own timestamp, not against the clock: a replay a
year later gives the same verdict. For a record that a recovery of its writer has written again, it is measured against
the time at which that writer first read its source.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal, Protocol

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.types import (
    ArrayType,
    BinaryType,
    BooleanType,
    IntegerType,
    LongType,
    StringType,
    StructField,
    StructType,
    TimestampType,
)

from streaming_jobs.declare.format import Block, BlockReader, Format, Refusal, with_null_rows
from streaming_jobs.declare.schemas import nullable
from streaming_jobs.declare.topic import RecordTimestamp
from streaming_jobs.errors import FunctionRaised, RecourseError
from streaming_jobs.sources.base import Aside
from streaming_jobs.storage.files import write_json
from streaming_jobs.storage.locations import Location, StorePath
from streaming_jobs.stream import KafkaTopic

if TYPE_CHECKING:
    from confluent_kafka import Message


# Records of a topic in one form, whether Kafka gives them or an archive does, so that both become the same rows.

HEADERS_ARROW = pa.list_(pa.struct([("key", pa.string()), ("value", pa.binary())]))
FIRST_READ = "recourse.first_read"
"""The header of a record that a replay has written: when its source was first read, in milliseconds since 1970."""
LARGEST_MS = (2**63 - 1) // 1000
TIMESTAMP_TYPES = ("NoTimestampType", "CreateTime", "LogAppendTime")
"""Kafka's names, in the order of librdkafka's numbers."""


class SourceRecords(Protocol):
    @property
    def values(self) -> list[bytes | None]:
        """The values' bytes."""

    @property
    def times(self) -> np.ndarray:
        """The records' timestamps, milliseconds since 1970, no larger than microseconds allow."""

    def column(self, name: str) -> pa.Array:
        """One of partition, offset, key, headers, timestamp_type."""

    def take(self, rows: Sequence[int]) -> SourceRecords:
        """Those of these rows."""

    def __len__(self) -> int: ...


@dataclass(frozen=True)
class KafkaMessages:
    messages: Sequence[Message]

    @cached_property
    def values(self) -> list[bytes | None]:
        return [m.value() for m in self.messages]

    @cached_property
    def times(self) -> np.ndarray:
        """As the consumer has them, cut to what microseconds allow."""
        return np.clip([m.timestamp()[1] for m in self.messages], -LARGEST_MS, LARGEST_MS).astype(np.int64)

    def column(self, name: str) -> pa.Array:
        return _COLUMNS[name](self.messages)

    def take(self, rows: Sequence[int]) -> KafkaMessages:
        return KafkaMessages([self.messages[row] for row in rows])

    def __len__(self) -> int:
        return len(self.messages)


@dataclass(frozen=True)
class ArchivedRecords:
    """Rows of an archive, of one partition: offset, timestamp_ms, timestamp_type, key, value, headers."""

    partition: int
    rows: pa.RecordBatch

    @cached_property
    def values(self) -> list[bytes | None]:
        return list(self.rows["value"].to_pylist())

    @cached_property
    def times(self) -> np.ndarray:
        return np.asarray(self.rows["timestamp_ms"])

    def column(self, name: str) -> pa.Array:
        if name == "partition":
            return pa.array(np.full(len(self), self.partition, dtype=np.int32))
        return self.rows[name]

    def take(self, rows: Sequence[int]) -> ArchivedRecords:
        return ArchivedRecords(self.partition, self.rows.take(pa.array(rows, pa.int64())))

    def __len__(self) -> int:
        return int(self.rows.num_rows)

    @property
    def end(self) -> int:
        return int(self.rows["offset"][-1].as_py()) + 1


def first_reads(headers: pa.Array) -> np.ndarray:
    """The times that records have in the header `FIRST_READ`, and the greatest number for those without one."""
    times = np.full(len(headers), LARGEST_MS, dtype=np.int64)
    flat = pc.list_flatten(headers)
    at = np.flatnonzero(pc.fill_null(pc.equal(flat.field("key"), FIRST_READ), False))
    rows = np.asarray(pc.list_parent_indices(headers))[at]
    for row, value in zip(rows, flat.field("value").take(pa.array(at)).to_pylist(), strict=True):
        if value is not None and value.isdigit() and len(value) < 16:
            times[row] = int(value)
    return times


def _headers(messages: Sequence[Message]) -> pa.Array:
    """The headers of each record; null without any."""
    each: list[Any] = [m.headers() for m in messages]
    return pa.array([[{"key": k, "value": v} for k, v in h] if h else None for h in each], HEADERS_ARROW)


_COLUMNS: dict[str, Callable[[Sequence[Message]], pa.Array]] = {
    "partition": lambda messages: pa.array([m.partition() for m in messages], pa.int32()),
    "offset": lambda messages: pa.array([m.offset() for m in messages], pa.int64()),
    "key": lambda messages: pa.array([m.key() for m in messages], pa.binary()),
    "headers": _headers,
    "timestamp_type": lambda messages: pa.array([TIMESTAMP_TYPES[m.timestamp()[0]] for m in messages], pa.string()),
}


HEADERS = ArrayType(StructType([StructField("key", StringType()), StructField("value", BinaryType())]))
POSITION = (
    StructField("topic", StringType()),
    StructField("partition", IntegerType()),
    StructField("offset", LongType()),
    StructField("timestamp", TimestampType()),
    StructField("key", BinaryType()),
)
"""The columns of a record's position, and its key."""
REFUSED = StructType(
    [
        *POSITION,
        StructField("value", BinaryType()),
        StructField("headers", HEADERS),
        StructField("reason", StringType()),
        StructField("detail", StringType()),
    ]
)
"""The columns of refused records, of topics and tables."""
RECORD = "_record"
"""The column of the decoded value."""
TIME = pa.timestamp("us", "UTC")
_TOMBSTONE = Refusal("tombstone", "the value is null and the stream does not take tombstones")


@dataclass(frozen=True)
class RecordBlocks:
    """Makes record batches. `rows`: "all" with the decoded values, or the "refused" ones with reason and detail.

    `used` is a file that may list the columns in use, `_record.field` for fields of the value; the
    others are null. It is read when the first batch is made. `recovered`: the topic has records that a recovery has
    written again. `aside` are good records that are refused all the same, without a dead letter if they have no
    refusal. With `drops_refused`, no record that the format refuses has a dead letter.
    """

    declared: KafkaTopic
    rows: Literal["all", "refused"]
    used: Location | None = None
    recovered: bool = False
    aside: Aside = field(default_factory=dict)
    drops_refused: bool = False

    @cached_property
    def _format(self) -> Format:
        return self.declared.records

    @cached_property
    def _ahead(self) -> timedelta | None:
        return self.declared.ahead

    @cached_property
    def spark_schema(self) -> StructType:
        if self.rows == "refused":
            return REFUSED
        return StructType(
            [
                *POSITION,
                *([StructField("timestamp_type", StringType())] if self.declared.timestamp_type else []),
                *([StructField("headers", HEADERS)] if self.declared.headers else []),
                StructField("tombstone", BooleanType()),
                StructField(RECORD, nullable(self._format.schema)),
                StructField("_bad", BooleanType()),
            ]
        )

    @cached_property
    def schema(self) -> pa.Schema:
        return to_arrow_schema(self.spark_schema, timezone="UTC")

    @cached_property
    def _used(self) -> frozenset[str] | None:
        """The columns to build; None: all."""
        return read_used(self.used)

    @cached_property
    def _fields(self) -> list[str]:
        """The fields of the value that are built, in the schema's order."""
        names = self._format.schema.fieldNames()
        needed = {self.declared.time_column} if self._ahead is not None else set()
        return [name for name in names if name in needed or self._wanted(f"{RECORD}.{name}")]

    @cached_property
    def _reader(self) -> BlockReader:
        return self._format.reader(None if self._used is None else self._fields)

    def _wanted(self, column: str) -> bool:
        return self._used is None or column in self._used

    def batch(self, messages: Sequence[Message]) -> pa.RecordBatch:
        """The messages of a consumer as one batch, in their order."""
        return self.of(KafkaMessages(messages))

    def of(self, records: SourceRecords) -> pa.RecordBatch:
        """The records as one batch, in their order."""
        tombstones = _tombstones(records.values)
        columns, refused = self._judged(records, tombstones)
        aside = self._set_aside(records) if self.aside else {}
        if self.rows == "refused":
            letters = {row: why for row, why in aside.items() if why is not None}
            return self._refused(records, letters if self.drops_refused else {**refused, **letters})
        size = len(records)
        bad, tombstone = np.zeros(size, dtype=bool), np.zeros(size, dtype=bool)
        bad[[*refused, *aside]] = True
        tombstone[tombstones] = True
        columns = with_null_rows(columns, aside)  # no expression of Spark meets their fields
        fields = list(self.schema.field(RECORD).type)
        made = dict(zip(self._fields, columns.columns, strict=True))
        record = [made[f.name] if f.name in made else pa.nulls(size, f.type) for f in fields]
        further = [name for name in ("headers", "timestamp_type") if name in self.schema.names and self._wanted(name)]
        built = {
            **self._position(records),
            **{name: records.column(name) for name in further},
            "tombstone": pa.array(tombstone),
            RECORD: pa.StructArray.from_arrays(record, fields=fields),
            "_bad": pa.array(bad),
        }
        arrays = [built[f.name] if f.name in built else pa.nulls(size, f.type) for f in self.schema]
        return pa.RecordBatch.from_arrays(arrays, schema=self.schema)

    def _set_aside(self, records: SourceRecords) -> dict[int, Refusal | None]:
        """By row the records that are set aside."""
        partitions, offsets = np.asarray(records.column("partition")), np.asarray(records.column("offset"))
        found = np.flatnonzero(np.isin(offsets, [offset for _, offset in self.aside]))
        places = ((int(row), (int(partitions[row]), int(offsets[row]))) for row in found)
        return {row: self.aside[place] for row, place in places if place in self.aside}

    def _times(self, records: SourceRecords) -> np.ndarray:
        """What `max_ahead` is measured against, in milliseconds since 1970."""
        if not self.recovered:
            return records.times
        times: np.ndarray = np.minimum(records.times, first_reads(records.column("headers")))
        return times

    def _judged(
        self, records: SourceRecords, tombstones: Sequence[int]
    ) -> tuple[pa.RecordBatch, Mapping[int, Refusal]]:
        """The decoded values, and by row why a record is refused."""
        try:
            block = self._reader.read(self._framed(records))
        except RecourseError:  # of the event time, which names it, or of a schema registry
            raise
        except Exception as error:
            words = " ".join(f"{type(error).__name__}: {error}".split())[:300]
            raise FunctionRaised(
                f"the format {type(self._format).__name__} of topic {self.declared.name} raised {words}",
                "correct the format: it refuses a record, and never raises",
            ) from error
        if block.columns.num_columns != len(self._fields):
            raise FunctionRaised(
                f"the format {type(self._format).__name__} of topic {self.declared.name} returned "
                f"{block.columns.num_columns} columns for {len(self._fields)} fields",
                "return a column for each field that `reader` was asked for, in the schema's order",
            )
        columns, refused = self._stamped(block, records), dict(block.refused)
        for row in tombstones:
            refused[row] = _TOMBSTONE
            if self.declared.tombstones == "keep":
                del refused[row]
        if self.declared.time_column is not None and self._ahead is not None:
            refused.update(self._too_far_ahead(columns.column(self.declared.time_column), records, refused))
        return columns, refused

    def _stamped(self, block: Block, records: SourceRecords) -> pa.RecordBatch:
        """The decoded values, with the records' timestamps where they are the event time."""
        time, columns = self.declared.event_time, block.columns
        if not isinstance(time, RecordTimestamp) or time.column not in self._fields:
            return columns
        stamps = pa.array(records.times * 1000, mask=records.times < 0).view(TIME)
        columns = columns.set_column(self._fields.index(time.column), columns.schema.field(time.column), stamps)
        return with_null_rows(columns, [row for row in block.refused if records.values[row] is not None])

    def _framed(self, records: SourceRecords) -> Sequence[bytes | None]:
        """The values, with what the format needs of the headers."""
        frame = self.declared.header_frame
        return records.values if frame is None else frame.block(records.values, records.column("headers"))

    def _too_far_ahead(
        self, events: pa.Array, records: SourceRecords, refused: Mapping[int, Refusal]
    ) -> dict[int, Refusal]:
        """The records whose event time is more than `ahead` after their own timestamp; a negative one is none."""
        assert self._ahead is not None
        times = self._times(records)
        micros = pc.cast(pc.cast(events, pa.timestamp("us")), pa.int64())
        event = np.asarray(pc.fill_null(micros, np.iinfo(np.int64).min))
        ahead_ms = self._ahead // timedelta(milliseconds=1)
        latest = np.minimum(times, LARGEST_MS - ahead_ms) + ahead_ms
        late = np.flatnonzero((times >= 0) & (event > latest * 1000))
        found = {}
        for row in (int(row) for row in late if int(row) not in refused):
            own = times[row] == records.times[row]
            since = "the record's own timestamp" if own else "its source was first read"
            found[row] = Refusal(
                "event_time_ahead",
                f"field '{self.declared.time_column}' is {_shown(int(event[row]))}, more than "
                f"{self.declared.max_ahead} after {since}, {_shown(int(times[row]) * 1000)}",
            )
        return found

    def _position(self, records: SourceRecords) -> dict[str, pa.Array]:
        """The columns of the records' positions that are wanted."""
        ways: dict[str, Callable[[], pa.Array]] = {
            "topic": lambda: pa.repeat(self.declared.name, len(records)),
            "partition": lambda: records.column("partition"),
            "offset": lambda: records.column("offset"),
            "timestamp": lambda: pa.array(records.times * 1000).view(TIME),
            "key": lambda: records.column("key"),
        }
        return {name: make() for name, make in ways.items() if self._wanted(name)}

    def _refused(self, records: SourceRecords, refused: Mapping[int, Refusal]) -> pa.RecordBatch:
        rows = sorted(refused)
        chosen = records.take(rows)
        arrays = [
            *self._position(chosen).values(),
            pa.array(chosen.values, pa.binary()),
            chosen.column("headers"),
            pa.array([refused[row].reason for row in rows], pa.string()),
            pa.array([refused[row].detail for row in rows], pa.string()),
        ]
        return pa.RecordBatch.from_arrays(arrays, schema=self.schema)


def _tombstones(values: Sequence[bytes | None]) -> list[int]:
    """The rows without a value, mostly none."""
    return [row for row, value in enumerate(values) if value is None] if None in values else []


def note_used(path: Location, columns: Iterable[str]) -> None:
    """Write the columns in use."""
    if isinstance(path, StorePath):
        path.write_bytes(json.dumps(sorted(columns)).encode())
    else:
        write_json(path, sorted(columns), durable=False)


def with_refused(records: pa.Table, places: Collection[tuple[int, int]]) -> pa.Table:
    """All records with those at these partitions and offsets refused; no expression of Spark meets their fields."""
    at = zip(records["partition"].to_pylist(), records["offset"].to_pylist(), strict=True)
    refused = pa.array([place in places for place in at], pa.bool_())
    for name, value in ((RECORD, None), ("_bad", True)):
        place, column = records.schema.get_field_index(name), records[name]
        changed = pc.if_else(refused, pa.scalar(value, column.type), column)
        records = records.set_column(place, records.schema.field(name), changed)
    return records


def read_used(path: Location | None) -> frozenset[str] | None:
    """The columns in the file; None without a file."""
    if path is None:
        return None
    try:
        return frozenset(json.loads(path.read_text(encoding="utf-8")))
    except FileNotFoundError:
        return None


def _shown(micros: int) -> str:
    return str(pc.strftime(pa.scalar(micros, TIME), "%Y-%m-%d %H:%M:%S").as_py()).removesuffix(".000000")
