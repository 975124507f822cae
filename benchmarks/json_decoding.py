"""What the verdicts on JSON records cost: `Json.decode` beside a plain `from_json`, in turns, in one Spark session.

    python benchmarks/json_decoding.py [rows] [rounds]

Prints, for each kind of record, the CPU time that Spark's tasks took per record (which other programs on the
machine disturb little), records a second on the wall clock, and the ratio of the CPU times, best rounds each.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Callable

from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.types import (
    ArrayType,
    BooleanType,
    DoubleType,
    LongType,
    StringType,
    StructField,
    StructType,
    TimestampType,
)

from streaming_jobs.examples.flights.streams import FLIGHT
from streaming_jobs.formats import Json
from streaming_jobs.platform.spark import start
from streaming_jobs.settings import Settings

ORDER = StructType(
    [
        StructField("id", LongType(), nullable=False),
        StructField("customer", StringType(), nullable=False),
        StructField("amount", DoubleType()),
        StructField("at", TimestampType(), nullable=False),
        StructField("paid", BooleanType()),
        StructField("city", StringType()),
    ]
)
PLACED = StructType(
    [
        *ORDER.fields,
        StructField("place", StructType([StructField("zip", StringType()), StructField("lat", DoubleType())])),
        StructField("tags", ArrayType(StringType(), containsNull=False)),
    ]
)


def order(city: str = "Springfield") -> list[Column]:
    """Fields of a small flat record, 120 bytes as JSON."""
    number = F.col("id")
    return [
        number,
        F.concat(F.lit("customer-"), (number % 100_000).cast("string")).alias("customer"),
        (number * 0.25).alias("amount"),
        time_text(number).alias("at"),
        (number % 2 == 0).alias("paid"),
        F.lit(city).alias("city"),
    ]


def placed() -> list[Column]:
    """The same with an inner object, an array, and text that looks like a number."""
    place = F.struct((10_000 + F.col("id") % 90_000).cast("string").alias("zip"), (F.col("id") * 0.001).alias("lat"))
    return [*order(), place.alias("place"), F.array(F.lit("a"), F.lit("b")).alias("tags")]


def flight() -> list[Column]:
    """A record of the topic `flights`."""
    number = F.col("id")
    made = {
        "year": F.lit(2013),
        "month": number % 12 + 1,
        "day": number % 28 + 1,
        "sched_dep": time_text(number * 60),
        "actual_dep": time_text(number * 60 + 300),
        "dep_delay": number % 60 - 10,
        "arr_delay": number % 80 - 20,
        "carrier": F.element_at(F.array(*map(F.lit, ("UA", "B6", "9E", "AA"))), (number % 4 + 1).cast("int")),
        "flight": number % 5000,
        "tailnum": F.concat(F.lit("N"), (number % 90_000).cast("string")),
        "origin": F.lit("EWR"),
        "dest": F.lit("IAH"),
        "air_time": number % 300,
        "distance": number % 3000,
        "cancelled": number % 40 == 0,
    }
    return [made[name].alias(name) for name in FLIGHT.fieldNames()]


def time_text(seconds: Column) -> Column:
    """A time of 2013 as text."""
    return F.date_format(F.timestamp_seconds(seconds % 31_000_000 + 1_357_000_000), "yyyy-MM-dd'T'HH:mm:ss'Z'")


def plain(frame: DataFrame, schema: StructType) -> DataFrame:
    """What one writes without verdicts."""
    return frame.select(F.from_json(F.col("value").cast("string"), schema).alias("_record")).select("_record.*")


def decoded(frame: DataFrame, schema: StructType) -> DataFrame:
    """What a source does."""
    return Json(schema).decode(frame, "value").where("not _bad").select("_record.*")


def measured(spark: SparkSession, frame: DataFrame, name: str) -> tuple[float, float]:
    """CPU seconds of the tasks, and wall seconds, of running a frame to nowhere."""
    context = spark.sparkContext
    context.setJobGroup(name, name)
    started = time.perf_counter()
    frame.write.format("noop").mode("overwrite").save()
    wall = time.perf_counter() - started
    tracker, store = context.statusTracker(), spark._jsc.sc().statusStore()
    job = tracker.getJobInfo(max(tracker.getJobIdsForGroup(name)))
    assert job is not None
    # The store learns of a task's end a little later than the caller.
    deadline = time.monotonic() + 10
    while any(store.lastStageAttempt(stage).status().name() != "COMPLETE" for stage in job.stageIds):
        if time.monotonic() > deadline:
            raise SystemExit("Spark does not say that the stage is complete")
    return sum(store.lastStageAttempt(stage).executorCpuTime() for stage in job.stageIds) / 1e9, wall


def compare(spark: SparkSession, rows: int, rounds: int, schema: StructType, fields: list[Column]) -> str:
    """One line of the result."""
    value = F.to_json(F.struct(*fields)).cast("binary").alias("value")
    frame = spark.range(rows).select(value).cache()
    size = frame.select(F.avg(F.octet_length("value"))).first()
    assert size is not None
    ways: dict[str, Callable[[DataFrame, StructType], DataFrame]] = {"plain": plain, "decoded": decoded}
    if decoded(frame, schema).count() != rows:
        raise SystemExit("the made records are not all good")
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in ways}
    for _ in range(rounds):
        for name, way in ways.items():
            times[name].append(measured(spark, way(frame, schema), name))
    frame.unpersist()
    cpu = {name: min(cpu for cpu, _ in times[name]) for name in ways}
    rate = {name: rows / min(wall for _, wall in times[name]) for name in ways}
    return (
        f"{size[0]:.0f} bytes, {len(schema.fields)} fields: "
        f"plain {cpu['plain'] / rows * 1e6:.2f} us, {rate['plain'] / 1e3:.0f}k/s; "
        f"decoded {cpu['decoded'] / rows * 1e6:.2f} us, {rate['decoded'] / 1e3:.0f}k/s; "
        f"ratio {cpu['decoded'] / cpu['plain']:.2f}"
    )


def main() -> None:
    """Compare three kinds of records."""
    rows, rounds = (
        (int(sys.argv[1]) if len(sys.argv) > 1 else 2_000_000),
        (int(sys.argv[2]) if len(sys.argv) > 2 else 5),
    )
    with tempfile.TemporaryDirectory() as home:
        flags = {"home": home, "spark.master": "local[2]", "spark.driver_memory_mb": 2048}
        spark = start(Settings.load(flags), name="benchmark")
        for name, schema, fields in (
            ("order", ORDER, order()),
            ("flight", FLIGHT, flight()),
            ("placed", PLACED, placed()),
        ):
            print(f"{name}: {compare(spark, rows, rounds, schema, fields)}", flush=True)
        spark.stop()


if __name__ == "__main__":
    main()
