"""Plans that Spark makes once for all records of a batch, and that run on any part of the records.

A plan over records in the driver's memory has them in leaves, `LocalTableScan`. For a part, the physical plan is made
again with other rows in those leaves: no analysis, no optimiser, no compiler; a run is one job of Spark. Records of a
later batch are such a part, too, unless the plan depends on its time, or reads more than records.

A run that raises says where it stopped. Spark evaluates row by row: the row that a leaf handed out last is the one that
raised. Python code gets its rows in batches and reads ahead; there, it is the first row behind those that came back.
Both are counted by Spark's own metrics. The worker of a Python function names the row (`failing_row.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import structlog

from streaming_jobs.platform.failures import text_of
from streaming_jobs.platform.processes.failing_row import LOCATES, failing_row
from streaming_jobs.runtime.spark_plan import set_to, without_rules
from streaming_jobs.sources.base import Span

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from pyspark.sql import DataFrame, SparkSession

log = structlog.get_logger()

_LEAF = "LocalTableScanExec"
_OTHER_LEAVES = frozenset({"FileSourceScanExec", "BatchScanExec", "RangeExec", "OneRowRelationExec"})
"""What a function may read beside the records. Any other leaf may hide records: that of a kept frame, or of an RDD."""
_LASTING = frozenset({"RangeExec", "OneRowRelationExec"})
"""Leaves beside those of records that are the same in a later batch."""


@dataclass(frozen=True)
class _Node:
    """A physical operator above records, without any: it is made anew for each part, and others are kept."""

    plan: Any
    children: tuple[_Node | Any, ...]
    records: str | None = None
    """The source whose records a leaf has."""


HANDED_OUT, CAME_BACK = "numOutputRows", "pythonNumRowsReceived"
"""Spark's metrics of a leaf, and of an operator with Python code."""
_BATCH = 100
"""Rows of a batch for Python code."""
ROW_BY_ROW = 2 * _BATCH
"""Records of a part, at most, that go to Python code row by row."""
_BATCH_ROWS = ("spark.sql.execution.arrow.maxRecordsPerBatch", "spark.sql.execution.python.udf.maxRecordsPerBatch")


@dataclass(frozen=True)
class Stopped:
    """A run that raised `error`: most likely on a record in one of the spans `near`. It may be on any other."""

    error: Exception
    near: Sequence[Span] = ()


@dataclass(frozen=True)
class RowsCounted:
    """The rows that a run has handed out until it raised, by source, and those that came back to each Python operator.

    Beside the latter, the rows of a batch for Python code.
    """

    handed_out: Sequence[tuple[str, int]]
    came_back: Sequence[tuple[int, int]]

    def near(self, error: Exception) -> list[tuple[str, int, int]]:
        """Where the run that raised `error` stopped: ranges of rows by source."""
        from pyspark.errors import PythonException

        last = [(name, count - 1, count) for name, count in self.handed_out if count]
        if not self.came_back:
            return last
        back, batch = min(self.came_back)
        ahead = isinstance(error, PythonException)  # else, an expression on what has come back
        if ahead and (row := failing_row(text_of(error))) is not None:
            return [(name, row, row + 1) for name, _ in self.handed_out]
        first = back if ahead else max(back - batch, 0)
        behind = [(name, first, first + batch) for name, _ in self.handed_out]
        return behind if ahead else [*behind, *last]


