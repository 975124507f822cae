"""The state of a job, tried with the query of the stream that is to go on with it.

Spark compares little of a query with state that it finds: types, not meanings. The sum of another column, or a grouping
by the same columns in another order, goes on with the state without an error, and its results are wrong. So a batch of
the job is computed again: by the stream's own query, in a copy of the checkpoint, from the state before the batch. The
state fits if the state after it is the job's, key by key and partition by partition.

A trial shows nothing about code that the records of this batch do not reach.
"""

from __future__ import annotations

import re
import shutil
import threading
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from streaming_jobs.errors import RecourseError, UsageError
from streaming_jobs.inspection.adoption import CarriedState
from streaming_jobs.inspection.checkpoint_history import CheckpointHistory
from streaming_jobs.ledger.positions import TopicOffsets
from streaming_jobs.platform.failures import classify
from streaming_jobs.platform.spark_on_store import hadoop_path
from streaming_jobs.runtime.function_plan import all_set_to, format_of_state
from streaming_jobs.runtime.query_builder import QueryBuilder
from streaming_jobs.settings import Settings
from streaming_jobs.sources.base import TopicReader
from streaming_jobs.sources.connection import Connection
from streaming_jobs.state import stream_record
from streaming_jobs.state.checkpoint import Checkpoint, copied, cut, cuttable
from streaming_jobs.storage.files import scratch
from streaming_jobs.stream import Stream
from streaming_jobs.text.spelling import counted
from streaming_jobs.verification.offset_ranges import Span

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.types import StructField

_LONGEST = 3600
"""Seconds that the batch may take."""
_REFUSED = re.compile(r"\[(?:STATE_STORE|STREAMING_STATEFUL|STDS|CANNOT_LOAD_STATE)_[\w.]+\].*")
"""Spark's own refusal of a state: other types, other operators, a version that is not there."""
_WITH_NULLS = "map('ignoreNullFields', 'false')"
FROM_THE_RECORDS = (
    "start the state from the records instead: declare the stream with a table of its own, beginning with the earliest "
    "record that the state needs; or declare what the job computes, and plan the adoption again"
)


