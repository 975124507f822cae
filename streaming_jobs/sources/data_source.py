"""The frame of every data source of Spark (`pyspark.sql.datasource`), and the frames that a stream's function gets.

Spark calls a data source in three kinds of Python processes:

    planner     one per query, as long as it runs: decides where the next batch ends (`StreamReader`)
    workers     read the parts of a large batch; Spark reuses the processes from batch to batch
    pickling    one at the start, which only takes the reader apart and sends it to the workers

A small batch needs no worker: the planner sends its records along with the plan of the batch (`getCache`, as Spark's
`SimpleDataSourceStreamReader` does). So a live stream does not pay for a task that starts a reader. The planner decodes
them while Spark logs and plans the batch.

Each record has its fields in `_record`, and `_bad` says if it was refused (`record_blocks.py`). The streaming frame
counts its bad records on the way (`observe`) and leaves them out; `bad_records` reads the offsets of the batch again
and returns only those. Spark's state only reports that it dropped rows, so `late_records` counts the records behind the
watermark in the same way.
"""

from __future__ import annotations

import pickle
import sys
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, Literal, Protocol, TypeVar

import pyarrow as pa
import pyarrow.compute as pc
from pyspark import cloudpickle  # a lambda may compute an event time
from pyspark.sql import functions as F
from pyspark.sql.datasource import DataSource, DataSourceReader, InputPartition
from pyspark.sql.datasource_internal import _SimpleStreamReaderWrapper
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadLimit, SupportsTriggerAvailableNow
from pyspark.sql.types import StructType

from streaming_jobs.declare.columns import SOURCE_COLUMN
from streaming_jobs.ledger.positions import OffsetRange
from streaming_jobs.sources.base import SourceCounts
from streaming_jobs.sources.planner import BatchLimits
from streaming_jobs.sources.record_blocks import RECORD, note_used
from streaming_jobs.sources.source_clock import SourceClock, TimedSource
from streaming_jobs.storage.locations import Location
from streaming_jobs.text.durations import milliseconds

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, SparkSession

    from streaming_jobs.declare.table_source import DeltaSource
    from streaming_jobs.stream import KafkaTopic


class SourcePlanner(Protocol):
    def next_end(self, start: Mapping[int, int]) -> Mapping[int, int]:
        """The end of the batch that begins at `start`; equal to it if nothing new is there."""

    def stop_at_present_end(self) -> None:
        """Plan no batch beyond the present end, or beyond the bound of the limits."""

    def close(self) -> None:
        """Close its connections."""


PlannerT = TypeVar("PlannerT", bound=SourcePlanner)
Split = tuple[Sequence[InputPartition], list[pa.RecordBatch] | None]
"""The parts of a batch that tasks read; or one part, and the records of a small batch that are sent along."""


@dataclass(frozen=True)
class Reading(ABC, Generic[PlannerT]):
    """What to read, offsets of a batch or of a start; it is pickled into Spark's Python processes.

    `name` is that of the data source, in plans too. With `limits` it is a stream that begins at `starts`. `workers` is
    the number of cores that the session had when the query was built. With `timed`, its planner says how far its event
    times are.
    """

    name: str
    starts: Mapping[int, int]
    ends: Mapping[int, int] | None = None
    limits: BatchLimits | None = None
    workers: int = 2
    timed: TimedSource | None = None

    @property
    def tasks(self) -> int:
        """The number of tasks for a batch that is planned now: executors may have come or gone since the start."""
        return self.workers if self.limits is None else self.limits.tasks_now() or self.workers

    @property
    def times(self) -> Path | None:
        """The file of the times of its batches (`read_times.py`)."""
        return None if self.limits is None else self.limits.times

    @property
    @abstractmethod
    def schema(self) -> StructType:
        """The columns of its records."""

    @property
    @abstractmethod
    def source(self) -> str:
        """The name of the topic or table in the checkpoint."""

    @abstractmethod
    def planner(self) -> PlannerT:
        """A planner of its batches, with clients of its own."""

    @abstractmethod
    def parts(self) -> Sequence[InputPartition]:
        """The parts of its range, one per task."""

    @abstractmethod
    def split(self, planner: PlannerT, starts: dict[int, int], ends: dict[int, int]) -> Split:
        """The parts of a stream's batch."""

    @abstractmethod
    def read(self, part: InputPartition) -> Iterator[pa.RecordBatch]:
        """Yields the records of a part, in a worker."""