@dataclass(frozen=True)
class PlannedOnce:
    """Frames of one function, planned for all records of a batch."""

    spark: SparkSession
    plans: Sequence[_Node]
    schemas: Sequence[Any]
    numbers: Mapping[str, NDArray[Any]]
    """The number of each record by source, in the order of the records: ascending."""
    rows: Mapping[str, Any]
    """The records by source, as Spark has them."""
    largest: Mapping[str, int]
    """The records for which the plans were made, by source; none if they are for this batch alone."""

    @classmethod
    def of(
        cls,
        spark: SparkSession,
        held: Mapping[str, DataFrame],
        frames: Callable[[Mapping[str, DataFrame]], Sequence[DataFrame]],
        numbers: Mapping[str, NDArray[Any]],
    ) -> PlannedOnce | None:
        """Plan `frames` of the `held` records; None if a plan cannot be run on parts of them.

        Such are plans with subqueries or frames that the function keeps, and the plans of a Spark without this
        interface, which is private.
        """
        from py4j.protocol import Py4JError, Py4JJavaError  # type: ignore[import-untyped]

        with _planned_as_written(spark):
            made = [frame._jdf for frame in frames(held)]
            plans = [frame.queryExecution().executedPlan() for frame in made]
        try:
            rows = {name: rows_of(frame) for name, frame in held.items()}
            records = _Records(spark._jvm, {_identity(spark._jvm, each): name for name, each in rows.items()})
            nodes = [_node(plan, records) for plan in plans]
            lasts = all(records.last_beyond(frame.queryExecution()) for frame in made)
            largest = {name: int(each.size()) for name, each in rows.items()} if lasts else {}
            planned = cls(spark, nodes, [each.schema() for each in made], numbers, rows, largest)
            planned.frames(())
            for node in nodes:
                _Run(planned, (), counts=True).with_rows(node)
        except _CannotBeParted:
            return None
        except Py4JJavaError:
            raise
        except (Py4JError, TypeError, ValueError) as error:
            log.info("each part of the batch is planned anew", reason=str(error))
            return None
        return planned

    def without_records(self) -> PlannedOnce:
        """The plans alone, to be kept for a later batch."""
        return replace(self, numbers={}, rows={})

    def on(self, held: Mapping[str, DataFrame], numbers: Mapping[str, NDArray[Any]]) -> PlannedOnce | None:
        """The same plans on the records of another batch; None if these have to be planned.

        So do more records than there were: Spark may have left out a limit that they reach.
        """
        if any(len(numbers[name]) > self.largest.get(name, -1) for name in held):
            return None
        return replace(self, numbers=numbers, rows={name: rows_of(frame) for name, frame in held.items()})

    def near(self, counted: RowsCounted, error: Exception) -> list[Span]:
        """Where a run of all records stopped; spans of numbers."""
        everything = {name: [(0, len(numbers))] for name, numbers in self.numbers.items()}
        return self._spans(counted.near(error), everything)

    def _spans(self, near: Sequence[tuple[str, int, int]], parts: Mapping[str, Sequence[Span]]) -> list[Span]:
        """The spans of numbers of some rows of the parts, each a number of ranges of all rows."""
        import numpy as np  # a session imports it while Spark starts

        spans = []
        for name, begin, end in near:
            part = np.concatenate([np.arange(0), *(np.arange(*span) for span in parts[name])])[begin:end]
            if len(part):
                numbers = self.numbers[name]
                spans.append((int(numbers[part[0]]), int(numbers[part[-1]]) + 1))
        return spans

    def run(self, spans: Sequence[Span]) -> Stopped | None:
        """Run each plan on the records with these numbers, in one task; None if none raises."""
        with set_to(self.spark, "spark.sql.leafNodeDefaultParallelism", "1"):  # a task that fails costs its Python
            for node in self.plans:
                run = _Run(self, spans, counts=size(spans) > 1)
                plan = run.with_rows(node)
                try:
                    with run.in_batches() if run.counts else nullcontext():
                        plan.executeCollect()
                except Exception as error:  # noqa: BLE001 - whoever searches judges it
                    return Stopped(error, self._spans(run.near(error), run.rows))
        return None

    def frames(self, spans: Sequence[Span]) -> list[DataFrame]:
        """The frames of the records with these numbers; whatever is made of them plans no more than that."""
        from pyspark.sql import DataFrame

        session = self.spark._jsparkSession
        with set_to(self.spark, "spark.sql.leafNodeDefaultParallelism", "1"):
            rows = [_Run(self, spans).with_rows(node).execute() for node in self.plans]
        made = [session.internalCreateDataFrame(*each, False) for each in zip(rows, self.schemas, strict=True)]
        return [DataFrame(each, self.spark) for each in made]


