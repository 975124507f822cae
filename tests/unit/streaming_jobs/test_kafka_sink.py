"""What a topic as a sink declares, and what is refused before anything runs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import pytest
from pyspark.sql.types import LongType, StringType, StructField, StructType

from streaming_jobs import DeltaTable, Json, KafkaSink, KafkaTopic, NotNull, Raw, Stream, UsageError, stream
from streaming_jobs.catalog.graph import Graph, Node, describe
from streaming_jobs.catalog.topology import Topology
from streaming_jobs.runtime.code_version import code_version
from tests.support.worlds import NoBytes

ORDER = StructType([StructField("id", LongType(), nullable=False), StructField("customer", StringType())])
RAW = KafkaTopic("raw-orders", value=Raw())
ORDERS = KafkaTopic("orders", value=Json(ORDER))
SINK = KafkaSink(ORDERS, key="customer")


def pairs(raw: Any) -> Any:
    """Return a frame for the table and one for the topic."""
    return {"orders": raw, "out": raw}


def flow(name: str, reads: KafkaTopic, **sinks: Any) -> Stream:
    return Stream(name, lambda raw: raw, {"raw": reads}, sinks)


def test_a_stream_of_batches_only_has_a_primary_table_of_its_batches() -> None:
    @stream(source=RAW, sink=SINK)
    def clean(raw: Any) -> Any:
        return raw

    assert clean.batches_only
    assert clean.output_names == ("orders",)
    assert (clean.primary.name, clean.secondary) == ("clean_batches", ())
    assert clean.table_names == ("clean_batches", "clean_dead_letters")
    assert clean.outputs(raw="frame") == {"orders": "frame"}  # type: ignore[arg-type]
    assert replace(clean, name="other").topic_sinks == {"orders": SINK}


def test_tables_and_topics_of_one_mapping_are_told_apart_and_a_table_is_primary() -> None:
    both = Stream("both", pairs, {"raw": RAW}, {"out": SINK, "orders": DeltaTable("orders")})  # type: ignore[dict-item]
    assert (list(both.sinks), list(both.topic_sinks)) == (["orders"], ["out"])
    assert (both.primary.name, both.batches_only) == ("orders", False)
    assert both.output_names == ("orders", "out")
    assert both.outputs(raw="frame") == {"orders": "frame", "out": "frame"}  # type: ignore[arg-type]
    assert both.topic_sinks["out"].ledger_name == "topic:orders"


@pytest.mark.parametrize(
    ("declare", "text"),
    [
        (lambda: KafkaSink("orders"), r"'orders', not a KafkaTopic"),  # type: ignore[arg-type]
        (lambda: KafkaSink(ORDERS, shards=0), "shards=0"),
        (lambda: KafkaSink(ORDERS, shards=65), "shards=65"),
        (lambda: KafkaSink(ORDERS, shards=2, route="r"), "has shards, and a route"),
        (lambda: KafkaSink(ORDERS, shards=2, delivery="at_least_once"), "has shards, and delivery='at_least_once'"),
        (lambda: KafkaSink(ORDERS, delivery="exactly-once"), "delivery='exactly-once'"),  # type: ignore[arg-type]
        (lambda: KafkaSink(ORDERS, emit="append"), "emit='append'"),  # type: ignore[arg-type]
        (lambda: KafkaSink(ORDERS, unknown_topic="skip"), "unknown_topic='skip'"),  # type: ignore[arg-type]
        (lambda: KafkaSink(ORDERS, headers="customer"), "is a field of the value"),
        (lambda: KafkaSink(ORDERS, key="k", route="k"), "route and key are both"),
        (lambda: KafkaSink(KafkaTopic("t", value=NoBytes())), "its format NoBytes only reads"),
        (lambda: KafkaSink(KafkaTopic("t", value=Json(StructType([StructField("__key", LongType())])))), "is taken"),
        (lambda: flow("s", RAW, a=SINK, b=SINK), "writes a topic twice"),
        (lambda: flow("s", ORDERS, a=SINK), "reads the topic orders and writes it"),
        (lambda: flow("s", RAW, a="orders"), "sink is 'orders'"),
        (lambda: Stream("s", pairs, {"raw": RAW}, {"a": SINK}, rules={"a": [NotNull("id")]}), "row rules of the topic"),
    ],
)
def test_a_wrong_declaration_is_refused_with_the_next_step(declare: Callable[[], Any], text: str) -> None:
    with pytest.raises(UsageError, match=text) as refused:
        declare()
    assert refused.value.next_step


def test_a_topic_has_one_writer_and_streams_that_read_their_own_records_by_way_of_others_are_refused() -> None:
    clean, priced = flow("clean", RAW, out=SINK), flow("priced", ORDERS, out=DeltaTable("priced"))
    topology = Topology.of([priced, clean])
    graph = Graph.of(topology.streams.values())
    assert graph.before(Node("topic", "orders")) == [Node("stream", "clean")]
    assert graph.after(Node("topic", "orders")) == [Node("stream", "priced")]
    with pytest.raises(UsageError, match="topic orders is written by clean and again"):
        Topology.of([clean, flow("again", RAW, out=SINK)])
    prices = KafkaTopic("prices", value=Json(ORDER))
    back = KafkaSink(prices)
    with pytest.raises(UsageError, match="read what they write: (here|there) -> topic .* -> (here|there) -> topic"):
        Topology.of([flow("here", prices, out=SINK), flow("there", ORDERS, out=back)])


def test_the_topology_reads_as_text_with_its_topics() -> None:
    assert describe(Topology.of([flow("clean", RAW, out=replace(SINK, route="where"))])) == (
        "stream clean\n"
        "  <- topic raw-orders as raw\n"
        "  -> table clean_batches (primary, append)\n"
        "  -> topic orders, or that in where (secondary, exactly once, key customer)\n"
        "  -> table clean_dead_letters (dead letters)\n"
    )


@pytest.mark.parametrize(
    "change",
    [{"key": "id"}, {"emit": "update"}, {"delivery": "at_least_once"}, {"topic": KafkaTopic("orders", value=Raw())}],
)
def test_another_sink_is_another_version_of_the_code(change: Mapping[str, Any]) -> None:
    first = Stream("both", pairs, {"raw": RAW}, {"out": SINK})  # type: ignore[dict-item]
    other = Stream("both", pairs, {"raw": RAW}, {"out": replace(SINK, **change)})  # type: ignore[dict-item]
    assert code_version(first, ()) != code_version(other, ())
