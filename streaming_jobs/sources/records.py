"""Records of a topic in one form, whether Kafka gives them or an archive does, so that both become the same rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

if TYPE_CHECKING:
    from confluent_kafka import Message

HEADERS_ARROW = pa.list_(pa.struct([("key", pa.string()), ("value", pa.binary())]))
FIRST_READ = "recourse.first_read"
"""The header of a record that a replay has written: when its source was first read, in milliseconds since 1970."""
LARGEST_MS = (2**63 - 1) // 1000
TIMESTAMP_TYPES = ("NoTimestampType", "CreateTime", "LogAppendTime")
"""Kafka's names, in the order of librdkafka's numbers."""


class Records(Protocol):
    """Some records, in order."""

    @property
    def values(self) -> list[bytes | None]:
        """The values' bytes."""

    @property
    def times(self) -> np.ndarray:
        """The records' timestamps, milliseconds since 1970, no larger than microseconds allow."""

    def column(self, name: str) -> pa.Array:
        """One of partition, offset, key, headers, timestamp_type."""

    def take(self, rows: Sequence[int]) -> Records:
        """Those of these rows."""

    def __len__(self) -> int: ...


@dataclass(frozen=True)
class KafkaMessages:
    """Messages of a consumer."""

    messages: Sequence[Message]

    @cached_property
    def values(self) -> list[bytes | None]:
        """As the consumer has them."""
        return [m.value() for m in self.messages]

    @cached_property
    def times(self) -> np.ndarray:
        """As the consumer has them, cut to what microseconds allow."""
        return np.clip([m.timestamp()[1] for m in self.messages], -LARGEST_MS, LARGEST_MS).astype(np.int64)

    def column(self, name: str) -> pa.Array:
        """The column, built from the messages."""
        return _COLUMNS[name](self.messages)

    def take(self, rows: Sequence[int]) -> KafkaMessages:
        """Those messages."""
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
        """The values' bytes."""
        return list(self.rows["value"].to_pylist())

    @cached_property
    def times(self) -> np.ndarray:
        """The column of times."""
        return np.asarray(self.rows["timestamp_ms"])

    def column(self, name: str) -> pa.Array:
        """The column itself."""
        if name == "partition":
            return pa.array(np.full(len(self), self.partition, dtype=np.int32))
        return self.rows[name]

    def take(self, rows: Sequence[int]) -> ArchivedRecords:
        """Those rows."""
        return ArchivedRecords(self.partition, self.rows.take(pa.array(rows, pa.int64())))

    def __len__(self) -> int:
        return int(self.rows.num_rows)

    @property
    def end(self) -> int:
        """The offset after the last record."""
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