class _Run:
    """One plan with the records of some spans of numbers; it `counts` its rows if it is to say where it stopped."""

    def __init__(self, planned: PlannedOnce, spans: Sequence[Span], *, counts: bool = False) -> None:
        self.planned = planned
        self.counts = counts
        self.rows = {name: _within(numbers, spans) for name, numbers in planned.numbers.items()}
        self.handed_out: list[tuple[str, Any]] = []
        self.came_back: list[Any] = []
        self.to_python: list[Any] = []
        """The operators whose rows go to Python code."""
        self.batch = _BATCH if size(spans) > ROW_BY_ROW else 1

    def with_rows(self, node: _Node | Any) -> Any:
        """The operator above the records, made anew."""
        if not isinstance(node, _Node):
            return node
        if node.records is not None:
            rows = self.planned.rows[node.records]
            part = rows.slice(0, 0)
            for begin, end in self.rows[node.records]:
                part = part.concat(rows.slice(begin, end))
            plan = node.plan.copy(node.plan.output(), part, node.plan.stream())
            if self.counts:
                self.handed_out.append((node.records, self._counted(plan, HANDED_OUT)))
            return plan
        jvm: Any = self.planned.spark._jvm
        plan = node.plan.withNewChildren(jvm.PythonUtils.toSeq([self.with_rows(each) for each in node.children]))
        if self.counts and plan.metrics().contains(CAME_BACK):
            self.came_back.append(self._counted(plan, CAME_BACK))
            self.to_python += _each(plan.children())
        return plan

    def _counted(self, plan: Any, name: str) -> Any:
        """A metric of an operator that tasks report when they fail, too."""
        jvm: Any = self.planned.spark._jvm
        metric = plan.longMetric(name)
        metric.reset()
        known = jvm.org.apache.spark.util.AccumulatorMetadata(metric.id(), metric.name(), True)
        getattr(metric, "metadata_$eq")(known)
        return metric

    @contextmanager
    def in_batches(self) -> Iterator[None]:
        """Python code gets so many rows at a time. Tasks take the options from the job's properties."""
        context = self.planned.spark.sparkContext
        options = {**dict.fromkeys(_BATCH_ROWS, str(self.batch)), LOCATES: "true"}
        before = {name: context.getLocalProperty(name) for name in options}
        for name, option in options.items():
            context.setLocalProperty(name, option)
        try:
            yield
        finally:
            for name, value in before.items():
                context.setLocalProperty(name, value)  # type: ignore[arg-type]  # None removes it

    def near(self, error: Exception) -> list[tuple[str, int, int]]:
        """Where the run that raised `error` stopped.

        For a row of Python code, Spark takes rows of the leaves until it has made the row: a filter leaves some out.
        """
        near = self.counted.near(error)
        if self.batch == 1 or len(self.to_python) != 1 or (row := failing_row(text_of(error))) is None:
            return near
        for _, metric in self.handed_out:
            metric.reset()
        try:
            self.to_python[0].executeTake(row + 1)
        except Exception as another:  # noqa: BLE001 - the record of this exception is found later
            log.info("the record of a row is not known", reason=str(another)[:300])
            return near
        return [(name, count - 1, count) for name, count in self.counted.handed_out if count]

    @property
    def counted(self) -> RowsCounted:
        return RowsCounted(
            [(name, int(metric.value())) for name, metric in self.handed_out],
            [(int(metric.value()), self.batch) for metric in self.came_back],
        )


def size(spans: Sequence[Span]) -> int:
    return sum(end - begin for begin, end in spans)