class PackedSource(DataSource):
    """A data source of Spark; each reading has a subclass of its own with `packed`, the pickled `Reading`.

    A format may be of a module of the user's: `paths` are the folders in which the driver finds modules.
    """

    packed: bytes
    paths: tuple[str, ...]

    @property
    def reading(self) -> Reading[Any]:
        """The reading, in this process."""
        sys.path.extend(path for path in self.paths if path not in sys.path)
        reading = pickle.loads(self.packed)  # noqa: S301 - packed by the driver
        assert isinstance(reading, Reading)
        return reading

    def schema(self) -> StructType:
        return self.reading.schema

    def reader(self, schema: StructType) -> DataSourceReader:  # noqa: ARG002 - it is ours
        return BatchReader(self.reading)

    def streamReader(self, schema: StructType) -> StreamReader:  # noqa: N802, ARG002 - Spark's name
        return StreamReader(self.reading)


def load(spark: SparkSession, reading: Reading[Any]) -> DataFrame:
    """The frame of a reading: a stream if it has limits, else a batch."""
    name = reading.name
    paths = tuple(path for path in sys.path if path)
    packed = cloudpickle.dumps(reading)  # type: ignore[no-untyped-call]
    named = {"packed": packed, "paths": paths, "name": classmethod(lambda _: name)}
    _register(spark, type(name, (PackedSource,), named))
    return (spark.read if reading.limits is None else spark.readStream).format(name).load()


def _register(spark: SparkSession, source: type[DataSource]) -> None:
    """`spark.dataSource.register`, but tasks that read the source get no accumulator of Python's.

    None of ours adds to it, and yet at the end of each task Spark's scheduler would ask this process to merge it, and
    wait, before it submits the next stage.
    """
    from py4j.protocol import Py4JError  # type: ignore[import-untyped]

    try:
        from pyspark.sql.udf import _wrap_function

        jvm: Any = spark.sparkContext._jvm
        made = _wrap_function(spark.sparkContext, source)
        parts = (made.command, made.envVars, made.pythonIncludes, made.pythonExec, made.pythonVer, made.broadcastVars)
        function = jvm.SimplePythonFunction(*(part() for part in parts), None)
        kind = "org.apache.spark.sql.execution.datasources.v2.python.UserDefinedPythonDataSource"
        spark._jsparkSession.dataSource().registerPython(source.name(), getattr(jvm, kind)(function))
    except (ImportError, AttributeError, TypeError, Py4JError) as error:  # all of it is private: only speed is lost
        import structlog  # not in the processes of tasks

        structlog.get_logger().info("tasks carry an accumulator of Python", reason=str(error)[:300])
        spark.dataSource.register(source)


class BatchReader(DataSourceReader):
    def __init__(self, reading: Reading[Any]) -> None:
        self.reading = reading

    def partitions(self) -> Sequence[InputPartition]:
        return self.reading.parts()

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        return self.reading.read(partition)


