"""A driver's pipeline over a stream on disk, with real tables and without Spark.

The fakes are Spark's alone: a frame is rows in memory, and staging hands them to deltalake's committer.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import pyarrow as pa
from deltalake import DeltaTable

from streaming_jobs.ledger.entry import CodeVersion, LedgerEntry
from streaming_jobs.ledger.positions import OffsetRange
from streaming_jobs.runtime.batch import BatchPipeline
from streaming_jobs.runtime.batch_hooks import BatchFiles, BatchHooks, BatchReport, DriverPathAttempts
from streaming_jobs.runtime.spark_plan import PlanTraits
from streaming_jobs.settings import StreamSettings
from streaming_jobs.sinks.base import BatchOfRows, Companion, PendingWrite, SinkSet
from streaming_jobs.sinks.delta.log import newest, walk
from streaming_jobs.sinks.delta.pending_writes import ArrowAppend
from streaming_jobs.sinks.delta.sink import DeltaSink
from streaming_jobs.sources.base import SourceCounts
from streaming_jobs.sources.read_times import NO_TIMES, BatchReadTimes
from streaming_jobs.state.stream_folder import StreamFolder
from tests.support.worlds import CODE, DEAD_LETTERS, PRIMARY, SECONDARY, STREAM, TOPIC, TOPIC_ID, Disk, parity

PLAIN = PlanTraits(stateful=False, multiplies=False)
STATE = PlanTraits(stateful=True, multiplies=False)
UNKNOWN = PlanTraits(stateful=False, multiplies=False, unknown=("RememberThings",))


@dataclass
class Frame:
    """Rows in memory where Spark has a frame."""

    rows: pa.Table
    log: list[str]
    sparkSession: None = None

    def where(self, condition: str) -> Frame:
        """Rows whose n leaves the remainder that the condition ends with."""
        mask = [n % 2 == int(condition[-1]) for n in self.rows["n"].to_pylist()]
        return Frame(self.rows.filter(pa.array(mask, pa.bool_())), self.log)

    def persist(self) -> Frame:
        self.log.append("persist")
        return self

    def unpersist(self) -> None:
        self.log.append("unpersist")

    @property
    def write(self) -> Frame:
        """Stands for Spark's writer too."""
        return self

    def format(self, name: str) -> Frame:
        self.log.append(f"write {name}")
        return self

    def mode(self, name: str) -> Frame:
        return self

    def save(self) -> None:
        """Runs the plan."""


@dataclass
class Recorded(ArrowAppend):
    """An append that says when it was committed."""

    log: list[str] = field(default_factory=list)

    def commit(self, made: LedgerEntry) -> int | None:
        self.log.append(f"commit {self.sink.name}")
        return super().commit(made)

    def close(self) -> None:
        self.log.append(f"close {self.sink.name}")


@dataclass
class Source:
    """The part of a Kafka source that the pipeline uses."""

    name: str = TOPIC
    observation: str = "recourse_things"
    lateness: timedelta | None = timedelta(seconds=10)

    def rows(self, offsets: OffsetRange) -> int:
        return offsets.records

    def late_records(self, spark: object, offsets: OffsetRange, watermark_ms: int) -> int:
        """Reads the batch's own range again."""
        assert offsets.records == 15
        return watermark_ms // 1000

    def bad_records(self, spark: object, offsets: OffsetRange) -> Any:
        """The table of dead letters reads them, which is in memory here."""
        raise NotImplementedError

    def bad_rows(self, spark: object, offsets: OffsetRange, count: int) -> Any:
        return self.bad_records(spark, offsets)


class Output(DeltaSink):
    """A table whose rows are in memory already; it says what is asked of it."""

    def __init__(self, sink: DeltaSink, driver: Driver) -> None:
        super().__init__(sink.path, sink.declared, sink.stream, sink.handle)
        self.driver = driver

    def fit(self, output: Frame, topics: object) -> Frame:  # type: ignore[override]
        self.driver.fitted.append(self.name)
        return output

    def prepare(self, frame: Frame, rows: BatchOfRows) -> PendingWrite:  # type: ignore[override]
        self.settings = self.driver.pipeline.settings
        return self.driver.prepare(self, frame, rows)


class Letters(Output):
    """The table of dead letters; how many there are is what the driver's source counts."""

    def prepare_letters(self, spark: None, refused: Any, rejected: Any, rows: BatchOfRows) -> PendingWrite:
        return self.driver.prepare_letters(self, refused, rejected, rows)


