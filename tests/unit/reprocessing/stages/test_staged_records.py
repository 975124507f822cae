"""Staged records are appended to their topics once, whatever is killed between, or not at all."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from reprocessing.plan import written_topics
from reprocessing.plan.written_topics import WrittenTopics
from reprocessing.replay.session import last_entry
from reprocessing.stages import checks
from reprocessing.stages.recovery import RecoveryContext
from reprocessing.stages.staged_records import append_records, records_staged, rows_of, written_until
from reprocessing.stages.stages import Compare
from streaming_jobs.errors import PreflightRefused, UsageError
from streaming_jobs.examples.shop.streams import stock_changes
from streaming_jobs.ledger.entry import LedgerEntry, Txn
from streaming_jobs.ledger.positions import OffsetRange, WrittenRange
from streaming_jobs.platform.table_rows import rows
from streaming_jobs.preflight.snapshot import ledger_file
from streaming_jobs.settings import Settings, TopicSinkSettings
from streaming_jobs.sinks.batches import batches_rows
from streaming_jobs.sinks.kafka.staged import StagedWriter
from streaming_jobs.sinks.kafka.writer import Clients, TransactionWriter
from streaming_jobs.sinks.schemas import BATCHES
from streaming_jobs.sinks.tables import existing_table, store_of
from streaming_jobs.sources.topics import TopicInfo
from streaming_jobs.state.ledger_file import RawLine
from streaming_jobs.stream import Stream
from tests.conftest import SettingsFactory
from tests.support.kafka_cluster import Cluster, Producer
from tests.unit.streaming_jobs.sinks.kafka.test_staged import Records

BOTH, ONE, NONE = ("a", "b"), ("a",), ()
MADE = {3: BOTH, 4: NONE, 5: ONE, 6: BOTH}
"""By batch of the replay, the topics for which it has made records."""


class Killed(Exception):
    """Stands for a kill -9."""


class Written:
    """Topics in memory; the writers are those of a stream."""

    def __init__(self, topics: frozenset[str] = frozenset(BOTH)) -> None:
        self.cluster, self.there = Cluster(), topics

    @contextmanager
    def appending(self, stream: Any, sink: Any, generation: int) -> Iterator[TransactionWriter]:
        clients = Clients({}, producer=self.cluster.producer, consumer=self.cluster.consumer)
        writer = TransactionWriter(stream.name, sink.ledger_name, sink.name, TopicSinkSettings(), clients)
        writer.open(generation)
        yield writer

    @property
    def _topics(self) -> Any:
        info = TopicInfo("a", "id-a", 1, 1, 1, "delete", 1_000_000, -1)
        return SimpleNamespace(describe=lambda name: info if name in self.there else None)

    def topic_id(self, topic: str) -> str:
        return f"id-{topic}"

    def partitions(self, topic: str) -> int:
        return 3

    records = WrittenTopics.records

    def values(self) -> dict[str, list[bytes]]:
        return {topic: self.cluster.values(topic) for topic in BOTH}


ALL = {"a": [b"a3", b"a5", b"a6"], "b": [b"b3", b"b6"]}


@pytest.fixture
def context(settings: SettingsFactory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A replay in generation 2 that has followed its stream over four batches."""
    monkeypatch.setattr("streaming_jobs.sinks.kafka.writer._CLAIM", 0.0)
    sinks = {name: SimpleNamespace(name=name, ledger_name=f"topic:{name}", exactly_once=True) for name in BOTH}
    made = SimpleNamespace(
        settings=settings(),
        replay_settings=settings().model_copy(update={"state_dir": tmp_path / "replay"}),
        stream=SimpleNamespace(name="s", topic_sinks=sinks, batches_only=False, primary=None),
        plan=SimpleNamespace(id="s-0001", generation=2, wrong_from={"a": {0: 0, 1: 0}}),
        rebuilt_table=lambda _: SimpleNamespace(position=Txn(2, 6)),
        staged_records=tmp_path / "_records",
        written=Written(),
        crash_point=lambda _: None,
    )
    for batch, topics in MADE.items():
        for name in topics:
            value = f"{name}{batch}".encode()
            records = Records([(name, b"k", value, [("recourse.batch", str(batch).encode())], 0, -1)])
            StagedWriter(made.staged_records / name).write(entry(batch, f"topic:{name}", written=1), records)
        counted = entry(batch, "t", **{f"topic:{name}": 1 for name in topics})
        ledger_file(made.replay_settings, "s").append(counted, {"t": batch})
    made.replayed = lambda: RecoveryContext.replayed(made)
    made._ledger = ledger_file(made.replay_settings, "s")
    return made


