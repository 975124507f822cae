"""A stream whose processor has timers of the wall clock."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from pyspark.sql import DataFrame, Row
from pyspark.sql.streaming.stateful_processor import StatefulProcessor, StatefulProcessorHandle, TimerValues
from pyspark.sql.types import StringType, StructField, StructType

from streaming_jobs.formats import Json
from streaming_jobs.stream import DeltaTable, KafkaTopic, stream

TICK = StructType([StructField("k", StringType(), False)])


class Counted(StatefulProcessor):
    """Writes a key's count when a timer fires, a millisecond after its records."""

    def init(self, handle: StatefulProcessorHandle) -> None:
        self.handle, self.count = handle, handle.getValueState("count", "n bigint")

    def handleInputRows(self, key: Any, rows: Iterator[Any], timerValues: TimerValues) -> Iterator[Row]:
        before = (self.count.get() or (0,))[0] if self.count.exists() else 0
        self.count.update((before + sum(1 for _ in rows),))
        self.handle.registerTimer(timerValues.getCurrentProcessingTimeInMs() + 1)
        yield from ()

    def handleExpiredTimer(self, key: Any, timerValues: TimerValues, expiredTimerInfo: Any) -> Iterator[Row]:
        yield Row(k=key[0], n=(self.count.get() or (0,))[0])


@stream(source=KafkaTopic("ticks", value=Json(TICK)), sink=DeltaTable("counted"))
def counted(ticks: DataFrame) -> DataFrame:
    """Counts by key."""
    return ticks.groupBy("k").transformWithState(Counted(), "k string, n bigint", "Append", "ProcessingTime")
