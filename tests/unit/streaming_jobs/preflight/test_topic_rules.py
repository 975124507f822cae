"""The rules about what a stream reads: a table that is gone, another one or put back, records that became void."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql.types import LongType, StructField, StructType

from streaming_jobs.declare.table_source import DeltaSource
from streaming_jobs.errors import OffsetsLost, PreflightRefused, TableAwaited, TopicUnknown
from streaming_jobs.preflight.findings import StartFinding, enforce
from streaming_jobs.preflight.rules import check_start
from streaming_jobs.preflight.snapshot import (
    CheckpointSnapshot,
    StreamSnapshot,
    TopicSnapshot,
    _content_gone,
    take_snapshot,
)
from streaming_jobs.preflight.topic_rules import topic_findings
from streaming_jobs.runtime.stream_runner import AWAIT_DELAY, Retries
from streaming_jobs.state import topic_records
from streaming_jobs.state.stream_record import BoundTopic
from streaming_jobs.state.topic_records import VoidRange
from streaming_jobs.stream import DeltaTable, Stream
from tests.conftest import SettingsFactory
from tests.support.life import STREAM, TOPIC, TOPIC_ID, Life, Topics
from tests.support.worlds import fresh, settled
from tests.support.written_table import WrittenTable

TABLE = "numbers"


def reading(
    snapshot: StreamSnapshot, position: int | None = None, start: int = 0, **changes: Any
) -> list[StartFinding]:
    """The findings about a stream whose last batch, not committed yet, read versions [start, position)."""
    values: dict[str, Any] = {"earliest": {0: 0}, "latest": {0: 50}, "continues": {0: 10}, "kind": "table", **changes}
    topic_id = values.pop("topic_id", "id")
    made = replace(snapshot, topics=(TopicSnapshot(TABLE, topic_id, **values),))
    if position is not None:
        assert made.record is not None
        record = replace(made.record, topics=(BoundTopic(TABLE, "id", {0: 0}),))
        at = CheckpointSnapshot(7, 6, {7: {TABLE: {0: position}}, 6: {TABLE: {0: start}}}, {7: {TABLE: {0: start}}})
        made = replace(made, record=record, checkpoint=at)
    return list(topic_findings(made))


def test_a_table_not_made_yet_is_awaited_unless_something_else_is_wrong_and_one_that_is_gone_is_not() -> None:
    with pytest.raises(TableAwaited, match="table numbers, which stream parity reads, does not exist yet"):
        enforce(reading(fresh(), topic_id=None))
    with pytest.raises(PreflightRefused, match="table numbers, which the stream reads, is gone"):
        enforce(reading(settled(6), 40, 30, topic_id=None))
    other = StartFinding("refuse", "something else", "do it")
    with pytest.raises(PreflightRefused, match="something else"):
        enforce([*reading(fresh(), topic_id=None), other])


@pytest.mark.parametrize(("start", "lost"), [(0, False), (1, True), (9, True), (10, False), (30, False)])
def test_versions_between_the_content_and_the_first_that_is_left_are_lost(start: int, lost: bool) -> None:
    findings = reading(settled(6), 40, start)
    assert [finding.severity for finding in findings] == (["lost"] if lost else [])
    if lost:
        with pytest.raises(OffsetsLost, match=r"versions? \d.* of table numbers can no longer be read") as refused:
            enforce(findings)
        assert "--to-batch -1" in refused.value.next_step and "--to-offsets 0:10" in refused.value.next_step


@pytest.mark.parametrize(("committed", "way"), [(None, "start the stream over"), (6, "--to-batch -1")])
def test_a_planned_batch_whose_content_is_gone_is_lost_and_the_way_out_is_named(
    committed: int | None, way: str
) -> None:
    at = CheckpointSnapshot(7, committed, {7: {TABLE: {0: 40}}}, {7: {TABLE: {0: 0}}})
    record = settled(6).record
    assert record is not None
    bound = replace(record, topics=(BoundTopic(TABLE, "id", {0: 0}),))
    found = reading(replace(settled(6), checkpoint=at, record=bound), content_gone=39)
    with pytest.raises(OffsetsLost, match="batch 7 reads the content of table numbers at version 39") as refused:
        enforce(found)
    assert way in refused.value.next_step
    assert reading(settled(6), 40, 30) == []


@pytest.mark.parametrize("gone", ["log", "file"])
def test_whether_the_content_can_be_read_is_looked_at_for_a_planned_batch(settings: SettingsFactory, gone: str) -> None:
    home = settings()
    home.tables.mkdir(parents=True)
    table = WrittenTable(home.tables / TABLE).make()
    version = table.batch(1)
    table.batch(2)
    rows = StructType([StructField("n", LongType())])
    reader = Stream("reader", lambda rows: rows, {"rows": DeltaSource(TABLE, rows)}, {"out": DeltaTable("out")})

    def at(start: int = 0, committed: int | None = None) -> CheckpointSnapshot:
        return CheckpointSnapshot(0, committed, {0: {TABLE: {0: version + 1}}}, {0: {TABLE: {0: start}}})

    assert _content_gone(home, reader, TABLE, at()) is None
    if gone == "log":
        (table.path / "_delta_log" / f"{0:020d}.json").unlink()
    else:
        for file in table.path.glob("*.parquet"):
            file.unlink()
    assert _content_gone(home, reader, TABLE, at()) == version
    assert _content_gone(home, reader, TABLE, at(start=1)) is None
    assert _content_gone(home, reader, TABLE, at(committed=0)) is None
    assert _content_gone(home, reader, "things", at()) is None


def test_another_table_and_an_older_copy_are_refused() -> None:
    with pytest.raises(OffsetsLost, match="table numbers was deleted and made anew"):
        enforce(reading(settled(6), 40, 30, topic_id="other"))
    with pytest.raises(OffsetsLost, match="table numbers ends at version 34, the stream has read up to version 39"):
        enforce(reading(settled(6), 40, 30, latest={0: 35}))


@pytest.mark.parametrize("kind", [TableAwaited, TopicUnknown])
def test_a_table_or_topic_is_awaited_for_its_time_and_then_it_is_a_refusal(
    kind: type[TableAwaited] | type[TopicUnknown],
) -> None:
    retries = Retries(max_restarts=0, await_table=60)
    error = kind("table numbers does not exist yet", "start its writer")
    for now in (0.0, 30.0, 59.0):
        assert retries.failed(error, now) == (error, AWAIT_DELAY) and retries.due(now + AWAIT_DELAY)
    assert retries.failures == 0 and not retries.gave_up
    refused, delay = retries.failed(error, 60.0)
    assert delay is None and isinstance(refused, PreflightRefused) and "after 60 s of waiting" in refused.found


def test_a_stream_that_has_read_what_became_void_without_it_does_not_start(tmp_path: Path) -> None:
    """It was not declared when the recovery was planned; a batch after the range would have left it out."""
    life = Life.of_batches(tmp_path, 3)
    now = time.time()
    read, behind = VoidRange(0, 25, 28, "p-0001", 2, now + 60), VoidRange(0, 30, 40, "p-0001", 2, now + 60)

    def declared(*ranges: VoidRange, topic_id: str = TOPIC_ID) -> list[str]:
        topic_records.declare_void(life.settings, TOPIC, topic_id, writer="w", path=(1, 2), ranges=ranges)
        findings = check_start(take_snapshot(life.settings, STREAM, Topics()))
        return [f"{each.severity}: {each.found}; {each.next_step}" for each in findings]

    assert declared(behind) == []
    (found,) = declared(read)
    assert "refuse: plan p-0001 has declared offsets 25 to 27 of topic things" in found
    assert found.endswith("recourse recover plan things --to-offsets 0:25")
    assert declared(replace(read, at=now - 86_400)) == [], "its batches are later: they left the range out"
    assert declared(replace(read, generation=3)) == [], "it does not hold"
