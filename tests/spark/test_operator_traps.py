"""What Spark's operators do that surprises: each is refused, flagged, or as the documentation says.

Elsewhere: null keys of joins (`test_join_null_keys.py`); hopping and sliding windows (`hops` and `just_before` in
`test_operators.py`); keys and final rows (`tests/broker/test_emit.py`); windows that the last batch closes
(`test_batch_watermark.py`); the watermark of the slowest topic (`test_settings.py`); functions of a module that is
imported before Spark starts (`test_topology.py`); Java without the vector module (`test_spark_jvm.py`); bytes that
only look like a record (`test_fuzz_formats.py`, `test_avro.py`, `test_protobuf.py`).
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import structlog
from pyspark import cloudpickle
from pyspark.sql import DataFrame, Row, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.streaming.state import GroupState
from pyspark.sql.streaming.stateful_processor import StatefulProcessor

from streaming_jobs import DeltaTable, Json, KafkaTopic, Stream, stream
from streaming_jobs.errors import FunctionRaised
from streaming_jobs.inspection.operator_state import figures
from streaming_jobs.testing import StreamTest
from tests.support.tick_flows import counted

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # type: ignore[no-untyped-call]

NOON = datetime(2026, 1, 1, 12, tzinfo=UTC)
EVENT = Json({"k": "string not null", "at": "timestamp not null"})
EVENTS = KafkaTopic("events", value=EVENT, event_time="at", lateness="1 minute")
Make = Callable[..., StreamTest]


def send(test: StreamTest, *minutes: int) -> None:
    """Send events of key a, and run the stream."""
    for minute in minutes:
        test.send({"k": "a", "at": NOON + timedelta(minutes=minute)})
    test.run()


def declared(function: Callable[..., DataFrame], **table: Any) -> Stream:
    return stream(name="s", source=EVENTS, sink=DeltaTable("t", **table))(function)


class Count(StatefulProcessor):
    """The number of a key's events, again with each batch."""

    def init(self, handle: Any) -> None:
        self.handle = handle
        self.count = handle.getValueState("count", "n bigint")

    def handleInputRows(self, key: Any, rows: Iterator[Any], timerValues: Any) -> Iterator[Row]:
        n = (self.count.get()[0] if self.count.exists() else 0) + sum(1 for _ in rows)
        self.count.update((n,))
        yield Row(k=key[0], n=n)

    def close(self) -> None:
        """Nothing is open."""


def by_processor(events: DataFrame) -> DataFrame:
    return events.groupBy("k").transformWithState(Count(), "k string, n bigint", "Update", "EventTime")


def by_pandas(events: DataFrame) -> DataFrame:
    def count(key: tuple[str], frames: Iterable[pd.DataFrame], state: GroupState) -> Iterator[pd.DataFrame]:
        n = (state.get[0] if state.exists else 0) + sum(map(len, frames))
        state.update((n,))
        yield pd.DataFrame({"k": [key[0]], "n": [n]})

    types = ("k string, n bigint", "n bigint", "update", "NoTimeout")
    return events.groupBy("k").applyInPandasWithState(count, *types)


@pytest.mark.parametrize(("function", "counted", "late"), [(by_processor, 2, 1), (by_pandas, 3, 0)])
def test_a_processor_drops_late_records_and_a_function_of_pandas_counts_them(
    stream_test: Make, function: Callable[..., DataFrame], counted: int, late: int
) -> None:
    test = stream_test(declared(function, keys=["k"]))
    send(test, 0)
    send(test, 60)
    send(test, 0)
    assert ([row["n"] for row in test.rows()], test.late) == ([counted], late)


class Misnamed(Count):
    def handleInputRows(self, key: Any, rows: Iterator[Any], timerValues: Any) -> Iterator[Row]:
        for row in rows:
            self.handle.registerTimer(int(row.at.timestamp() * 1000))
        yield from ()

    def handleExpiredTimer(self, key: Any, timer_values: Any, info: Any) -> Iterator[Row]:
        yield Row(k=key[0], n=0)


def test_an_argument_of_another_name_fails_at_the_first_timer_and_is_named(stream_test: Make) -> None:
    def function(events: DataFrame) -> DataFrame:
        return events.groupBy("k").transformWithState(Misnamed(), "k string, n bigint", "Append", "EventTime")

    test = stream_test(declared(function))
    with pytest.raises(FunctionRaised, match="unexpected keyword argument"):
        send(test, 0, 60)
    assert test.rows() == []


def test_a_table_that_the_function_reads_itself_and_timers_of_the_wall_clock_are_flagged(
    stream_test: Make, tmp_path: Path, spark: SparkSession
) -> None:
    names = tmp_path / "names.csv"
    names.write_text("code,label\na,Ann\n")

    def function(events: DataFrame) -> DataFrame:
        labels = events.sparkSession.read.csv(str(names), header=True, schema="code string, label string")
        return events.join(labels, F.col("k") == F.col("code")).select("k", "label")

    test = stream_test(declared(function))
    with structlog.testing.capture_logs() as logged:
        send(test, 0)
    assert test.rows() == [{"k": "a", "label": "Ann"}]
    (flagged,) = [line for line in logged if "reads a table or files itself" in line["event"]]
    assert "csv" in flagged["reads"]
    with structlog.testing.capture_logs() as logged:
        ticks = stream_test(counted)
        ticks.send({"k": "a"})
        ticks.run()
    assert any("of the wall clock" in line["event"] for line in logged)


def test_the_partitions_of_the_state_are_those_of_the_first_start(stream_test: Make, spark: SparkSession) -> None:
    """So Spark's own number may change; a stream with more needs its state rebuilt."""
    test = stream_test(declared(lambda events: events.groupBy("k").agg(F.count("*").alias("n")), keys=["k"]))
    send(test, 0)
    before = spark.conf.get("spark.sql.shuffle.partitions") or ""
    spark.conf.set("spark.sql.shuffle.partitions", str(int(before) + 3))
    try:
        send(test, 1)
    finally:
        spark.conf.set("spark.sql.shuffle.partitions", before)
    assert [row["n"] for row in test.rows()] == [2]
    [operator] = figures(spark, test._checkpoint)[1]
    assert operator.store.partitions == int(before)


def test_the_code_of_a_processor_is_that_of_the_start(stream_test: Make) -> None:
    class Twice(Count):
        def handleInputRows(self, key: Any, rows: Iterator[Any], timerValues: Any) -> Iterator[Row]:
            for row in super().handleInputRows(key, rows, timerValues):
                yield Row(k=row.k, n=2 * row.n)

    Twice.__name__ = Twice.__qualname__ = "Count"

    def twice(events: DataFrame) -> DataFrame:
        return events.groupBy("k").transformWithState(Twice(), "k string, n bigint", "Update", "EventTime")

    test = stream_test(declared(by_processor, keys=["k"]))
    send(test, 0)
    test.deploy(replace(test.stream, function=twice))
    send(test, 1)
    assert [row["n"] for row in test.rows()] == [4]
