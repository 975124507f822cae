"""What Spark reports of a query, and the end of a stopped one as it is."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from streaming_jobs.runtime.stream_queries import RunningQuery, SparkQuery
from tests.support.waiting import wait_for


def test_a_query_that_was_stopped_has_not_ended_while_its_batch_is_at_work(spark: SparkSession) -> None:
    """Spark calls it terminated: neither `isActive` nor `awaitTermination` shows that its thread still runs."""
    inside, go_on = threading.Event(), threading.Event()

    def batch(*_: object) -> None:
        inside.set()
        assert go_on.wait(60)

    before = spark.conf.get("spark.sql.streaming.stopTimeout")
    spark.conf.set("spark.sql.streaming.stopTimeout", "200ms")
    rates = spark.readStream.format("rate").load()
    started = rates.writeStream.foreachBatch(batch).start()
    query: RunningQuery = SparkQuery(started)
    try:
        assert inside.wait(60)
        assert query.isActive and not query.ended
        with pytest.raises(Exception, match="failed to stop within"):
            query.stop()
        assert not query.isActive and not query.ended
        assert started.awaitTermination(0.001), "as if it had ended"
        go_on.set()
        wait_for(lambda: query.ended, "the end of the thread")
    finally:
        go_on.set()
        spark.conf.set("spark.sql.streaming.stopTimeout", str(before))


def test_the_reports_after_a_batch_are_there_whole_and_the_newest_one_always(
    spark: SparkSession, tmp_path: Path
) -> None:
    for number in range(3):
        (tmp_path / f"{number}.txt").write_text("a row\n")
    rows = spark.readStream.option("maxFilesPerTrigger", 1).text(str(tmp_path))
    started = rows.writeStream.foreachBatch(lambda *_: None).trigger(availableNow=True).start()
    query = SparkQuery(started)
    assert started.awaitTermination(60)
    seen = {after: [report["batchId"] for report in query.reports(after)] for after in (-1, 1, 2)}
    assert seen == {-1: [0, 1, 2], 1: [2], 2: [2]}
    for report in query.reports(-1):
        assert report["durationMs"].keys() >= {"addBatch", "triggerExecution"}
        assert len(report["sources"]) == 1
