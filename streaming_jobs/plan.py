"""What can be read off a stream's analysed plan before it runs: is there state, and can rows multiply.

Works on the text of Spark's analysed plan (`QueryExecution.analyzed`), one node a line, `~` before streaming
nodes. The state fingerprint is that text for every stateful node without generated ids and without the watermark
delay: it changes when an aggregation, a grouping or a window changes, and state built by the old one would be
silently wrong under the new one.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

_NODE = re.compile(r"^[\s:+|-]*~?([A-Za-z0-9]+)")
_STATEFUL = ("Aggregate", "Deduplicate", "FlatMapGroups", "TransformWithState", "SessionWindow")
_MULTIPLIES = ("Generate", "Expand", "Join", "MapInPandas", "MapInArrow", "PythonMapInArrow", "FlatMap")
_GENERATED = re.compile(r"#\d+L?|-T\d+ms|[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")


@dataclass(frozen=True)
class PlanTraits:
    """What of a stream's plan decides how its batches travel."""

    stateful: bool
    multiplies: bool


def traits(frame: DataFrame) -> PlanTraits:
    """The traits of a streaming frame's plan."""
    return traits_of(_analysed(frame))


def state_fingerprint(frame: DataFrame) -> dict[str, str]:
    """Every stateful node of the plan in a form that only a change of meaning changes; empty without state."""
    return fingerprint_of(_analysed(frame))


def traits_of(plan: str) -> PlanTraits:
    """The traits of a plan given as text."""
    nodes = _nodes(plan)
    sources = sum(1 for name, _ in nodes if name.startswith("StreamingRelation"))
    stateful = any(name.startswith(_STATEFUL) or (name == "Join" and sources > 1) for name, _ in nodes)
    return PlanTraits(stateful=stateful, multiplies=any(name.startswith(_MULTIPLIES) for name, _ in nodes))


def fingerprint_of(plan: str) -> dict[str, str]:
    """The fingerprint of a plan given as text."""
    stateful = [line for name, line in _nodes(plan) if name.startswith((*_STATEFUL, "Join"))]
    if not traits_of(plan).stateful:
        return {}
    return {str(index): _GENERATED.sub("", line.lstrip(" :+|-~")) for index, line in enumerate(stateful)}


def _nodes(plan: str) -> list[tuple[str, str]]:
    return [(match[1], line) for line in plan.splitlines() if (match := _NODE.match(line))]


def _analysed(frame: DataFrame) -> str:
    return str(frame._jdf.queryExecution().analyzed().toString())