class StreamReader(_SimpleStreamReaderWrapper, SupportsTriggerAvailableNow):
    """Reads a stream: Spark's wrapper, with admission control, and with records sent along for small batches only.

    Offsets have the form of the checkpoint, `{topic or table: {partition: offset}}`. A thread splits a batch, and
    decodes a small one, while Spark logs its offsets and plans it; the process waits for Spark meanwhile.
    """

    def __init__(self, reading: Reading[Any]) -> None:
        self.reading = reading
        self.simple_reader: Any = self  # Spark asks it for `SupportsTriggerAvailableNow`
        self._planner: SourcePlanner | None = None
        self._clock: SourceClock | None = None
        self._ahead: ThreadPoolExecutor | None = None
        self._split: tuple[dict[str, Any], dict[str, Any], Future[Split]] | None = None
        self._sent: tuple[dict[str, Any], dict[str, Any], list[pa.RecordBatch]] | None = None

    def __getstate__(self) -> dict[str, Any]:
        unsent = dict.fromkeys(("simple_reader", "_planner", "_clock", "_ahead", "_split", "_sent"))
        return {"reading": self.reading, **unsent}

    @property
    def planner(self) -> SourcePlanner:
        """The planner, in the process that plans."""
        if self._planner is None:
            self._planner = self.reading.planner()
        return self._planner

    def initialOffset(self) -> dict[str, Any]:  # noqa: N802 - Spark's name
        """The offsets of a checkpoint's first batch."""
        return self._named(self.reading.starts)

    def getDefaultReadLimit(self) -> ReadLimit:  # noqa: N802 - Spark's name
        """None: the planner decides."""
        return ReadAllAvailable()

    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:  # noqa: N802, ARG002
        """The end of the next batch; `start` if there is nothing new."""
        self._one_thread()
        end = self._named(self.planner.next_end(self._offsets(start)))
        self._ahead = self._ahead or ThreadPoolExecutor(1, "split")
        self._split = None
        if start != end:
            span = self._offsets(start), self._offsets(end)
            self._split = start, end, self._ahead.submit(self.reading.split, self.planner, *span)
        if self.reading.timed is not None:
            self._tell_time(self.reading.timed)
        return end

    def _tell_time(self, source: TimedSource) -> None:
        """Say how far the event times of the batch's records are, once these are read."""
        if self._clock is None:
            self._clock = SourceClock(source)
        if self._split is None:
            self._clock.nothing()
        else:
            self._clock.batch(self._split[2].result()[1])

    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802 - Spark's name
        """Note the present end: the query ends there."""
        self.planner.stop_at_present_end()

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> Sequence[InputPartition]:
        """One partition for records that are sent along, else one per task."""
        self._one_thread()
        ahead, self._split = self._split, None
        if ahead is not None and ahead[:2] == (start, end):
            parts, records = ahead[2].result()
        else:  # after a restart: the batch was planned before
            parts, records = self.reading.split(self.planner, self._offsets(start), self._offsets(end))
        self._sent = None if records is None else (start, end, records)
        return parts

    def getCache(self, start: dict[str, Any], end: dict[str, Any]) -> Iterator[Any] | None:  # noqa: N802 - Spark's name
        """The records that are sent along with the plan."""
        if self._sent is None or self._sent[:2] != (start, end):
            return None
        batches, self._sent = self._sent[2], None
        return iter(batches)

    def commit(self, end: dict[str, Any]) -> None:
        """Nothing: the checkpoint has the position."""

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        return self.reading.read(partition)

    def stop(self) -> None:
        if self._ahead is not None:
            self._ahead.shutdown()
        if self._clock is not None:
            self._clock.close()
        if self._planner is not None:
            self._planner.close()

    def _one_thread(self) -> None:
        """Wait until a batch that Spark has not asked for is split: the planner is for one thread at a time."""
        if self._split is not None:
            wait([self._split[2]])

    def _offsets(self, offset: dict[str, Any]) -> dict[int, int]:
        return {int(p): int(o) for p, o in offset.get(self.reading.source, {}).items()}

    def _named(self, offsets: Mapping[int, int]) -> dict[str, Any]:
        return {self.reading.source: {str(p): offsets[p] for p in sorted(offsets)}}


