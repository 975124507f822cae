"""An archive in memory, for the readers of topics."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import pyarrow as pa

from streaming_jobs.sources.base import Span
from streaming_jobs.sources.record_blocks import HEADERS_ARROW, ArchivedRecords


@dataclass
class MemoryArchive:
    """Records by partition and offset, of what was covered; `asked` notes what was read."""

    rows: Mapping[int, Sequence[int]]
    covered: Mapping[int, Span]
    asked: list[tuple[int, Span]] = field(default_factory=list)
    name: str = "things_archive"

    def bounds(self) -> Mapping[int, Span]:
        return self.covered

    def read(self, partition: int, span: Span, most: int) -> Iterator[ArchivedRecords]:
        self.asked.append((partition, span))
        offsets = [o for o in self.rows[partition] if span[0] <= o < span[1]]
        for at in range(0, len(offsets), most):
            yield archived(partition, offsets[at : at + most])

    def first_at(self, ms: int, spans: Mapping[int, Span]) -> Mapping[int, int]:
        raise AssertionError("nobody asks for times here")

    def mean_size(self, starts: Mapping[int, int]) -> float | None:
        return 100.0


def archived(partition: int, offsets: Sequence[int]) -> ArchivedRecords:
    count = len(offsets)
    columns = {
        "offset": pa.array(offsets, pa.int64()),
        "timestamp_ms": pa.array([0] * count, pa.int64()),
        "timestamp_type": pa.array(["CreateTime"] * count),
        "key": pa.nulls(count, pa.binary()),
        "value": pa.array([b"{}"] * count, pa.binary()),
        "headers": pa.nulls(count, HEADERS_ARROW),
    }
    return ArchivedRecords(partition, pa.record_batch(columns))
