"""What the salt of a hot account does to the tasks and the state of the stream `payment_parts`.

    python -m benchmarks.salting --payments 200000 --salts 1,16 --rounds 2

"fullest task" is the share of all payments that one of eight tasks after the shuffle counts, "largest part" the payers
in the largest row of the state; both follow from the payments alone. "ms" is the median time of whole batches of 20,000
payments while a window fills (StreamingQueryProgress, triggerExecution): the last half of the batches of each round.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from benchmarks.measuring import Figures, Workshop, quiet, table, workshop
from streaming_jobs.declare.topic_sink import KafkaSink
from streaming_jobs.examples.payments.feed import send
from streaming_jobs.examples.payments.payments import Payment, payments
from streaming_jobs.examples.payments.streams import PARTS, PAYMENT, PAYMENTS, TOPICS, parts, payment_parts
from streaming_jobs.sources.topics import Topics
from streaming_jobs.stream import Stream

TASKS, BATCH, PER_SECOND, PAYERS, DEADLINE = 8, 20_000, 1_500, 100_000, 600.0


def salted(salts: int, number: int) -> Stream:
    """The stream with another number of salts, under a name and with a topic of its own."""

    def divided(payments: DataFrame) -> DataFrame:
        return parts(payments, salts)

    name = f"parts_{salts}_{number}"
    sink = KafkaSink(replace(PARTS, name=name), key="account")
    return replace(payment_parts, name=name, function=divided, sinks={name: sink}, topic_sinks={})  # type: ignore[dict-item]


@contextmanager
def shuffled_to(tasks: int, spark: SparkSession) -> Iterator[None]:
    """Batch queries have this number of tasks after a shuffle."""
    wanted = {"spark.sql.shuffle.partitions": str(tasks), "spark.sql.adaptive.enabled": "false"}
    before = {name: str(spark.conf.get(name)) for name in wanted}
    for name, value in wanted.items():
        spark.conf.set(name, value)
    try:
        yield
    finally:
        for name, value in before.items():
            spark.conf.set(name, value)


def by_task(spark: SparkSession, made: list[Payment], salts: int) -> tuple[float, int]:
    """The share of the payments that the fullest task counts, and the payers of the largest part."""
    frame = spark.createDataFrame([tuple(vars(payment).values()) for payment in made], PAYMENT)
    with shuffled_to(TASKS, spark):
        each = parts(frame, salts).groupBy(F.spark_partition_id()).agg(F.sum("payments"), F.max("payers")).collect()
    return max(row[1] for row in each) / len(made), max(row[2] for row in each)


def batch_times(shop: Workshop, stream: Stream) -> list[float]:
    """Milliseconds of each batch of the last half."""
    Topics.of(shop.settings.kafka, shop.bootstrap).create(stream.name, TOPICS[PARTS.name])
    started = shop.start(stream)
    shop.finish(started, seconds=DEADLINE)
    times = [float(started.progress[batch]["triggerExecution"]) for batch in sorted(started.progress)]
    return times[len(times) // 2 :]


def main() -> int:
    """Measure each number of salts, in turns, and print a table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.salting", description=__doc__)
    parser.add_argument("--payments", type=int, default=200_000)
    parser.add_argument("--salts", default="1,16")
    parser.add_argument("--rounds", type=int, default=2)
    options = parser.parse_args()
    quiet()
    salts = [int(text) for text in options.salts.split(",")]
    made = payments(options.payments, seconds=1 / PER_SECOND, payers=PAYERS)
    with workshop({"stream.max_offsets_per_trigger": BATCH}) as shop:
        Topics.of(shop.settings.kafka, shop.bootstrap).create(PAYMENTS.name, TOPICS[PAYMENTS.name])
        send(shop.settings.kafka, shop.bootstrap, made)
        times: dict[int, list[float]] = {each: [] for each in salts}
        for number in range(options.rounds):
            for each in salts:
                times[each] += batch_times(shop, salted(each, number))
        rows: list[Figures] = []
        for each in salts:
            share, largest = by_task(shop.spark, made, each)
            rows.append(
                {
                    "salts": each,
                    "fullest task": f"{share:.0%}",
                    "largest part, payers": largest,
                    "ms": round(statistics.median(times[each])),
                }
            )
    sys.stdout.write(table(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
