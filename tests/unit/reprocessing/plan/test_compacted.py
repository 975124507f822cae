"""Compacted topics: which recoveries would lose keys, and the plan that writes all of them anew."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from reprocessing.plan.journal import journal_of
from reprocessing.plan.plan import Base, RecoveryPlan
from reprocessing.plan.plan_file import names, next_id, save, sealed
from reprocessing.plan.planner import reminders
from reprocessing.plan.snapshot import PlanningSnapshot
from reprocessing.plan.targets import Resolved
from reprocessing.plan.undo import plan_undo
from reprocessing.plan.void_records import CommittedOffsets, WrittenAtPlanning, written_topics
from streaming_jobs.declare.topic_sink import KafkaSink
from streaming_jobs.errors import UsageError
from streaming_jobs.examples.shop.streams import CHANGES, stock_changes
from streaming_jobs.ledger.entry import LedgerEntry
from streaming_jobs.ledger.positions import WrittenRange
from streaming_jobs.preflight.snapshot import TopicSnapshot, ledger_file, take_snapshot
from streaming_jobs.settings import Settings
from streaming_jobs.sinks.tables import store_of
from streaming_jobs.sources.topics import TopicInfo
from streaming_jobs.state import savepoints, stream_record, topic_records
from streaming_jobs.state.topic_records import TopicRecord, VoidRange
from streaming_jobs.stream import DeltaTable, Stream
from tests.support.life import STREAM, TOPIC_ID, Life, Topics
from tests.unit.reprocessing.plan.test_plan_file import stream_plan

TOPIC, END = CHANGES.name, 8
SAVEPOINT, NOTHING = Base("g0001-b000000000", 1, 0, {}), Base(None, 1, -1, {})
RIGHT = [(0, "a", "a1"), (1, "b", "b1")]
WRONG = [(4, "b", "WRONG"), (5, "x", "WRONG")]


class Compacted(Topics):
    """The topic of `life.py`, or any other, with a log cleaner."""

    def describe(self, name: str) -> TopicInfo:
        return TopicInfo(name, self.topic_id, 1, -1, "compact,delete")


def cleaned(records: Iterable[tuple[int, str, str]]) -> list[tuple[int, str, str]]:
    """What a log cleaner leaves: the newest record of each key."""
    return sorted({key: (offset, key, value) for offset, key, value in records}.values())


def read(records: Iterable[tuple[int, str, str]], record: TopicRecord) -> Mapping[str, str]:
    """What a reader has that begins at the beginning and leaves void records out."""
    void = record.holding().spans.get(0, ())
    return {key: value for offset, key, value in records if not any(b <= offset < e for b, e in void)}


def test_a_replay_from_a_savepoint_ends_without_the_keys_that_the_cleaner_has_taken() -> None:
    """Why the plan is refused: the corrected code writes no `b` again, and its right record went with the wrong one."""
    record = TopicRecord(TOPIC, "id", "stock_changes", (1, 2), (VoidRange(0, 4, 7, "p-0001", 2, 0.0),))
    assert read(RIGHT + WRONG, record) == {"a": "a1", "b": "b1"}
    assert read(cleaned(RIGHT + WRONG), record) == {"a": "a1"}


def planned(home: Path, start: Base, topics: Topics, monkeypatch: pytest.MonkeyPatch) -> WrittenAtPlanning:
    """The topics of `stock_changes`, whose second batch is wrong, for a replay that begins at `start`."""
    settings = Settings.load({"home": home})
    for number, (first, end) in enumerate([(0, 3), (4, 7)]):
        written = WrittenRange(TOPIC, topics.topic_id, 0, first, end, end - first)
        entry = LedgerEntry("batch", "stock_changes", "stock_changes_batches", 1, number, written=(written,))
        ledger_file(settings, "stock_changes").append(entry, {})
    monkeypatch.setattr(type(store_of(stock_changes.primary)), "commits", lambda *_: [])
    record = stream_record.first("stock_changes")
    snapshot = SimpleNamespace(settings=settings, stream=stock_changes, topics=topics, record=record)
    committed = SimpleNamespace(found=())
    return written_topics(
        cast("PlanningSnapshot", snapshot), start, None, cast("CommittedOffsets", committed), discards=False
    )


def test_a_compacted_topic_is_written_anew_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError, match=f"topic {TOPIC} of stream stock_changes is compacted") as refused:
        planned(tmp_path / "a", SAVEPOINT, Compacted(end=END), monkeypatch)
    assert "recourse recover plan stock_changes --to-batch -1" in refused.value.next_step
    anew = planned(tmp_path / "b", NOTHING, Compacted(end=END), monkeypatch)
    assert anew.wrong_from == {TOPIC: {0: 0}}
    (note,) = anew.notes
    assert f"topic {TOPIC} is compacted" in note and "tombstone" in note and "neither abort nor undo" in note


def test_a_topic_that_only_expires_or_has_nothing_wrong_is_no_matter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expires = planned(tmp_path / "a", SAVEPOINT, Topics(end=END), monkeypatch)
    assert (expires.wrong_from, expires.notes) == ({TOPIC: {0: 4}}, ())
    after_all = Base("g0001-b000000001", 1, 1, {})
    assert planned(tmp_path / "b", after_all, Compacted(end=END), monkeypatch).notes == ()
    assert topic_records.load(Settings.load({"home": tmp_path / "b"}), TOPIC) is None


def test_a_compacted_source_is_named_in_the_plan(tmp_path: Path) -> None:
    life = Life.of_batches(tmp_path, 2)
    found = take_snapshot(life.settings, STREAM, Compacted()).topics
    assert [topic.compacted for topic in found] == [True]
    assert [topic.compacted for topic in take_snapshot(life.settings, STREAM, Topics()).topics] == [False]
    preflight = SimpleNamespace(topics=[*found, TopicSnapshot("other", "id")])
    snapshot = SimpleNamespace(
        settings=life.settings, stream=STREAM, record=life.record, preflight=preflight, savepoints=()
    )
    notes = reminders(cast("PlanningSnapshot", snapshot), Resolved(None, {}), NOTHING, None)
    assert [note.split(":")[0] for note in notes] == ["topic things is compacted"]


class Writes(Life):
    """Each batch writes as many records to the topic as it reads."""

    def entry(self, batch: int, generation: int = 1, code: str = "a") -> LedgerEntry:
        written = WrittenRange(TOPIC, TOPIC_ID, 0, 10 * batch, 10 * batch + 10, 10)
        return replace(super().entry(batch, generation, code), written=(written,))


def test_an_undo_to_a_savepoint_is_refused_too(tmp_path: Path) -> None:
    """The recovery itself wrote the topic anew; the records that its undo would let count again may be gone."""
    declared = {"things": DeltaTable("things", partition_by=["place"]), "out": KafkaSink(CHANGES, key="product")}
    life = Writes.begin(tmp_path, Stream(STREAM.name, STREAM.function, STREAM.sources, declared))
    for number in range(3):
        life.batch(number)
    before = savepoints.take(life.settings, life.stream, life.record, 1, "recovery")
    drafted = stream_plan(next_id(life.settings, STREAM.name))
    only = replace(drafted, saw=replace(drafted.saw, generation=life.record.generation - 1))
    plan = sealed(RecoveryPlan(only.id, 1.0, (only,)))
    save(life.settings, plan)
    journal = journal_of(life.settings, plan.id)
    journal.write("take_savepoint", "done", {"savepoint": before.id}, stream=STREAM.name)
    journal.write("clean_up", "done")
    with pytest.raises(UsageError, match=f"topic {TOPIC} of stream things is compacted") as refused:
        plan_undo(life.settings, {STREAM.name: life.stream}, Compacted(end=30), plan)
    assert "recourse recover plan things --to-batch -1" in refused.value.next_step
    assert names(life.settings) == [plan.id], "no plan is made"
