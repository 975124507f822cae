"""Rows that a table cannot hold become dead letters, on the driver's way, before anything is written."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pyarrow as pa
import pytest
from deltalake import DeltaTable, QueryBuilder
from pyspark.sql.types import (
    ArrayType,
    BinaryType,
    DataType,
    DateType,
    DecimalType,
    DoubleType,
    LongType,
    MapType,
    NullType,
    StringType,
    StructField,
    StructType,
    TimestampNTZType,
    TimestampType,
    VariantType,
)

from streaming_jobs.declare.columns import REASON_COLUMN
from streaming_jobs.errors import UsageError
from streaming_jobs.settings import Settings
from streaming_jobs.sinks.base import PendingWrite
from streaming_jobs.sinks.delta import dead_letters, refused_rows
from streaming_jobs.sinks.delta.maintenance import TableMaintenance
from streaming_jobs.sinks.delta.sink import DeltaSink
from streaming_jobs.sinks.delta.store import ensure_sink
from streaming_jobs.sinks.delta.writers import prepare_write
from streaming_jobs.stream import DeltaTable as Declared
from tests.support.delta_table import InProcess
from tests.support.orders import merged
from tests.support.worlds import STREAM, entry


def write(sink: DeltaSink, rows: pa.Table, batch: int = 0) -> list[dict[str, Any]]:
    """Commit rows in the driver's memory, appended or upserted as the table declares it; the dead letters of them."""
    frame: Any = InProcess(rows, sink.schema)
    if sink.declared.keys:
        staged: PendingWrite = merged(sink, rows, by_position=False)
    else:
        staged = prepare_write(sink, frame, driver=True, spark_commits=False, batch=(1, 0))
    staged.commit(entry(batch))
    return [] if staged.rejected is None else letters(staged.rejected)


NESTED = StructType(
    [
        StructField("id", LongType()),
        StructField("text", StringType()),
        StructField("inside", StructType([StructField("text", StringType())])),
        StructField("items", ArrayType(StringType())),
        StructField("pairs", MapType(StringType(), ArrayType(StringType()))),
    ]
)
BROKEN = [b"\xff", b"a\xc3", b"\xed\xa0\x80", b"\xc0\xaf", b"\xf4\x90\x80\x80"]
FINE = ["", "a", "\U0010ffff", "\ud7ff", "日本", "\x00"]


def text(values: Sequence[bytes | None]) -> pa.Array:
    """Text made of any bytes, as Spark's Arrow batches bring it."""
    raw = pa.array(values, pa.binary())
    return pa.Array.from_buffers(pa.string(), len(raw), raw.buffers())


def nested(values: Sequence[bytes | None], first: int = 0) -> pa.Table:
    """Rows with a value in the text, in a struct, in a list, as a map's key and as its value: one place per row."""
    rows: list[pa.Table] = []
    count = len(values)
    for place in range(1 if None in values else 5):  # no map has a null for a key
        taken = [text(values if place == number else [b"fine"] * count) for number in range(5)]
        offsets = pa.array(range(count + 1), pa.int32())
        lists = pa.ListArray.from_arrays(offsets, taken[4])
        rows.append(
            pa.table(
                {
                    "id": pa.array(range(first + place * count, first + (place + 1) * count), pa.int64()),
                    "text": taken[0],
                    "inside": pa.StructArray.from_arrays([taken[1]], ["text"]),
                    "items": pa.ListArray.from_arrays(offsets, taken[2]),
                    "pairs": pa.MapArray.from_arrays(offsets, taken[3], lists),
                }
            )
        )
    return pa.concat_tables(rows).combine_chunks()


def letters(rows: pa.Table) -> list[dict[str, Any]]:
    return list(dead_letters._from_rows(rows).to_pylist())


def test_rows_with_bytes_that_are_no_text_are_found_wherever_they_are_and_fine_ones_are_passed_on_as_they_are() -> None:
    fine = nested([value.encode() for value in FINE])
    rows = pa.concat_tables([nested(BROKEN, 1000), fine, nested([None, b"x"], 2000).slice(0, 2)])
    good, bad = refused_rows.split(Declared("t"), NESTED, rows)
    assert sorted(bad["id"].to_pylist()) == list(range(1000, 1000 + 5 * len(BROKEN)))
    assert good.num_rows == fine.num_rows + 2
    good.validate(full=True)
    assert set(bad[REASON_COLUMN].to_pylist()) == {"not_utf8"}
    good, bad = refused_rows.split(Declared("t"), NESTED, fine)
    assert good is fine and bad.num_rows == 0


