"""A batch of a stream that writes a topic too: the order of its commits, and a repetition after a kill."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql.types import LongType, StructField, StructType

from streaming_jobs import Json, KafkaSink, KafkaTopic
from streaming_jobs.ledger.entry import LedgerEntry
from streaming_jobs.ledger.positions import WrittenRange
from streaming_jobs.sinks.base import BatchOfRows, PendingWrite
from streaming_jobs.testing.tables import MemoryTable, MemoryWrite
from tests.support.batch_driver import Driver, Frame, Start, newest_entry, numbers
from tests.support.worlds import DEAD_LETTERS, PRIMARY, SECONDARY, STREAM, Disk, parity

NUMBER = StructType([StructField("n", LongType())])
NAME = "topic:numbers"


def all_three(things: Any) -> Any:
    """Both tables of `parity`, and every number in the topic."""
    return {**parity.function(things), "numbers": things}


@dataclass
class Recorded(MemoryWrite):
    """A write of the topic that says when it was committed."""

    driver: Driver | None = None

    def commit(self, entry: LedgerEntry) -> int | None:
        assert self.driver is not None
        self.driver.log.append(f"commit {self.sink.name}")
        return super().commit(replace(entry, written=(WrittenRange("numbers", "id", 0, 10, 14, 4),)))


class Topic(MemoryTable):
    """The topic in memory; it outlives a driver."""

    driver: Driver

    def prepare(self, frame: Any, rows: BatchOfRows) -> PendingWrite:
        self.driver.log.append(f"stage {self.name}")
        assert isinstance(frame, Frame)
        return Recorded(self, frame.rows, driver=self.driver)

    def fit(self, output: Any, topics: object) -> Any:
        return output


@pytest.fixture
def topic() -> Topic:
    return Topic(NAME)


def with_topic(driver: Driver, topic: Topic) -> Driver:
    """The driver of the stream with its topic."""
    topic.driver = driver
    sink = KafkaSink(KafkaTopic("numbers", value=Json(NUMBER)))
    driver.pipeline.stream = replace(parity, function=all_three, topic_sinks={"numbers": sink})
    driver.pipeline.sinks = replace(driver.pipeline.sinks, topics=[topic])
    return driver


def test_the_topic_comes_after_the_tables_and_before_the_primary_which_says_where_it_lies(
    disk: Disk, start: Start, topic: Topic
) -> None:
    driver = with_topic(start(), topic)
    driver.bad = 1
    driver.run(0)
    assert driver.commits == [DEAD_LETTERS, SECONDARY, NAME, PRIMARY]
    newest = newest_entry(disk, PRIMARY)
    assert newest.txns[NAME] == newest.txn.version and newest.rows[NAME] == 4
    assert newest.written == (WrittenRange("numbers", "id", 0, 10, 14, 4),)
    assert topic.rows()["n"].to_pylist() == [1, 2, 3, 4]


def test_a_batch_that_the_topic_has_is_not_sent_again_and_the_primary_still_says_where_it_lies(
    disk: Disk, start: Start, topic: Topic
) -> None:
    class Killed(BaseException):
        pass

    def kill(name: str, stream: str, number: int) -> None:
        if (name, stream) == ("secondary_committed", STREAM):
            raise Killed

    driver = with_topic(start(), topic)
    driver.at = kill
    with pytest.raises(Killed):
        driver.run(0)
    assert topic.rows().num_rows == 4 and numbers(disk, PRIMARY) == []
    again = with_topic(start(), topic)
    again.run(0)
    assert again.commits == [PRIMARY] and f"stage {NAME}" not in again.log
    assert topic.rows().num_rows == 4 and numbers(disk, PRIMARY) == [2, 4]
    newest = newest_entry(disk, PRIMARY)
    assert newest.written == (WrittenRange("numbers", "id", 0, 10, 14, 4),) and newest.rows[NAME] == 4


@pytest.mark.parametrize("has", [False, True])
def test_the_plan_of_a_stream_of_topics_only_runs_even_if_they_have_the_batch(
    start: Start, topic: Topic, has: bool
) -> None:
    """Otherwise neither its state nor the counts of its records would be computed."""
    driver = with_topic(start(), topic)
    sinks = driver.pipeline.stream.topic_sinks
    driver.pipeline.stream = replace(parity, function=lambda things: things, sinks=sinks, topic_sinks={})
    driver.pipeline.sinks = replace(driver.pipeline.sinks, secondary=[], topics_only=True)
    if has:
        driver.disk.plan(0)
        topic.append(pa.table({"n": [1]}), replace(driver.disk.entry(0), table=NAME, code=driver.pipeline.code))
    driver.run(0)
    assert ("write noop" in driver.log) == has
    assert (f"stage {NAME}" in driver.log) != has
