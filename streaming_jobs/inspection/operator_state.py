"""The state of a stream's operators, read from its checkpoint by Spark's own readers; nothing is written there.

The readers (`state-metadata`, `statestore`) copy the files of one committed batch. A live stream goes on meanwhile; if
Spark removes a file of that batch first, the reading starts again at the newest one.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from streaming_jobs.errors import RecourseError, TransientError, UsageError
from streaming_jobs.platform.spark_on_store import hadoop_path
from streaming_jobs.state.checkpoint import Checkpoint
from streaming_jobs.storage.locations import files_below

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, SparkSession

_ATTEMPTS = 3
_TIMERS = "timers"
_GONE = re.compile("FileNotFound|does not exist|STDS_(COMMITTED_BATCH|OFFSET_LOG|OFFSET_METADATA_LOG)_UNAVAILABLE")
T = TypeVar("T")


@dataclass(frozen=True)
class StateStore:
    """One store of an operator: its default one, a side of a join, a variable of a processor, or its timers."""

    operator: int
    kind: str
    name: str
    partitions: int
    options: Mapping[str, str]


@dataclass(frozen=True)
class StoreFigures:
    """A store with the types of its columns; `fullest` is the number of rows of its fullest partition.

    `rows_before` are its rows at batch `before`, the middle one of those that can be read. `bytes` are those of the
    files of all stores of its operator, older versions included.
    """

    store: StateStore
    columns: Mapping[str, str]
    rows: int
    bytes: int
    fullest: int
    before: int
    rows_before: int

    @property
    def skew(self) -> float:
        """Rows of the fullest partition, divided by those of an average one; 1 without rows."""
        return self.fullest * self.store.partitions / self.rows if self.rows else 1.0

    def as_json(self) -> dict[str, Any]:
        store, figures = asdict(self.store), asdict(self)
        del store["options"], figures["store"]
        return {**store, **figures, "skew": round(self.skew, 2)}


def entries_of(
    spark: SparkSession, checkpoint: Checkpoint, key: str | Mapping[str, Any] | None = None, batch: int | None = None
) -> list[dict[str, Any]]:
    """The entries of a key in every store, or of all keys: operator, store, partition, key, and what it holds.

    A text is compared with each column of a key, a mapping with the columns that it names, both as text.
    """

    def read(at: int) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = []
        for store in stores(spark, checkpoint, at):
            frame = _frame(spark, checkpoint, at, store)
            if key is not None:
                frame = frame.where(_matches(frame, key))
            for row in frame.toArrow().to_pylist():
                place = {"operator": store.operator, "store": store.name, "partition": row.pop("partition_id")}
                found.append({**place, **row})
        return found

    return _reading(checkpoint, batch, read)


def figures(spark: SparkSession, checkpoint: Checkpoint, batch: int | None = None) -> tuple[int, list[StoreFigures]]:
    """The batch that was read, and the figures of every store after it."""

    def read(at: int) -> tuple[int, list[StoreFigures]]:
        earlier = sorted(number for number in checkpoint.committed if number <= at)
        before = earlier[(len(earlier) - 1) // 2]  # a live stream removes the oldest one with each batch
        return at, [_figures(spark, checkpoint, at, before, store) for store in stores(spark, checkpoint, at)]

    return _reading(checkpoint, batch, read)


def stores(spark: SparkSession, checkpoint: Checkpoint, batch: int) -> list[StateStore]:
    """The stores that the operators had after a batch, in their order."""
    _ = spark.streams.active  # begins the coordinator of state stores, without which no state is loaded
    found: dict[tuple[int, str], StateStore] = {}
    read = spark.read.format("state-metadata").option("batchId", batch)
    for row in read.load(hadoop_path(checkpoint.folder)).collect():
        for name, options in _readable(row.operatorName, row.operatorProperties):
            known = {"operatorId": str(row.operatorId), **options}
            store = StateStore(row.operatorId, row.operatorName, name, row.numPartitions, known)
            found.setdefault((row.operatorId, name), store)
    return [found[place] for place in sorted(found, key=lambda place: place[0])]


def _readable(operator: str, properties: str) -> Sequence[tuple[str, Mapping[str, str]]]:
    """By name the options with which each part of an operator's state is read."""
    if operator.startswith("symmetricHashJoin"):
        return [(side, {"joinSide": side}) for side in ("left", "right")]
    if not operator.startswith("transformWithState"):
        return [("default", {})]
    variables = json.loads(properties).get("stateVariables", [])
    names = [json.loads(each)["stateName"] if isinstance(each, str) else each["stateName"] for each in variables]
    return [
        (_TIMERS, {"readRegisteredTimers": "true"}) if name.startswith("$") else (name, {"stateVarName": name})
        for name in names
    ]


