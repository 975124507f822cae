"""The columns beside a record's value, by row: key, headers, timestamp and topic."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property
from itertools import repeat
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from streaming_jobs.sinks.kafka.producer import Header, Record

KEY, HEADERS, TIMESTAMP, ROUTE = "__key", "__headers", "__timestamp", "__route"
PLACE = ("__topic", "__partition", "__offset")
RECORD_OVERHEAD, HEADER_OVERHEAD = 100, 10
"""Bytes that Kafka's format adds at most to a record alone in its batch, and to a header."""
_SOURCE = "recourse.source"


class RecordColumns:
    """The columns of a block of rows; rows without a route go to `topic`, and all have the `fixed` headers."""

    def __init__(self, rows: pa.RecordBatch, topic: str, fixed: Sequence[Header]) -> None:
        self._rows = rows
        self._names = frozenset(rows.schema.names)
        self._topic = topic
        self._fixed = list(fixed)
        self.keys: Sequence[bytes | None] = self._list(KEY)
        self.times: Sequence[int | None] = self._list(TIMESTAMP)
        self._own = rows.column(HEADERS).to_pylist() if HEADERS in self._names else None
        self._sources = self._source_headers() if self._names.issuperset(PLACE) and fixed else None

    @cached_property
    def topics(self) -> Sequence[str]:
        if ROUTE not in self._names:
            return [self._topic] * self._rows.num_rows
        routes: list[str | None] = self._rows.column(ROUTE).to_pylist()
        return [route or self._topic for route in routes]

    def headers(self, row: int) -> list[Header]:
        """The headers of a record: the batch's, its source position, its own."""
        headers = list(self._fixed)
        if self._sources is not None and (source := self._sources[row]) is not None:
            headers.append((_SOURCE, source))
        if self._own is not None and self._own[row]:
            headers += [(header["key"], header["value"]) for header in self._own[row] if header is not None]
        return headers

    def records(self, values: Sequence[bytes | None]) -> Iterator[Record]:
        """The records of all rows, made without a step of Python per row where the headers are the same."""
        alike = self._sources is None and self._own is None
        headers = repeat(self._fixed) if alike else map(self.headers, range(self._rows.num_rows))
        topics = self.topics if ROUTE in self._names else repeat(self._topic)
        times = [time or 0 for time in self.times] if TIMESTAMP in self._names else repeat(0)
        return zip(topics, self.keys, values, headers, times, repeat(-1))

    def most_bytes(self, values: Sequence[bytes | None]) -> int | None:
        """What none of the records is larger than; None if rows have headers of their own, which are not looked at."""
        if self._own is not None:
            return None
        longest = max((len(value) for value in values if value is not None), default=0)
        if KEY in self._names:
            longest += pc.max(pc.binary_length(self._rows.column(KEY))).as_py() or 0
        longest += sum(len(name.encode()) + len(content or b"") + HEADER_OVERHEAD for name, content in self._fixed)
        if self._sources is not None:
            longest += max((len(source) for source in self._sources if source is not None), default=0)
            longest += len(_SOURCE) + HEADER_OVERHEAD
        return longest + RECORD_OVERHEAD

    def _list(self, name: str) -> list[Any]:
        values: list[Any] = self._rows.column(name).to_pylist() if name in self._names else [None] * self._rows.num_rows
        return values

    def _source_headers(self) -> Sequence[bytes | None]:
        """`topic/partition/offset`; None for a row without one."""
        parts = [self._rows.column(name).cast(pa.string()) for name in PLACE]
        joined: list[bytes | None] = pc.binary_join_element_wise(*parts, "/").cast(pa.binary()).to_pylist()
        return joined