class Driver:
    """A driver's pipeline over a stream on disk; a new one over the same disk is a restart.

    What a test wants to happen around a batch it puts into `before_commit`, `report`, `replan`, `at` or `prepare`.
    """

    def __init__(self, disk: Disk, code: CodeVersion = CODE) -> None:
        self.disk, self.log, self.reports = disk, [], []  # type: tuple[Disk, list[str], list[BatchReport]]
        self.bad = 0
        self.newest: int | None = 7_000_000
        self.watermark: int | None = None
        self.times = NO_TIMES
        self.rejected: pa.Table | None = None
        self.rejected_of = PRIMARY
        self.noted = 0
        self.ways: list[tuple[bool, bool]] = []
        self.fitted: list[str] = []
        self.before_commit: Callable[[], object] = lambda: None
        self.report: Callable[[BatchReport], object] = self.reports.append
        self.replan: Callable[[Any, int], bool] = lambda *_: False
        self.at: Callable[[str, str, int], object] = lambda name, _, number: self.log.append(f"{name} {number}")
        self.prepare: Callable[[Output, Frame, BatchOfRows], PendingWrite] = self.in_memory
        self.prepare_letters: Callable[[Output, Any, Any, BatchOfRows], PendingWrite] = self.letters_in_memory
        self.sinks = Disk(disk.settings).open().sinks
        self.stop = threading.Event()
        self.pipeline = BatchPipeline(
            stream=parity,
            generation=1,
            topic_ids={TOPIC: TOPIC_ID},
            sources=[Source()],
            sinks=self.sink_set(),
            files=BatchFiles(
                StreamFolder.of(disk.settings, STREAM).checkpoint(1),
                disk.ledger_file,
                DriverPathAttempts(disk.settings.state / STREAM / "attempt"),
            ),
            hooks=BatchHooks(
                stop=self.stop,
                before_commit=lambda: self.before_commit() and None,
                report=lambda made: self.report(made) and None,
                between=lambda batch: self.log.append(f"between {batch}"),
                replan=lambda files, batch: bool(self.replan(files, batch)),
                at=lambda name, stream, number: self.at(name, stream, number) and None,
            ),
            code=code,
            settings=StreamSettings(),
            traits=PLAIN,
            upkeep=[type("TableMaintenance", (), {"after_commit": lambda _: self.log.append("upkeep")})()],
            query=self,
        )

    def sink_set(
        self, secondary: Sequence[str] = (SECONDARY,), tombstones: Mapping[str, DeltaSink] | None = None
    ) -> SinkSet:
        """The tables of the stream."""
        return SinkSet(
            Output(self.sinks[PRIMARY], self),
            [Output(self.sinks[name], self) for name in secondary],
            Letters(self.sinks[DEAD_LETTERS], self),
            [Companion(Output(sink, self), table, "deletes") for table, sink in (tombstones or {}).items()],
        )

    def observed(self, observation: str) -> SourceCounts:
        assert observation == "recourse_things"
        return SourceCounts(self.bad, self.newest)

    def dropped_behind(self) -> int | None:
        self.log.append("ask for dropped rows")
        return self.watermark

    def count_failed_rows(self, wanted: bool) -> None:
        """Frames in memory count nothing."""

    def rows_counted(self) -> None:
        return None

    def send_anew(self, records: object) -> bool:
        return False

    def read_times(self) -> BatchReadTimes:
        return self.times

    def in_memory(self, output: Output, frame: Frame, rows: BatchOfRows) -> Recorded:
        self.log.append(f"stage {output.name}")
        self.ways.append(output.write_path(rows))
        rejected = self.rejected if output.name == self.rejected_of else None
        noted = frame.rows.slice(0, self.noted)
        before = [
            Recorded(companion.sink, noted, log=self.log)
            for companion in self.pipeline.sinks.companions
            if companion.table == output.name and isinstance(companion.sink, Output) and self.noted
        ]
        return Recorded(output, frame.rows, rejected=rejected, before=before, log=self.log)

    def letters_in_memory(self, output: Output, refused: Any, rejected: Any, rows: BatchOfRows) -> Recorded:
        count = sum(count for _, _, count in refused) + sum(rows.num_rows for rows in rejected)
        self.log.append(f"stage {output.name}")
        letters = [{"topic": TOPIC, "offset": number, "reason": "not_json"} for number in range(count)]
        schema = pa.schema(output.handle.schema().to_arrow())
        return Recorded(output, pa.Table.from_pylist(letters, schema), log=self.log)

    def run(self, batch: int, numbers: list[int] | None = None) -> None:
        """Spark plans the batch and calls the pipeline."""
        self.disk.plan(batch)
        numbers = [1, 2, 3, 4] if numbers is None else numbers
        rows = pa.table({"k": pa.array(["x"] * len(numbers), pa.string()), "n": pa.array(numbers, pa.int64())})
        self.pipeline(Frame(rows, self.log), batch)  # type: ignore[arg-type]

    @property
    def commits(self) -> list[str]:
        """The tables in the order they were committed to."""
        return [line.removeprefix("commit ") for line in self.log if line.startswith("commit ")]


Start = Callable[..., Driver]


def numbers(disk: Disk, table: str) -> list[int]:
    return sorted(DeltaTable(disk.table(table)).to_pyarrow_table()["n"].to_pylist())


def newest_entry(disk: Disk, table: str) -> LedgerEntry:
    commit, _ = newest(disk.table(table), STREAM)
    assert commit is not None and commit.entry is not None
    return commit.entry


def commits_of(disk: Disk, table: str) -> int:
    return sum(1 for c in walk(disk.table(table)) if c.entry and c.entry.kind == "batch")