def _frame(spark: SparkSession, checkpoint: Checkpoint, batch: int, store: StateStore) -> DataFrame:
    options = {**store.options, "batchId": str(batch)}
    return _named_apart(spark.read.format("statestore").options(**options).load(hadoop_path(checkpoint.folder)))


def _named_apart(frame: DataFrame) -> DataFrame:
    """The frame with different names in each struct: the buffers of two aggregates may both be `count`."""
    from pyspark.sql import functions as F
    from pyspark.sql.types import StructField, StructType

    for column in frame.schema.fields:
        names = column.dataType.fieldNames() if isinstance(column.dataType, StructType) else []
        if len(set(names)) < len(names):
            assert isinstance(column.dataType, StructType)
            earlier = [names[:at].count(name) for at, name in enumerate(names)]
            apart = [f"{name}_{count + 1}" if count else name for name, count in zip(names, earlier, strict=True)]
            fields = zip(apart, column.dataType.fields, strict=True)
            kind = StructType([StructField(name, field.dataType, field.nullable) for name, field in fields])
            frame = frame.withColumn(column.name, F.col(column.name).cast(kind))
    return frame


def _matches(frame: DataFrame, key: str | Mapping[str, Any]) -> Column:
    from pyspark.sql import functions as F

    columns = frame.select("key.*").columns
    if isinstance(key, str):
        wanted = [F.col("key")[name].cast("string") == key for name in columns]
        return F.array_contains(F.array(*wanted), True) if wanted else F.lit(False)
    if unknown := key.keys() - set(columns):
        raise UsageError(f"a key has no column {', '.join(sorted(unknown))}", f"its columns: {', '.join(columns)}")
    condition = F.lit(True)
    for name, value in key.items():
        condition = condition & (F.col("key")[name].cast("string") == str(value))
    return condition


def _figures(spark: SparkSession, checkpoint: Checkpoint, at: int, before: int, store: StateStore) -> StoreFigures:
    frame = _frame(spark, checkpoint, at, store)
    rows = [row["count"] for row in frame.groupBy("partition_id").count().collect()]
    earlier = _frame(spark, checkpoint, before, store).count() if before < at else sum(rows)
    columns = {f.name: f.dataType.simpleString() for f in frame.schema.fields if f.name != "partition_id"}
    size = sum(each.st_size for _, each in files_below(checkpoint.folder / "state" / str(store.operator)))
    return StoreFigures(store, columns, sum(rows), size, max(rows, default=0), before, earlier)


def _reading(checkpoint: Checkpoint, batch: int | None, read: Callable[[int], T]) -> T:
    """`read` of a batch, by default of the newest; that one may be replaced by a newer one while it is read."""
    attempts = _ATTEMPTS if batch is None else 1
    while True:
        known = checkpoint.committed
        at = max(known, default=None) if batch is None else batch
        if at is None or at not in known:
            name = checkpoint.folder.name
            if not known:
                raise UsageError(f"the checkpoint {name} has no batch yet", "wait for the stream's first batch")
            there = f"batches {min(known)} to {max(known)}"
            raise UsageError(f"the checkpoint {name} has {there}, and not batch {at}", "name one of them")
        attempts -= 1
        try:
            return read(at)
        except Exception as error:
            if isinstance(error, RecourseError) or not _file_gone(error):
                raise
            if not attempts:
                raise TransientError(
                    f"the state after batch {at} is no longer whole: {str(error).splitlines()[0][:300]}",
                    "read a newer batch, or the stream's savepoint",
                ) from error


def _file_gone(error: Exception) -> bool:
    """True if a file of the checkpoint was removed while it was read, or before."""
    return _GONE.search(str(error)) is not None