OUTSIDE = [2_932_897, -719_163, 2**31 - 1, -(2**31)]
"""Days since 1970: the years 10000, 0, and the ends of the type."""
DAY = 86_400_000_000
TIMES = StructType(
    [
        StructField("id", LongType()),
        StructField("day", DateType()),
        StructField("at", TimestampType()),
        StructField("local", TimestampNTZType()),
        StructField("inside", StructType([StructField("day", DateType())])),
        StructField("items", ArrayType(TimestampType())),
        StructField("pairs", MapType(DateType(), TimestampNTZType())),
    ]
)


def times(days: Sequence[int]) -> pa.Table:
    """Each of the days in each of seven places, one place per row, and a row of nulls."""
    fine, rows = 19_723, []
    at, local = pa.timestamp("us", "UTC"), pa.timestamp("us")
    for place in range(7):
        made = [days if place == number else [fine] * len(days) for number in range(7)]
        micros = [[max(-(2**63), min(day * DAY, 2**63 - 1)) for day in each] for each in made]
        offsets = pa.array(range(len(days) + 1), pa.int32())
        dates = [pa.array(each, pa.int32()).cast(pa.date32()) for each in made]
        rows.append(
            {
                "id": pa.array(range(place * len(days), (place + 1) * len(days)), pa.int64()),
                "day": dates[0],
                "at": pa.array(micros[1], pa.int64()).cast(at),
                "local": pa.array(micros[2], pa.int64()).cast(local),
                "inside": pa.StructArray.from_arrays([dates[3]], ["day"]),
                "items": pa.ListArray.from_arrays(offsets, pa.array(micros[4], pa.int64()).cast(at)),
                "pairs": pa.MapArray.from_arrays(offsets, dates[5], pa.array(micros[6], pa.int64()).cast(local)),
            }
        )
    tables = [pa.table(each) for each in rows]
    nothing = pa.table({name: pa.nulls(1, column.type) for name, column in rows[0].items()})
    return pa.concat_tables([*tables, nothing])


def test_dates_and_times_outside_of_the_calendar_are_found_wherever_they_are() -> None:
    rows = times(OUTSIDE)
    good, bad = refused_rows.split(Declared("t"), TIMES, rows)
    assert good["id"].to_pylist() == [None]
    assert sorted(bad["id"].to_pylist()) == list(range(7 * len(OUTSIDE)))
    assert set(bad[REASON_COLUMN].to_pylist()) == {"time_out_of_range"}
    within = times([-719_162, 2_932_896])
    assert refused_rows.split(Declared("t"), TIMES, within)[0] is within
    values = [json.loads(letter["value"]) for letter in letters(bad)]
    assert [one["day"] for one in values[:2]] == ["10000-01-01", "0000-12-31"]


@pytest.mark.parametrize("keys", [(), ("id",)], ids=["append", "upsert"])
def test_a_year_that_python_has_not_leaves_the_table_readable(home: Settings, keys: tuple[str, ...]) -> None:
    sink = ensure_sink(home, Declared("t", keys=keys), STREAM, TIMES, generation=1)
    rows = pa.concat_tables([times(OUTSIDE).slice(0, 7 * len(OUTSIDE)), times([2_932_896]).slice(0, 7)])
    refused = write(sink, rows.slice(26) if keys else rows)
    assert DeltaTable(sink.path).to_pyarrow_table().num_rows == 7
    assert {letter["reason"] for letter in refused} == {"time_out_of_range"}


def test_a_dead_letter_shows_any_time_that_a_row_without_its_key_has() -> None:
    values = [json.loads(letter["value"]) for letter in letters(times([0, *OUTSIDE]))]
    assert [one["day"] for one in values[:3]] == ["1970-01-01", "10000-01-01", "0000-12-31"]
    assert values[5]["at"] == "1970-01-01 00:00:00.000000Z" and values[6]["at"] == "10000-01-01 00:00:00.000000Z"


@pytest.mark.parametrize("keys", [(), ("text",)], ids=["append", "upsert"])
def test_a_table_stays_readable_and_is_written_on(home: Settings, keys: tuple[str, ...]) -> None:
    sink = ensure_sink(home, Declared("t", keys=keys), STREAM, NESTED, generation=1)
    rows = nested([b"x"]).set_column(1, "text", text([b"k%d" % number for number in range(5)]))
    poisoned = rows.set_column(1, "text", text([b"\xff", b"k1", b"k7", b"\xfe\xff", b"k8"]))
    assert write(sink, rows, 0) == []
    refused = write(sink, poisoned, 1)
    assert [(one["reason"], json.loads(one["value"])["text"]) for one in refused] == [
        ("not_utf8", "\\xff"),
        ("not_utf8", "\\xfe\\xff"),
    ]
    assert write(sink, rows, 2) == []
    TableMaintenance(sink, home.table, 1).compact()
    stored = QueryBuilder().register("t", DeltaTable(sink.path)).execute("SELECT text FROM t ORDER BY text").read_all()
    stored_texts = pa.table(stored)["text"].to_pylist()
    assert set(stored_texts) == {"k0", "k1", "k2", "k3", "k4", "k7", "k8"}
    assert stored_texts.count("k0") == (1 if keys else 2)


