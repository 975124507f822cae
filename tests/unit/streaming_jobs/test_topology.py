"""All streams together: one name, one writer per table, and the whole as text."""

from __future__ import annotations

import importlib
import os
import re
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from pyspark.sql.types import LongType, StringType, StructField, StructType, TimestampType

from streaming_jobs.catalog.graph import describe
from streaming_jobs.catalog.topology import Topology
from streaming_jobs.declare.table_source import DeltaSource
from streaming_jobs.errors import UsageError
from streaming_jobs.stream import DeltaTable, KafkaTopic, Stream
from tests.support.worlds import THINGS, NoBytes, parity, plain

FLOW = """
from streaming_jobs.stream import DeltaTable, KafkaTopic, stream
from tests.support.worlds import NoBytes

@stream(source=KafkaTopic("{topic}", value=NoBytes()), sink=DeltaTable("{name}"))
def {name}(records):
    return records
"""


@pytest.fixture
def flows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A package that declares two streams in two modules, one of them visible in both."""
    package = tmp_path / "made_topology"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "one.py").write_text(FLOW.format(topic="a", name="first"))
    (package / "two.py").write_text("from made_topology.one import first\n" + FLOW.format(topic="b", name="second"))
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    importlib.invalidate_caches()
    yield package
    for name in [name for name in sys.modules if name.split(".")[0] == "made_topology"]:
        del sys.modules[name]


def test_the_streams_of_a_package_are_found_in_all_its_modules_each_once(flows: Path) -> None:
    assert list(Topology.load(["made_topology"]).streams) == ["first", "second"]
    assert list(Topology.load(["made_topology.one"]).streams) == ["first"]


def test_the_streams_of_packages_below_a_package_are_found_and_no_test_is_imported(flows: Path) -> None:
    for name in ("eu/north", "plain", "tests"):
        (flows / name).mkdir(parents=True)
    for package in ("eu", "eu/north", "tests"):
        (flows / package / "__init__.py").write_text("")
    (flows / "eu" / "orders.py").write_text(FLOW.format(topic="c", name="orders"))
    (flows / "eu" / "north" / "deep.py").write_text(FLOW.format(topic="d", name="deep"))
    (flows / "plain" / "bare.py").write_text(FLOW.format(topic="e", name="bare"))  # without an __init__.py
    for not_imported in ("tests/helper.py", "test_one.py", "conftest.py", "__main__.py"):
        (flows / not_imported).write_text("raise SystemExit('imported')\n")
    assert list(Topology.load(["made_topology"]).streams) == ["bare", "deep", "first", "orders", "second"]
    assert list(Topology.load(["made_topology.eu"]).streams) == ["deep", "orders"]


def test_a_module_of_the_project_hides_installed_packages_and_none_of_the_standard_library(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for before in ([], [str(tmp_path)]):  # as for `recourse`, and for `python -m`
        monkeypatch.setattr(sys, "path", [*before, *sys.path])
        Topology.load([])
        entries = [Path(entry) for entry in sys.path]
        [project] = [n for n, entry in enumerate(entries) if entry == tmp_path]
        assert entries.index(Path(os.__file__).parent) < project
        assert project < min(n for n, entry in enumerate(entries) if entry.name == "site-packages")


def test_modules_without_a_stream_and_one_that_is_not_there_are_refused(flows: Path) -> None:
    (flows / "empty.py").write_text("def forgotten(things):\n    return things\n")
    with pytest.raises(UsageError, match="declares no stream: none of made_topology.empty has a function") as refused:
        Topology.load(["made_topology.empty"])
    assert "@stream(source=..., sink=...)" in refused.value.next_step
    assert list(Topology.load(["made_topology.empty", "made_topology.one"]).streams) == ["first"]
    assert not Topology.load([]).streams
    with pytest.raises(UsageError, match="no module named 'no_such_flows'") as refused:
        Topology.load(["no_such_flows"])
    assert "flows" in refused.value.next_step


@pytest.mark.parametrize("name", ["made_topology", "made_topology.three"])
def test_a_module_that_misses_something_itself_says_what(flows: Path, name: str) -> None:
    (flows / "three.py").write_text("import no_such_library\n")
    with pytest.raises(UsageError, match=r"no_such_library.*three\.py:1"):
        Topology.load([name])


@pytest.mark.parametrize(
    ("code", "text"),
    [("x = (\n", "SyntaxError"), ("\nKafkaTopic('t', valeu=1)\n", "NameError"), ("\n1 / 0\n", "ZeroDivisionError")],
)
def test_a_fault_in_a_module_is_its_author_s_and_is_told_with_its_line(flows: Path, code: str, text: str) -> None:
    (flows / "four.py").write_text(code)
    with pytest.raises(UsageError, match=rf"{text}.*four\.py:[12]\)"):
        Topology.load(["made_topology"])


def test_streams_are_in_order_of_their_names_and_an_unknown_one_is_told_with_those_that_are_known() -> None:
    topology = Topology.of([plain, parity])
    assert list(topology.streams) == ["parity", "plain"]
    assert topology.select([]) == [parity, plain]
    assert topology.select(["plain", "parity"]) == [plain, parity]
    with pytest.raises(UsageError, match="no stream is named 'orders'") as refused:
        Topology.of([plain, parity]).select(["orders"])
    assert refused.value.next_step == "the streams are: parity, plain"
    with pytest.raises(UsageError) as refused:
        Topology.of([])["orders"]
    assert refused.value.next_step == "the streams are: none"


def test_two_streams_of_one_name_are_refused_and_one_stream_twice_is_one() -> None:
    assert Topology.of([plain, plain]).select([]) == [plain]
    with pytest.raises(UsageError, match="two streams are named plain"):
        Topology.of([plain, replace(plain, sinks={"x": DeltaTable("x")})])


@pytest.mark.parametrize("table", ["plain", "odds", "plain_dead_letters"])
def test_a_table_has_one_writer(table: str) -> None:
    other = Stream("other", lambda things: things, {"things": THINGS}, {"x": DeltaTable(table)})
    with pytest.raises(UsageError, match=f"table {table} is written by (plain|parity) and other"):
        Topology.of([plain, parity, other])


@pytest.mark.parametrize(
    ("line", "advice"),
    [
        ("price = F.udf('double')(lambda n: 1.0)", r"@F.udf\(DoubleType\(\)\)"),
        ("price = F.col('n') * 2", "in the stream's function"),
        ("price = F.lit(2)", "in the stream's function"),
    ],
)
def test_a_module_that_needs_spark_while_it_is_imported_is_told_what_to_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, line: str, advice: str
) -> None:
    (tmp_path / "needs_spark_flow.py").write_text(f"from pyspark.sql import functions as F\n\n{line}\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr("pyspark.SparkContext._active_spark_context", None)
    with pytest.raises(UsageError, match=r"uses Spark while it is imported.*needs_spark_flow.py:3") as refused:
        Topology.load(["needs_spark_flow"])
    assert re.search(advice, refused.value.next_step)
    sys.modules.pop("needs_spark_flow", None)


def reading(name: str, *sources: KafkaTopic | DeltaSource, table: str = "", schema: StructType | None = None) -> Stream:
    """A stream that reads these sources."""
    parameters = [f"s{number}" for number in range(len(sources))]
    function = eval(f"lambda {', '.join(parameters)}: s0")
    sink = DeltaTable(table or f"{name}_out", schema=schema)
    return Stream(name, function, dict(zip(parameters, sources, strict=True)), {sink.name: sink})


ROW = StructType([StructField("n", LongType()), StructField("t", TimestampType())])


def test_a_table_of_a_reader_is_read_with_its_writers_columns_and_topics_know_their_readers() -> None:
    writer = reading("clean", KafkaTopic("things", value=NoBytes()), table="cleaned", schema=ROW)
    reader = reading("late", DeltaSource("cleaned", event_time="t", lateness="1 hour"))
    topology = Topology.of([reader, writer])
    (source,) = topology["late"].tables_read
    assert source.schema == ROW and topology.writer("cleaned") == writer
    assert topology.table_readers("cleaned") == ["late"] and "things" in topology.topics
    assert "<- table cleaned as s0, watermark t - 1 hour" in describe(topology, ["late"])
    prices = KafkaTopic("prices", value=NoBytes())
    both = Stream("both", lambda t, p: t, {"t": THINGS, "p": prices}, {"x": DeltaTable("x")})
    topology = Topology.of([plain, both])
    assert set(topology.topics) == {"things", "prices"}
    assert topology.readers("things") == ["both", "plain"]
    assert topology.readers("prices") == ["both"]
    assert topology.readers("nothing") == []


@pytest.mark.parametrize(
    ("writer", "source", "words"),
    [
        (DeltaTable("cleaned"), DeltaSource("cleaned"), "whose columns stream clean does not declare"),
        (DeltaTable("cleaned", schema=ROW), DeltaSource("other"), "table other, which no stream writes"),
        (DeltaTable("cleaned", schema=ROW, keys=["n"]), DeltaSource("cleaned"), "its commits rewrite rows"),
        (
            DeltaTable("cleaned", schema=ROW),
            DeltaSource("cleaned", schema=StructType([StructField("n", StringType())])),
            "column n of table cleaned as string, and its writer declares bigint",
        ),
        (
            DeltaTable("cleaned", schema=ROW),
            DeltaSource("cleaned", schema=StructType([StructField("m", LongType())])),
            "column m of table cleaned, which has none",
        ),
        (
            DeltaTable("cleaned", schema=ROW),
            DeltaSource("cleaned", event_time="when", lateness="1 hour"),
            "event_time 'when' is not a column",
        ),
    ],
)
def test_a_table_that_cannot_be_read_is_refused_with_the_reason(
    writer: DeltaTable, source: DeltaSource, words: str
) -> None:
    clean = Stream("clean", lambda things: things, {"things": KafkaTopic("things", NoBytes())}, {"out": writer})
    with pytest.raises(UsageError, match=words):
        Topology.of([clean, reading("late", source)])


def test_an_upsert_table_of_a_reader_needs_an_order() -> None:
    def kept(source: KafkaTopic | DeltaSource, *order: str) -> Stream:
        sink = DeltaTable("newest", keys=["n"], order_by=list(order))
        return Stream("newest", lambda rows: rows, {"rows": source}, {"newest": sink})

    source = DeltaSource("events", schema=ROW)
    with pytest.raises(UsageError, match="upsert table newest without order_by") as refused:
        Topology.of([kept(source)])
    assert "order_by=" in refused.value.next_step
    Topology.of([kept(source, "t")])
    Topology.of([kept(KafkaTopic("things", NoBytes()))])


def test_streams_that_read_what_they_write_are_refused_with_the_cycle() -> None:
    first = reading("first", DeltaSource("b", schema=ROW), KafkaTopic("things", NoBytes()), table="a", schema=ROW)
    second = reading("second", DeltaSource("a"), table="b", schema=ROW)
    with pytest.raises(UsageError, match="first -> table a -> second -> table b -> first"):
        Topology.of([first, second])
    own = reading("own", DeltaSource("own_out", schema=ROW), schema=ROW)
    with pytest.raises(UsageError, match="own -> table own_out -> own"):
        Topology.of([own])
    chain = reading("third", DeltaSource("b"), schema=ROW)
    straight = reading("first", KafkaTopic("things", NoBytes()), table="a", schema=ROW)
    assert len(Topology.of([straight, second, chain, reading("fourth", DeltaSource("b"), schema=ROW)]).streams) == 4
