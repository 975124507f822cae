"""The schema against the declaration and against the last validation, also when the log no longer has that."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pyarrow as pa
from deltalake import write_deltalake
from pyspark.sql.types import ArrayType, LongType, MapType, StringType, StructField, StructType

from quality.table_checks import Past, SameSchema
from streaming_jobs.stream import DeltaTable as Declared
from tests.support.checked_tables import ORDERS, Orders


def widened(orders: Orders, **columns: pa.Array) -> None:
    """Another program adds columns."""
    write_deltalake(orders.path, pa.table(columns), mode="append", schema_mode="merge")


def replaced(orders: Orders, **columns: pa.Array) -> None:
    """Another program replaces the table's columns."""
    write_deltalake(orders.path, pa.table(columns), mode="overwrite", schema_mode="overwrite")


def test_the_declared_schema_passes_and_a_null_constraint_does_not_count(tmp_path: Path) -> None:
    orders = Orders.begin(tmp_path, Declared("orders", schema=ORDERS))
    outcome = orders.look(SameSchema())
    assert (outcome.passed, outcome.number) == (True, 0.0)
    assert outcome.observed.startswith("5 columns as declared; columns {")
    strict = StructType([StructField(f.name, f.dataType, False, {"comment": "x"}) for f in ORDERS.fields[::-1]])
    assert orders.look(SameSchema(), declared=Declared("orders", schema=strict)).passed


def test_an_added_column_is_a_warning_in_the_text(tmp_path: Path) -> None:
    orders = Orders.begin(tmp_path, Declared("orders", schema=ORDERS))
    widened(orders, extra=pa.array([1], pa.int32()))
    outcome = orders.look(SameSchema())
    assert outcome.passed and outcome.number == 1
    assert "warning: 1 column added: extra integer" in outcome.observed


def test_a_removed_and_a_changed_column_fail(tmp_path: Path) -> None:
    orders = Orders.begin(tmp_path, Declared("orders", schema=ORDERS))
    replaced(orders, id=pa.array(["x"]), place=pa.array(["y"]), value=pa.array([1.0]), price=pa.array([1.0]))
    outcome = orders.look(SameSchema())
    assert not outcome.passed and outcome.number == 3 and not outcome.error
    assert (
        "column at is gone; column id is string, was long; column price is double, was decimal(10,2)"
        in outcome.observed
    )


def test_a_changed_column_alone_fails(tmp_path: Path) -> None:
    orders = Orders.begin(tmp_path, Declared("orders", schema=ORDERS))
    other = StructType([StructField("id", StringType()), *ORDERS.fields[1:]])
    outcome = orders.look(SameSchema(), declared=Declared("orders", schema=other))
    assert not outcome.passed and outcome.observed.startswith("column id is long, was string")


def test_without_a_declared_schema_the_last_validation_counts(orders: Orders) -> None:
    orders.batch(0)
    first = orders.look(SameSchema())
    assert first.passed and "no earlier validation" in first.observed
    assert orders.look(SameSchema(), since=0).passed
    replaced(orders, id=pa.array([1]))
    outcome = orders.look(SameSchema(), since=1)
    assert not outcome.passed and "column at is gone" in outcome.observed
    assert orders.look(SameSchema(), since=2).passed


def test_the_last_outcome_is_used_once_the_log_is_shorter(orders: Orders) -> None:
    orders.batch(0)
    text = orders.look(SameSchema()).observed
    replaced(orders, id=pa.array([1]))
    orders.shorten()
    outcome = orders.look(SameSchema(), since=1, past=[Past(0.0, 1.0, text)])
    assert not outcome.passed and "column at is gone" in outcome.observed and not outcome.error
    unknown = orders.look(SameSchema(), since=1)
    assert not unknown.passed and "not known" in unknown.error


def test_a_field_inside_of_a_column_counts(orders: Orders) -> None:
    inner = StructType([StructField("a", LongType()), StructField("b", MapType(StringType(), ArrayType(LongType())))])
    declared = Declared("nested", schema=StructType([StructField("s", inner)]))
    checked = orders.checked()
    kind = pa.struct([("a", pa.int64()), ("b", pa.map_(pa.string(), pa.list_(pa.int64())))])
    orders.other("nested", pa.table({"s": pa.array([None], kind)}))
    assert orders.look(SameSchema(), declared=declared).passed
    other = StructType([StructField("s", StructType([StructField("a", StringType())]))])
    outcome = orders.look(SameSchema(), declared=replace(declared, schema=other))
    assert "column s is struct<a long, b map<string, array<long>>>, was struct<a string>" in outcome.observed
    assert SameSchema().look(checked).passed


def test_the_column_that_recourse_adds_does_not_count(tmp_path: Path) -> None:
    from streaming_jobs.sinks.schemas import POSITION_FIELD

    class Ordered(Orders):
        columns = StructType([*ORDERS.fields, POSITION_FIELD])

    orders = Ordered.begin(tmp_path, Declared("orders", keys=["id"], order_by=["at"], schema=ORDERS))
    outcome = orders.look(SameSchema())
    assert outcome.passed and outcome.number == 0, outcome