PARTED = StructType([StructField("k", StringType()), StructField("n", LongType())])


def parted(home: Settings, **declared: Any) -> DeltaSink:
    return ensure_sink(home, Declared("p", partition_by=["k"], **declared), STREAM, PARTED, generation=1)


@pytest.mark.parametrize(
    "value", ["日" * 17, "x" * 254, " " * 51, "~" * 85, "__HIVE_DEFAULT_PARTITION__", "\U0010ffff" * 13]
)
def test_what_cannot_name_a_partition_becomes_a_dead_letter(home: Settings, value: str) -> None:
    sink = parted(home)
    (letter,) = write(sink, pa.table({"k": [value, "a"], "n": [1, 2]}))
    assert (letter["reason"], json.loads(letter["value"])) == ("partition_value", {"k": value, "n": 1})
    assert DeltaTable(sink.path).to_pyarrow_table().to_pylist() == [{"k": "a", "n": 2}]


ODD = [".", "..", "-", "~", "a/b", "\x00", "\r\n", "null", "%", "=", "\u2028", "it's", "a b+c", "\ue000"]
LONGEST = ["日" * 16 + "x" * 13, "x" * 253, " " * 50 + "xxx", "~" * 84 + "x", "\U0010ffff" * 12]


@pytest.mark.parametrize("value", [*LONGEST, *ODD])
def test_the_longest_and_oddest_partition_values_come_back(home: Settings, value: str) -> None:
    sink = parted(home)
    assert write(sink, pa.table({"k": [value], "n": [1]})) == []
    assert DeltaTable(sink.path).to_pyarrow_table().to_pylist() == [{"k": value, "n": 1}]
    assert DeltaTable(sink.path).to_pyarrow_table(filters=[("k", "=", value)]).num_rows == 1


def test_an_empty_text_is_null_as_a_partition_and_a_dead_letter_as_a_key(home: Settings) -> None:
    rows = pa.table({"k": ["", "a"], "n": [1, 2]})
    sink = parted(home)
    assert write(sink, rows) == []
    assert sorted(DeltaTable(sink.path).to_pyarrow_table()["k"].to_pylist(), key=str) == [None, "a"]
    keyed = ensure_sink(home, Declared("q", keys=["k"], partition_by=["k"]), STREAM, PARTED, generation=1)
    for batch in range(2):
        assert [one["reason"] for one in write(keyed, rows, batch)] == ["partition_value"]
    assert DeltaTable(keyed.path).to_pyarrow_table().to_pylist() == [{"k": "a", "n": 2}]


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        (NullType(), "column c is a null without a type"),
        (ArrayType(NullType()), "column c.element is a null without a type"),
        (StructType([StructField("x", MapType(StringType(), NullType()))]), "column c.x.value is a null"),
        (VariantType(), "has the type variant, which is not stored"),
    ],
    ids=str,
)
def test_a_column_that_no_table_stores_is_refused_before_anything_is_made(
    home: Settings, kind: DataType, words: str
) -> None:
    schema = StructType([StructField("n", LongType()), StructField("c", kind)])
    schema = StructType([StructField("n", LongType()), StructField("c", kind)])
    with pytest.raises(UsageError, match=words):
        ensure_sink(home, Declared("t"), STREAM, schema, generation=1)
    with pytest.raises(UsageError, match=words):
        Declared("t", schema=schema)
    assert not (home.tables / "t").exists()


@pytest.mark.parametrize("kind", [BinaryType(), ArrayType(LongType()), DecimalType(9, 2), DoubleType()], ids=str)
def test_a_partition_column_that_would_come_back_otherwise_is_refused(home: Settings, kind: DataType) -> None:
    schema = StructType([StructField("n", LongType()), StructField("c", kind)])
    with pytest.raises(UsageError, match="cannot be partitioned by 'c'"):
        ensure_sink(home, Declared("t", partition_by=["c"]), STREAM, schema, generation=1)


def test_a_recovery_may_rebuild_a_table_of_before_that_is_partitioned_by_decimals(home: Settings) -> None:
    schema = StructType([StructField("n", LongType()), StructField("c", DecimalType(9, 2))])
    sink = ensure_sink(home, Declared("t", partition_by=["c"]), STREAM, schema, generation=2)
    assert sink.handle.metadata().partition_columns == ["c"]