@dataclass(frozen=True)
class StateTrial:
    """A trial in Spark, which `session` starts. Writes nothing but files in a scratch folder."""

    settings: Settings
    stream: Stream
    topics: TopicReader
    connection: Connection
    session: Callable[[], SparkSession]

    def __call__(self, history: CheckpointHistory, last: int) -> CarriedState:
        if not isinstance(self.settings.state, Path) or "://" in history.folder:
            raise UsageError("the job keeps state, and state on an object store is not taken over", FROM_THE_RECORDS)
        if len(history.sources) != 1 or len(history.topics) != 1:
            raise UsageError("the job keeps state and reads more than one topic", FROM_THE_RECORDS)
        checkpoint = Checkpoint(Path(history.folder))
        batch = self._choose(history, checkpoint, last)
        folder = scratch(self.settings.home, "adopt").folder / uuid.uuid4().hex
        job, again = folder / "job", folder / "again"
        folder.mkdir()
        try:
            cut(checkpoint, batch, job, copied)
            cut(checkpoint, batch - 1, again, copied)
            copied(job / "offsets" / str(batch), again / "offsets" / str(batch))
            return self._compared(job, again, batch, history.batches[batch].end)
        except RecourseError:
            raise
        except Exception as error:
            if refused := _REFUSED.search(str(error)):
                raise _unfit(self.stream.name, refused[0][:400]) from error
            raise classify(error) from error
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def _choose(self, history: CheckpointHistory, checkpoint: Checkpoint, last: int) -> int:
        """The newest batch with records that can be computed again."""
        whole = cuttable(checkpoint)
        if last not in whole:
            raise UsageError(
                f"the job keeps state, and its checkpoint does not have the state after batch {last} as a whole",
                "let the job finish a batch, then plan the adoption again",
            )
        for number in range(last, whole.start, -1):
            batch = history.batches.get(number)
            if batch is not None and batch.spans and all(map(self._is_there, batch.spans)):
                return number
        raise UsageError(
            f"the job keeps state, and none of its batches up to {last} can be computed again to compare the state: "
            "no records, no state from before it, or the topic no longer has the records",
            "let the job write a further batch with records, then plan the adoption again",
        )

    def _is_there(self, span: Span) -> bool:
        return self.topics.offsets(span.topic).earliest.get(span.partition, 0) <= span.start

    def _compared(self, job: Path, again: Path, batch: int, ends: TopicOffsets) -> CarriedState:
        spark = self.session()
        with all_set_to(spark, format_of_state(Checkpoint(job))):
            fingerprint = self._compute(spark, again, batch, ends)
            return CarriedState(batch, self._same_keys(spark, job, again, batch), fingerprint)

    def _compute(self, spark: SparkSession, again: Path, batch: int, ends: TopicOffsets) -> dict[str, str]:
        """Run the planned batch; returns the fingerprint of the stream's state."""
        builder = QueryBuilder(
            stream=self.stream,
            settings=self.settings,
            connection=self.connection,
            trigger="available-now",
            stop=threading.Event(),
            before_commit=lambda _: None,
            report=lambda _: None,
            until=ends,
        )
        fingerprint = builder.check(spark, stream_record.first(self.stream.name), keeps_state=False)
        query = builder.discarding(spark, again).start()
        try:
            if not query.awaitTermination(_LONGEST):
                why = f"batch {batch} was not computed within {_LONGEST // 60} minutes"
                raise UsageError(f"the state of the job could not be tried: {why}", FROM_THE_RECORDS)
        finally:
            query.stop()
        return fingerprint

    def _same_keys(self, spark: SparkSession, job: Path, again: Path, batch: int) -> int:
        """The number of keys of both, which are equal; raises UsageError if they are not."""
        keys, name, operators = 0, self.stream.name, _operators(job)
        if not_both := operators ^ _operators(again):
            raise _unfit(name, f"not both have a state {min(not_both)}")
        for operator in sorted(operators):
            before, after = (_state(spark, folder, operator, batch) for folder in (job, again))
            if _types(before) != _types(after):
                raise _unfit(name, f"it is {_types(before)} in the checkpoint, and {_types(after)} in the stream")
            if others := _others(before, after):
                raise _unfit(name, f"{counted(others, 'key')} had another value or another place after batch {batch}")
            keys += before.count()
        return keys


def _state(spark: SparkSession, folder: Path, operator: int, batch: int) -> DataFrame:
    """The keys of an operator after a batch, with their values and partitions."""
    read = spark.read.format("statestore").option("operatorId", operator).option("batchId", batch)
    return read.load(hadoop_path(folder)).selectExpr("key", "value", "partition_id")


def _others(before: DataFrame, after: DataFrame) -> int:
    """The number of keys that have another value, or are in one of both only."""
    place = f"to_json(struct(key, partition_id), {_WITH_NULLS}) AS place"
    sides = (
        side.selectExpr(place, f"value AS {name}", f"true AS in_{name}") for side, name in ((before, "a"), (after, "b"))
    )
    joined = next(sides).join(next(sides), "place", "full")
    same = " AND ".join(map(_same, before.schema["value"].dataType)) or "true"  # type: ignore[call-overload]
    return joined.where(f"NOT coalesce(in_a AND in_b AND {same}, false)").count()


def _same(field: StructField) -> str:
    """The condition for equal values: sums of floating point numbers depend on the order of the rows of a batch."""
    a, b = f"a.`{field.name}`", f"b.`{field.name}`"
    if field.dataType.typeName() in ("double", "float"):
        return f"({a} <=> {b} OR abs({a} - {b}) <= 1e-9 * greatest(abs({a}), abs({b})))"
    return f"(to_json(struct({a} AS v), {_WITH_NULLS}) <=> to_json(struct({b} AS v), {_WITH_NULLS}))"


def _types(state: DataFrame) -> str:
    return str(state.select("key", "value").schema.simpleString())


def _operators(checkpoint: Path) -> set[int]:
    return {int(each.name) for each in (checkpoint / "state").iterdir() if each.name.isdigit()}


def _unfit(stream: str, why: str) -> UsageError:
    return UsageError(f"the state of the job does not fit stream {stream}: {why}", FROM_THE_RECORDS)
