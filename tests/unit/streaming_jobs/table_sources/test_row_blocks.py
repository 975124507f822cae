"""Rows of Parquet files as record batches: types, partition values, later columns, verdicts."""

from __future__ import annotations

import json
from datetime import UTC, date, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any, Literal

import pyarrow as pa
import pytest
from deltalake import DeltaTable, write_deltalake
from pyspark.sql import types as T

from streaming_jobs.declare.table_source import DeltaSource
from streaming_jobs.sources.record_blocks import note_used
from streaming_jobs.table_sources.planner import FileToRead, RowBlocks, partition_value
from streaming_jobs.table_sources.versions import TableVersions

AT = datetime(2126, 1, 2, 3, 4, 5, 678901, tzinfo=UTC)
ROWS: list[dict[str, Any]] = [
    {
        "k": "ä/b c", "n": 7, "i": 3, "x": 1.5, "b": b"\x00\x01", "ok": True, "d": date(2024, 2, 29), "t": AT,
        "m": Decimal("12.30"), "s": {"a": 1, "t": AT}, "l": [1, None], "p": 5, "when": AT, "day": date(2020, 1, 1),
    },
    dict.fromkeys(("k", "n", "i", "x", "b", "ok", "d", "t", "m", "s", "l", "p", "when", "day")),
]  # fmt: skip
COLUMNS = T.StructType(
    [
        T.StructField("k", T.StringType()),
        T.StructField("n", T.LongType()),
        T.StructField("i", T.IntegerType()),
        T.StructField("x", T.DoubleType()),
        T.StructField("b", T.BinaryType()),
        T.StructField("ok", T.BooleanType()),
        T.StructField("d", T.DateType()),
        T.StructField("t", T.TimestampType()),
        T.StructField("m", T.DecimalType(10, 2)),
        T.StructField("s", T.StructType([T.StructField("a", T.LongType()), T.StructField("t", T.TimestampType())])),
        T.StructField("l", T.ArrayType(T.LongType())),
        T.StructField("p", T.IntegerType()),
        T.StructField("when", T.TimestampType()),
        T.StructField("day", T.DateType()),
        T.StructField("later", T.StringType()),
    ]
)


def written(path: Path) -> TableVersions:
    """A table with all kinds of columns, three of them partition columns."""
    schema = RowBlocks(DeltaSource("kinds", COLUMNS), TableVersions(path), "all").schema.field("_record").type
    kinds = pa.schema([field for field in schema if field.name != "later"])
    write_deltalake(path, pa.Table.from_pylist(ROWS, kinds), partition_by=["p", "when", "day"])
    return TableVersions(path)


def read(
    versions: TableVersions, rows: Literal["all", "refused"] = "all", used: Path | None = None, **options: Any
) -> list[dict[str, Any]]:
    blocks = RowBlocks(DeltaSource("kinds", COLUMNS, **options), versions, rows, used)
    files = [FileToRead(v.number, v.at, f) for v in versions.between(0, 1) for f in v.files]
    batches = list(blocks.of_files(files))
    assert all(batch.schema.equals(blocks.schema) for batch in batches)
    return [row for batch in batches for row in batch.to_pylist()]


def test_every_value_comes_back_as_it_was_written(tmp_path: Path) -> None:
    versions = written(tmp_path / "kinds")
    found = sorted(read(versions), key=lambda row: row["_record"]["n"] is None)
    assert [row["_record"] for row in found] == [{**row, "later": None} for row in ROWS]
    assert {(row["topic"], row["partition"], row["offset"], row["key"], row["tombstone"]) for row in found} == {
        ("kinds", 0, 0, None, False)
    }
    assert found[0]["timestamp"].timestamp() * 1000 == pytest.approx(versions.time_of(0))


def test_only_columns_that_somebody_looks_at_are_read(tmp_path: Path) -> None:
    note_used(used := tmp_path / "used.json", ["_record.n", "_record.p"])
    first = sorted(read(written(tmp_path / "kinds"), used=used), key=lambda row: row["_record"]["n"] is None)[0]
    assert {name: value for name, value in first["_record"].items() if value is not None} == {"n": 7, "p": 5}
    note_used(used, [])
    assert len(read(TableVersions(tmp_path / "kinds"), used=used)) == 2


def test_a_row_too_far_ahead_of_its_commit_is_refused_with_the_reason(tmp_path: Path) -> None:
    versions = written(tmp_path / "kinds")
    seconds = int((AT - datetime.fromtimestamp(versions.time_of(0) / 1000, UTC)).total_seconds())
    timed = {"event_time": "t", "lateness": "1 day"}
    assert [row["_bad"] for row in read(versions, max_ahead=f"{seconds + 1} seconds", **timed)] == [False, False]
    short = {**timed, "max_ahead": f"{seconds - 1} seconds"}
    assert sorted(row["_bad"] for row in read(versions, **short)) == [False, True]
    (letter,) = read(versions, "refused", **short)
    assert (
        letter["reason"] == "event_time_ahead"
        and f"more than {seconds - 1} seconds after the commit" in letter["detail"]
    )
    assert json.loads(letter["value"])["n"] == 7


@pytest.mark.parametrize(
    ("text", "kind", "value"),
    [
        ("", pa.string(), None),
        (None, pa.int32(), None),
        ("-3", pa.int32(), -3),
        ("true", pa.bool_(), True),
        ("2024-02-29", pa.date32(), date(2024, 2, 29)),
        ("2024-02-29 01:02:03.000004", pa.timestamp("us", "UTC"), datetime(2024, 2, 29, 1, 2, 3, 4, UTC)),
        ("2024-02-29T01:02:03.000004Z", pa.timestamp("us", "UTC"), datetime(2024, 2, 29, 1, 2, 3, 4, UTC)),
        ("1.50", pa.decimal128(10, 2), Decimal("1.50")),
    ],
)
def test_partition_values_are_read_as_the_protocol_writes_them(text: str | None, kind: pa.DataType, value: Any) -> None:
    assert partition_value(text, kind).as_py() == value


def test_a_file_of_more_rows_than_a_block_is_read_in_blocks(tmp_path: Path) -> None:
    write_deltalake(tmp_path / "long", pa.table({"n": pa.array(range(25_000), pa.int64())}))
    versions = TableVersions(tmp_path / "long")
    blocks = RowBlocks(DeltaSource("long", T.StructType([T.StructField("n", T.LongType())])), versions, "all")
    files = [FileToRead(v.number, v.at, f) for v in versions.between(0, 1) for f in v.files]
    sizes = [batch.num_rows for batch in blocks.of_files(files)]
    assert sum(sizes) == 25_000 and max(sizes) == 10_000 and DeltaTable(tmp_path / "long").version() == 0
