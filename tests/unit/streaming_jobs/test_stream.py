"""A declaration that cannot hold is refused where it is written, and a stream stays the function it wraps."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
from pyspark.sql.types import (
    ArrayType,
    DecimalType,
    DoubleType,
    IntegerType,
    LongType,
    StringType,
    StructField,
    StructType,
)

from streaming_jobs.catalog.graph import describe
from streaming_jobs.catalog.topology import Topology
from streaming_jobs.declare.columns import SOURCE_COLUMN
from streaming_jobs.declare.names import checked_name, kafka_name
from streaming_jobs.declare.slices import Slices
from streaming_jobs.declare.table import emits
from streaming_jobs.declare.table_source import DeltaSource
from streaming_jobs.declare.topic import ComputedTime, EpochMillis
from streaming_jobs.errors import ConfigurationError, UsageError
from streaming_jobs.formats import Json
from streaming_jobs.runtime.code_version import code_version
from streaming_jobs.stream import DeltaTable, KafkaTopic, Stream, stream
from streaming_jobs.testing import MemoryDeclaration, MemoryStore
from tests.support.worlds import OUTPUT, THINGS, TIMED, NoBytes

PRICES = KafkaTopic("prices", value=NoBytes())
LISTS = StructType([StructField("k", StringType()), StructField("l", ArrayType(LongType()))])


def identity(things: Any) -> Any:
    """What comes goes.

    Unchanged.
    """
    return things


def declare(**changes: Any) -> Stream:
    return stream(**{"source": THINGS, "sink": DeltaTable("out"), **changes})(identity)


def test_a_stream_is_named_and_described_by_its_function_and_still_is_it() -> None:
    made = declare(owners=["team@example.org"])
    assert (made.name, made.description) == ("identity", "What comes goes.\n\nUnchanged.")
    assert made.owners == ("team@example.org",)
    assert declare(name="other").name == "other"
    made = declare()
    assert made(5) == made(things=5) == 5
    assert made.function is identity


def test_sources_bind_to_parameters_by_place_or_name_and_the_first_sink_is_the_primary_one() -> None:
    assert dict(declare().sources) == {"things": THINGS}

    @stream(source={"prices": PRICES, "things": THINGS}, sink=DeltaTable("out"))
    def both(things: Any, prices: Any) -> Any:
        return things, prices

    assert both.sources == {"prices": PRICES, "things": THINGS}
    made = declare(sink={"good": DeltaTable("good_rows"), "odd": DeltaTable("odd_rows")})
    assert made.primary.name == "good_rows"
    assert [sink.name for sink in made.secondary] == ["odd_rows"]
    assert made.dead_letters == "identity_dead_letters"


@pytest.mark.parametrize("returned", [{"a": 1}, {"a": 1, "b": 2, "c": 3}, {}])
def test_outputs_that_are_not_the_sinks_are_refused_and_a_single_one_goes_to_the_single_sink(
    returned: dict[str, int],
) -> None:
    made = declare(sink={"a": DeltaTable("a"), "b": DeltaTable("b")})
    with pytest.raises(UsageError, match=r"its sinks are \['a', 'b'\]"):
        made.outputs(things=returned)  # type: ignore[arg-type]
    assert made.outputs(things={"b": 2, "a": 1}) == {"a": 1, "b": 2}  # type: ignore[arg-type, comparison-overlap]
    assert declare().outputs(things=7) == {"out": 7}  # type: ignore[arg-type, comparison-overlap]


@pytest.mark.parametrize("name", ["", "1st", "Orders", "or-ders", "a.b", "../x", "a b", "ö", "a" * 64, "a\n"])
def test_names_are_those_that_can_be_a_folder_and_an_identifier(name: str) -> None:
    for make in (lambda: checked_name("stream", name), lambda: DeltaTable(name), lambda: declare(name=name or " ")):
        with pytest.raises(UsageError, match="is not a (stream|table) name"):
            make()
    assert checked_name("stream", "a" * 63) == "a" * 63


@pytest.mark.parametrize("name", ["", ".", "..", "a b", "a/b", "ö", "a" * 250])
def test_topic_names_are_kafkas(name: str) -> None:
    with pytest.raises(UsageError, match="is not a topic name"):
        KafkaTopic(name, value=NoBytes())
    assert KafkaTopic("A.b_c-1", value=NoBytes()).name == "A.b_c-1"


def test_a_topic_of_another_cluster_has_one_name_however_it_is_declared() -> None:
    one, other = KafkaTopic("orders", value=NoBytes(), cluster="eu"), KafkaTopic("orders@eu", value=NoBytes())
    assert one == other and hash(one) == hash(other)
    assert (one.name, one.cluster) == ("orders@eu", "eu")
    assert replace(one, headers=True).name == "orders@eu" and replace(one, name="late").name == "late@eu"
    assert (KafkaTopic("orders", value=NoBytes()).cluster, kafka_name("orders@eu")) == ("", "orders")
    for name, cluster in (("orders@", ""), ("orders", "E U"), ("a@b@c", ""), ("orders@eu", "us"), ("@eu", "")):
        with pytest.raises(UsageError):
            KafkaTopic(name, value=NoBytes(), cluster=cluster)


Declare = Callable[[], object]


def topic_of(value: Any) -> KafkaTopic:
    return KafkaTopic("t", value=value)


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: declare(source={"thing": THINGS}), "the function takes"),
        (lambda: declare(source={"things": THINGS, "prices": PRICES}), "the function takes"),
        (lambda: stream(source=THINGS, sink=DeltaTable("out"), name="none")(lambda: None), r"the function takes \[\]"),
        (lambda: declare(source={}), "needs a source and a sink"),
        (lambda: declare(sink={}), "needs a source and a sink"),
        (lambda: declare(sink={"a": DeltaTable("out"), "b": DeltaTable("out")}), "names a table twice"),
        (lambda: declare(sink=DeltaTable("identity_dead_letters")), "names a table twice"),
        (lambda: KafkaTopic("t", value=NoBytes(), event_time="n"), "event_time and lateness go together"),
        (lambda: KafkaTopic("t", value=NoBytes(), lateness="1 h"), "event_time and lateness go together"),
        (lambda: KafkaTopic("t", value=NoBytes(), event_time="x", lateness="1 h"), "'x' is not a field"),
        (
            lambda: KafkaTopic("t", value=NoBytes(), event_time="n", lateness="1 h"),
            "(?s)topic t: event_time 'n' is bigint, not a timestamp.*EpochMillis\\('n'\\)",
        ),
        (
            lambda: KafkaTopic("t", value=NoBytes(), event_time=EpochMillis("m"), lateness="1 h"),
            "'m' is not a field of its value",
        ),
        (
            lambda: KafkaTopic("t", value=NoBytes(TIMED), event_time=EpochMillis("at"), lateness="1 h"),
            "EpochMillis\\('at'\\) is of a field that is timestamp, not a number",
        ),
        (
            lambda: KafkaTopic("t", value=NoBytes(), event_time=EpochMillis("n", column="N"), lateness="1 h"),
            "has a field 'N' already",
        ),
        (
            lambda: KafkaTopic("t", value=NoBytes(), event_time=ComputedTime(lambda nn: nn), lateness="1 h"),
            "(?s)'nn' is not a field of its value.*did you mean 'n'",
        ),
        (
            lambda: KafkaTopic("t", value=NoBytes(), event_time=lambda n: n, lateness="1 h"),  # type: ignore[arg-type]
            "(?s)event_time is <function.*ComputedTime",
        ),
        (
            lambda: DeltaSource("t", event_time=EpochMillis("n"), lateness="1 h"),  # type: ignore[arg-type]
            "(?s)table t: event_time is EpochMillis.*let the stream that writes the table",
        ),
        (lambda: DeltaTable("t", schema={"k": "strng"}), "(?s)table t: field 'k' has.*'string'"),  # type: ignore[arg-type]
        (lambda: DeltaSource("t", schema="k string"), "(?s)table t: 'k string' is no schema"),  # type: ignore[arg-type]
        (
            lambda: DeltaSource("t", schema=OUTPUT, event_time="n", lateness="1 h"),
            "(?s)table t: event_time 'n' is bigint, not a timestamp.*timestamp_millis\\('n'\\)",
        ),
        (lambda: topic_of(OUTPUT), r"(?s)topic t: value=StructType.* is no format.*write value=Json\("),
        (lambda: topic_of([OUTPUT] * 9), r"value=\[StructType.{86}\.\.\. is no format"),
        (lambda: topic_of({"k": "string"}), r"(?s)value={'k': 'string'} is no format.*write value=Json\("),
        (lambda: topic_of(NoBytes), r"(?s)is no format.*write value=NoBytes\(\.\.\.\)"),
        (
            lambda: KafkaTopic("t", value=NoBytes(StructType([StructField(SOURCE_COLUMN, LongType())]))),
            "the field name _source is taken",
        ),
        (lambda: DeltaTable("t", order_by=["n"]), "order_by and delete_when are for upserts"),
        (lambda: DeltaTable("t", delete_when="n < 0"), "order_by and delete_when are for upserts"),
        (lambda: DeltaTable("t", schema=OUTPUT, keys=["id"]), "'id' is not a column of its schema"),
        (lambda: DeltaTable("t", schema=OUTPUT, partition_by=["day"]), "'day' is not a column of its schema"),
        (lambda: DeltaTable("t", schema=OUTPUT, keys=["k"], order_by=["nope"]), "'nope' is not a column of its schema"),
        (lambda: DeltaTable("t", schema=LISTS, keys=["k"], order_by=["l"]), "'l' has the type array"),
        (lambda: DeltaTable("t", keys=["k"], order_by=["_position"]), "the column name _position is taken"),
        (lambda: DeltaTable("t", keys=["_deleted_at"], order_by=["n"]), "the column name _deleted_at is taken"),
        (lambda: DeltaTable("t", keys=["k"], deletes_kept="0 s"), "deletes_kept is 0 s"),
        (lambda: DeltaTable("t", fresh_within="0 s"), "fresh_within is 0 s"),
        (lambda: DeltaTable("t", fresh_within="soon"), "table t: fresh_within: "),
        (
            lambda: DeltaTable("t" * 60, keys=["k"], order_by=["n"], delete_when="n < 0"),
            "_deletes' is not a table name",
        ),
    ],
)
def test_sources_sinks_and_options_that_do_not_go_together_are_refused(make: Declare, text: str) -> None:
    with pytest.raises(UsageError, match=text):
        make()


@pytest.mark.parametrize("name", ["a`b", "__delete", "__Partition", "__offset", "__row", "__position", "__topic"])
def test_a_column_that_cannot_be_quoted_or_is_ours_is_refused(name: str) -> None:
    schema = StructType([*OUTPUT.fields, StructField(name, LongType())])
    for make in (lambda: DeltaTable("t", schema=schema), lambda: DeltaTable("t", keys=[name])):
        with pytest.raises(UsageError, match="has a backtick|is taken by Recourse") as refused:
            make()
        assert refused.value.next_step == "rename the column"


@pytest.mark.parametrize(
    ("make", "place"),
    [
        (lambda: KafkaTopic("t", NoBytes(TIMED), event_time="at", lateness="ten minutes"), "topic t: lateness: "),
        (lambda: KafkaTopic("t", NoBytes(), max_ahead="ten minutes"), "topic t: max_ahead: "),
        (lambda: DeltaSource("t", event_time="at", lateness="ten minutes"), "table t: lateness: "),
        (lambda: DeltaTable("t", keys=["k"], deletes_kept="ten minutes"), "table t: deletes_kept: "),
        (lambda: Slices("at", reach="ten minutes"), "slices of at: reach: "),
    ],
)
def test_what_is_no_duration_is_named_with_its_topic_or_table_and_option(make: Declare, place: str) -> None:
    with pytest.raises(ConfigurationError, match=f"^REC-002 {place}'ten minutes' is not a duration"):
        make()


def test_how_late_and_how_far_ahead_an_event_time_may_be_is_declared_with_it() -> None:
    assert KafkaTopic("t", value=NoBytes(TIMED), event_time="at", lateness="6 hours").delay == timedelta(hours=6)
    assert THINGS.delay is None
    made = KafkaTopic("t", value=NoBytes(TIMED), event_time="at", lateness="6 hours")
    assert made.ahead == timedelta(days=1)
    assert replace(made, max_ahead="10 minutes").ahead == timedelta(minutes=10)
    assert replace(made, max_ahead=None).ahead is None
    assert KafkaTopic("t", value=NoBytes()).ahead is None, "there is no event time"
    with pytest.raises(ConfigurationError, match="is not a duration"):
        replace(made, max_ahead="soon")


def test_a_table_with_keys_is_an_upsert_and_one_whose_deletes_have_an_order_has_another_that_remembers_them() -> None:
    table = DeltaTable("t", schema=OUTPUT, keys=["k"], order_by=["n"], partition_by=["k"])
    assert (table.mode, table.keys, table.order_by, table.partition_by) == ("upsert", ("k",), ("n",), ("k",))
    assert DeltaTable("t").mode == "append"
    assert hash(DeltaTable("t", keys=["k"])) == hash(DeltaTable("t", keys=("k",)))
    table = DeltaTable("t", keys=["k"], order_by=["n"], delete_when="n < 0", deletes_kept="2 days")
    deletes = table.deletes
    assert deletes is not None
    assert (deletes.name, deletes.keys, deletes.order_by, deletes.deletes_kept, deletes.deletes) == (
        "t_deletes",
        ("k",),
        ("n",),
        "2 days",
        None,
    )
    assert DeltaTable("t", keys=["k"], delete_when="n < 0").deletes is None
    assert DeltaTable("t", keys=["k"], order_by=["n"]).deletes is None


def test_a_field_of_the_format_may_have_any_other_name() -> None:
    value = NoBytes(StructType([StructField("a b", StringType())]))
    assert KafkaTopic("t", value=value).value.schema.fieldNames() == ["a b"]


def test_results_are_emitted_as_the_sink_declares_or_its_keys_suggest_and_what_makes_no_sense_is_refused() -> None:
    assert emits(DeltaTable("t")) == emits(DeltaTable("t", emit="close")) == "close"
    assert emits(DeltaTable("t", keys=["k"])) == emits(DeltaTable("t", keys=["k"], emit="update")) == "update"
    final = DeltaTable("t", keys=["k"], emit="close")
    assert emits(final) == "close" and final.mode == "upsert"
    assert "-> table t (primary, upsert by k, emit on close)" in describe(Topology.of([declare(sink=final)]))
    assert code_version(declare(sink=final), ()) != code_version(declare(sink=DeltaTable("t", keys=["k"])), ())
    with pytest.raises(UsageError, match="without keys every one of these rows would stay") as refused:
        DeltaTable("t", emit="update")
    assert refused.value.next_step == "name the keys, or write emit='close' for final results"
    with pytest.raises(UsageError, match="table t: emit='closed'") as misspelt:
        DeltaTable("t", emit="closed")  # type: ignore[arg-type]
    assert misspelt.value.next_step == "did you mean 'close'?"


def test_any_declaration_of_a_table_is_a_sink_and_nothing_else_is() -> None:
    in_memory = MemoryDeclaration("out", MemoryStore())
    assert declare(sink=in_memory).primary is in_memory
    for sink, words in (
        ("out", "write DeltaTable\\('out', ...\\)"),
        (DeltaTable, "write a DeltaTable"),
        (5, "a DeltaTable"),
    ):
        with pytest.raises(UsageError, match="stream identity: sink is .*, not a DeltaTable") as refused:
            declare(sink={"out": sink})
        assert re.search(words, refused.value.next_step)


def test_declaring_a_stream_imports_nothing_that_opens_tables() -> None:
    """The command line answers at once; deltalake takes longer to import than that."""
    declaring = """
