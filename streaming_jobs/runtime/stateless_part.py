"""The part of a stream's plan ahead of its state: what can be run on any of a batch's records, without the others.

The function is called with batch frames, as a test calls it, and the plan is cut below the lowest operators that keep
state. Of an aggregation, what it computes of each record belongs to that part: the columns that it groups by, and the
arguments of its functions (`sum(price / quantity)`).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from streaming_jobs.errors import ConfigurationError
from streaming_jobs.runtime.spark_plan import is_known, keeps_state

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

    from streaming_jobs.stream import Stream


_VERDICT = re.compile(r"\b_bad#\d+")
"""The column by which a source leaves out refused records: only the plan of a topic's records has it."""


def stateless_parts(stream: Stream, records: Mapping[str, DataFrame]) -> list[DataFrame]:
    """The frames ahead of the state for these records, by the function's parameters.

    Raises ConfigurationError if Spark does not take the function's plan for batch frames, or if nothing is ahead of the
    state.
    """
    try:
        outputs = stream.outputs(**records)
        parts = [part for frame in outputs.values() for part in _ahead_of_state(frame)]
    except Exception as error:
        words = " ".join(str(error).split())[:300]
        raise not_separable(stream.name, f"its function cannot be called with batch frames: {words}") from error
    if not parts:
        raise not_separable(stream.name, "no operator is ahead of its state")
    return parts


def not_separable(stream: str, why: str) -> ConfigurationError:
    return ConfigurationError(
        f"stream {stream} keeps state, and errors sets aside records on which its function raises: {why}",
        'write errors=ErrorPolicy(function="fail") and let the function return null where it would raise (try_cast, '
        "try_divide); or move what raises into a stream without state, with a topic between the two",
    )


def _ahead_of_state(frame: DataFrame) -> Iterator[DataFrame]:
    from pyspark.sql import DataFrame

    spark = frame.sparkSession
    jvm: Any = spark._jvm
    of_rows, column = jvm.org.apache.spark.sql.classic.Dataset.ofRows, jvm.org.apache.spark.sql.classic.ExpressionUtils
    parts, _ = _cut(frame._jdf.queryExecution().analyzed())
    for plan, inputs in parts:
        made = of_rows(spark._jsparkSession, plan)
        if inputs:
            gateway: Any = spark.sparkContext._gateway
            columns = gateway.new_array(jvm.org.apache.spark.sql.Column, len(inputs))
            for number, expression in enumerate(inputs):
                columns[number] = column.column(expression).alias(f"c{number}")
            made = made.select(columns)
        yield DataFrame(made, spark)


def _cut(plan: Any) -> tuple[list[tuple[Any, list[Any]]], bool]:
    """The largest parts without state that read a topic, and True if the plan keeps state of a topic's records.

    Each part has the expressions that an aggregation above it computes of its rows.
    """
    if not _reads_topic(plan):
        return [], False
    children, name = _each(plan.children()), str(plan.nodeName())
    below = [_cut(child) for child in children]
    parts = [part for found, _ in below for part in found]
    if any(stateful for _, stateful in below):
        return parts, True
    joins_streams = name == "Join" and len(parts) == len(children)
    if children and (keeps_state(name) or not is_known(name) or joins_streams):
        inputs = _inputs(plan) if name == "Aggregate" else []
        return [(part, inputs) for part, _ in parts], True
    return [(plan, [])], False


def _reads_topic(plan: Any) -> bool:
    return _VERDICT.search(str(plan.toString())) is not None


def _inputs(aggregate: Any) -> list[Any]:
    """What an aggregation computes of each row."""
    found = _each(aggregate.groupingExpressions())
    for expression in _each(aggregate.aggregateExpressions()):
        found += _arguments(expression)
    return found


def _arguments(expression: Any) -> list[Any]:
    """The arguments of the aggregate functions in an expression, and the conditions of their filters."""
    if expression.getClass().getSimpleName() == "AggregateExpression":
        return [*_each(expression.aggregateFunction().children()), *_each(expression.filter().toList())]
    return [argument for child in _each(expression.children()) for argument in _arguments(child)]


def _each(scala: Any) -> list[Any]:
    return [scala.apply(index) for index in range(scala.size())]