def _within(numbers: NDArray[Any], spans: Sequence[Span]) -> list[Span]:
    """The rows whose numbers are in the spans."""
    import numpy as np  # a session imports it while Spark starts

    return [(int(begin), int(end)) for begin, end in np.searchsorted(numbers, np.asarray(spans).reshape(-1, 2))]


class _CannotBeParted(Exception):
    """The plan has records where another part cannot be put."""


@dataclass(frozen=True)
class _Records:
    """The sources by the first row of their leaves: each copy of a leaf that Spark makes has this very object."""

    jvm: Any
    by_first_row: Mapping[int, str]

    def source_of(self, leaf: Any) -> str | None:
        """The source whose records a leaf has; None: it has others."""
        return self.by_first_row.get(_identity(self.jvm, leaf.rows()))

    def last_beyond(self, query: Any) -> bool:
        """True if the plan holds for other records at another time.

        Not if it asks for the time or for random numbers, which Spark takes when it plans, or reads files, a table, or
        rows that the function has made. Nor if a source has no record: then the plan may lack its leaf.
        """
        analysed, time = query.analyzed(), self.jvm.org.apache.spark.sql.catalyst.trees.TreePattern.CURRENT_LIKE()
        if 0 in self.by_first_row or not analysed.deterministic() or analysed.containsPattern(time):
            return False
        leaves = [(leaf, str(leaf.getClass().getSimpleName())) for leaf in _each(query.executedPlan().collectLeaves())]
        return all(kind in _LASTING or (kind == _LEAF and self.source_of(leaf) is not None) for leaf, kind in leaves)

    def unlinked(self, plan: Any) -> Any:
        """The operator without its link to a logical plan, which has the records."""
        tags = self.jvm.org.apache.spark.sql.execution.SparkPlan
        plan.unsetTagValue(tags.LOGICAL_PLAN_TAG())
        plan.unsetTagValue(tags.LOGICAL_PLAN_INHERITED_TAG())
        return plan


def rows_of(frame: DataFrame) -> Any:
    """The records of a frame in the driver's memory, as Spark has them."""
    (leaf,) = _each(frame._jdf.queryExecution().analyzed().collectLeaves())
    return leaf.data()


def _identity(jvm: Any, rows: Any) -> int:
    """That of the first row; 0 without rows, of which any part is the same."""
    return int(jvm.System.identityHashCode(rows.head())) if rows.nonEmpty() else 0


def _node(plan: Any, records: _Records) -> _Node:
    found = _parted(plan, records)
    if not isinstance(found, _Node):
        raise _CannotBeParted
    return found


def _parted(plan: Any, records: _Records) -> _Node | Any:
    kind, children = str(plan.getClass().getSimpleName()), _each(plan.children())
    if plan.subqueries().nonEmpty():
        raise _CannotBeParted
    if children:
        below = tuple(_parted(child, records) for child in children)
        if not any(isinstance(each, _Node) for each in below):
            return plan
        plans = [each.plan if isinstance(each, _Node) else each for each in below]
        empty = plan.withNewChildren(records.jvm.PythonUtils.toSeq(plans))
        return _Node(records.unlinked(empty), below)
    if kind == _LEAF:
        if (source := records.source_of(plan)) is None:
            return plan
        return _Node(records.unlinked(plan.copy(plan.output(), plan.rows().slice(0, 0), plan.stream())), (), source)
    if kind not in _OTHER_LEAVES:
        raise _CannotBeParted
    return plan


def _each(scala: Any) -> list[Any]:
    return [scala.apply(index) for index in range(scala.size())]


@contextmanager
def _planned_as_written(spark: SparkSession) -> Iterator[None]:
    """Records stay in leaves of the plan: the optimiser evaluates expressions of rows that it has, and adaptive plans
    hide their leaves."""
    with without_rules(spark, ("ConvertToLocalRelation",)), set_to(spark, "spark.sql.adaptive.enabled", "false"):
        yield