@dataclass(frozen=True)
class FrameSource(ABC):
    """One source of one stream as frames; `parameter` is that of the stream's function, `lateness` the watermark delay.

    Files of the session lie beside `client`, the file with the properties of Kafka's client.
    """

    parameter: str
    declared: KafkaTopic | DeltaSource
    client: Location
    lateness: timedelta | None

    @property
    @abstractmethod
    def kind(self) -> str:
        """The first part of the names of its data sources."""

    @property
    @abstractmethod
    def fields(self) -> Sequence[str]:
        """The names of its records' fields."""

    @property
    def name(self) -> str:
        return self.declared.name

    @property
    def event_time(self) -> str | None:
        return self.declared.time_column

    @property
    def _position(self) -> Sequence[str]:
        """The columns of `_source`."""
        return ["topic", "partition", "offset", "timestamp", "key", "tombstone"]

    @property
    def observation(self) -> str:
        """The name of the metrics that count this source's records."""
        return f"recourse_{self.parameter}"

    @abstractmethod
    def _reading(
        self,
        name: str,
        rows: Literal["all", "refused"],
        start: Mapping[int, int],
        used: Location | None = None,
    ) -> Reading[Any]:
        """A reading from `start` on. `used` is a file that may list the columns in use."""

    def stream(
        self,
        spark: SparkSession,
        *,
        start: Mapping[int, int],
        limits: BatchLimits,
        owner: str,
        timed: TimedSource | None = None,
    ) -> DataFrame:
        """The streaming frame of good records. `start` holds for a checkpoint's first batch only.

        `owner` is the stream's name: the data sources of a session have different names. With `timed`, its planner
        says how far its event times are.
        """
        used = self._used(owner)
        used.unlink(missing_ok=True)
        reading = self._reading(self.reading_name(owner), "all", start, used)
        judged = load(spark, replace(reading, limits=limits, workers=_parallel_tasks(spark), timed=timed))
        frame = self.good(judged.observe(self.observation, *self._counted()))
        if self.event_time is None or self.lateness is None:
            return frame
        return frame.withWatermark(self.event_time, f"{milliseconds(self.lateness)} milliseconds")

    def reading_name(self, owner: str) -> str:
        return f"{self.kind}-{owner}-{self.parameter}"  # no part can have a hyphen

    def build_only(self, owner: str, columns: Iterable[str]) -> None:
        """Leave all other columns of `stream` null (`RecordBlocks`); before the query starts."""
        note_used(self._used(owner), columns)

    def batch(self, spark: SparkSession, start: Mapping[int, int], end: Mapping[int, int]) -> DataFrame:
        """The good records of a range as a batch frame."""
        return self.good(self.judged(spark, start, end))

    def judged(self, spark: SparkSession, start: Mapping[int, int], end: Mapping[int, int]) -> DataFrame:
        """All records of a range with the verdict on them, as a batch frame; `good` leaves out the refused ones."""
        return self._range(spark, "all", start, end)

    def held(self, spark: SparkSession, rows: pa.Table) -> DataFrame:
        """Records of `judged` that the driver has in memory, as such a frame."""
        whole = rows if rows.num_rows else rows.schema.empty_table()  # PySpark takes no table without any chunk
        return spark.createDataFrame(whole, self._reading(f"{self.kind}-held-{self.parameter}", "all", {}).schema)

    def counts_held(self, rows: pa.Table) -> SourceCounts:
        """The counts of records of `judged` that the driver has in memory."""
        good = rows.filter(pc.invert(rows["_bad"]))
        timed = self.event_time and self.lateness is not None and good.num_rows
        newest = pc.cast(pc.max(good["timestamp"]), pa.int64()).as_py() if timed else None
        return SourceCounts(rows.num_rows - good.num_rows, newest)

    def counts(self, judged: DataFrame) -> SourceCounts:
        """The counts of the records in a frame of `judged`, as the streaming frame observes them."""
        return SourceCounts(*judged.agg(*self._counted()).head())  # type: ignore[misc]

    def bad_records(self, spark: SparkSession, offsets: OffsetRange) -> DataFrame:
        """The refused records of a range: topic, partition, offset, timestamp, key, value, headers, reason, detail."""
        return self._range(spark, "refused", offsets.start, offsets.end)

    def bad_rows(self, spark: SparkSession, offsets: OffsetRange, count: int) -> pa.Table:  # noqa: ARG002 - of a table
        """`bad_records`, of which the range has `count`, in the driver's memory."""
        return self.bad_records(spark, offsets).toArrow()

    def late_records(self, spark: SparkSession, offsets: OffsetRange, watermark_ms: int) -> int:
        return 0 if self.event_time is None else self.late(spark, offsets, watermark_ms).count()

    def late(self, spark: SparkSession, offsets: OffsetRange, watermark_ms: int) -> DataFrame:
        """Good records of a range, as `judged`, whose event time is at or behind a watermark (ms since 1970)."""
        judged = self.judged(spark, offsets.start, offsets.end)
        return judged.where(~F.col("_bad") & (self.event_micros <= F.lit(watermark_ms * 1000)))

    @property
    def event_micros(self) -> Column:
        """The event time of a record of `judged` in microseconds; one without a zone is UTC."""
        return F.unix_micros(F.col(RECORD)[self.event_time].cast("timestamp"))

    def _range(
        self, spark: SparkSession, rows: Literal["all", "refused"], start: Mapping[int, int], end: Mapping[int, int]
    ) -> DataFrame:
        reading = self._reading(f"{self.kind}-{rows}-{self.parameter}", rows, start)
        return load(spark, replace(reading, ends=dict(end), workers=_parallel_tasks(spark)))

    def _used(self, owner: str) -> Location:
        return self.client.parent / f"{self.client.stem}-{self.reading_name(owner)}.json"

    def _counted(self) -> list[Column]:
        """The figures that are observed of a batch, in the order of `SourceCounts`."""
        bad = F.col("_bad")
        figures = [F.count_if(bad).alias("bad")]
        if self.event_time and self.lateness is not None:
            figures += [F.max(F.when(~bad, F.unix_micros("timestamp"))).alias("newest")]
        return figures

    def good(self, judged: DataFrame) -> DataFrame:
        """The good records: their fields, and their position as `_source`."""
        position = F.struct(*(F.col(name) for name in self._position))
        return judged.where(~F.col("_bad")).select(f"{RECORD}.*", position.alias(SOURCE_COLUMN))


def _parallel_tasks(spark: SparkSession) -> int:
    return int(spark.sparkContext.defaultParallelism)
