"""Upserts of 1,000 keys: the product's sink beside Spark's MERGE, on equal tables, in turns, in one Spark session.

    python -m benchmarks.upserts --rows 1000000 --rounds 10 --out benchmarks/results/upserts.json
    python -m benchmarks.upserts --rows 10000 --rounds 20 --many 200

The tables are equal to the byte at the beginning and must hold the same rows at the end. MERGE is what the
documentation of Delta shows, in a session with two shuffle partitions and one snapshot partition, once on a table like
ours and once on one with deletion vectors, which save MERGE from rewriting files. Our sink runs twice, without an order
and with `order_by`, where each row is compared with the table's own. Times are from a computed frame in Spark to the
end of the commit; MB are of the files that the commit adds. `--many` then makes so many upserts on our table alone and
says whether they, or a read of the whole table, take longer than at first.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from deltalake import DeltaTable as Table
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.types import DoubleType, LongType, StringType, StructField, StructType

from benchmarks.measuring import quantile, quiet, save, table
from streaming_jobs.declare.columns import POSITION_COLUMN, SOURCE_COLUMN
from streaming_jobs.ledger.entry import LedgerEntry
from streaming_jobs.platform.spark import start
from streaming_jobs.settings import Settings
from streaming_jobs.sinks.delta.direct_writers import ArrowAppend
from streaming_jobs.sinks.delta.fitting import fitted
from streaming_jobs.sinks.delta.maintenance import TableMaintenance
from streaming_jobs.sinks.delta.sink import DeltaSink
from streaming_jobs.sinks.delta.table_setup import ensure_sink
from streaming_jobs.sinks.delta.writers import prepare_write
from streaming_jobs.sinks.schemas import POSITION_FIELD
from streaming_jobs.stream import DeltaTable

GOAL = 3.0
UPSERT = 1_000
FILES = 4
SCHEMA = StructType(
    [
        StructField("k", LongType()),
        StructField("name", StringType()),
        StructField("city", StringType()),
        StructField("amount", DoubleType()),
        StructField("count", LongType()),
    ]
)
NAMES = {
    "ours": "Recourse",
    "ordered": "Recourse, `order_by`",
    "merge": "Spark MERGE",
    "vectors": "Spark MERGE, deletion vectors",
}


@dataclass
class Contestant:
    """One way to upsert into one table, and what each upsert took and wrote."""

    path: Path
    upsert: Callable[[DataFrame], object]
    seconds: list[float] = field(default_factory=list)
    megabytes: list[float] = field(default_factory=list)
    files: list[int] = field(default_factory=list)

    def run(self, frame: DataFrame) -> None:
        """One upsert, measured."""
        began = time.perf_counter()
        self.upsert(frame)
        self.seconds.append(time.perf_counter() - began)
        sizes = [size for _, size in _added(self.path)]
        self.megabytes.append(sum(sizes) / 2**20)
        self.files.append(len(sizes))


def rows(keys: Sequence[int] | np.ndarray[Any, Any], round_: int) -> pa.Table:
    """One row per key; which round wrote it can be seen."""
    return pa.table(
        {
            "k": pa.array(keys, pa.int64()),
            "name": [f"customer {key}" for key in keys],
            "city": [f"city {key % 5000} after round {round_}" for key in keys],
            "amount": np.asarray(keys) * 0.25 + round_,
            "count": pa.array([round_] * len(keys), pa.int64()),
        }
    )


def fill(settings: Settings, count: int, name: str = "ours", order_by: Sequence[str] = ()) -> DeltaSink:
    """Our table with so many rows, in files that each hold keys of the whole range, as a table that grew has."""
    output = StructType([*SCHEMA.fields, POSITION_FIELD]) if order_by else SCHEMA
    sink = ensure_sink(settings, DeltaTable(name, keys=["k"], order_by=order_by), "upserts", output, generation=1)
    keys = np.random.default_rng(0).permutation(count)
    for batch, part in enumerate(np.array_split(keys, FILES)):
        filled = rows(part, 0)
        if order_by:
            places = np.arange(batch * len(part), (batch + 1) * len(part))  # as a topic is read
            filled = filled.append_column(POSITION_COLUMN, pa.array(places, pa.int64()))
        ArrowAppend(sink, filled).commit(LedgerEntry("batch", "upserts", name, 1, batch))
    return sink


def keys_of(round_: int, count: int) -> np.ndarray[Any, Any]:
    """A tenth of them new."""
    random = np.random.default_rng(1000 + round_)
    new = UPSERT // 10
    known = random.choice(count, UPSERT - new, replace=False)
    return np.concatenate([known, np.arange(count + round_ * new, count + (round_ + 1) * new)])


def our_upsert(sink: DeltaSink, upkeep: TableMaintenance) -> Callable[[DataFrame], object]:
    """What a stream's batch does with its frame."""

    def upsert(frame: DataFrame) -> None:
        at = sink.position
        assert at is not None
        place = F.struct(F.lit("t").alias("topic"), F.lit(0).alias("partition"), F.col("k").alias("offset"))
        sourced = frame.withColumn(SOURCE_COLUMN, place)
        rows = fitted(sink, sourced, ["t"])
        staged = prepare_write(sink, rows, driver=True, spark_commits=False, batch=(1, at.batch + 1), topics=["t"])
        staged.commit(LedgerEntry("batch", "upserts", sink.name, 1, at.batch + 1, rows={"written": staged.rows}))
        upkeep.after_commit()

    return upsert


def spark_merge(spark: SparkSession, path: Path) -> Callable[[DataFrame], object]:
    """What Delta's documentation shows."""
    from delta.tables import DeltaTable as SparkTable

    target = SparkTable.forPath(spark, str(path))

    def upsert(frame: DataFrame) -> object:
        merge = target.alias("t").merge(frame.alias("s"), "t.k = s.k")
        return merge.whenMatchedUpdateAll().whenNotMatchedInsertAll().execute()

    return upsert


