"""Upserts of 1,000 keys: the product's sink beside Spark's MERGE, on equal tables, in turns, in one Spark session.

    python -m benchmarks upserts --rows 1000000 --rounds 10 --out benchmarks/results/upserts.json

The tables are equal to the byte at the beginning and must hold the same rows at the end. MERGE is what the
documentation of Delta shows, in a session with two shuffle partitions and one snapshot partition, once on a table like
ours and once on one with deletion vectors, which save MERGE from rewriting files. Our sink runs twice, without an order
and with `order_by`, where each row is compared with the table's own. Times are from a computed frame in Spark to the
end of the commit; MB are of the files that the commit adds. Exit code 1: less than 3 times as fast as the faster MERGE,
or other rows than MERGE's.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.types import StructType

from benchmarks.place import spark_session
from benchmarks.run import Report, Row, seconds_of
from benchmarks.writers import STREAM, Write, Writer, our_sink, write_in_turns
from streaming_jobs.declare.columns import POSITION_COLUMN
from streaming_jobs.declare.schemas import schema_of
from streaming_jobs.ledger.entry import LedgerEntry
from streaming_jobs.settings import Settings
from streaming_jobs.sinks.delta.maintenance import TableMaintenance
from streaming_jobs.sinks.delta.pending_writes import ArrowAppend
from streaming_jobs.sinks.delta.sink import DeltaSink
from streaming_jobs.sinks.delta.store import ensure_sink
from streaming_jobs.sinks.schemas import POSITION_FIELD
from streaming_jobs.stream import DeltaTable

GOAL = 3.0
UPSERT, FILES, WARM_UP = 1_000, 4, 2
SCHEMA = schema_of({"k": "bigint", "name": "string", "city": "string", "amount": "double", "count": "bigint"})


def run(report: Report, *, rows: Annotated[int, "of the tables"] = 1_000_000, rounds: int = 10) -> None:
    with tempfile.TemporaryDirectory(prefix="benchmark-") as folder:
        settings = Settings.load({"home": Path(folder) / "home", "spark.shuffle_partitions": 2})
        ours, ordered = _filled(settings, rows, "ours"), _filled(settings, rows, "ordered", ["count"])
        merge, vectors = Path(folder) / "merge", Path(folder) / "vectors"
        for copy in (merge, vectors):
            shutil.copytree(str(ours.path), copy)
        with spark_session(settings) as spark:
            spark.sql(f"ALTER TABLE delta.`{vectors}` SET TBLPROPERTIES (delta.enableDeletionVectors = true)")
            writers = [
                Writer("Recourse", _our_upsert(settings, ours)),
                Writer("Recourse, `order_by`", _our_upsert(settings, ordered)),
                Writer("Spark MERGE", spark_merge(spark, merge)),
                Writer("Spark MERGE, deletion vectors", spark_merge(spark, vectors)),
            ]
            write_in_turns(spark, writers, lambda number: _upserted(number, rows), rounds, WARM_UP)
            report.table("figures", [writer.figures("MB written", "files written") for writer in writers])
            contents = [
                _contents(spark, path) for path in (Path(str(ours.path)), Path(str(ordered.path)), merge, vectors)
            ]
    plain, with_order, *merges = (writer.median("ms") for writer in writers)
    ratio, equal = min(merges) / plain, all(content.equals(contents[0]) for content in contents)
    report.say(
        f"{UPSERT:,} keys into {rows:,} rows: {ratio:.1f} times as fast as the faster MERGE; tables equal: {equal}\n"
        f"with order_by, {with_order / plain:.2f} times as long as without",
        ratio=ratio, order=with_order / plain, equal=equal,
    )  # fmt: skip
    report.judge(ratio >= GOAL and equal)


def _rows(keys: Sequence[int] | np.ndarray[Any, Any], written: int) -> pa.Table:
    """One row per key; which upsert wrote it can be seen."""
    return pa.table(
        {
            "k": pa.array(keys, pa.int64()),
            "name": [f"customer {key}" for key in keys],
            "city": [f"city {key % 5000} after round {written}" for key in keys],
            "amount": np.asarray(keys) * 0.25 + written,
            "count": pa.array([written] * len(keys), pa.int64()),
        }
    )


def _upserted(number: int, count: int) -> pa.Table:
    """The rows of an upsert, a tenth of them with new keys."""
    random, new = np.random.default_rng(1000 + number), UPSERT // 10
    known = random.choice(count, UPSERT - new, replace=False)
    return _rows(np.concatenate([known, np.arange(count + number * new, count + (number + 1) * new)]), number + 1)


def _filled(settings: Settings, count: int, name: str, order_by: Sequence[str] = ()) -> DeltaSink:
    """Our table with so many rows, in files that each hold keys of the whole range, as a table that grew has."""
    output = StructType([*SCHEMA.fields, POSITION_FIELD]) if order_by else SCHEMA
    sink = ensure_sink(settings, DeltaTable(name, keys=["k"], order_by=order_by), STREAM, output, generation=1)
    for batch, part in enumerate(np.array_split(np.random.default_rng(0).permutation(count), FILES)):
        rows = _rows(part, 0)
        if order_by:
            positions = np.arange(batch * len(part), (batch + 1) * len(part))  # as a topic is read
            rows = rows.append_column(POSITION_COLUMN, pa.array(positions, pa.int64()))
        ArrowAppend(sink, rows).commit(LedgerEntry("batch", STREAM, name, 1, batch))
    return sink


def _our_upsert(settings: Settings, sink: DeltaSink) -> Write:
    upsert = our_sink(sink.for_batches(settings.stream), after=TableMaintenance(sink, settings.table, 1).after_commit)
    return lambda frame, batch: {**upsert(frame, FILES + batch), **_written(Path(str(sink.path)))}


def spark_merge(spark: SparkSession, path: Path) -> Write:
    """What Delta's documentation shows."""
    from delta.tables import DeltaTable as SparkTable

    target = SparkTable.forPath(spark, str(path))

    def upsert(frame: DataFrame, _: int) -> Row:
        merge = target.alias("t").merge(frame.alias("s"), "t.k = s.k")
        ms = 1000 * seconds_of(merge.whenMatchedUpdateAll().whenNotMatchedInsertAll().execute)
        return {"ms": ms, **_written(path)}

    return upsert


def _written(path: Path) -> Row:
    for log in sorted((path / "_delta_log").glob("*.json"), reverse=True):
        actions = [json.loads(line) for line in log.read_text().splitlines()]
        if any(action.get("commitInfo", {}).get("operation") == "MERGE" for action in actions):
            sizes = [action["add"]["size"] for action in actions if "add" in action]
            return {"MB written": sum(sizes) / 2**20, "files written": len(sizes)}
    raise LookupError(f"no merge in {path}")


def _contents(spark: SparkSession, path: Path) -> pa.Table:
    return spark.read.format("delta").load(str(path)).select(*SCHEMA.fieldNames()).orderBy("k").toArrow()
