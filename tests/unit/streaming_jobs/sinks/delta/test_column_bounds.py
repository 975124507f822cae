"""No filter misses a row: the bounds of columns, on every way that deltalake commits and through two readers."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable, Field, Schema, write_deltalake
from pyspark.sql.types import DecimalType, LongType, StringType, StructField, StructType

from reprocessing.stages.publish import _publish
from streaming_jobs.ledger.entry import LedgerEntry
from streaming_jobs.settings import Settings
from streaming_jobs.sinks.delta import column_bounds
from streaming_jobs.sinks.delta.content import DeltaContent, content_of
from streaming_jobs.sinks.delta.maintenance import TableMaintenance
from streaming_jobs.sinks.delta.parquet import add_actions
from streaming_jobs.sinks.delta.pending_writes import ArrowAppend, ArrowMerge, ParquetAppend
from streaming_jobs.sinks.delta.sink import DeltaSink
from streaming_jobs.sinks.delta.store import ensure_sink
from streaming_jobs.sinks.delta.table_files import table_files
from streaming_jobs.stream import DeltaTable as Declared
from tests.support import values
from tests.support.delta_table import files_below
from tests.support.worlds import STREAM, entry

pytestmark = pytest.mark.slow

Way = Callable[[Settings], DeltaSink]
NUMBERS = StructType([StructField("id", LongType()), StructField("n", LongType())])


def make(
    settings: Settings, name: str = "odd", keys: tuple[str, ...] = (), schema: StructType = values.SCHEMA
) -> DeltaSink:
    return ensure_sink(settings, Declared(name, keys=keys), STREAM, schema, generation=1)


def published(sink: DeltaSink, content: DeltaContent, generation: int) -> DeltaSink:
    entry = LedgerEntry("publish", STREAM, sink.name, generation, 0, plan="p")
    _publish(sink, content, entry, f"r-{generation}")
    return sink


def appended(settings: Settings, name: str = "odd") -> DeltaSink:
    """A batch for each row, so that each file's bounds are one value's; then all of them in one file."""
    sink, rows = make(settings, name), values.rows()
    for number in range(rows.num_rows):
        ArrowAppend(sink, rows.slice(number, 1)).commit(entry(number))
    ArrowAppend(sink, values.rows(1000)).commit(entry(rows.num_rows))
    return sink


def by_executors(settings: Settings) -> DeltaSink:
    sink, rows = make(settings), values.rows()
    known = [name for name in rows.column_names if name not in ("single", "double")]  # as Spark does it with NaN
    folder = sink.path / "g0001" / "b0"
    folder.mkdir(parents=True)
    for number in range(rows.num_rows):
        pq.write_table(rows.slice(number, 1), folder / f"part-{number}.parquet", write_statistics=known)
    pq.write_table(values.rows(1000), folder / "part-all.parquet", row_group_size=4, write_statistics=known)
    ParquetAppend(sink, *add_actions(sink.path, files_below(sink.path, folder), [], sink.bounded)).commit(entry(0))
    return sink


def merged(settings: Settings) -> DeltaSink:
    sink, rows = make(settings, keys=("id",)), values.rows()
    for number in range(0, rows.num_rows, 3):
        ArrowMerge(sink, rows.slice(number, 3)).commit(entry(number))
    ArrowMerge(sink, values.rows(1000)).commit(entry(rows.num_rows))
    return sink


def compacted(settings: Settings) -> DeltaSink:
    sink = appended(settings)
    TableMaintenance(sink, settings.table, 1).compact()
    assert sink.handle.get_add_actions().num_rows == 1
    return sink


def recovered(settings: Settings) -> DeltaSink:
    sink = make(settings)
    ArrowAppend(sink, values.rows(5000)).commit(entry(0))
    return published(sink, content_of(appended(settings, "staged").path), 2)


def undone(settings: Settings) -> DeltaSink:
    sink = appended(settings)
    before = content_of(sink.path)
    empty = replace(before, files={})
    return published(published(sink, empty, 2), before, 3)


def of_before(settings: Settings) -> DeltaSink:
    """A table without the property, with the statistics that deltalake writes into the log by default."""
    path, rows = settings.tables / "odd", values.rows()
    handle = DeltaTable.create(path, Schema.from_json(values.SCHEMA.json()))
    for number in range(rows.num_rows):
        write_deltalake(handle, rows.slice(number, 1), mode="append")
    write_deltalake(handle, values.rows(1000), mode="append")
    return make(settings)


WAYS = [appended, by_executors, merged, compacted, recovered, undone, of_before]
EVERY = [
    *(pytest.param(way, slice(number % 4, None, 4), id=way.__name__) for number, way in enumerate(WAYS)),
    *(pytest.param(way, slice(None), id=f"{way.__name__}, all", marks=pytest.mark.long) for way in WAYS),
]
"""Each way with every fourth filter, beginning with another one, so that each filter is asked; at length with all."""


@pytest.mark.parametrize(("way", "every"), EVERY)
def test_every_row_comes_back_as_it_was_and_every_filter_finds_it(home: Settings, way: Way, every: slice) -> None:
    sink = way(home)
    expected = values.as_text(pa.concat_tables([values.rows(), values.rows(1000)]))
    assert values.as_text(DeltaTable(sink.path).to_pyarrow_table()) == expected
    missed = [
        *values.missed_by_pyarrow(sink.path, every, cast_text=way is merged),
        *values.missed_by_datafusion(sink.path, every),
    ]
    if way is of_before:  # its files keep Parquet's own statistics of floats until they are compacted
        missed = [each for each in missed if "DataFusion: single" not in each and "DataFusion: double" not in each]
    assert missed == []


def test_files_are_passed_over_by_what_has_bounds(home: Settings) -> None:
    sink = appended(home)
    assert sink.bounded == ("tiny", "small", "whole", "long", "day", "at", "local")
    actions = pa.table(sink.handle.get_add_actions(flatten=True))
    have = {name.partition(".")[2] for name in actions.column_names if name.startswith("min.")}
    assert have == set(sink.bounded)
    lines = [json.loads(line) for line in (sink.path / "_delta_log" / f"{1:020d}.json").read_text().split("\n") if line]
    (stats,) = [json.loads(line["add"]["stats"]) for line in lines if "add" in line]
    assert stats["minValues"].keys() | {"inside"} == set(sink.bounded) | {"inside"}


def test_a_column_that_was_added_later_has_no_bounds_and_its_nulls_are_found(home: Settings) -> None:
    sink = make(home, "later", schema=StructType(NUMBERS.fields[:1]))
    ArrowAppend(sink, pa.table({"id": [1]})).commit(entry(0))
    sink = make(home, "later", schema=NUMBERS)
    assert sink.bounded == ("id",)
    ArrowAppend(sink, pa.table({"id": [2], "n": [7]})).commit(entry(1))
    assert make(home, "later", schema=NUMBERS).bounded == ("id",)
    rows = DeltaTable(sink.path).to_pyarrow_table(filters=column_bounds.pc.field("n").is_null())
    assert rows["id"].to_pylist() == [1]


def test_a_column_loses_its_bounds_when_older_files_without_them_are_published(home: Settings) -> None:
    old = DeltaTable.create(home.tables / "old", Schema.from_json(NUMBERS.json()))
    write_deltalake(old, pa.table({"id": [1], "n": [7]}), mode="append")
    (action,) = table_files(home.tables / "old", 1).values()
    stats = {"numRecords": 1, "minValues": {"id": 1}, "maxValues": {"id": 1}, "nullCount": {"id": 0}}
    bare = replace(action, stats=json.dumps(stats))
    sink = make(home, "new", schema=NUMBERS)
    ArrowAppend(sink, pa.table({"id": [2], "n": [8]})).commit(entry(0))
    assert sink.bounded == ("id", "n")
    published(sink, DeltaContent({bare.path: bare}, home.tables / "old", NUMBERS.json(), ()), 2)
    assert sink.bounded == ("id",)
    assert DeltaTable(sink.path).to_pyarrow_table(filters=[("n", "=", 7)])["id"].to_pylist() == [1]


def test_which_columns_have_bounds_of_many_those_of_merges_and_none_with_a_rounded_namesake() -> None:
    schema = StructType([StructField(f"c{n}", LongType()) for n in range(40)])
    chosen = column_bounds.boundable(schema, ["c0"], ["c39"])
    assert len(chosen) == 32 and chosen[0] == "c1" and chosen[-1] == "c39"
    inside = StructType([StructField("id", DecimalType(20, 0)), StructField("n", StringType())])
    schema = StructType([*NUMBERS.fields, StructField("inside", inside)])
    assert column_bounds.boundable(schema, []) == ("n",)


@pytest.mark.parametrize("names", [(), ("a",), ("a b", "x,y", "order", "naïve", 'q"r', "a.b", "1a")], ids=len)
def test_names_of_any_kind_are_followed_by_deltalake(home: Settings, names: tuple[str, ...]) -> None:
    sink = make(home, "names", schema=StructType([StructField(name, LongType()) for name in (*names, "id")]))
    assert sink.bounded == (*names, "id")
    ArrowAppend(sink, pa.table({name: [1] for name in (*names, "id")})).commit(entry(0))
    actions = pa.table(sink.handle.get_add_actions(flatten=True))
    assert {f"min.{name}" for name in sink.bounded} <= set(actions.column_names)
    assert column_bounds.decode("a, `b c`,d") == ("a", "b c", "d")


def test_what_was_set_by_hand_is_replaced_by_what_is_true(home: Settings) -> None:
    sink = make(home, "set", schema=NUMBERS)
    ArrowAppend(sink, pa.table({"id": [1], "n": [7]})).commit(entry(0))
    sink.handle.alter.set_table_properties({column_bounds.PROPERTY: "id"})
    assert make(home, "set", schema=NUMBERS).bounded == ("id",)
    DeltaTable.create(home.tables / "fresh", Schema([Field("id", "long"), Field("n", "long")]))
    assert make(home, "fresh", schema=NUMBERS).bounded == ("id", "n")