def _added(path: Path) -> list[tuple[str, int]]:
    """The files that the newest commit with data added: path and bytes."""
    for log in sorted((path / "_delta_log").glob("*.json"), reverse=True):
        actions = [json.loads(line) for line in log.read_text().splitlines()]
        operation = next((a["commitInfo"].get("operation") for a in actions if "commitInfo" in a), "")
        if operation == "MERGE":
            return [(a["add"]["path"], a["add"]["size"]) for a in actions if "add" in a]
    return []


def _contents(spark: SparkSession, path: Path) -> pa.Table:
    return spark.read.format("delta").load(str(path)).select(*SCHEMA.fieldNames()).orderBy("k").toArrow()


def in_turns(spark: SparkSession, contestants: dict[str, Contestant], count: int, rounds: int) -> None:
    """Each upserts the same rows, in an order that changes."""
    names = list(contestants)
    for number in range(rounds + 2):
        frame = spark.createDataFrame(rows(keys_of(number, count), number + 1)).persist()
        frame.count()
        for name in names[number % len(names) :] + names[: number % len(names)]:
            contestants[name].run(frame)
        frame.unpersist()
    for one in contestants.values():  # the first two compile
        del one.seconds[:2], one.megabytes[:2], one.files[:2]


def many(spark: SparkSession, ours: Contestant, count: int, first: int, upserts: int) -> list[dict[str, Any]]:
    """So many upserts on our table, with its files and the time of a read of all rows after each fourth of them."""
    figures = [_layout(ours.path, "before", ours.seconds)]
    for part in range(4):
        ours.seconds.clear()
        for number in range(first + part * upserts // 4, first + (part + 1) * upserts // 4):
            ours.run(spark.createDataFrame(rows(keys_of(number, count), number + 1)))
        figures.append(_layout(ours.path, f"{(part + 1) * upserts // 4}", ours.seconds))
        sys.stderr.write(f"{figures[-1]}\n")
    return figures


def _layout(path: Path, label: str, seconds: Sequence[float]) -> dict[str, Any]:
    handle = Table(path)
    sizes = handle.get_add_actions(flatten=True)["size_bytes"].to_pylist()
    began = time.perf_counter()
    total = pc.sum(handle.to_pyarrow_table()["count"]).as_py()
    read = time.perf_counter() - began
    assert total
    return {
        "upserts": label,
        "median s": statistics.median(seconds),
        "live files": len(sizes),
        "smallest MB": min(sizes) / 2**20,
        "largest MB": max(sizes) / 2**20,
        "all MB": sum(sizes) / 2**20,
        "read of all rows s": read,
    }


def main() -> int:
    """Measure, compare, print; exit code 1 below the goal or with other rows than MERGE's."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.upserts")
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--many", type=int, default=0)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    quiet()
    with tempfile.TemporaryDirectory(prefix="benchmark-") as folder:
        settings = Settings.load({"home": Path(folder) / "home", "spark.shuffle_partitions": 2})
        sink = fill(settings, options.rows)
        ordered = fill(settings, options.rows, "ordered", ["count"])
        paths = {name: Path(folder) / name for name in NAMES} | {"ours": sink.path, "ordered": ordered.path}
        for name in ("merge", "vectors"):
            shutil.copytree(sink.path, paths[name])
        spark = start(settings, name="benchmark")
        try:
            spark.sql(f"ALTER TABLE delta.`{paths['vectors']}` SET TBLPROPERTIES (delta.enableDeletionVectors = true)")
            upkeep = TableMaintenance(sink, settings.table, 1)
            contestants = {
                "ours": Contestant(paths["ours"], our_upsert(sink, upkeep)),
                "ordered": Contestant(
                    paths["ordered"], our_upsert(ordered, TableMaintenance(ordered, settings.table, 1))
                ),
                **{name: Contestant(paths[name], spark_merge(spark, paths[name])) for name in ("merge", "vectors")},
            }
            in_turns(spark, contestants, options.rows, options.rounds)
            contents = {name: _contents(spark, path) for name, path in paths.items()}
            equal = all(each.equals(contents["ours"]) for each in contents.values())
            figures = [_figures(name, one) for name, one in contestants.items()]
            later = []
            if options.many >= 4:
                later = many(spark, contestants["ours"], options.rows, options.rounds + 2, options.many)
        finally:
            spark.stop()
    ratio = min(figures[2]["median s"], figures[3]["median s"]) / figures[0]["median s"]
    order = figures[1]["median s"] / figures[0]["median s"]
    sys.stdout.write(f"{UPSERT:,} keys into {options.rows:,} rows\n\n{table(figures)}\n")
    if later:
        sys.stdout.write(f"{table(later)}\n")
    sys.stdout.write(f"{ratio:.1f} times as fast as the faster MERGE; tables equal: {equal}\n")
    sys.stdout.write(f"with order_by, {order:.2f} times as long as without\n")
    save(options.out, rows=options.rows, figures=figures, ratio=ratio, order=order, equal=equal, many=later)
    return int(ratio < GOAL or not equal)


def _figures(name: str, one: Contestant) -> dict[str, Any]:
    return {
        "": NAMES[name],
        "median s": statistics.median(one.seconds),
        "p90 s": quantile(one.seconds, 0.9),
        "MB written": statistics.mean(one.megabytes),
        "files written": statistics.mean(one.files),
        "live files": len(list(Table(one.path).file_uris())) if name != "vectors" else "",
    }


if __name__ == "__main__":
    sys.exit(main())
