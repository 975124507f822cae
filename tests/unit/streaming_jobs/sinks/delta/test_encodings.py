"""Columns without a dictionary: the file is no larger for it, and has the same statistics."""

from __future__ import annotations

import random
import uuid
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake import write_deltalake
from pyspark.sql.types import DoubleType, LongType, StringType, StructField, StructType

from streaming_jobs.settings import Settings
from streaming_jobs.sinks.delta.encodings import almost_distinct
from streaming_jobs.sinks.delta.pending_writes import ArrowAppend
from streaming_jobs.sinks.delta.row_engine import Files
from streaming_jobs.sinks.delta.sink import DeltaSink
from streaming_jobs.sinks.delta.store import ensure_sink
from streaming_jobs.stream import DeltaTable as Declared
from tests.support.worlds import STREAM, entry

COUNT = 200_000
CHANCE = np.random.default_rng(7)


def texts(distinct: int) -> pa.Array:
    made = random.Random(7)
    values = pa.array([str(uuid.UUID(int=made.getrandbits(128))) for _ in range(distinct)])
    return values.take(pa.array(CHANCE.integers(0, distinct, COUNT)))


def of(numbers: np.ndarray, kind: pa.DataType | None = None) -> pa.Array:
    return pa.array(numbers, kind)


DISTINCT = {
    "an id": of(np.arange(COUNT)),
    "a share": of(CHANCE.random(COUNT)),
    "a time": of(np.sort(CHANCE.integers(0, 1 << 40, COUNT)), pa.timestamp("us", "UTC")),
    "a text": pa.array([f"name {n}" for n in range(COUNT)]),
    "an id or null": of(np.arange(COUNT)).take(pa.array([n if n % 3 else None for n in range(COUNT)])),
}
REPEATED = {
    "customers": texts(25_000),
    "prices": of(CHANCE.integers(0, 30_000, COUNT) / 100),
    "wide numbers": of(CHANCE.integers(0, 1 << 60, 100_000)[CHANCE.integers(0, 100_000, COUNT)]),
    "seconds": of(np.arange(COUNT) // 200 * 1_000_000, pa.timestamp("us", "UTC")),
    "order of 20 lines": of(np.arange(COUNT) // 20),
    "text of 100 lines": pa.array([f"file {n // 100}" for n in range(COUNT)]),
    "narrow": of(CHANCE.integers(0, 200_000, COUNT), pa.int32()),
    "flag": of(np.arange(COUNT) % 2 == 0),
    "mostly null": of(np.arange(COUNT)).take(pa.array([n if n % 8 == 0 else None for n in range(COUNT)])),
    "inside": pa.StructArray.from_arrays([of(np.arange(COUNT))], ["id"]),
}


@pytest.mark.parametrize("name", DISTINCT)
def test_a_column_of_distinct_values_is_found(name: str) -> None:
    assert almost_distinct(pa.table({name: DISTINCT[name]})) == [name]


@pytest.mark.parametrize("name", REPEATED)
def test_a_column_that_a_dictionary_makes_smaller_keeps_it(name: str) -> None:
    assert almost_distinct(pa.table({name: REPEATED[name]})) == []


def test_a_small_table_keeps_its_dictionaries() -> None:
    assert almost_distinct(pa.table({"id": range(16_383)})) == []
    assert almost_distinct(pa.table({"id": range(16_384)})) == ["id"]


def test_more_text_than_one_array_can_hold_is_not_joined() -> None:
    chunk = pa.array([f"{n} " + "x" * 70_000 for n in range(1_000)])
    rows = pa.table({"text": pa.chunked_array([chunk] * 31)})
    assert rows.nbytes > 1 << 31
    assert almost_distinct(rows) == [], "31 times the same"


def test_a_table_is_no_larger_than_with_all_dictionaries(home: Settings, tmp_path: Path) -> None:
    rows = pa.table({f"c{n}": column for n, column in enumerate([*DISTINCT.values(), *REPEATED.values()])})
    sink = ensure_sink(home, Declared("all"), STREAM, _struct(rows), generation=1)
    ArrowAppend(sink, rows).commit(entry(0))
    write_deltalake(tmp_path / "plain", rows)
    sizes = [_sum_of_sizes(place) for place in (sink.path, tmp_path / "plain")]
    assert sizes[0] <= sizes[1]


SCHEMA = StructType(
    [
        StructField("id", LongType()),
        StructField("name", StringType()),
        StructField("share", DoubleType()),
        StructField("n", LongType()),
    ]
)


def of_schema() -> pa.Table:
    columns = [DISTINCT["an id"], DISTINCT["a text"], DISTINCT["a share"], REPEATED["order of 20 lines"]]
    return pa.table(columns, names=SCHEMA.fieldNames())


@pytest.mark.parametrize("by_task", [False, True])
def test_dictionaries_and_statistics_of_a_file(home: Settings, *, by_task: bool) -> None:
    sink = ensure_sink(home, Declared("things"), STREAM, SCHEMA, generation=1)
    path = _by_task(sink, of_schema()) if by_task else _by_driver(sink, of_schema())
    group = pq.read_metadata(path).row_group(0)
    chunks = [group.column(number) for number in range(group.num_columns)]
    assert [chunk.path_in_schema for chunk in chunks if chunk.has_dictionary_page] == ["n"]
    assert [chunk.path_in_schema for chunk in chunks if chunk.statistics is not None] == ["id", "name", "n"]
    assert pq.read_table(path).equals(of_schema())


@pytest.mark.parametrize("by_task", [False, True])
def test_with_floats_inside_of_a_struct(home: Settings, *, by_task: bool) -> None:
    """Then the default is a file without statistics, and pyarrow takes no names."""
    inside = StructField("inside", StructType([StructField("share", DoubleType())]))
    schema = StructType([*SCHEMA.fields, inside])
    sink = ensure_sink(home, Declared("things"), STREAM, schema, generation=1)
    struct = pa.StructArray.from_arrays([DISTINCT["a share"]], ["share"])
    rows = of_schema().append_column("inside", struct)
    path = _by_task(sink, rows) if by_task else _by_driver(sink, rows)
    group = pq.read_metadata(path).row_group(0)
    chunks = [group.column(number) for number in range(group.num_columns)]
    assert [chunk.path_in_schema for chunk in chunks if chunk.statistics is not None] == ["id", "name", "n"]
    kept = [chunk.path_in_schema for chunk in chunks if chunk.has_dictionary_page]
    assert kept == (["id", "name", "share", "n", "inside.share"] if by_task else ["n", "inside.share"])


def _by_driver(sink: DeltaSink, rows: pa.Table) -> Path:
    ArrowAppend(sink, rows).commit(entry(0))
    (path,) = Path(sink.path).glob("*.parquet")
    return path


def _by_task(sink: DeltaSink, rows: pa.Table) -> Path:
    files = Files(sink.path, sink.path / "g1")
    files.add("", rows)
    (path,) = files.close()
    return Path(sink.path) / path


def _sum_of_sizes(table: object) -> int:
    return sum(file.stat().st_size for file in Path(str(table)).rglob("*.parquet"))


def _struct(rows: pa.Table) -> StructType:
    from pyspark.sql.pandas.types import from_arrow_schema

    return from_arrow_schema(rows.schema)
