"""A stream's output in the columns of its table, and with it the place of each row's record.

An output that keeps the column `_source` names the record of each row. Upserts need that for their order, and dead
letters to name the record of a refused row: without it the records without a row could not be listed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import functions as F
from pyspark.sql.types import StructType

from streaming_jobs.declare.columns import SOURCE_COLUMN
from streaming_jobs.declare.rules import NO_RULES, RowRules
from streaming_jobs.sinks.delta.upsert_order import DELETE_COLUMN, packed
from streaming_jobs.sinks.row_rules import marked
from streaming_jobs.sinks.schemas import is_position

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

    from streaming_jobs.declare.table import DeclaredTable

TOPIC = "__topic"
ORDER = ("__partition", "__offset")
PLACE = (TOPIC, *ORDER)
"""Columns that name a row's record; they are in no table."""


def fitted(
    declared: DeclaredTable, schema: StructType, frame: DataFrame, topics: Sequence[str], rules: RowRules = NO_RULES
) -> DataFrame:
    """The table's columns in its order and types, plus the columns that ordering, deleting, refusing, judging need.

    For appends from one topic the topic's name is left out: only refused rows need it, and `named` adds it to them.
    """
    sourced = SOURCE_COLUMN in frame.columns
    columns = []
    for field in schema.fields:
        # Code that is older than the table lacks its newest columns: null, also in rows that an upsert replaces.
        value = F.col(f"`{field.name}`") if field.name in frame.columns and not is_position(field) else F.lit(None)
        if is_position(field) and sourced and declared.order_by:
            value = F.expr(packed(topics, SOURCE_COLUMN))
        columns.append(value.cast(field.dataType).alias(field.name))
    if declared.mode == "upsert":
        if sourced:
            columns += [F.col(f"{SOURCE_COLUMN}.{name.strip('_')}").alias(name) for name in PLACE]
        if declared.delete_when:
            columns.append(F.coalesce(F.expr(declared.delete_when), F.lit(False)).alias(DELETE_COLUMN))
    elif sourced and _is_place(frame):
        names = ORDER if len(topics) == 1 else PLACE
        columns += [F.col(f"{SOURCE_COLUMN}.{name.strip('_')}").alias(name) for name in names]
    whole = frame.select(*columns)
    if not rules:
        return whole
    return marked(whole, declared.name, rules, exempt=F.col(DELETE_COLUMN) if DELETE_COLUMN in whole.columns else None)


def has_place(rows: DataFrame) -> bool:
    """True if fitted rows name their record."""
    return set(ORDER) <= set(rows.columns)


def named(refused: pa.Table, topics: Sequence[str]) -> pa.Table:
    """Refused rows with the topic of their records, where they have the rest of the place."""
    if TOPIC in refused.column_names or not set(ORDER) <= set(refused.column_names) or len(topics) != 1:
        return refused
    topic = pc.if_else(pc.is_valid(refused[ORDER[1]]), pa.scalar(topics[0]), pa.scalar(None, pa.string()))
    return refused.append_column(TOPIC, topic)


def as_returned(schema: StructType, rows: pa.Table) -> pa.Table:
    """Rows as the function returned them, without the position that is added to them."""
    return rows.drop_columns([f.name for f in schema.fields if is_position(f) and f.name in rows.column_names])


def _is_place(frame: DataFrame) -> bool:
    """True if `_source` is the column that Recourse adds; an append-only table may have any other of that name."""
    kind = frame.schema[SOURCE_COLUMN].dataType
    return isinstance(kind, StructType) and {name.strip("_") for name in PLACE} <= set(kind.fieldNames())
