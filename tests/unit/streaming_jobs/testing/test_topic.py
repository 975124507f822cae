"""A topic in memory keeps the contracts of a source and of a reader of topics; the pipeline reads its bad records."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import pyarrow as pa
import pytest
from pyspark.sql.types import LongType, StructField, StructType

from streaming_jobs.errors import UsageError
from streaming_jobs.formats import Json
from streaming_jobs.ledger.positions import OffsetBounds, OffsetRange
from streaming_jobs.preflight.snapshot import take_snapshot
from streaming_jobs.runtime.batch import BatchPipeline
from streaming_jobs.runtime.batch_hooks import BatchFiles, BatchHooks, DriverPathAttempts
from streaming_jobs.runtime.spark_plan import PlanTraits
from streaming_jobs.settings import StreamSettings
from streaming_jobs.sinks.base import SinkSet
from streaming_jobs.sources.base import Source, SourceCounts, TopicReader
from streaming_jobs.sources.kafka import TopicReading
from streaming_jobs.sources.planner import BatchLimits
from streaming_jobs.sources.read_times import NO_TIMES, BatchReadTimes
from streaming_jobs.sources.record_blocks import RecordBlocks
from streaming_jobs.stream import KafkaTopic
from streaming_jobs.testing import MemoryRecord, MemoryTable, MemoryTopic, StreamTest
from streaming_jobs.testing.topic import FileClients, MemoryTopics
from tests.conftest import SettingsFactory
from tests.support import ROOT
from tests.support.worlds import CODE, DEAD_LETTERS, PRIMARY, SECONDARY, STREAM, TOPIC, TOPIC_ID, Disk, parity
from tests.unit.streaming_jobs.sinks.test_base import frame

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

NUMBERS = Json(StructType([StructField("n", LongType(), False)]))
BAD = {2: b"{", 7: b"?"}


def no_json(value: bytes | None) -> tuple[str, str] | None:
    return ("not_json", repr(value)) if value in BAD.values() else None


@pytest.fixture
def topic() -> MemoryTopic:
    """Ten records in partition 0, of which two are bad, and five in partition 1; one second apart."""
    first = [MemoryRecord(BAD.get(n, b"{}"), b"key", 1000 * n) for n in range(10)]
    return MemoryTopic(TOPIC, {0: first, 1: first[3:7] + first[:1]}, no_json, topic_id=TOPIC_ID)


def test_it_is_read_by_ranges(topic: MemoryTopic) -> None:
    source: Source = topic
    whole = OffsetRange(TOPIC, TOPIC_ID, {0: 0, 1: 0}, {0: 10, 1: 5})
    bad = source.bad_records(cast("Any", None), whole).toArrow()
    assert list(zip(bad["partition"].to_pylist(), bad["offset"].to_pylist(), strict=True)) == [(0, 2), (0, 7)]
    verdicts = zip(bad["reason"].to_pylist(), bad["detail"].to_pylist(), strict=True)
    assert list(verdicts) == [("not_json", "b'{'"), ("not_json", "b'?'")]
    part = OffsetRange(TOPIC, TOPIC_ID, {0: 3, 1: 4}, {0: 7, 1: 5})
    assert source.bad_records(cast("Any", None), part).toArrow().num_rows == 0
    assert source.late_records(cast("Any", None), part, 4000) == 3, "at or behind it"
    assert source.late_records(cast("Any", None), whole, 2000) == 3, "a bad record is not late"


def test_its_ends_are_told(topic: MemoryTopic) -> None:
    topic.first = {0: 4}
    reader: TopicReader = topic
    assert reader.offsets(TOPIC) == OffsetBounds({0: 4, 1: 0}, {0: 10, 1: 5})
    assert reader.latest(TOPIC) == {0: 10, 1: 5} and reader.describe("another") is None
    assert reader.offsets_for_time(TOPIC, 6000) == {0: 6, 1: 3}
    assert reader.offsets_for_time(TOPIC, 0) == {0: 4, 1: 0} and reader.offsets_for_time(TOPIC, 60_000) == {0: 10, 1: 5}
    assert reader.mean_size(TOPIC, {0: 8}) == 5.0 and reader.mean_size(TOPIC, {0: 10}) is None
    with pytest.raises(UsageError, match="no topic"):
        reader.offsets("another")


def test_preflight_and_the_pipeline_work_on_it(topic: MemoryTopic, settings: SettingsFactory, tmp_path: Path) -> None:
    disk = Disk(settings()).open()
    snapshot = take_snapshot(disk.settings, parity, topic)
    assert [(t.topic_id, t.latest) for t in snapshot.topics] == [(TOPIC_ID, {0: 10, 1: 5})]

    class Counted:
        def observed(self, observation: str) -> SourceCounts:
            assert observation == topic.observation
            return SourceCounts(2)

        def dropped_behind(self) -> int | None:
            return None

        def count_failed_rows(self, wanted: bool) -> None:
            raise AssertionError("the stream sets no record aside")

        def rows_counted(self) -> None:
            return None

        def send_anew(self, records: object) -> bool:
            return False

        def read_times(self) -> BatchReadTimes:
            return NO_TIMES

    letters = MemoryTable(DEAD_LETTERS)
    pipeline = BatchPipeline(
        stream=parity,
        generation=1,
        topic_ids={TOPIC: TOPIC_ID},
        sources=[topic],
        sinks=SinkSet(MemoryTable(PRIMARY), [MemoryTable(SECONDARY)], letters),
        files=BatchFiles(disk.checkpoint(), disk.ledger_file, DriverPathAttempts(tmp_path / "attempt")),
        hooks=BatchHooks(threading.Event(), lambda: None, lambda _: None, lambda _: None),
        code=CODE,
        settings=StreamSettings(),
        traits=PlanTraits(stateful=False, multiplies=False),
        query=Counted(),
    )
    disk.plan(0)
    pipeline(frame(1, 2, 3, 4), 0)
    assert letters.rows()["offset"].to_pylist() == [2, 7] and letters.rows()["detail"].to_pylist() == ["b'{'", "b'?'"]
    newest = letters.newest_entry()
    assert newest is not None and newest.stream == STREAM


def test_topics_in_a_file_are_planned_and_read_as_kafka_is(tmp_path: Path) -> None:
    records = [MemoryRecord(b'{"n": 1}', b"a", 1000, [("h", b"x")]), MemoryRecord(b"{", None, 2000)]
    client = FileClients.save(
        MemoryTopics({"things": MemoryTopic("things", {0: records, 1: records[:1]})}), tmp_path / "f"
    )
    declared = KafkaTopic("things", value=NUMBERS, headers=True)
    limits = BatchLimits(10, 1000, 1 << 20, 0.0)
    blocks = RecordBlocks(declared, "all")
    reading = TopicReading("test", {0: 0, 1: 0}, limits=limits, blocks=blocks, client=client, clients=FileClients())
    planner = pickle.loads(pickle.dumps(reading)).planner()
    planner.stop_at_present_end()
    end = planner.next_end({0: 0, 1: 0})
    assert end == {0: 2, 1: 1} == planner.next_end(end)
    parts, sent = reading.split(planner, {0: 0, 1: 0}, end)
    rows = pa.Table.from_batches(sent).to_pylist()
    assert sorted((row["partition"], row["offset"], row["_bad"]) for row in rows) == [
        (0, 0, False),
        (0, 1, True),
        (1, 0, False),
    ]
    assert (rows[0]["_record"], rows[0]["key"], rows[0]["headers"]) == ({"n": 1}, b"a", [{"key": "h", "value": b"x"}])
    assert pa.Table.from_batches(reading.read(parts[0])).num_rows == 3, "a worker reads the same"


def test_a_process_of_spark_that_reads_a_stream_under_test_imports_no_driver(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded: list[str] = []

    def read(_test: StreamTest, _topics: MemoryTopics, client: Path) -> None:
        script = f"import pickle, sys; pickle.load(open({str(client)!r}, 'rb')); print(*sys.modules)"
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        loaded.extend(
            subprocess.check_output([sys.executable, "-c", script], env=environment, text=True, timeout=60).split()
        )

    monkeypatch.setattr(StreamTest, "_run", read)
    StreamTest(parity, cast("SparkSession", None), tmp_path).run()
    assert "streaming_jobs.testing.topic" in loaded
    assert not {"streaming_jobs.settings", "streaming_jobs.testing.stream_test", "deltalake"} & set(loaded)
