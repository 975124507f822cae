"""The sinks of a stream: tables with the columns that belong in them, and topics that its rows may name."""

from __future__ import annotations

import sys
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, cast

import pytest
from pyspark.sql.types import ArrayType, BooleanType, LongType, MapType, StringType, StructField, StructType

from streaming_jobs import Json, KafkaSink, KafkaTopic
from streaming_jobs.declare.columns import SOURCE_COLUMN
from streaming_jobs.declare.rules import NotNull
from streaming_jobs.errors import UsageError
from streaming_jobs.ledger.entry import Txn
from streaming_jobs.runtime.stream_sinks import DiscardedSinks, SinkOpening, make_tables, sinks_of, upkeep_of
from streaming_jobs.settings import Settings
from streaming_jobs.sinks.delta.maintenance import TableMaintenance
from streaming_jobs.sinks.delta.sink import DeltaSink
from streaming_jobs.sinks.kafka.output import TopicOutput
from streaming_jobs.sinks.schemas import DEAD_LETTERS
from streaming_jobs.sinks.tables import all_tables, begin_late, open_tables
from streaming_jobs.sources.topics import TopicInfo
from streaming_jobs.stream import DeltaTable, Stream, StreamSource
from streaming_jobs.testing import MemoryDeclaration, MemoryStore, MemoryTable
from tests.conftest import SettingsFactory
from tests.support.worlds import OUTPUT, THINGS, parity

PRICES = DeltaTable("prices", keys=["k"], order_by=["n"], delete_when="gone", deletes_kept="3 hours")
SEEN = MemoryDeclaration("seen", MemoryStore())
ROWS = StructType([StructField("k", StringType()), StructField("n", LongType()), StructField("gone", BooleanType())])
SOURCED = StructType([*ROWS.fields, StructField(SOURCE_COLUMN, StructType([]))])


def stream(*sinks: Any) -> Stream:
    return Stream("market", lambda things: things, {"things": THINGS}, {sink.name: sink for sink in sinks})


def frame(schema: StructType) -> Any:
    return SimpleNamespace(schema=schema, columns=schema.fieldNames())


def test_each_table_has_the_columns_that_belong_in_it_and_batches_see_it_through_its_own_store(
    settings: SettingsFactory,
) -> None:
    outputs = {"prices": frame(SOURCED), "seen": frame(ROWS)}
    tables = make_tables(settings(), stream(PRICES, SEEN), outputs, 1)
    assert {name: table.schema.fieldNames() for name, table in tables.items()} == {
        "prices": ["k", "n", "gone", "_position"],
        "seen": ["k", "n", "gone"],
        "prices_deletes": ["k", "n", "_deleted_at", "_position"],
        "market_dead_letters": DEAD_LETTERS.fieldNames(),
    }
    assert list(tables) == [declared.name for declared, _ in all_tables(stream(PRICES, SEEN))]
    market, home = stream(PRICES, SEEN), settings()
    tables = make_tables(home, market, {"prices": frame(SOURCED), "seen": frame(ROWS)}, 1)
    sinks = sinks_of(market, tables, home.for_stream("market"))
    assert [sink.name for sink in sinks] == ["prices", "seen", "prices_deletes", "market_dead_letters"]
    assert isinstance(sinks.primary, DeltaSink) and sinks.primary.deletes_table is not None
    assert sinks.primary.deletes_table.name == "prices_deletes"
    assert [(each.table, each.kind) for each in sinks.companions] == [("prices", "deletes")]
    assert [type(sink) for sink in sinks.secondary] == [MemoryTable]
    forgets = {u.name: u.forgets for u in upkeep_of(market, tables, home, 1) if type(u) is TableMaintenance}
    assert forgets == {"prices": None, "prices_deletes": timedelta(hours=3), "market_dead_letters": None}


def test_a_stream_that_begins_to_remember_deletes_gets_the_table_for_them_once(settings: SettingsFactory) -> None:
    home, before = settings(), stream(replace(PRICES, delete_when=None))
    make_tables(home, before, {"prices": frame(SOURCED)}, 1)
    market = stream(PRICES)
    assert "prices_deletes" not in open_tables(home, market)
    begin_late(home, market, generation=2)
    made = open_tables(home, market)["prices_deletes"]
    assert made.schema.fieldNames() == ["k", "n", "_deleted_at", "_position"] and str(made.position) == "g0002 batch -1"
    begin_late(home, market, generation=3)
    again = open_tables(home, market)["prices_deletes"]
    assert (again.table_id, again.position) == (made.table_id, made.position)


