"""The table `inventory` of the stock movements, by a batch program over all records of its topic.

    python -m benchmarks.speed.peers.batch_spark BOOTSTRAP TOPIC TABLE

It reads with Spark's own Kafka source, in the settings of `plain_spark`, and overwrites the table.
"""

from __future__ import annotations

import sys

from pyspark.sql import functions as F

from benchmarks.speed.peers.plain_spark import session
from streaming_jobs.examples.stock.streams import MOVEMENT, inventory


def main() -> None:
    """Overwrite the table."""
    bootstrap, topic, table = sys.argv[1:]
    spark = session({})
    records = (
        spark.read.format("kafka")
        .option("kafka.bootstrap.servers", bootstrap)
        .option("subscribe", topic)
        .option("startingOffsets", "earliest")
        .load()
    )
    movements = records.select(F.from_json(F.col("value").cast("string"), MOVEMENT).alias("m")).select("m.*")
    inventory.function(movements).write.format("delta").mode("overwrite").save(table)
    spark.stop()


if __name__ == "__main__":
    main()
