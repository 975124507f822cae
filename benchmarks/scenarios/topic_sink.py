"""A topic as a sink: the product's, exactly once, beside Spark's own, at least once, in turns in one Spark session.

    python -m benchmarks topic_sink --rows 100000 --rounds 15 --out benchmarks/results/topic_sink.json
    python -m benchmarks topic_sink --rows 100 --rounds 40

Each contestant writes the same rows, which are computed and kept in Spark's memory, into a topic of its own: from the
frame to the end of the transaction, or of Spark's job. Our sink runs with its headers and without, and by shards. CPU
time is that of all processes, the broker too. At the end the topics must hold the same rows. Exit code 1: other rows
than Spark's, or less than 0.55 times its rows per second in batches of 100,000, less than 1.0 times in batches of 100.
"""

from __future__ import annotations

from typing import Any, cast

import numpy as np
import pyarrow as pa
from pyspark.sql import DataFrame
from pyspark.sql import functions as F

from benchmarks.laid_home import unchanged
from benchmarks.place import Workshop, workshop
from benchmarks.run import Report, Row
from benchmarks.speed.topic_watch import committed_records
from benchmarks.writers import STREAM, Write, Writer, our_sink, write_in_turns
from streaming_jobs.declare.schemas import schema_of
from streaming_jobs.declare.topic_sink import KafkaSink
from streaming_jobs.formats import Json
from streaming_jobs.platform.jars import ensure, locked
from streaming_jobs.platform.spark_jvm import CLASS_PATH
from streaming_jobs.runtime.stream_sinks import ConnectedSinks, SinkOpening
from streaming_jobs.settings import Settings
from streaming_jobs.sinks.kafka.output import TopicOutput
from streaming_jobs.stream import KafkaTopic, Stream

GOALS = {100_000: 0.55, 100: 1.0}
"""The least share of Spark's rows per second, by the rows of a batch."""
PARTITIONS, SHARDS, WARM_UP = 4, 4, 3
PAYMENT = schema_of(
    {
        "id": "bigint not null",
        "account": "string not null",
        "amount": "bigint",
        "at": "timestamp",
        "kind": "string",
        "net": "bigint",
    }
)


def run(report: Report, *, rows: int = 100_000, rounds: int = 15) -> None:
    jars = ":".join(map(str, ensure(Settings.load({}), locked("peers"))))
    with workshop({"spark.extra": {CLASS_PATH: jars}, "spark.shuffle_partitions": 2}) as shop:
        topics = shop.place.topics()
        names = ("spark", "ours", "plain", "shards")
        for name in names:
            topics.create(name, PARTITIONS)
        ours, plain = _opened(shop, "ours"), _opened(shop, "plain", headers=False)
        sharded = _opened(shop, "shards", shards=SHARDS)
        writers = [
            Writer("Spark's sink, at least once", spark_sink(shop.place.bootstrap, "spark")),
            Writer("Recourse, exactly once", our_sink(ours)),
            Writer("Recourse, without headers", our_sink(plain)),
            Writer(f"Recourse, {SHARDS} shards", our_sink(sharded, driver=False)),
        ]
        try:
            write_in_turns(shop.spark, writers, lambda number: payments(rows, number), rounds, WARM_UP)
        finally:
            for output in (ours, plain, sharded):
                output.close()
        contents = [_contents(shop.place.bootstrap, name) for name in names]
    figures = [{**w.figures("prepare ms", "commit ms"), "rows/s": round(1000 * rows / w.median("ms"))} for w in writers]
    report.table("figures", figures)
    ratio = writers[0].median("ms") / writers[1].median("ms")
    equal = all(content.equals(contents[0]) for content in contents)
    equal = equal and contents[0].num_rows == (rounds + WARM_UP) * rows
    report.say(
        f"batches of {rows:,} rows: {ratio:.2f} times the rows per second of Spark's sink; topics equal: {equal}",
        ratio=ratio, equal=equal,
    )  # fmt: skip
    report.judge(ratio >= GOALS.get(rows, 0.0) and equal)


def payments(count: int, batch: int) -> pa.Table:
    """Rows of a batch; no two batches have a row in common."""
    ids = np.arange(batch * count, (batch + 1) * count)
    return pa.table(
        {
            "id": pa.array(ids),
            "account": [f"account-{number}" for number in (ids * 7919) % 20_011],
            "amount": pa.array((ids * 31) % 90_000),
            "at": pa.array(ids * 1000 + 1_700_000_000_000_000, pa.timestamp("us", tz="UTC")),
            "kind": [("card", "transfer", "cash")[number % 3] for number in ids],
            "net": pa.array((ids * 31) % 90_000 * 99 // 100),
        }
    )


def spark_sink(bootstrap: str, topic: str) -> Write:
    """What Spark's documentation shows, with the compression that ours has."""

    def write(frame: DataFrame, _: int) -> Row:
        key, value = F.col("account").cast("binary").alias("key"), F.to_json(F.struct(*PAYMENT.names)).alias("value")
        writer = frame.select(key, value).write.format("kafka").option("kafka.bootstrap.servers", bootstrap)
        writer.option("kafka.compression.type", "lz4").option("topic", topic).save()
        return {}

    return write


def _opened(shop: Workshop, topic: str, shards: int | None = None, *, headers: bool = True) -> TopicOutput:
    """The sink of a stream with one topic, opened as a driver opens it."""
    sink = KafkaSink(KafkaTopic(topic, value=Json(PAYMENT)), key="account", shards=shards)
    sinks: dict[str, Any] = {topic: sink}
    stream = Stream(f"{STREAM}_{topic}", unchanged, {"value": KafkaTopic("in", Json(PAYMENT))}, sinks)
    topic_sink = shop.settings.topic_sink.model_copy(update={"headers": headers})
    settings = shop.settings.model_copy(update={"topic_sink": topic_sink})
    (output,) = ConnectedSinks().open(SinkOpening(settings, stream, 1, shop.connection()))
    return cast("TopicOutput", output)


def _contents(bootstrap: str, topic: str) -> pa.Table:
    """The rows of all committed records, by id."""
    block = Json(PAYMENT).reader().read([value for _, value in committed_records(bootstrap, topic, PARTITIONS)])
    if block.refused:
        raise RuntimeError(f"topic {topic}: {next(iter(block.refused.values()))}")
    return pa.Table.from_batches([block.columns]).sort_by("id")
