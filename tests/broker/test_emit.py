"""Final results in tables with keys: `emit="close"` runs what Spark refuses to emit at each change."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest
from pyspark.sql import DataFrame
from pyspark.sql import functions as F
from pyspark.sql.types import StringType, StructField, StructType, TimestampType

from streaming_jobs.formats import Json
from streaming_jobs.state.stream_folder import StreamFolder
from streaming_jobs.stream import DeltaTable, KafkaTopic, stream
from tests.support.driver import Bench, produce, rows

CLICK = StructType([StructField("k", StringType(), False), StructField("at", TimestampType(), False)])
CLICKS, SALES = (
    KafkaTopic(name, value=Json(CLICK), event_time="at", lateness="1 second") for name in ("clicks", "sales")
)
BEGIN = datetime(2026, 3, 2, tzinfo=UTC)


@stream(source=CLICKS, sink=DeltaTable("visits", keys=["k", "begin"], emit="close"))
def visits(clicks: DataFrame) -> DataFrame:
    """Clicks of a key without a gap of ten seconds."""
    counted = clicks.groupBy(F.session_window("at", "10 seconds"), "k").agg(F.count("*").alias("n"))
    return counted.select("k", F.col("session_window.start").alias("begin"), "n")


@stream(source={"clicks": CLICKS, "sales": SALES}, sink=DeltaTable("sold", keys=["k", "at"], emit="close"))
def sold(clicks: DataFrame, sales: DataFrame) -> DataFrame:
    """Each click, with its sale within a minute if there is one."""
    sale = sales.select(F.col("k").alias("sale"), F.col("at").alias("sold_at"))
    within = F.expr("k = sale AND sold_at BETWEEN at AND at + INTERVAL 1 MINUTE")
    return clicks.join(sale, within, "left").select("k", "at", "sold_at")


@pytest.fixture
def made(bench: Callable[..., Bench]) -> Iterator[Bench]:
    made = bench({"stream.state_partitions": 1})
    for topic in (CLICKS, SALES):
        made.topics.create(topic.name, 1)
    yield made
    for topic in (CLICKS, SALES):
        made.topics.delete(topic.name)


def send(bench: Bench, topic: KafkaTopic, events: Sequence[tuple[str, int]]) -> None:
    values = ({"k": key, "at": (BEGIN + timedelta(seconds=second)).isoformat()} for key, second in events)
    produce(bench.bootstrap, topic.name, [(None, json.dumps(value).encode()) for value in values])


def test_sessions_and_a_left_join_write_final_rows_by_key_over_a_restart(made: Bench) -> None:
    send(made, CLICKS, [("a", 0), ("a", 5), ("b", 5)])
    send(made, SALES, [("a", 20)])
    refused = made.run(replace(visits, name="refused", sinks={"refused": DeltaTable("refused", keys=["k", "begin"])}))
    assert refused.status.error is not None and "session window" in refused.status.error["found"]
    for each in (visits, sold):
        assert made.run(each).status.error is None
    assert rows(made.settings, "visits") == []
    send(made, CLICKS, [("a", 8), ("z", 300)])
    send(made, SALES, [("y", 300)])
    for each in (visits, sold):
        assert made.run(each).status.error is None
    counted = {(row["k"], row["begin"].astimezone(UTC), row["n"]) for row in rows(made.settings, "visits")}
    assert counted == {("a", BEGIN, 3), ("b", BEGIN + timedelta(seconds=5), 1)}, "the session went on after the restart"
    joined = sorted((row["k"], row["at"].second, row["sold_at"] is not None) for row in rows(made.settings, "sold"))
    planned = [StreamFolder.of(made.settings, name).checkpoint(1).metadata(0) for name in ("visits", "sold")]
    assert [each["conf"]["spark.sql.shuffle.partitions"] for each in planned] == ["1", "1"], "of their state"
    assert joined == [("a", 0, True), ("a", 5, True), ("a", 8, True), ("b", 5, False)], "b unmatched, once it is final"