import sys
from streaming_jobs.stream import DeltaTable, KafkaTopic, Stream
class Value:
    class schema:
        fieldNames = list
    reader = None
made = Stream("s", lambda t: t, {"t": KafkaTopic("t", Value())}, {"out": DeltaTable("out", keys=["k"])})
assert made.primary.mode == "upsert"
print("deltalake" in sys.modules)
"""
    printed = subprocess.run([sys.executable, "-c", declaring], capture_output=True, text=True, check=True).stdout
    assert printed.strip() == "False"


def test_a_mapping_is_a_schema() -> None:
    made = Json(
        {
            "id": "BIGINT NOT NULL",
            "note": "string",
            "price": "decimal(10, 2)",
            "legs": ["int"],
            "grid": "array<array<double>>",
            "place": {"x": "double not null"},
            "n": LongType(),
            "m": LongType,
        }
    )
    expected = [
        StructField("id", LongType(), nullable=False),
        StructField("note", StringType()),
        StructField("price", DecimalType(10, 2)),
        StructField("legs", ArrayType(IntegerType())),
        StructField("grid", ArrayType(ArrayType(DoubleType()))),
        StructField("place", StructType([StructField("x", DoubleType(), nullable=False)])),
        StructField("n", LongType()),
        StructField("m", LongType()),
    ]
    assert made.schema == StructType(expected)
    assert made == Json(StructType(expected))
    assert DeltaTable("t", schema={"id": "bigint not null"}).schema == StructType(expected[:1])  # type: ignore[arg-type]
    assert DeltaSource("t", schema={"note": "string"}).columns == StructType(expected[1:2])  # type: ignore[arg-type]
    assert made.read(b'{"id": 1, "legs": [2]}')["legs"] == [2]


@pytest.mark.parametrize(
    ("declared", "found", "remedy"),
    [
        ({"k": "strng"}, "field 'k' has the type 'strng', which is unknown", "did you mean 'string'?"),
        ({"k": 5}, "field 'k' has the type 5", "boolean, tinyint"),
        ({"k": ["int", "int"]}, "field 'k' has the type", "boolean, tinyint"),
        ("k string", "'k string' is no schema of records", "{'id': 'bigint not null', 'note': 'string'}"),
        ({}, "the record declares no field", ""),
        ({"k": "map<string,string>"}, "which is unknown", "boolean, tinyint"),
    ],
)
def test_another_type_is_refused_by_name(declared: Any, found: str, remedy: str) -> None:
    with pytest.raises(UsageError) as refused:
        Json(declared)
    assert found in refused.value.found and remedy in refused.value.next_step