def entry(batch: int, table: str, **rows: int) -> LedgerEntry:
    offsets = (OffsetRange("in", "id-in", {0: batch * 10}, {0: batch * 10 + 10}),)
    return LedgerEntry("batch", "s", table, 2, batch, offsets, rows=rows)


def noted(context: Any) -> dict[Txn, list[tuple[str, int, int]]]:
    """By batch, the ranges in the lines that the stream's ledger adopts from the replay's, and in those themselves."""
    RecoveryContext.adopt_ledger(context)
    lines = ledger_file(context.settings, "s").after("s", None, at_most=20)
    found = {each.entry.txn: [(r.topic, r.first, r.end) for r in each.entry.written] for each in lines}
    assert found == {e.txn: [(r.topic, r.first, r.end) for r in e.written] for e in context.replayed()}
    return found


RANGES = {
    Txn(2, 3): [("a", 0, 1), ("b", 0, 1)],
    Txn(2, 4): [],
    Txn(2, 5): [("a", 1, 2)],
    Txn(2, 6): [("a", 2, 3), ("b", 1, 2)],
}


def test_records_are_appended_in_the_order_of_their_batches_and_noted(context: Any) -> None:
    assert records_staged(context) == 5
    found = append_records(context)
    assert context.written.values() == ALL and (found["records"], found["appended"]) == (5, 5)
    assert noted(context) == RANGES
    assert [r.headers() for r in context.written.cluster.of("a")][1] == [("recourse.batch", b"5")]
    again = append_records(context)
    assert context.written.values() == ALL, "a stage may run again"
    assert (again["records"], again["appended"]) == (5, 0), "its seconds are not those of the first run's records"


@pytest.mark.parametrize("point", ["recover_append_written", "recover_append_next"])
@pytest.mark.parametrize("after", range(5))
def test_killed_anywhere_each_record_is_appended_once(context: Any, point: str, after: int) -> None:
    left = [after]

    def crash_point(name: str) -> None:
        left[0] -= name == point
        if left[0] < 0:
            raise Killed

    context.crash_point = crash_point
    killed = False
    try:
        append_records(context)
    except Killed:
        killed = True
    assert killed
    context.crash_point = lambda _: None
    append_records(context)
    assert context.written.values() == ALL and noted(context) == RANGES


class Plain(Producer):
    """A producer without transactions: acknowledged records are in the topic."""

    def flush(self, timeout: float) -> int:
        left = super().flush(timeout)
        self.cluster.committed += self.sent
        self.sent = []
        return left


@pytest.mark.parametrize(
    ("exactly_once", "shards", "again"),
    [(True, None, []), (True, 2, []), (False, None, [b"a3"])],
    ids=["transactions", "shards", "at_least_once"],
)
def test_a_batch_that_a_kill_has_kept_from_its_note_is_appended_again_only_at_least_once(
    context: Any,
    settings: SettingsFactory,
    monkeypatch: pytest.MonkeyPatch,
    exactly_once: bool,
    shards: int | None,
    again: list[bytes],
) -> None:
    cluster, topics = context.written.cluster, context.written._topics

    def producer(config: dict[str, Any]) -> Producer:
        return cluster.producer(config) if "transactional.id" in config else Plain(cluster, config)

    monkeypatch.setattr("streaming_jobs.sinks.kafka.sharded._AT_ONCE", 1)
    monkeypatch.setattr(written_topics, "Clients", lambda config: Clients(config, producer, cluster.consumer))
    monkeypatch.setattr(written_topics.Topics, "of", lambda *_: topics)
    for sink in context.stream.topic_sinks.values():
        sink.exactly_once, sink.shards = exactly_once, shards
    context.written = WrittenTopics(settings({"kafka.bootstrap_servers": "127.0.0.1:1"}))

    def killed(point: str) -> None:
        raise Killed(point)

    context.crash_point = killed
    with pytest.raises(Killed, match="recover_append_written"):
        append_records(context)
    assert cluster.values("a") == [b"a3"]
    context.crash_point = lambda _: None
    append_records(context)
    assert {topic: cluster.values(topic) for topic in BOTH} == {**ALL, "a": [*again, *ALL["a"]]}
    first = len(again)
    assert noted(context)[Txn(2, 3)] == [("a", first, first + 1), ("b", 0, 1)]
    markers = [record.topic() for record in cluster.committed if record.topic() not in BOTH]
    assert bool(markers) == exactly_once and any("shards-2" in topic for topic in markers) == bool(shards)


