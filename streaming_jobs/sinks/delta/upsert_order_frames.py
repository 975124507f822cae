"""The order of upserts (`upsert_order.py`) on Spark's frames: the same rules, for batches through the executors."""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from typing import TYPE_CHECKING

import pyarrow as pa
from pyspark.sql import Window
from pyspark.sql import functions as F

from streaming_jobs.declare.columns import POSITION_COLUMN
from streaming_jobs.errors import OutputMismatch
from streaming_jobs.sinks.delta.remembered_deletes import notes
from streaming_jobs.sinks.delta.sink import DeltaSink
from streaming_jobs.sinks.delta.upsert_order import DELETE_COLUMN, RESET_COLUMN, ROW_COLUMN, Order, at_least

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

_RESET_AT = "__reset_at"


def last_per_key(rows: DataFrame, sink: DeltaSink, place: Sequence[str]) -> tuple[DataFrame, int]:
    """The last row of each key by its place in the source, and their number; `rows` are numbered."""
    keys = sink.declared.keys
    count, distinct = rows.count(), rows.select(*map(_column, keys)).distinct().count()
    if count == distinct:
        return rows.drop(ROW_COLUMN), distinct
    if not place:
        raise OutputMismatch(
            f"a batch has {count} rows for {distinct} keys of table {sink.name} and nothing says which are last",
            "set order_by on the sink, or keep the column _source in the stream's output",
        )
    return _greatest(rows, keys, [*map(_column, place)]), distinct


def last_events(rows: DataFrame, keys: Sequence[str], order: Order) -> DataFrame:
    """One event per key; with the column `__delete`, the column `__reset` is added. `rows` are numbered."""
    if DELETE_COLUMN in rows.columns:
        place = F.struct(*map(_column, [*([POSITION_COLUMN] if order.by_position else []), ROW_COLUMN]))
        resets = F.max(F.when(_without_order(order), place)).over(Window.partitionBy(*map(_column, keys)))
        rows = rows.withColumn(_RESET_AT, resets).where(F.col(_RESET_AT).isNull() | (place >= F.col(_RESET_AT)))
        rows = rows.withColumn(RESET_COLUMN, F.col(_RESET_AT).isNotNull()).drop(_RESET_AT)
    compared = []
    for column in order.all:
        value = _column(column)
        if column in order.floating:
            compared.append(F.isnan(value))
            value = F.when(F.isnan(value), F.lit(0.0)).otherwise(value.cast("double") + F.lit(0.0))
        compared += [_column(column).isNotNull(), value]
    return _greatest(rows, keys, compared)


def beside(events: DataFrame, delete_table: DeltaSink, order: Order) -> DataFrame:
    """Each event `s` with the remembered delete `t` of its key, if there is one."""
    keys = delete_table.declared.keys
    columns = list(dict.fromkeys([*keys, *order.all]))
    held = events.sparkSession.read.format("delta").load(str(delete_table.path)).select(*map(_column, columns))
    s, t = F.struct(*map(_column, events.columns)).alias("s"), F.struct(*map(_column, columns)).alias("t")
    on = reduce(lambda a, b: a & b, [F.col(f"s.`{key}`") == F.col(f"t.`{key}`") for key in keys])
    return events.select(s).join(held.select(t), on, "left")


def split(events: DataFrame, delete_table: DeltaSink, order: Order) -> tuple[DataFrame, pa.Table]:
    """The events to merge into the table, and the changes to its remembered deletes; `events` as from `beside`."""
    deleted, reset = F.col(f"s.{DELETE_COLUMN}"), F.col(f"s.{RESET_COLUMN}")
    taken = F.col("t").isNull() | deleted | reset | F.expr(at_least(order))
    no_order = reduce(lambda a, b: a & b, [F.col(f"s.`{c}`").isNull() for c in order.columns])
    noted = (deleted & ~no_order) | (reset & F.col("t").isNotNull())
    columns = list(dict.fromkeys([*delete_table.declared.keys, *order.all, DELETE_COLUMN, RESET_COLUMN]))
    rows = events.where(noted).select(*(F.col(f"s.`{c}`") for c in columns)).toArrow()
    return events.where(taken).select("s.*"), notes(rows, delete_table.declared.keys, order)


def _greatest(rows: DataFrame, keys: Sequence[str], compared: Sequence[Column]) -> DataFrame:
    """The greatest row of each key, the later one of those that are equal."""
    row = F.struct(*map(_column, rows.columns))
    last = F.max_by(row, F.struct(*compared, F.col(ROW_COLUMN)))
    return rows.groupBy(*map(_column, keys)).agg(last.alias(ROW_COLUMN)).select(f"{ROW_COLUMN}.*").drop(ROW_COLUMN)


def _without_order(order: Order) -> Column:
    condition = F.col(DELETE_COLUMN)
    for column in order.columns:
        condition = condition & _column(column).isNull()
    return condition


def _column(name: str) -> Column:
    return F.col(f"`{name}`")
