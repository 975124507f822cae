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
    for plan, inputs in _cut(frame._jdf.queryExecution().analyzed()):
        made = of_rows(spark._jsparkSession, plan)
        if inputs:
            gateway: Any = spark.sparkContext._gateway
            columns = gateway.new_array(jvm.org.apache.spark.sql.Column, len(inputs))
            for number, expression in enumerate(inputs):
                columns[number] = column.column(expression).alias(f"c{number}")
            made = made.select(columns)
        yield DataFrame(made, spark)


def _cut(plan: Any) -> Iterator[tuple[Any, list[Any]]]:
    """The largest parts without state that read a topic, with the expressions that an aggregation above computes."""
    if not _reads_topic(plan):
        return
    children = _each(plan.children())
    if not any(map(_has_state, children)) and _is_stateful(plan):
        inputs = _inputs(plan) if plan.nodeName() == "Aggregate" else []
        yield from ((child, inputs) for child in children if _reads_topic(child))
        return
    if not _has_state(plan):
        yield plan, []
        return
    for child in children:
        yield from _cut(child)


def _has_state(plan: Any) -> bool:
    """True if an operator of the plan keeps state of a topic's records."""
    return _is_stateful(plan) or any(_has_state(child) for child in _each(plan.children()))


def _is_stateful(plan: Any) -> bool:
    """True if the operator keeps state of a topic's records, or may keep it."""
    children, name = _each(plan.children()), str(plan.nodeName())
    if not children or not _reads_topic(plan):
        return False
    return keeps_state(name) or not is_known(name) or (name == "Join" and all(map(_reads_topic, children)))


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
