"""What a table of PostgreSQL as a sink declares, and what is refused before anything runs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import pytest
from pydantic import ValidationError
from pyspark.sql.types import ArrayType, DecimalType, IntegerType, LongType, StringType, StructField, StructType

from streaming_jobs import (
    DeltaTable,
    Json,
    KafkaSink,
    KafkaTopic,
    NotNull,
    PostgresTable,
    Raw,
    Stream,
    UsageError,
    stream,
)
from streaming_jobs.catalog.graph import describe
from streaming_jobs.catalog.topology import Topology
from streaming_jobs.declare.postgres_table import column_types
from streaming_jobs.declare.table import is_declared_table
from streaming_jobs.runtime.code_version import code_version
from streaming_jobs.runtime.declaration import parts_of
from streaming_jobs.settings import PostgresSettings, Settings, load

ORDER = StructType([StructField("id", LongType(), nullable=False), StructField("customer", StringType())])
LISTS = StructType([StructField("tags", ArrayType(StringType()))])
RAW = KafkaTopic("raw-orders", value=Raw())
ORDERS = PostgresTable("orders", keys=["id"], order_by=["changed"], delete_when="gone")


def same(raw: Any) -> Any:
    return raw


def flow(name: str, **sinks: Any) -> Stream:
    return Stream(name, same, {"raw": RAW}, sinks)


def test_a_stream_of_a_postgresql_table_alone_has_a_primary_table_of_its_batches() -> None:
    @stream(source=RAW, sink=ORDERS)
    def kept(raw: Any) -> Any:
        return raw

    assert kept.batches_only
    assert kept.output_names == ("orders",)
    assert (kept.primary.name, kept.secondary) == ("kept_batches", ())
    assert kept.table_names == ("kept_batches", "kept_dead_letters"), "Delta tables alone"
    assert replace(kept, name="other").postgres_tables == {"orders": ORDERS}
    assert (ORDERS.mode, ORDERS.ledger_name, ORDERS.table_names) == (
        "upsert",
        "postgres:orders",
        ("orders", "orders_deletes"),
    )
    assert is_declared_table(ORDERS)


def test_sinks_of_one_mapping_are_told_apart_and_may_share_a_name() -> None:
    topic = KafkaSink(KafkaTopic("orders", value=Json(ORDER)))
    every = flow("every", database=ORDERS, topic=topic, table=DeltaTable("orders"))
    assert every.output_names == ("table", "topic", "database")
    assert (every.primary.name, every.batches_only) == ("orders", False)
    assert list(every.postgres_tables) == ["database"]


@pytest.mark.parametrize(
    ("declare", "text"),
    [
        (lambda: PostgresTable("Orders"), "not a table name"),
        (lambda: PostgresTable("recourse_ledger"), "is taken by Recourse itself"),
        (lambda: PostgresTable("t", order_by=["a"]), "order_by and delete_when are for upserts"),
        (lambda: PostgresTable("t", emit="update"), "every one of these rows would stay"),
        (lambda: PostgresTable("t", keys=["nope"], schema=ORDER), "'nope' is not a column of its schema"),
        (lambda: PostgresTable("t", schema=LISTS), "tags has the type array, which is not written to PostgreSQL"),
        (lambda: PostgresTable("t", keys=["k"], deletes_kept="never"), "deletes_kept"),
        (lambda: flow("s", a=ORDERS, b=ORDERS), "names a table of PostgreSQL twice"),
        (lambda: flow("s", a=ORDERS, b=PostgresTable("orders_deletes")), "names a table of PostgreSQL twice"),
        (lambda: Stream("s", same, {"raw": RAW}, {"a": ORDERS}, rules={"a": [NotNull("id")]}), "row rules of the"),
    ],
)
def test_a_wrong_declaration_is_refused(declare: Callable[[], Any], text: str) -> None:
    with pytest.raises(UsageError, match=text):
        declare()


def test_a_nested_column_is_refused_with_the_way_to_write_it() -> None:
    with pytest.raises(UsageError) as refused:
        PostgresTable("t", schema=LISTS)
    assert refused.value.next_step == "write it as text: to_json(tags)"


def test_each_type_has_columns_that_hold_all_of_its_values() -> None:
    assert column_types(IntegerType()) == ("integer", "bigint", "numeric")
    assert column_types(DecimalType(12, 2)) == ("numeric(12,2)", "numeric")
    assert column_types(ArrayType(LongType())) == ()


def test_a_postgresql_table_has_one_writer() -> None:
    with pytest.raises(UsageError, match="PostgreSQL table orders is written by first and second"):
        Topology.of([flow("first", out=ORDERS), flow("second", out=PostgresTable("orders"))])


def test_the_topology_reads_as_text_with_its_postgresql_tables() -> None:
    assert describe(Topology.of([flow("kept", out=ORDERS)])) == (
        "stream kept\n"
        "  <- topic raw-orders as raw\n"
        "  -> table kept_batches (primary, append)\n"
        "  -> PostgreSQL table orders (secondary, upsert by id)\n"
        "  -> table kept_dead_letters (dead letters)\n"
    )


@pytest.mark.parametrize("change", [{"keys": ["other"]}, {"order_by": ["id"]}, {"delete_when": "false"}])
def test_another_table_is_another_version_of_the_code(change: Mapping[str, Any]) -> None:
    other = flow("kept", out=replace(ORDERS, **change))
    assert code_version(flow("kept", out=ORDERS), ()) != code_version(other, ())
    assert code_version(flow("kept", out=ORDERS), ()) == code_version(
        flow("kept", out=replace(ORDERS, description="text")), ()
    )


def test_a_changed_option_is_among_what_changed_since_the_last_start() -> None:
    said = parts_of(flow("kept", out=ORDERS), Settings.load({}))
    assert said["table postgres:orders: order_by"] == "changed"


@pytest.mark.parametrize(
    ("url", "text"),
    [
        ("mysql://me@/db", "no URL of a database"),
        ("postgresql://me:s3cret@/db", "has a password"),
        ("postgresql://me@/db?password=s3cret", "has a password"),
        ("postgresql://me@db.example/orders", "add sslmode=verify-full"),
        ("postgresql://me@/orders?host=db.example", "add sslmode=verify-full"),
    ],
)
def test_a_url_with_a_password_or_without_a_word_on_tls_is_refused(url: str, text: str) -> None:
    with pytest.raises(ValidationError, match=text) as refused:
        PostgresSettings(url=url)
    assert "s3cret" not in str(refused.value)


@pytest.mark.parametrize(
    "url",
    [
        "",
        "postgresql:///db",
        "postgresql://me@localhost:5433/db",
        "postgresql://me@/db?host=/run/postgresql",
        "postgresql://me@db.example/orders?sslmode=verify-full",
    ],
)
def test_a_url_of_this_machine_or_with_a_word_on_tls_is_taken(url: str) -> None:
    assert PostgresSettings(url=url).url == url


def test_the_password_is_hidden_where_settings_are_shown() -> None:
    loaded = load({"postgres.url": "postgresql://me@/db", "postgres.password": "s3cret"})
    shown = {origin.key: origin.value for origin in loaded.origins}
    assert shown["postgres.password"] == "(hidden)"
    assert "s3cret" not in repr(loaded.settings)
