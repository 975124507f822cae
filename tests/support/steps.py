"""A source of Spark whose batches are files of seconds: one file for each batch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pyarrow as pa
from pyspark.sql.datasource import InputPartition
from pyspark.sql.types import BooleanType, StructField, StructType, TimestampType

from streaming_jobs.sources.data_source import Reading, Split

START = datetime(2026, 1, 1, tzinfo=UTC)
ARROW = pa.schema([("_record", pa.struct([("at", pa.timestamp("us", "UTC"))])), ("_bad", pa.bool_())])


@dataclass
class Steps:
    """A planner whose batches lie in a folder, one file for each; a file may come later."""

    folder: Path

    def next_end(self, start: Mapping[int, int]) -> dict[int, int]:
        return {0: start[0] + (self.folder / str(start[0])).exists()}

    def stop_at_present_end(self) -> None:
        """It ends where no file is."""

    def close(self) -> None:
        """It has no connection."""


class Part(InputPartition):
    def __init__(self, at: int, first: int = 0, every: int = 1) -> None:
        self.at, self.first, self.every = at, first, every


@dataclass(frozen=True, kw_only=True)
class StepReading(Reading[Steps]):
    """Records with event times, one file of seconds for each batch; `-` before a second: the record is bad."""

    folder: Path
    sent: bool = True
    parts_of: int = 1
    """The parts of a batch that is not sent along."""

    @property
    def schema(self) -> StructType:
        record = StructType([StructField("at", TimestampType())])
        return StructType([StructField("_record", record), StructField("_bad", BooleanType())])

    @property
    def source(self) -> str:
        return self.folder.name

    def planner(self) -> Steps:
        return Steps(self.folder)

    def parts(self) -> Sequence[InputPartition]:
        return []

    def split(self, planner: Steps, starts: dict[int, int], ends: dict[int, int]) -> Split:
        parts = [Part(starts[0], first, self.parts_of) for first in range(self.parts_of)]
        return parts, list(self.read(parts[0])) if self.sent else None

    def read(self, part: InputPartition) -> Iterator[pa.RecordBatch]:
        assert isinstance(part, Part)
        numbers = (self.folder / str(part.at)).read_text().split()[part.first :: part.every]
        times = [{"at": START + timedelta(seconds=abs(int(n)))} for n in numbers]
        bad = [n.startswith("-") for n in numbers]
        arrays = [pa.array(times, ARROW.field(0).type), pa.array(bad, pa.bool_())]
        yield pa.RecordBatch.from_arrays(arrays, schema=ARROW)


def step(folder: Path, number: int, *seconds: int) -> None:
    folder.mkdir(exist_ok=True)
    made = folder.parent / f"{folder.name}-{number}"
    made.write_text(" ".join(map(str, seconds)))
    made.rename(folder / str(number))
