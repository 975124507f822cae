"""Plans that Spark makes once for all records of a batch, and that run on any part of the records.

A plan over records in the driver's memory has them in leaves, `LocalTableScan`. For a part, the physical plan is made
again with other rows in those leaves: no analysis, no optimiser, no compiler; a run is one job of Spark.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import structlog

from streaming_jobs.runtime.spark_plan import set_to, without_rules
from streaming_jobs.sources.base import Span

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

log = structlog.get_logger()

_LEAF = "LocalTableScanExec"
_OTHER_LEAVES = frozenset({"FileSourceScanExec", "BatchScanExec", "RDDScanExec", "RangeExec", "OneRowRelationExec"})
"""What a function may read beside the records. Any other leaf may hide records, such as that of a kept frame."""


@dataclass(frozen=True)
class _Node:
    """A physical operator above records: it is made anew for each part, and others are kept."""

    plan: Any
    children: tuple[_Node | Any, ...]
    records: str | None = None
    """The source whose records a leaf has."""


@dataclass(frozen=True)
class PlannedOnce:
    """Frames of one function, planned for all records of a batch, by source."""

    spark: SparkSession
    plans: Sequence[_Node]

    @classmethod
    def of(
        cls,
        spark: SparkSession,
        held: Mapping[str, DataFrame],
        frames: Callable[[Mapping[str, DataFrame]], Sequence[DataFrame]],
    ) -> PlannedOnce | None:
        """Plan `frames` of the `held` records; None if a plan cannot be run on parts of them.

        Such are plans with subqueries or frames that the function keeps, and the plans of a Spark without this
        interface, which is private.
        """
        from py4j.protocol import Py4JError, Py4JJavaError  # type: ignore[import-untyped]

        with _planned_as_written(spark):
            plans = [frame._jdf.queryExecution().executedPlan() for frame in frames(held)]
        try:
            records = _Records.of(held)
            planned = cls(spark, [_node(plan, records) for plan in plans])
            for node in planned.plans:
                planned._with(node, {name: [(0, 0)] for name in held})
        except _CannotBeParted:
            return None
        except Py4JJavaError:
            raise
        except Py4JError as error:
            log.info("each part of the batch is planned anew", reason=str(error))
            return None
        return planned

    def run(self, parts: Mapping[str, Sequence[Span]]) -> None:
        """Run each plan on the rows of these spans, by source, in one task; raises what Spark raises."""
        with set_to(self.spark, "spark.sql.leafNodeDefaultParallelism", "1"):  # a task that fails costs its Python
            for node in self.plans:
                self._with(node, parts).executeCollect()

    def _with(self, node: _Node | Any, parts: Mapping[str, Sequence[Span]]) -> Any:
        if not isinstance(node, _Node):
            return node
        if node.records is not None:
            spans, rows = parts[node.records], node.plan.rows()
            part = rows.slice(0, 0)
            for begin, end in spans:
                part = part.concat(rows.slice(begin, end))
            return node.plan.copy(node.plan.output(), part, node.plan.stream())
        jvm: Any = self.spark._jvm
        return node.plan.withNewChildren(jvm.PythonUtils.toSeq([self._with(each, parts) for each in node.children]))


class _CannotBeParted(Exception):
    """The plan has records where another part cannot be put."""


@dataclass(frozen=True)
class _Records:
    """How leaves with records are known: by the id of their first column; a copy of a leaf, which Spark makes for a
    second use, by the names of all columns."""

    by_id: Mapping[int, str]
    by_names: Mapping[tuple[str, ...], Sequence[str]]

    @classmethod
    def of(cls, held: Mapping[str, DataFrame]) -> _Records:
        by_id, by_names = {}, defaultdict[tuple[str, ...], list[str]](list)
        for name, frame in held.items():
            (leaf,) = _each(frame._jdf.queryExecution().analyzed().collectLeaves())
            by_id[_id(leaf)] = name
            by_names[_columns(leaf)].append(name)
        return cls(by_id, by_names)

    def source_of(self, leaf: Any) -> str | None:
        """The source whose records a leaf has; None: it has others."""
        names = self.by_names.get(_columns(leaf), ())
        if len(names) > 1 and _id(leaf) not in self.by_id:
            raise _CannotBeParted
        return self.by_id.get(_id(leaf), names[0]) if names else None


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
        return _Node(plan, below) if any(isinstance(each, _Node) for each in below) else plan
    if kind == _LEAF:
        source = records.source_of(plan)
        return plan if source is None else _Node(plan, (), source)
    if kind not in _OTHER_LEAVES:
        raise _CannotBeParted
    return plan


def _id(leaf: Any) -> int:
    return int(leaf.output().head().exprId().id())


def _columns(leaf: Any) -> tuple[str, ...]:
    return tuple(str(each.name()) for each in _each(leaf.output()))


def _each(scala: Any) -> list[Any]:
    return [scala.apply(index) for index in range(scala.size())]


@contextmanager
def _planned_as_written(spark: SparkSession) -> Iterator[None]:
    """Records stay in leaves of the plan: the optimiser evaluates expressions of rows that it has, and adaptive plans
    hide their leaves."""
    with without_rules(spark, ("ConvertToLocalRelation",)), set_to(spark, "spark.sql.adaptive.enabled", "false"):
        yield