def test_an_older_driver_writes_nothing_once_the_records_are_appended(context: Any) -> None:
    sink = context.stream.topic_sinks["a"]
    with context.written.appending(context.stream, sink, 1) as zombie:
        append_records(context)
        context.stream.name = "other"
        assert zombie.newest is not None
        with pytest.raises(Exception, match="generation 2|another driver"):
            zombie.write(entry(9, "topic:a"), Records())
    assert context.written.values() == ALL


def test_records_that_are_gone_are_noticed_before_the_first_one_is_appended(context: Any) -> None:
    (context.staged_records / "b" / "g0002-b000000006.parquet").unlink()
    gone = "0 staged records of g0002 batch 6 .* has made 1"
    with pytest.raises(PreflightRefused, match=gone):
        Compare(())._rebuilt(context)  # while the streams run
    with pytest.raises(PreflightRefused, match=gone) as refused:
        append_records(context)
    assert "recover abort s-0001" in refused.value.next_step and not context.written.cluster.committed


def test_a_batch_that_the_staging_tables_lack_is_left_to_the_replay(context: Any) -> None:
    StagedWriter(context.staged_records / "b").write(entry(7, "topic:b", written=3), Records())
    assert append_records(context)["records"] == 5
    assert context.written.values() == ALL


def test_a_batch_whose_line_a_kill_has_lost_is_appended(context: Any) -> None:
    records = Records([("a", b"k", b"a7", [], 0, -1)])
    StagedWriter(context.staged_records / "a").write(entry(7, "topic:a", written=1), records)
    context.rebuilt_table = lambda _: SimpleNamespace(position=Txn(2, 7))
    append_records(context)
    assert context.written.values() == {**ALL, "a": [*ALL["a"], b"a7"]}


def test_a_topic_that_is_gone_is_named(context: Any) -> None:
    context.written.there = frozenset({"a"})
    with pytest.raises(UsageError, match="topic b is gone"):
        append_records(context)


def test_staged_records_are_compared_as_if_they_came_after_everything(context: Any) -> None:
    blocks = [*rows_of(cast("RecoveryContext", context), context.stream.topic_sinks["a"])]
    assert [value for block in blocks for value in block.values] == [b"a3", b"a5", b"a6"]
    offsets = [offset for block in blocks for offset in block.column("offset").to_pylist()]
    assert offsets == sorted(set(offsets)) and offsets[0] >= 1 << 40
    assert all(block.times.min() > 1_600_000_000_000 for block in blocks), "without a time, that of now"


def test_the_published_records_end_with_the_batch_that_was_followed(context: Any) -> None:
    live: Settings = context.settings
    context.result = lambda _: {"generation": 1, "batch": 5}
    context.plan.base = SimpleNamespace(after=Txn(1, 2))
    for batch in range(8):
        ranges = (WrittenRange("a", "id-a", batch % 2, batch * 10, batch * 10 + 9, 9),)
        line = LedgerEntry("batch", "s", "t", 1, batch, written=ranges)
        ledger_file(live, "s").append(line, {})
    assert written_until(context, "a") == {0: 49, 1: 59}
    for batch in range(5):  # after planning the topic got a third partition, which the newest batches write
        line = LedgerEntry(
            "batch", "s", "t", 1, 8 + batch, written=(WrittenRange("a", "id-a", 2, batch, batch + 1, 1),)
        )
        ledger_file(live, "s").append(line, {})
    context.result = lambda _: {"generation": 1, "batch": 12}
    assert written_until(context, "a") == {0: 69, 1: 79, 2: 5}
    for batch in (13, 14):  # the newest batches write to the other partitions alone
        ranges = (WrittenRange("a", "id-a", batch % 2, batch * 10, batch * 10 + 9, 9),)
        ledger_file(live, "s").append(LedgerEntry("batch", "s", "t", 1, batch, written=ranges), {})
    context.result = lambda _: {"generation": 1, "batch": 14}
    assert written_until(context, "a") == {0: 149, 1: 139, 2: 5}