def test_a_stream_that_begins_to_set_rows_aside_gets_a_quarantine_beside_each_such_table(
    settings: SettingsFactory,
) -> None:
    home, before = settings(), stream(PRICES, SEEN)
    make_tables(home, before, {"prices": frame(SOURCED), "seen": frame(ROWS)}, 1)
    aside = [NotNull("k", on_fail="quarantine")]
    market = replace(before, rules={"prices": aside, "seen": aside})
    assert not {"prices_quarantine", "seen_quarantine"} & open_tables(home, market).keys()
    begin_late(home, market, generation=2)
    tables = open_tables(home, market)
    own = ["_rules", "_reason", "_topic", "_partition", "_offset", "_generation", "_batch"]
    for name in ("prices_quarantine", "seen_quarantine"):
        assert tables[name].schema.fieldNames() == ["k", "n", "gone", *own] and tables[name].position == Txn(2, -1)
    sinks = sinks_of(market, tables, home.for_stream("market"))
    assert [sink.name for sink in sinks.others()][-3:] == [
        "prices_quarantine",
        "seen_quarantine",
        "market_dead_letters",
    ]
    assert sinks.counted_as(sinks.companions[-1].sink) == "quarantined:seen"
    assert isinstance(sinks.primary, DeltaSink) and sinks.primary.rules.quarantines
    seen = sinks.secondary[0]
    assert isinstance(seen, MemoryTable) and seen.rules.quarantines and seen.quarantine is not None
    assert {u.name for u in upkeep_of(market, tables, home, 1)} >= {"prices_quarantine", "seen_quarantine"}


def test_a_table_beside_another_has_names_and_types_of_its_columns_and_nothing_that_constrains_them(
    settings: SettingsFactory,
) -> None:
    above = {"delta.invariants": '{"expression":{"expression":"n > 0"}}', "delta.generationExpression": "n + 1"}
    inner = StructType([StructField("at", LongType(), True, above)])
    nested = MapType(StringType(), ArrayType(inner))
    output = StructType([*ROWS.fields[:1], StructField("n", LongType(), True, above), ROWS["gone"]])
    output = StructType([*output.fields, StructField("more", nested, True, above)])
    home, market = settings(), stream(PRICES)
    make_tables(home, stream(replace(PRICES, delete_when=None)), {"prices": frame(output)}, 1)
    assert open_tables(home, market)["prices"].schema["n"].metadata == above
    market = replace(market, rules={"prices": [NotNull("k", on_fail="quarantine")]})
    begin_late(home, market, generation=1)
    tables = open_tables(home, market)
    assert "delta." not in tables["prices_quarantine"].schema.json()
    assert tables["prices_quarantine"].schema["more"].dataType.simpleString() == nested.simpleString()
    assert "delta." not in tables["prices_deletes"].schema.json()


def test_a_table_with_a_column_of_the_quarantines_own_is_refused(settings: SettingsFactory) -> None:
    schema = StructType([*OUTPUT.fields, StructField("_Batch", LongType())])
    judged = replace(parity, rules={"evens": [NotNull("k", on_fail="quarantine")]})
    with pytest.raises(UsageError, match="_Batch is one of its quarantine's own"):
        make_tables(settings(), judged, {"evens": frame(schema), "odds": frame(OUTPUT)}, 1)


@pytest.mark.parametrize("name", ["a`b", "__delete"])
def test_an_output_column_that_no_table_can_take_is_refused(settings: SettingsFactory, name: str) -> None:
    schema = StructType([*OUTPUT.fields, StructField(name, LongType())])
    output: Any = SimpleNamespace(schema=schema)
    with pytest.raises(UsageError, match="table evens: "):
        make_tables(settings(), parity, {"evens": output}, 1)


LINE = Json(StructType([StructField("line", StringType())]))


class Lookup:
    """A broker that has every topic."""

    def describe(self, name: str) -> TopicInfo | None:
        return TopicInfo(name, "id", 1, -1, "delete")


def split(lines: Any) -> Any:
    return {"good": lines, "bad": lines}


def forwarded(lines: Any) -> Any:
    return lines


def topic(name: str) -> KafkaTopic:
    return KafkaTopic(name, value=LINE)


LINES: dict[str, StreamSource] = {"lines": topic("lines")}


def allowed(flow: Stream, flows: list[str], *names: str) -> dict[str, list[str]]:
    """By sink those of the names that its rows may go to."""
    connection = cast("Any", SimpleNamespace(topics=Lookup(), client=Path("client.json")))
    settings = Settings.load({"flows": flows})
    opened = cast("list[TopicOutput]", DiscardedSinks().open(SinkOpening(settings, flow, 1, connection)))
    return {sink.declared.name: [name for name in names if sink.topics[name]] for sink in opened}


def test_rows_may_not_go_to_a_topic_that_the_stream_reads_or_that_another_sink_of_it_writes() -> None:
    flow = Stream("split", split, LINES, {name: KafkaSink(topic(name), route="to") for name in ("good", "bad")})
    assert allowed(flow, [], "good", "bad", "lines", "other") == {"good": ["good", "other"], "bad": ["bad", "other"]}


def test_rows_may_not_go_to_a_topic_that_another_declared_stream_writes(monkeypatch: pytest.MonkeyPatch) -> None:
    flow = Stream("router", forwarded, LINES, {"mine": KafkaSink(topic("mine"), route="to")})
    module = ModuleType("declared_here")
    module.__dict__.update(
        flow=flow,
        other=Stream("other", forwarded, LINES, {"theirs": KafkaSink(topic("theirs"))}),
        reader=Stream("reader", forwarded, {"lines": topic("read")}, {"read_lines": DeltaTable("read_lines")}),
    )
    monkeypatch.setitem(sys.modules, module.__name__, module)
    assert allowed(flow, [module.__name__], "mine", "theirs", "read") == {"mine": ["mine", "read"]}
