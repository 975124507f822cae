"""The batches of a table: where each one ends, what it reads, and its rows as record batches."""

from __future__ import annotations

import json
from dataclasses import replace
from datetime import UTC, date, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any, Literal

import pyarrow as pa
import pytest
from deltalake import DeltaTable, write_deltalake
from pyspark.sql import types as T

from streaming_jobs.declare.table_source import DeltaSource
from streaming_jobs.errors import OffsetsLost
from streaming_jobs.sources.planner import BatchLimits
from streaming_jobs.sources.record_blocks import note_used
from streaming_jobs.state import stream_record
from streaming_jobs.state.stream_folder import StreamFolder
from streaming_jobs.state.stream_record import Accepted
from streaming_jobs.table_sources.planner import FileToRead, RowBlocks, TablePlanner, is_small, partition_value, tasks
from streaming_jobs.table_sources.versions import DataFile, RebuiltRows, TableVersions
from tests.conftest import SettingsFactory
from tests.support.written_table import WrittenTable

LIMITS = BatchLimits(seconds=3, records=5, bytes=1 << 30, wait=0.0)


@pytest.fixture
def table(tmp_path: Path) -> WrittenTable:
    return WrittenTable(tmp_path / "numbers").make()


def planner(table: WrittenTable, limits: BatchLimits = LIMITS) -> TablePlanner:
    return TablePlanner(TableVersions(table.path, "count"), limits)


def test_the_first_batch_is_the_whole_table_the_next_ones_are_bounded_by_rows_and_a_version_over_the_bound_is_one(
    table: WrittenTable,
) -> None:
    for first in (1, 4, 7, 10):
        table.batch(first, first + 1, first + 2)
    plans = planner(table)
    assert plans.next_version(0) == 5
    assert [each.file.rows for each in plans.files(0, 5)] == [3, 3, 3, 3]
    assert plans.next_version(1) == 2, "two versions are six rows"
    assert planner(table, replace(LIMITS, records=6)).next_version(1) == 3
    assert plans.next_version(5) == 5
    table.batch()
    assert plans.next_version(5) == 6, "a version without rows is passed"
    assert plans.files(5, 6) == []
    table.batch(*range(20))
    table.batch(1)
    assert planner(table).next_version(1) == 2


def test_with_available_now_it_ends_where_the_table_ended_or_at_the_bound(table: WrittenTable) -> None:
    table.batch(1)
    table.batch(2)
    plans, bounded = planner(table), planner(table, replace(LIMITS, until={0: 2}))
    plans.stop_at_present_end()
    bounded.stop_at_present_end()
    table.batch(3)
    assert plans.next_version(1) == 3 and plans.next_version(3) == 3
    assert bounded.next_version(0) == 2 and bounded.next_version(2) == 2
    with pytest.raises(OffsetsLost, match="ends at version 3, and the stream has read up to 8"):
        planner(table, replace(LIMITS, until={0: 9})).stop_at_present_end()


def test_versions_that_a_plan_writes_anew_are_never_divided(table: WrittenTable) -> None:
    for number in range(1, 7):
        table.batch(number)
    files = TableVersions(table.path).content(3).files
    versions = TableVersions(table.path, "count", in_place=RebuiltRows(3, 7, files, files))
    plans = TablePlanner(versions, replace(LIMITS, records=3))
    plans.stop_at_present_end()
    ends = [plans.next_version(1), plans.next_version(3), plans.next_version(7)]
    assert ends == [3, 7, 7], "three rows of the rebuilt ones do not fit beside the two before them"
    assert [each.version for each in plans.files(1, 3)] == [1, 2]
    assert [each.version for each in plans.files(3, 7)] == [6, 6, 6]
    assert len(plans.files(0, 7)) == 3


def test_what_is_gone_is_refused_with_its_range_and_so_is_a_table_that_was_put_back(table: WrittenTable) -> None:
    for number in (1, 2, 3, 4):
        table.batch(number)
    for version in (1, 2):
        (table.path / "_delta_log" / f"{version:020d}.json").unlink()
    with pytest.raises(OffsetsLost, match="versions 1 to 2 of table numbers can no longer be read"):
        planner(table).next_version(1)
    assert planner(table).next_version(3) == 5
    with pytest.raises(OffsetsLost, match="ends at version 4, and the stream has read up to 8"):
        planner(table).next_version(9)


def test_it_waits_for_a_first_version_as_long_as_the_limits_say(table: WrittenTable) -> None:
    now = [0.0]
    plans = TablePlanner(
        TableVersions(table.path, "count"),
        replace(LIMITS, wait=1.0),
        monotonic=lambda: now[0],
        sleep=lambda seconds: (
            now.__setitem__(0, now[0] + seconds) or (now[0] > 0.5 and table.version == 0 and table.batch(1))
        ),
    )
    assert plans.next_version(1) == 2 and 0.5 < now[0] < 1.0
    assert plans.next_version(2) == 2 and now[0] > 1.5


def test_tasks_get_runs_of_files_in_order_and_of_about_the_same_size() -> None:
    files = [FileToRead(1, 0, DataFile(f"f{n}", {}, 10, 1)) for n in range(10)]
    parts = tasks(files, 3)
    assert [each for part in parts for each in part] == files
    assert [len(part) for part in parts] == [4, 3, 3]
    assert tasks([], 3) == [] and is_small(files)
    assert not is_small([FileToRead(1, 0, DataFile("f", {}, 10, 30_000))])


def test_a_batch_ends_before_rows_that_other_programs_may_still_take_back(
    table: WrittenTable, settings: SettingsFactory
) -> None:
    home = settings()
    table.batch(1)
    first, foreign = table.batch(2), table.foreign(8)
    accepted = (Accepted("numbers", foreign, "right", 0.0),)
    stream_record.save(home, replace(stream_record.first("count"), accepted=accepted))
    records = (StreamFolder.of(home, "count").record,)
    plans = TablePlanner(TableVersions(table.path, "count", records), LIMITS)
    assert plans.next_version(first) == foreign and plans.next_version(foreign) == foreign
    table.batch(3)
    assert plans.next_version(foreign) == foreign + 2
    assert [each.file.rows for each in plans.files(foreign, foreign + 2)] == [1, 1]


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
