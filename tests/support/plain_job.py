"""A streaming job as people write it with PySpark alone, from Kafka to a Delta table; it imports nothing of Recourse.

`python tests/support/plain_job.py '<json>'` runs one query until it has read all that its topic has, then ends. The
JSON has `kind`, `bootstrap`, `topic`, `checkpoint`, `table`, `jars`, and may have `starting`, `per_batch`, `kill_after`
(the batch after whose commit to the table JVM and process are killed), `sql` (statements before the query), `shape`
(`totals` or `distinct`: what is computed with state), `key` of a merge, `conf` of the session.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from typing import Any

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F


def session(jars: list[str]) -> SparkSession:
    """A session with Kafka and Delta, as their own documentation sets it up; small, since it lives for seconds."""
    return (
        SparkSession.builder.master("local[2]")
        .config("spark.jars", ",".join(jars))
        .config("spark.driver.extraJavaOptions", "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC")
        .config("spark.sql.extensions", "io.delta.sql.DeltaSparkSessionExtension")
        .config("spark.sql.catalog.spark_catalog", "org.apache.spark.sql.delta.catalog.DeltaCatalog")
        .config("spark.sql.shuffle.partitions", "2")
        .config("spark.databricks.delta.snapshotPartitions", "1")
        .config("spark.sql.sources.parallelPartitionDiscovery.parallelism", "4")
        .config("spark.ui.enabled", "false")
        .getOrCreate()
    )


def records(spark: SparkSession, job: dict[str, Any]) -> DataFrame:
    """The topic's records with their places."""
    return (
        spark.readStream.format("kafka")
        .option("kafka.bootstrap.servers", job["bootstrap"])
        .option("subscribe", job["topic"])
        .option("startingOffsets", job.get("starting", "earliest"))
        .option("failOnDataLoss", "false")
        .option("maxOffsetsPerTrigger", job.get("per_batch", 4))
        .load()
        .select(F.col("value").cast("string").alias("id"), "partition", "offset")
    )


def totals(records: DataFrame) -> DataFrame:
    """Number and sum of the ids, by their remainder."""
    number = F.col("id").cast("int")
    return records.groupBy((number % 3).alias("bucket")).agg(
        F.count("*").alias("records"), F.sum(number).alias("total")
    )


def distinct(records: DataFrame) -> DataFrame:
    """Each remainder once."""
    return records.select((F.col("id").cast("int") % 7).alias("id")).dropDuplicates(["id"])


SHAPES = {"totals": totals, "distinct": distinct, "records": lambda records: records}


def merge(batch: DataFrame, number: int, job: dict[str, Any]) -> None:
    """An upsert by key."""
    from delta.tables import DeltaTable

    spark, key = batch.sparkSession, job.get("key", "id")
    if not DeltaTable.isDeltaTable(spark, job["table"]):
        batch.limit(0).write.format("delta").save(job["table"])
    target = DeltaTable.forPath(spark, job["table"])
    merged = target.alias("t").merge(batch.alias("s"), f"t.{key} = s.{key}")
    merged.whenMatchedUpdateAll().whenNotMatchedInsertAll().execute()


def append(batch: DataFrame, number: int, job: dict[str, Any]) -> None:
    """A plain append, which a repeated batch doubles."""
    batch.write.format("delta").mode("append").save(job["table"])


def append_once(batch: DataFrame, number: int, job: dict[str, Any]) -> None:
    """The append of Delta's documentation for foreachBatch, which a repeated batch skips."""
    written = batch.write.format("delta").mode("append")
    written.option("txnAppId", "plain-job").option("txnVersion", number).save(job["table"])


WRITERS = {"merge": merge, "append": append, "append-once": append_once}


def send(spark: SparkSession, job: dict[str, Any]) -> None:
    """Send the ids from `ids[0]` to `ids[1] - 1`, each into the partition of its parity."""
    numbers = spark.range(*job["ids"], numPartitions=1)
    records = numbers.selectExpr("cast(id AS string) AS value", "cast(id % 2 AS int) AS partition")
    records.write.format("kafka").options(**{"kafka.bootstrap.servers": job["bootstrap"], "topic": job["topic"]}).save()


def run(spark: SparkSession, job: dict[str, Any], written_by_all: threading.Barrier) -> None:
    """Run the query until the topic's end.

    Queries with `kill_after` run at once: when each has written that batch to its table, and none has committed it to
    its checkpoint, JVM and process are killed.
    """
    for statement in job.get("sql", ()):
        spark.sql(statement)
    if job["kind"] == "sql":
        return
    for name, value in job.get("conf", {}).items():
        spark.conf.set(name, value)
    shape = job.get("shape", "records")
    frame = SHAPES[shape](records(spark, job))
    written = frame.writeStream.outputMode("update" if shape == "totals" else "append")
    written = written.option("checkpointLocation", job["checkpoint"]).trigger(availableNow=True)
    if job["kind"] == "sink":
        query = written.format("delta").start(job["table"])
    else:
        writer = WRITERS[job["kind"]]

        def write(batch: DataFrame, number: int) -> None:
            writer(batch, number, job)
            if job.get("kill_after") == number:
                written_by_all.wait(120)
                os.kill(int(spark._jvm.java.lang.ProcessHandle.current().pid()), signal.SIGKILL)  # type: ignore[union-attr]
                os.kill(os.getpid(), signal.SIGKILL)

        query = written.foreachBatch(write).start()
    if "kill_after" not in job:
        query.awaitTermination()


if __name__ == "__main__":
    jobs = json.loads(sys.argv[1])
    spark = session(jobs[0]["jars"])
    killed = threading.Barrier(sum("kill_after" in job for job in jobs) or 1)
    for each in jobs:
        if each["kind"] == "send":
            send(spark, each)
        else:
            run(spark, each, killed)
    for query in spark.streams.active:
        query.awaitTermination()
    spark.stop()
