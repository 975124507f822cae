"""Where the wrong records of a topic begin, by the ledger of their writer; and which of them a log cleaner takes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pyarrow as pa
import pytest

from reprocessing.explainer import explain
from reprocessing.plan.journal import journal_of
from reprocessing.plan.notes import reminders
from reprocessing.plan.plan import Base, RecoveryPlan
from reprocessing.plan.plan_file import load, names, next_id, save, sealed
from reprocessing.plan.planner import plan_undo
from reprocessing.plan.snapshot import PlanningSnapshot
from reprocessing.plan.targets import Resolved
from reprocessing.plan.void_records import (
    CommittedOffsets,
    WrittenAtPlanning,
    declared_since,
    first_changed,
    first_written,
    lowest,
    written_after,
    written_topics,
    wrong_from,
)
from reprocessing.stages.stages import stages_of
from streaming_jobs.declare.topic_sink import KafkaSink
from streaming_jobs.errors import UsageError
from streaming_jobs.examples.shop.streams import CHANGES, stock_changes
from streaming_jobs.ledger.entry import LedgerEntry, Txn
from streaming_jobs.ledger.positions import WrittenRange
from streaming_jobs.preflight.snapshot import TopicSnapshot, ledger_file, take_snapshot
from streaming_jobs.settings import Settings
from streaming_jobs.sinks.schemas import BATCHES
from streaming_jobs.sinks.tables import store_of
from streaming_jobs.sources.topics import TopicInfo
from streaming_jobs.sources.void_ranges import VoidRanges
from streaming_jobs.state import stream_record, topic_records
from streaming_jobs.state.ledger_file import LedgerFile
from streaming_jobs.state.stream_record import Generation, StreamRecord
from streaming_jobs.state.topic_records import TopicRecord, VoidRange
from streaming_jobs.stream import DeltaTable, Stream
from tests.support.life import STREAM, TOPIC_ID, Life, Topics
from tests.support.stream_on_disk import append
from tests.unit.reprocessing.plan.test_plan_file import stream_plan

TOPIC = CHANGES.name
IDS = {TOPIC: "id"}


def wrote(partition: int, first: int, end: int, topic: str = TOPIC, topic_id: str = "id") -> WrittenRange:
    return WrittenRange(topic, topic_id, partition, first, end, end - first)


def entry(generation: int, batch: int, *written: WrittenRange) -> LedgerEntry:
    return LedgerEntry("batch", "stock_changes", "stock_changes_batches", generation, batch, written=written)


@pytest.fixture
def ledger(tmp_path: Path) -> LedgerFile:
    """Three batches, the last two of which a recovery has repeated in generation 2."""
    file = LedgerFile(tmp_path)
    for each in (
        entry(1, 0, wrote(0, 0, 10), wrote(1, 0, 5)),
        entry(1, 1, wrote(0, 11, 20)),
        entry(1, 2, wrote(0, 21, 30), wrote(1, 6, 9)),
        entry(2, 1, wrote(0, 31, 40)),
        entry(2, 2, wrote(0, 41, 50), wrote(1, 10, 13)),
    ):
        file.append(each, {})
    return file


def at(generation: int, batch: int) -> Base:
    return Base("g", generation, batch, {})


@pytest.mark.parametrize(
    ("after", "firsts"),
    [
        (Txn(1, 0), {0: 11, 1: 6}),
        (Txn(1, 1), {0: 21, 1: 6}),
        (Txn(1, 2), {0: 31, 1: 10}),
        (Txn(2, 1), {0: 41, 1: 10}),
        (Txn(2, 2), {}),
    ],
)
def test_everything_that_a_later_batch_wrote_is_wrong_of_whichever_generation(
    ledger: LedgerFile, after: Txn, firsts: dict[int, int]
) -> None:
    assert written_after(ledger, stock_changes, after, IDS).get(TOPIC, {}) == firsts


def test_a_batch_that_only_the_table_knows_counts_too(ledger: LedgerFile) -> None:
    newest = entry(2, 3, wrote(1, 14, 15))
    assert written_after(ledger, stock_changes, Txn(2, 2), IDS, [newest]) == {TOPIC: {1: 14}}


def test_what_was_written_to_an_earlier_topic_of_the_name_does_not_count(ledger: LedgerFile) -> None:
    ledger.append(entry(2, 3, wrote(0, 2, 4, topic_id="old"), wrote(0, 60, 61)), {})
    assert written_after(ledger, stock_changes, Txn(2, 2), IDS) == {TOPIC: {0: 60}}


def test_a_ledger_that_does_not_reach_back_is_no_answer(tmp_path: Path) -> None:
    file = LedgerFile(tmp_path)
    file.append(entry(1, 7, wrote(0, 70, 80)), {})
    with pytest.raises(UsageError, match="does not reach back"):
        written_after(file, stock_changes, Txn(1, 3), IDS)
    assert written_after(file, stock_changes, Txn(0, -1), IDS) == {TOPIC: {0: 70}}


def test_a_partition_without_wrong_records_begins_at_its_end() -> None:
    ends = {TOPIC: {0: 51, 1: 14}}
    assert wrong_from(at(2, 1), ends, {TOPIC: {0: 41}}) == {TOPIC: {0: 41, 1: 14}}


def test_a_batch_in_the_topic_alone_and_offsets_known_to_be_wrong_are_void_too() -> None:
    ends = {TOPIC: {0: 60, 1: 20}}
    found = wrong_from(at(2, 2), ends, {}, known=[{TOPIC: {1: 10}}], in_flight=[wrote(0, 51, 59), wrote(1, 14, 19)])
    assert found == {TOPIC: {0: 51, 1: 10}}


def test_a_replay_from_the_very_start_makes_the_whole_topic_void() -> None:
    start = replace(at(1, -1), savepoint=None)
    ends = {TOPIC: {0: 60, 1: 20}, "routed": {0: 9}}
    found = wrong_from(start, ends, {TOPIC: {0: 11}, "routed": {0: 4}})
    assert found == {TOPIC: {0: 0, 1: 0}, "routed": {0: 0}}


def test_readers_go_back_before_ranges_that_count_again() -> None:
    before, after = VoidRanges.of([(0, 10, 20), (1, 5, 9)]), VoidRanges.of([(1, 5, 9), (1, 9, 12)])
    assert first_changed({0: 40, 1: 30}, before, after) == {0: 10, 1: 30}
    assert lowest([wrote(0, 5, 6), wrote(0, 3, 4)]) == {TOPIC: {0: 3}}


def test_what_a_replay_appended_that_was_given_up_stays_void_for_a_plan_that_goes_back_behind_it() -> None:
    """Generation 2 was given up, 3 continued generation 1; its range would not hold on the path of generation 4."""
    generations = (
        Generation(1, 0.0, "first start"),
        Generation(3, 0.0, "abort of a-0001", 1, 30, aborts=True),
    )
    record = StreamRecord("stock_changes", generations)
    void = (VoidRange(0, 100, 200, "a-0001", 3, 0.0),)
    topic = TopicRecord(TOPIC, "id", "stock_changes", (1, 3), void)
    back, behind = Generation(4, 0.0, "", 1, 20), Generation(4, 0.0, "", 3, 40)
    assert declared_since([topic], record, at(1, 20), back) == {TOPIC: {0: 100}}
    assert declared_since([topic], record, at(1, 30), replace(back, from_batch=30)) == {TOPIC: {0: 100}}
    assert declared_since([topic], record, at(3, 40), behind) == {}, "it holds on the path"
    undone = StreamRecord("stock_changes", (generations[0], Generation(2, 0.0, "recovery", 1, 10)))
    corrected = TopicRecord(TOPIC, "id", "stock_changes", (1, 2), (VoidRange(0, 50, 100, "a-0001", 2, 0.0),))
    assert declared_since([corrected], undone, at(1, 30), Generation(3, 0.0, "", 1, 30)) == {}, "an undo counts them"


FIRST = (Generation(1, 0.0, "first start"),)


def lines(folder: Path, *written: tuple[int, WrittenRange]) -> LedgerFile:
    file = LedgerFile(folder)
    for batch, each in written:
        file.append(entry(1, batch, each), {})
    return file


def test_a_batch_that_the_ledger_has_lost_is_no_reason_to_begin_later(tmp_path: Path) -> None:
    """Batch 2 was the first after the base to write partition 1; its line went with a power cut."""
    whole = [
        (0, wrote(0, 0, 9)),
        (1, wrote(0, 10, 19)),
        (2, wrote(1, 5, 9)),
        (3, wrote(0, 20, 29)),
        (4, wrote(1, 12, 20)),
    ]
    complete = lines(tmp_path / "whole", *whole)
    assert written_after(complete, stock_changes, Txn(1, 0), IDS, generations=FIRST) == {TOPIC: {0: 10, 1: 5}}
    file = lines(tmp_path / "holed", *(each for each in whole if each[0] != 2))
    with pytest.raises(UsageError, match="lacks 1 of the batches .* the last of them g0001 batch 2:") as refused:
        written_after(file, stock_changes, Txn(1, 0), IDS, generations=FIRST)
    assert "--to-batch 2" in refused.value.next_step and "--to-batch -1" in refused.value.next_step
    assert written_after(file, stock_changes, Txn(1, 2), IDS, generations=FIRST) == {TOPIC: {0: 20, 1: 12}}
    rows = [(Txn(1, 0), wrote(1, 0, 4)), (Txn(1, 2), wrote(1, 5, 9))]
    found = written_after(file, stock_changes, Txn(1, 0), IDS, generations=FIRST, in_table=lambda: rows)
    assert found == {TOPIC: {0: 10, 1: 5}}, "the table of a stream of topics has it"
    in_log = [entry(1, 4, wrote(1, 12, 20)), entry(1, 3, wrote(0, 20, 29)), entry(1, 2, wrote(1, 5, 9))]
    assert written_after(file, stock_changes, Txn(1, 0), IDS, in_log, generations=FIRST) == found


def test_only_batches_on_the_path_have_to_be_there(tmp_path: Path) -> None:
    """Generation 2 took batch 2 of generation 1 back; what 1 wrote after that is void already."""
    file = LedgerFile(tmp_path)
    for each in (entry(1, 0), entry(1, 1), entry(1, 4), entry(2, 2), entry(2, 3), entry(2, 3)):
        file.append(each, {})
    undone = (*FIRST, Generation(2, 0.0, "recovery", 1, 1))
    assert written_after(file, stock_changes, Txn(1, 0), IDS, generations=undone) == {}
    with pytest.raises(UsageError, match="lacks 2 of the batches .* g0001 batch 3"):
        written_after(file, stock_changes, Txn(1, 0), IDS, generations=FIRST)
    later = (*FIRST, Generation(2, 0.0, "recovery", 1, 3))
    with pytest.raises(UsageError, match="lacks 2 of the batches .* g0001 batch 3"):
        written_after(file, stock_changes, Txn(1, 1), IDS, generations=later)


def test_the_table_of_a_stream_of_topics_fills_the_holes(tmp_path: Path) -> None:
    settings = Settings.load({"home": tmp_path})
    primary = stock_changes.primary
    table = store_of(primary).ensure(settings, primary, stock_changes.name, BATCHES, generation=1)
    written = [(0, wrote(0, 0, 9)), (1, wrote(0, 10, 19)), (2, wrote(1, 5, 9)), (3, wrote(0, 20, 29))]
    for batch, each in written:
        row = {"generation": 1, "batch": batch, "topic": TOPIC, "topic_id": "id", "partition": each.partition}
        row |= {"first_offset": each.first, "end_offset": each.end, "records": each.records}
        append(
            table,
            pa.Table.from_pylist([row], schema=pa.schema(table.readable().schema().to_arrow())),
            LedgerEntry("batch", "other", primary.name, 1, batch),
        )
    lines(ledger_file(settings, stock_changes.name).folder, *(each for each in written if each[0] != 2))
    record = StreamRecord(stock_changes.name, FIRST)
    assert first_written(settings, stock_changes, record, at(1, 0), IDS) == {TOPIC: {0: 10, 1: 5}}


END = 8
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


def written_at(home: Path, start: Base, topics: Topics, monkeypatch: pytest.MonkeyPatch) -> WrittenAtPlanning:
    """The topics of `stock_changes`, whose second batch is wrong, for a replay that begins at `start`."""
    settings = Settings.load({"home": home})
    for number, (first, end) in enumerate([(0, 3), (4, 7)]):
        written = WrittenRange(TOPIC, topics.topic_id, 0, first, end, end - first)
        entry = LedgerEntry("batch", "stock_changes", "stock_changes_batches", 1, number, written=(written,))
        ledger_file(settings, "stock_changes").append(entry, {})
    monkeypatch.setattr(type(store_of(stock_changes.primary)), "commits", lambda *_: [])
    record = stream_record.first("stock_changes")
    snapshot = SimpleNamespace(settings=settings, stream=stock_changes, topics=topics, record=record)
    committed = SimpleNamespace(of=lambda _: ())
    return written_topics(
        cast("PlanningSnapshot", snapshot), start, None, cast("CommittedOffsets", committed), discards=False
    )


def test_a_compacted_topic_is_written_anew_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError, match=f"topic {TOPIC} of stream stock_changes is compacted") as refused:
        written_at(tmp_path / "a", SAVEPOINT, Compacted(end=END), monkeypatch)
    assert "recourse recover plan stock_changes --to-batch -1" in refused.value.next_step
    anew = written_at(tmp_path / "b", NOTHING, Compacted(end=END), monkeypatch)
    assert anew.wrong_from == {TOPIC: {0: 0}}
    (note,) = anew.notes
    assert f"topic {TOPIC} is compacted" in note and "tombstone" in note and "neither abort nor undo" in note


def test_a_topic_that_only_expires_or_has_nothing_wrong_is_no_matter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expires = written_at(tmp_path / "a", SAVEPOINT, Topics(end=END), monkeypatch)
    assert (expires.wrong_from, expires.notes) == ({TOPIC: {0: 4}}, ())
    after_all = Base("g0001-b000000001", 1, 1, {})
    assert written_at(tmp_path / "b", after_all, Compacted(end=END), monkeypatch).notes == ()
    assert topic_records.load(Settings.load({"home": tmp_path / "b"}), TOPIC) is None


class Absent(Topics):
    """Nobody has created the topic yet."""

    def describe(self, name: str) -> None:  # type: ignore[override]
        del name


def test_a_topic_that_is_created_after_planning_gets_the_records_staged_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written = written_at(tmp_path, SAVEPOINT, Absent(end=END), monkeypatch)
    assert (written.wrong_from, written.ends, written.notes) == ({TOPIC: {}}, {}, ())
    only = replace(stream_plan("things-0001"), wrong_from=written.wrong_from, ends_written=written.ends)
    plan = RecoveryPlan(only.id, 1.0, (only,))
    stages = stages_of(plan, beside=True)
    assert plan.followed == (only,) and {"void_records", "append_records"} <= {stage.name for stage in stages}
    assert f"topic        {TOPIC}: nothing becomes void; corrected records are appended" in explain(plan, stages)
    save(settings := Settings.load({"home": tmp_path}), sealed(plan))
    assert load(settings, plan.id).streams[0].wrong_from == {TOPIC: {}}


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
    life.run(*range(3))
    before = life.savepoint(1, "recovery")
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