def test_no_older_batches_are_read_once_each_partition_of_the_topic_has_its_end(
    context: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A bug of three days has a quarter of a million batches, and the stream stands still while they are read."""
    context.result = lambda _: {"generation": 1, "batch": 99}
    context.plan.base = SimpleNamespace(after=Txn(1, 2))
    ledger = ledger_file(context.settings, "s")
    for batch in range(100):
        ranges = (WrittenRange("a", "id-a", batch % 3, batch * 10, batch * 10 + 9, 9),)
        ledger.append(LedgerEntry("batch", "s", "t", 1, batch, written=ranges), {})
    read, of_line = list[int](), RawLine.read
    monkeypatch.setattr(RawLine, "read", lambda line: (read.append(line.txn.batch), of_line(line))[1])
    assert written_until(context, "a") == {0: 999, 1: 979, 2: 989}
    assert read == [99, 98, 97]


def test_records_of_a_partition_that_came_since_the_plan_are_compared_from_its_beginning(
    context: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = list[Any]()
    monkeypatch.setattr(checks.topic_records, "load", lambda *_: None)
    monkeypatch.setattr(checks, "written_until", lambda *_: {1: 20, 2: 5})
    monkeypatch.setattr(checks, "_records_differ", lambda _, sink, old, new, staged: asked.append((old[0], new[0])))
    context.plan.wrong_from, context.journal = {"a": {0: 7, 1: 9}}, SimpleNamespace(done=lambda _: None)
    checks._topic_differences(context)
    assert asked == [({0: (7, 7), 1: (9, 20), 2: (0, 5)}, {0: (7, 7), 1: (9, 9)})]


def test_the_published_records_begin_after_the_batch_from_which_the_replay_starts(context: Any) -> None:
    context.plan.base = SimpleNamespace(after=Txn(1, 2))
    for batch in range(8):
        ranges = (WrittenRange("a", "id-a", batch % 2, batch * 10, batch * 10 + 9, 9),)
        ledger_file(context.settings, "s").append(LedgerEntry("batch", "s", "t", 1, batch, written=ranges), {})
    context.result = lambda _: {"generation": 1, "batch": 3}
    assert written_until(context, "a") == {1: 39}, "partition 0 has nothing after the replay's start"


def test_a_table_of_batches_gets_its_rows_with_the_append_once_and_stays_at_its_batch(context: Any) -> None:
    """That of a stream without a table of its own: each row says where a batch lies in a partition."""
    declared, settings = stock_changes.primary, context.replay_settings
    table = store_of(declared).ensure(settings, declared, "s", BATCHES, generation=2)
    for batch in MADE:
        table.append(batches_rows(Txn(2, batch), ()), entry(batch, declared.name))
    context.stream.batches_only, context.stream.primary = True, declared
    context.rebuilt_table = lambda each: existing_table(settings, each, "s")
    for _ in range(2):
        append_records(context)
    found = rows(settings.tables / declared.name).to_pylist()
    assert sorted((r["batch"], r["topic"], r["first_offset"], r["end_offset"]) for r in found) == sorted(
        (txn.batch, *each) for txn, ranges in RANGES.items() for each in ranges
    )
    stream = cast("Stream", SimpleNamespace(primary=declared))
    assert last_entry(settings, stream).same_offsets(entry(6, "")), "where the replay goes on"
    after = existing_table(settings, declared, "s")
    assert after.position == Txn(2, 6) and after.append(batches_rows(Txn(2, 7), ()), entry(7, declared.name))
