"""The three works with PySpark and Delta Lake as their documentation shows them.

    python -m benchmarks.speed.peers.plain_spark WORK BOOTSTRAP TOPIC TABLE CHECKPOINT [PROPERTY=VALUE ...]

Append tables are written by Delta's own streaming sink, the running total by MERGE in foreachBatch. Both are exactly
once: the sink by its transaction, the merge because a repeated batch writes the same totals. Prints READY when the
query has started, and ends when standard input does.
"""

from __future__ import annotations

import os
import sys

from delta.tables import DeltaTable
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.streaming.query import StreamingQuery
from pyspark.sql.streaming.readwriter import DataStreamWriter

from benchmarks.speed import flows
from benchmarks.speed.peers import at_end_of_input, say_ready
from streaming_jobs.platform.jars import ensure, locked, spark_jars
from streaming_jobs.settings import Settings

# As many records a batch as the product takes; without a limit, a backlog is one batch.
_BATCH = "300000"


def session(properties: dict[str, str]) -> SparkSession:
    """A session with Delta and Spark's Kafka source; jars that are missing are fetched."""
    settings = Settings.load()
    jars = [*spark_jars(settings), *ensure(settings, locked("peers"))]
    builder = (
        SparkSession.builder.master("local[*]")
        .config("spark.driver.extraClassPath", os.pathsep.join(map(str, jars)))
        .config("spark.sql.extensions", "io.delta.sql.DeltaSparkSessionExtension")
        .config("spark.sql.catalog.spark_catalog", "org.apache.spark.sql.delta.catalog.DeltaCatalog")
        .config("spark.sql.session.timeZone", "UTC")
        .config("spark.driver.host", "127.0.0.1")
        .config("spark.driver.bindAddress", "127.0.0.1")
    )
    for key, value in properties.items():
        builder = builder.config(key, value)
    return builder.getOrCreate()


def payments(spark: SparkSession, bootstrap: str, topic: str) -> DataFrame:
    source = (
        spark.readStream.format("kafka")
        .option("kafka.bootstrap.servers", bootstrap)
        .option("subscribe", topic)
        .option("startingOffsets", "earliest")
        .option("maxOffsetsPerTrigger", _BATCH)
        .load()
    )
    return source.select(F.from_json(F.col("value").cast("string"), flows.PAYMENT).alias("payment")).select("payment.*")


def stateless(source: DataFrame, table: str, checkpoint: str) -> StreamingQuery:
    return _append(flows.stateless.function(source), table, checkpoint)


def windowed(source: DataFrame, table: str, checkpoint: str) -> StreamingQuery:
    return _append(flows.windowed.function(source.withWatermark("at", "5 seconds")), table, checkpoint)


def running(source: DataFrame, table: str, checkpoint: str) -> StreamingQuery:
    totals = flows.running.function(source)
    DeltaTable.createIfNotExists(source.sparkSession).location(table).addColumns(totals.schema).execute()

    def upsert(batch: DataFrame, _: int) -> None:
        target = DeltaTable.forPath(batch.sparkSession, table).alias("target")
        merge = target.merge(batch.alias("source"), "source.account = target.account")
        merge.whenMatchedUpdateAll().whenNotMatchedInsertAll().execute()

    writer: DataStreamWriter = totals.writeStream.outputMode("update").foreachBatch(upsert)
    return writer.option("checkpointLocation", checkpoint).start()


def _append(rows: DataFrame, table: str, checkpoint: str) -> StreamingQuery:
    writer = rows.writeStream.format("delta").outputMode("append")
    return writer.option("checkpointLocation", checkpoint).start(table)


def main() -> None:
    """Run one work until standard input ends."""
    work, bootstrap, topic, table, checkpoint, *properties = sys.argv[1:]
    spark = session({key: value for key, _, value in (text.partition("=") for text in properties)})
    start = {"stateless": stateless, "windowed": windowed, "running": running}[work]
    query = start(payments(spark, bootstrap, topic), table, checkpoint)
    say_ready()
    at_end_of_input(query.stop)
    query.awaitTermination()
    spark.stop()


if __name__ == "__main__":
    main()
