"""The order of upserts through Spark is the order through Arrow, for batches that take one path or the other."""

from __future__ import annotations

import random
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pyarrow as pa
from pyspark.sql import SparkSession
from pyspark.sql import functions as F
from pyspark.sql.types import LongType, StructField, StructType, TimestampType

from streaming_jobs.ledger.entry import LedgerEntry
from streaming_jobs.platform.table_rows import rows as rows_of
from streaming_jobs.settings import Settings
from streaming_jobs.sinks.base import BatchOfRows
from streaming_jobs.sinks.delta.pending_writes import ArrowMerge
from streaming_jobs.sinks.delta.store import ensure_sink
from streaming_jobs.stream import DeltaTable
from tests.support.orders import HOSTILE, NAN, Event, Tables, expected, output, pairs, read
from tests.support.store_server import StoreServer


def script(chance: random.Random) -> list[Event]:
    """Rows, deletes and tombstones of some keys, each in a partition of its own."""
    events = []
    for _ in range(160):
        key = chance.randrange(30)
        at, n = chance.choice([None, None, -1.0, -0.0, 0.0, 1.0, NAN]), chance.choice([None, 0, 1])
        events.append(Event(key, at, n, chance.random() < 0.4, partition=key % 3))
    return read(events)


def test_both_paths_and_their_mixture_end_as_the_definition_says(
    spark: SparkSession, tmp_path: Path, tables_on_a_store: dict[str, Any]
) -> None:
    """On a store executors merge large batches themselves."""
    chance = random.Random(3)
    events = script(chance)
    numbered = list(enumerate(events))
    ways = {"driver": (True, True, True), "mixed": (False, True, False), "store": (False, True, False)}
    flags = {"store": tables_on_a_store}
    tables = {way: Tables.make(Settings.load({"home": tmp_path / way, **flags.get(way, {})})) for way in ways}
    for batch, (begin, end) in enumerate(((0, 60), (60, 100), (100, len(events)))):
        rows = numbered[begin:end]
        chance.shuffle(rows)
        frame = spark.createDataFrame(output(rows)).repartition(2)
        for way, drivers in ways.items():
            tables[way].stage(frame, driver=drivers[batch])
    truth = expected(events, by_position=True)
    assert len(truth) > 5 and len(truth) < 25
    assert {way: each.shown() for way, each in tables.items()} == dict.fromkeys(ways, truth)
    deletes = {way: sorted(map(repr, remembered(each))) for way, each in tables.items()}
    assert deletes["driver"] and deletes["mixed"] == deletes["store"] == deletes["driver"]


def test_executors_merge_once_and_read_only_files_whose_bounds_may_hold_a_key(
    spark: SparkSession, tmp_path: Path, tables_on_a_store: dict[str, Any], object_store: StoreServer
) -> None:
    settings = Settings.load({"home": tmp_path, **tables_on_a_store})
    columns = StructType([StructField("id", LongType()), StructField("at", TimestampType())])
    declared = DeltaTable("kept", keys=["id", "at"])
    mine, other = (ensure_sink(settings, declared, "s", columns, generation=1) for _ in range(2))
    mine.refresh()  # for a batch before this one
    at = datetime(2026, 1, 1, 0, 0, 0, 500, tzinfo=UTC)

    def entry(batch: int) -> LedgerEntry:
        return LedgerEntry("batch", "s", "kept", 1, batch)

    for batch in range(3):
        rows = pa.table({"id": [10 * batch, 10 * batch + 1], "at": pa.array([at] * 2, pa.timestamp("us", "UTC"))})
        ArrowMerge(other, rows).commit(entry(batch))
    events = spark.createDataFrame([(11, at), (12, at)], columns)
    write = mine.prepare(events, BatchOfRows(1, 3, driver=False))
    object_store.clear()
    write.commit(entry(3))
    asked = [each for each in object_store.requests() if each.key.endswith(".parquet") and "_delta_log" not in each.key]
    assert len({each.key for each in asked if each.method == "GET"}) == 2, "one of before, and the new one's footer"
    assert len([each for each in asked if each.method == "PUT"]) == 1
    assert sorted(rows_of(mine.path)["id"].to_pylist()) == [0, 1, 10, 11, 12, 20, 21]


def remembered(tables: Tables) -> list[dict[str, object]]:
    rows: list[dict[str, object]] = rows_of(tables.kept.path).drop_columns(["_deleted_at"]).to_pylist()
    return rows


def test_every_value_has_the_place_in_sparks_order_that_it_has_in_arrows(spark: SparkSession, tmp_path: Path) -> None:
    """One table ordered by a column of each type: all but one are null in a row."""
    types = {f"c{number}": kind for number, kind in enumerate(HOSTILE)}
    compared = [(column, *pair) for column, kind in types.items() for pair in pairs(HOSTILE[kind])]
    truth = {key: int(rank >= 0) for key, (*_, rank) in enumerate(compared)}
    columns = {"k": LongType(), **types, "value": LongType()}
    tables = Tables.make(Settings.load({"home": tmp_path}), types=columns)
    schema = pa.schema(tables.sink.handle.schema().to_arrow())
    count = len(compared)
    halves = []
    for place in (0, 1):
        values = {
            column: pa.array([f[1 + place] if f[0] == column else None for f in compared], schema.field(column).type)
            for column in types
        }
        rows = pa.table(
            {
                "k": pa.array(range(count), pa.int64()),
                **values,
                "value": pa.array([place] * count, pa.int64()),
                "gone": pa.array([False] * count),
                "_source": pa.array([{"topic": "t", "partition": 0, "offset": place}] * count),
            }
        )
        halves.append(spark.createDataFrame(rows))
    in_one_batch = halves[1].unionByName(halves[0]).withColumn("k", F.col("k") + count)
    tables.stage(in_one_batch.unionByName(halves[0]), driver=False)
    tables.stage(halves[1], driver=False)
    assert tables.shown() == truth | {key + count: place for key, place in truth.items()}
