"""The columns of a source that a stream uses, read from its optimised plan, so that the source builds no others.

In the plan, Spark has put a projection of what is used directly above the source:

    Project [_record#6.id AS id#11L, offset#2L AS o#19L]
    +- Filter (NOT _bad#7 AND NOT (_record#6.kind = test))
       +- CollectMetrics recourse_payments, [count(if (NOT _bad#7) null else _bad#7) AS bad#8L], 0
          +- Project [offset#2L, _record#6, _bad#7]
             +- StreamingRelationV2 ..., kafka_clean_payments, ..., [topic#0, partition#1, offset#2L, ...]

A column that is left out by mistake would be null without a word. So whatever does not look like this counts as
used: without that projection all columns are, and a record that is passed on whole uses all of its fields. And
Spark must not decide here what may come out otherwise in a later batch (`CASE WHEN current_date() < ... THEN net
ELSE gross END`): its rules that evaluate conditions are left out, and a plan that asks for the time uses all
columns.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from streaming_jobs.runtime.spark_plan import ATTRIBUTE, all_fields_shown, without_rules

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

_DECIDING = (
    "BooleanSimplification", "CombineFilters", "ConstantFolding", "ConstantPropagation", "ConvertToLocalRelation",
    "EliminateLimits", "EliminateOuterJoin", "EliminateSorts", "FoldablePropagation", "InferFiltersFromConstraints",
    "LikeSimplification", "NullPropagation", "OptimizeIn", "OptimizeOneRowPlan", "OptimizeRepartition",
    "PropagateEmptyRelation", "PruneFilters", "PushFoldableIntoBranches", "ReplaceNullWithFalseInPredicate",
    "SimplifyBinaryComparison", "SimplifyConditionals", "SimplifyConditionalsInPredicate",
)  # fmt: skip
"""Rules of org.apache.spark.sql.catalyst.optimizer that evaluate an expression or take a branch away."""
_TIME = re.compile(r"\b(current_\w+|now|localtimestamp|unix_timestamp|curdate)\(")
_OUTPUT = re.compile(r"\[([^\[\]]*)\], name=")


def used_columns(frame: DataFrame, sources: Mapping[str, Sequence[str]]) -> dict[str, frozenset[str]]:
    """The columns that a frame uses of each data source, by its name; those of the record as `_record.field`.

    `sources`: the fields of each one's record. A source of which all columns are used is not in the answer.
    """
    with all_fields_shown(frame.sparkSession), without_rules(frame.sparkSession, _DECIDING):
        plan = frame._jdf.queryExecution()
        if _TIME.search(str(plan.analyzed().toString()).lower()):
            return {}
        optimised = str(plan.sparkSession().sessionState().optimizer().execute(plan.analyzed()).toString())
    found = {name: used_in(optimised, name, fields) for name, fields in sources.items()}
    return {name: used for name, used in found.items() if used is not None}


def used_in(plan: str, source: str, fields: Sequence[str]) -> frozenset[str] | None:
    """The columns of one source, from the text of a plan; None: all."""
    from streaming_jobs.sources.record_blocks import RECORD  # here: a session imports NumPy while Spark starts

    lines = plan.split("\n")  # a name may have other characters that end a line
    (at, *further) = [i for i, line in enumerate(lines) if f", {source}, " in line] or [0]
    output = _OUTPUT.search(lines[at])
    if further or at == 0 or output is None:
        return None
    ids = {number: name for name, number in ATTRIBUTE.findall(output[1])}
    passed = _projected(lines[at - 1], ids)
    used = passed or set(ids.values())
    number = next((number for number, name in ids.items() if name == RECORD), "")
    elsewhere = "\n".join(line for i, line in enumerate(lines) if i != at and not (passed and i == at - 1))
    uses = re.findall(rf"(?<![\w`]){RECORD}#{number}(?!\d)(.?)", elsewhere)
    text = elsewhere.lower()  # Spark shows a name as the function wrote it
    named = [n for n in fields if f"{RECORD}#{number}.{n}".lower() in text]
    every = any(after != "." for after in uses)
    return frozenset(used | {f"{RECORD}.{name}" for name in (fields if every else named)})


def _projected(line: str, ids: Mapping[str, str]) -> set[str]:
    """The columns that a projection passes on, if it does nothing else; otherwise none."""
    projection = re.fullmatch(r"[\s:|~+-]*Project \[(.*)\]", line)
    members = projection[1].split(",") if projection else []
    passed = [ATTRIBUTE.fullmatch(member.strip()) for member in members]
    return {ids[m[2]] for m in passed if m} if all(m is not None and m[2] in ids for m in passed) else set()
