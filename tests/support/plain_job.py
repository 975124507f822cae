"""A streaming job as people write it with PySpark alone, from Kafka to a Delta table; it imports nothing of Recourse.

`python tests/support/plain_job.py '<json>'` runs a list of jobs in one session, one query after the other, each until it
has read all that its topic has. A job has `kind`, `bootstrap`, `topic`, `checkpoint`, `table`, `jars`, and may have
`starting`, `per_batch`, `kill_after`. Jobs with `kill_after` run at once: when each has committed that batch to its
table, JVM and process are killed. Two kinds have no query: `sql` (statements), and `send` (`ids` to a topic).
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
from pyspark.sql.streaming import StreamingQuery


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


def merge(batch: DataFrame, number: int, job: dict[str, Any]) -> None:
    """An upsert by key."""
    from delta.tables import DeltaTable

    spark = batch.sparkSession
    if not DeltaTable.isDeltaTable(spark, job["table"]):
        batch.limit(0).write.format("delta").save(job["table"])
    target = DeltaTable.forPath(spark, job["table"])
    merged = target.alias("t").merge(batch.alias("s"), "t.id = s.id")
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
    """Records `ids[0]` to `ids[1] - 1`, each into the partition of its parity."""
    numbers = spark.range(*job["ids"]).selectExpr("cast(id AS string) AS value", "cast(id % 2 AS int) AS partition")
    to_kafka = numbers.coalesce(1).sortWithinPartitions("value").write.format("kafka")
    to_kafka.option("kafka.bootstrap.servers", job["bootstrap"]).option("topic", job["topic"]).save()


def start(spark: SparkSession, job: dict[str, Any], killed: threading.Barrier) -> StreamingQuery:
    """Start the query; it reads to the topic's end, or kills this process together with the others that do so."""
    written = records(spark, job).writeStream.option("checkpointLocation", job["checkpoint"]).trigger(availableNow=True)
    if job["kind"] == "sink":
        return written.format("delta").start(job["table"])
    writer = WRITERS[job["kind"]]

    def write(batch: DataFrame, number: int) -> None:
        writer(batch, number, job)
        if job.get("kill_after") == number:
            killed.wait(120)
            os.kill(int(spark._jvm.java.lang.ProcessHandle.current().pid()), signal.SIGKILL)  # type: ignore[union-attr]
            os.kill(os.getpid(), signal.SIGKILL)

    return written.foreachBatch(write).start()


def run(spark: SparkSession, jobs: list[dict[str, Any]]) -> None:
    """Run the jobs in their order; returns unless one of them is to be killed."""
    killed = threading.Barrier(sum("kill_after" in job for job in jobs) or 1)
    for job in jobs:
        if job["kind"] == "send":
            send(spark, job)
        elif job["kind"] == "sql":
            for statement in job["sql"]:
                spark.sql(statement)
        else:
            query = start(spark, job, killed)
            if "kill_after" not in job:
                query.awaitTermination()
    for query in spark.streams.active:
        query.awaitTermination()


if __name__ == "__main__":
    wanted = json.loads(sys.argv[1])
    spark = session(wanted[0]["jars"])
    run(spark, wanted)
    spark.stop()
