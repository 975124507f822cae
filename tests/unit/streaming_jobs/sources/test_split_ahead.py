"""A batch is read and decoded while Spark logs its offsets, and handed out when Spark asks for its parts."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql.datasource import InputPartition
from pyspark.sql.streaming.datasource import ReadAllAvailable
from pyspark.sql.types import StructType

from streaming_jobs.errors import OffsetsLost
from streaming_jobs.sources.data_source import Reading, Split, StreamReader

RECORDS = pa.RecordBatch.from_pydict({"n": [1]})
PATIENCE = 30.0


class Five:
    """A planner of batches of five records."""

    def next_end(self, start: Mapping[int, int]) -> dict[int, int]:
        return {0: start[0] + 5 if start[0] < 10 else start[0]}

    def stop_at_present_end(self) -> None: ...

    def close(self) -> None: ...


@dataclass(frozen=True)
class Slow(Reading[Five]):
    """Splits a batch once it may; `spans` are those that it has split."""

    may: threading.Event = field(default_factory=threading.Event)
    spans: list[tuple[int, int]] = field(default_factory=list)
    error: Exception | None = None

    schema = StructType()
    source = "things"

    def planner(self) -> Five:
        return Five()

    def parts(self) -> Sequence[InputPartition]:
        return []

    def split(self, planner: Five, starts: dict[int, int], ends: dict[int, int]) -> Split:
        assert self.may.wait(PATIENCE)
        self.spans.append((starts[0], ends[0]))
        if self.error is not None:
            raise self.error
        return [InputPartition(ends[0])], [RECORDS]

    def read(self, part: InputPartition) -> Iterator[pa.RecordBatch]:
        yield RECORDS


def at(offset: int) -> dict[str, Any]:
    return {"things": {"0": offset}}


def end_of(reader: StreamReader, start: int) -> dict[str, Any]:
    return reader.latestOffset(at(start), ReadAllAvailable())


def test_a_batch_is_split_once_while_spark_logs_its_offsets() -> None:
    reading = Slow("slow", {0: 0})
    reader = StreamReader(reading)
    assert end_of(reader, 0) == at(5), "the answer does not wait for the records"
    reading.may.set()
    assert [part.value for part in reader.partitions(at(0), at(5))] == [5]
    assert list(reader.getCache(at(0), at(5)) or []) == [RECORDS]
    assert reading.spans == [(0, 5)]
    assert end_of(reader, 10) == at(10) and reading.spans == [(0, 5)], "nothing new, nothing to split"


def test_a_batch_that_was_planned_before_the_start_is_split_when_spark_asks() -> None:
    reading = Slow("slow", {0: 0})
    reading.may.set()
    reader = StreamReader(reading)
    assert [part.value for part in reader.partitions(at(0), at(7))] == [7]
    assert end_of(reader, 0) == at(5)
    assert [part.value for part in reader.partitions(at(0), at(7))] == [7], "of other offsets"
    assert reading.spans == [(0, 7), (0, 5), (0, 7)], "one after the other"


def test_what_splitting_raises_is_raised_when_spark_asks_for_the_parts() -> None:
    reading = Slow("slow", {0: 0}, error=OffsetsLost("records are gone", "see the status"))
    reading.may.set()
    reader = StreamReader(reading)
    assert end_of(reader, 0) == at(5)
    with pytest.raises(OffsetsLost, match="records are gone"):
        reader.partitions(at(0), at(5))


def test_the_next_batch_is_planned_after_the_one_that_is_being_split() -> None:
    """The planner and its connection are for one thread at a time."""
    reading = Slow("slow", {0: 0})
    reader = StreamReader(reading)
    end_of(reader, 0)
    second = threading.Thread(target=end_of, args=(reader, 5), daemon=True)
    second.start()
    second.join(0.2)
    assert second.is_alive() and reading.spans == []
    reading.may.set()
    second.join(PATIENCE)
    assert not second.is_alive()
    reader.partitions(at(5), at(10))
    assert reading.spans == [(0, 5), (5, 10)]
