"""One batch's way into tables and topics, step by step, with real tables and without Spark."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql.types import LongType, StructField, StructType

from streaming_jobs import Json, KafkaSink, KafkaTopic
from streaming_jobs.errors import CommitRefused, OffsetsLost, TransientError
from streaming_jobs.ledger.entry import LedgerEntry, Txn
from streaming_jobs.ledger.positions import WrittenRange
from streaming_jobs.runtime import crash_points
from streaming_jobs.runtime.batch_hooks import Pause, StopAtBorder, phases
from streaming_jobs.settings import StreamSettings
from streaming_jobs.sinks.base import BatchOfRows, PendingWrite
from streaming_jobs.sinks.delta.store import ensure_sink
from streaming_jobs.sources.read_times import BatchReadTimes, ReadTimes
from streaming_jobs.state.checkpoint import CheckpointSync
from streaming_jobs.stream import DeltaTable as Declared
from streaming_jobs.testing.tables import MemoryTable, MemoryWrite
from tests.support.batch_driver import STATE, Driver, Frame, Start, commits_of, newest_entry, numbers
from tests.support.stream_on_disk import lay_offsets
from tests.support.worlds import DEAD_LETTERS, OUTPUT, PRIMARY, SECONDARY, STREAM, Disk, entry, parity


def test_the_steps_of_a_batch_and_the_points_of_a_kill_are_those_of_the_contract(start: Start) -> None:
    driver = start()
    driver.bad = 2
    driver.run(0)
    assert driver.log == [
        "batch_committed -1",
        "between -1",
        "batch_started 0",
        "persist",
        f"stage {PRIMARY}",
        f"stage {SECONDARY}",
        "staged 0",
        f"stage {DEAD_LETTERS}",
        f"commit {DEAD_LETTERS}",
        f"commit {SECONDARY}",
        "secondary_committed 0",
        f"commit {PRIMARY}",
        f"close {DEAD_LETTERS}",
        f"close {SECONDARY}",
        f"close {PRIMARY}",
        "unpersist",
        "primary_committed 0",
        "upkeep",
    ]
    driver.run(1)
    met = [line.split()[0] for line in driver.log if line.split()[0] in crash_points.POINTS]
    assert tuple(met[1:]) == crash_points.POINTS + crash_points.POINTS[:4]


def test_each_row_is_in_its_table_and_each_entry_says_what_was_read_and_written_and_the_ledger_beside_it(
    disk: Disk, start: Start
) -> None:
    driver = start()
    driver.bad = 2
    driver.run(0)
    assert (numbers(disk, PRIMARY), numbers(disk, SECONDARY)) == ([2, 4], [1, 3])
    primary = newest_entry(disk, PRIMARY)
    assert primary == entry(0, rows={SECONDARY: 2, "dead_letters": 2, "written": 2})
    assert newest_entry(disk, SECONDARY) == entry(0, SECONDARY, rows={"written": 2})
    assert newest_entry(disk, DEAD_LETTERS) == entry(0, DEAD_LETTERS, rows={"written": 2})
    (report,) = driver.reports
    made = report.entry
    assert (made.batch, made.records, made.rows_written, made.dead_letters) == (0, 15, 2, 2)
    assert (report.path, report.committer, report.skipped, report.version) == ("driver", "direct", False, 1)
    newest = disk.ledger_file.newest(STREAM)
    assert newest is not None
    assert newest == (newest_entry(disk, PRIMARY), {PRIMARY: 1, SECONDARY: 1, DEAD_LETTERS: 1})


def test_a_frame_of_several_tables_is_fitted_in_the_batch_and_that_of_one_before_the_query(start: Start) -> None:
    several = start()
    several.run(0)
    assert several.fitted == [PRIMARY, SECONDARY]
    alone = start()
    both = alone.pipeline.stream
    name, declared = next(iter(both.sinks.items()))
    alone.pipeline.stream = replace(both, sinks={name: declared})
    alone.pipeline.sinks = replace(alone.pipeline.sinks, secondary=())
    alone.run(1)
    assert alone.fitted == [] and alone.log.count("persist") == 0


def test_outputs_of_one_state_are_made_of_what_they_share(start: Start) -> None:
    def outputs_of(rows: Frame) -> dict[str, Frame]:
        return {PRIMARY: rows, SECONDARY: rows.where("n % 2 = 1")}

    driver = start()
    driver.pipeline.shared = SimpleNamespace(outputs_of=outputs_of)  # type: ignore[assignment]
    driver.run(0)
    assert driver.fitted == [] and driver.log.count("persist") == driver.log.count("unpersist") == 1
    assert (numbers(driver.disk, PRIMARY), numbers(driver.disk, SECONDARY)) == ([1, 2, 3, 4], [1, 3])


def test_the_primary_names_the_transaction_of_every_other_table(disk: Disk, start: Start) -> None:
    driver = start()
    driver.run(0)
    driver.run(1, [2])
    txns = newest_entry(disk, PRIMARY).txns
    assert txns == {SECONDARY: Txn(1, 0).version, DEAD_LETTERS: Txn(1, -1).version}


def test_a_table_without_rows_in_a_batch_gets_no_commit_and_the_primary_always_one(disk: Disk, start: Start) -> None:
    driver = start()
    driver.run(0, [])
    assert driver.commits == [PRIMARY]
    assert newest_entry(disk, PRIMARY).rows == {SECONDARY: 0, "written": 0}
    assert commits_of(disk, PRIMARY) == 1


@pytest.mark.parametrize("table", [PRIMARY, SECONDARY])
def test_rows_without_a_key_become_dead_letters(disk: Disk, start: Start, table: str) -> None:
    driver = start()
    driver.rejected, driver.rejected_of = pa.table({"k": pa.nulls(3, pa.string()), "n": [7, 8, 9]}), table
    driver.run(0)
    assert newest_entry(disk, PRIMARY).rows["dead_letters"] == 3
    assert commits_of(disk, DEAD_LETTERS) == 1


@pytest.mark.parametrize("ends", [True, False])
def test_a_query_of_wall_clock_timers_ends_after_a_batch_without_records_and_rows(
    disk: Disk, start: Start, *, ends: bool
) -> None:
    driver = start()
    driver.pipeline.ends_when_quiet = ends
    folder, at = disk.checkpoint().folder, [disk.ends(0), disk.ends(0), disk.ends(0), disk.ends(0), disk.ends(1)]
    for batch, end in enumerate(at):
        lay_offsets(folder, batch, end, starts=disk.ends(-1))
    driver.run(0)
    driver.run(1, [2])  # a timer was due
    driver.run(2, [])
    if not ends:
        driver.run(3, [])
        return
    with pytest.raises(StopAtBorder):
        driver.run(3)
    assert driver.pipeline.stopped_at_border
    again = start()  # the batch that was planned last repeats, and says nothing about what has come since
    again.pipeline.ends_when_quiet = True
    again.run(3, [])
    again.run(4, [6])
    assert numbers(disk, PRIMARY) == [2, 2, 4, 6] and commits_of(disk, PRIMARY) == 5


def test_a_batch_with_another_watermark_is_followed_by_one_more(disk: Disk, start: Start) -> None:
    driver = start()
    driver.pipeline.ends_when_quiet = True
    folder = disk.checkpoint().folder
    for batch in range(4):
        lay_offsets(folder, batch, disk.ends(0), starts=disk.ends(-1), watermark=min(batch, 1) * 1000)
    for batch in (0, 1, 2):
        driver.run(batch, [])
    with pytest.raises(StopAtBorder):
        driver.run(3, [])


@pytest.mark.parametrize("table", [PRIMARY, SECONDARY])
def test_what_is_remembered_of_deletes_is_committed_before_its_table_and_once(
    disk: Disk, start: Start, monkeypatch: pytest.MonkeyPatch, table: str
) -> None:
    remembered = ensure_sink(disk.settings, Declared(f"{table}_deletes"), STREAM, OUTPUT, generation=1)

    def remembering(noted: int) -> Driver:
        driver = start()
        driver.pipeline.sinks, driver.noted = driver.sink_set(tombstones={table: remembered}), noted
        return driver

    driver = remembering(1)

    def dies(name: str, _: str, number: int) -> None:
        if name == "secondary_committed":
            raise KeyboardInterrupt

    driver.at = dies
    with pytest.raises(KeyboardInterrupt):
        driver.run(0)
    assert driver.commits == [remembered.name, SECONDARY]
    again = remembering(1)
    again.run(0)
    assert again.commits == [PRIMARY]
    made = newest_entry(disk, PRIMARY)
    assert made.rows == {remembered.name: 1, SECONDARY: 2, "written": 2}
    assert made.txns[remembered.name] == Txn(1, 0).version
    quiet = remembering(0)
    quiet.run(1)
    assert quiet.commits == [SECONDARY, PRIMARY]
    made = newest_entry(disk, PRIMARY)
    assert remembered.name not in made.rows and made.txns[remembered.name] == Txn(1, 0).version


def test_a_no_data_batch_asks_for_no_bad_records(disk: Disk, start: Start) -> None:
    """Spark runs batches without data when a watermark moves; observed counts are then of another batch."""
    driver = start()
    driver.run(0)
    driver.bad = 9
    driver.disk.plan(1)
    same = (disk.folder / "offsets" / "0").read_text()
    (disk.folder / "offsets" / "1").write_text(same)
    driver.run(1)
    assert DEAD_LETTERS not in driver.commits


def test_several_batches_leave_a_world_that_preflight_lets_start(disk: Disk, start: Start) -> None:
    driver = start()
    for batch in range(4):
        driver.bad = batch % 2
        driver.run(batch, list(range(batch * 3, batch * 3 + 3)))
        assert disk.findings() == []
        disk.finish(batch)
        assert disk.findings() == []
    assert numbers(disk, PRIMARY) + numbers(disk, SECONDARY) == [0, 2, 4, 6, 8, 10, 1, 3, 5, 7, 9, 11]


def test_a_batch_that_is_to_end_elsewhere_is_not_begun_unless_a_table_has_it(disk: Disk, start: Start) -> None:
    driver, checked = start(), []
    driver.replan = lambda _, batch: checked.append(batch) or len(checked) == 1
    with pytest.raises(StopAtBorder):
        driver.run(0)
    assert driver.pipeline.replanned and driver.pipeline.failure is None and commits_of(disk, PRIMARY) == 0
    driver.run(0)
    assert checked == [0, 0] and numbers(disk, PRIMARY) == [2, 4]
    again = start()
    again.replan = lambda *_: pytest.fail("it was asked")
    again.run(0)
    assert numbers(disk, PRIMARY) == [2, 4]


def test_a_stop_is_obeyed_before_any_side_effect_and_inside_a_batch_lets_it_end(disk: Disk, start: Start) -> None:
    driver = start()
    driver.stop.set()
    with pytest.raises(StopAtBorder):
        driver.run(0)
    assert driver.log == ["batch_committed -1"]
    assert driver.pipeline.stopped_at_border
    assert driver.pipeline.failure is None
    assert commits_of(disk, PRIMARY) == 0
    driver = start()
    driver.before_commit = driver.stop.set
    driver.run(0)
    assert numbers(disk, PRIMARY) == [2, 4]
    with pytest.raises(StopAtBorder):
        driver.run(1)


def test_no_table_gets_a_batch_before_its_offsets_are_on_disk_and_its_topics_looked_at(
    disk: Disk, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver, seen = start(), []

    def slow(what: str) -> None:
        time.sleep(0.05)
        seen.append((what, [line for line in driver.log if line.startswith("commit ")]))

    monkeypatch.setattr(CheckpointSync, "planned", lambda *_: slow("planned"))
    monkeypatch.setattr(CheckpointSync, "state", lambda *_: slow("state"))
    driver.before_commit = lambda: slow("topics")
    driver.run(0)
    assert seen[:3] == [("planned", []), ("topics", []), ("topics", [])], "the second time for a batch that took long"
    assert [what for what, _ in seen[3:]] == ["state", "state"], "the second time for what came after the rows"
    driver.run(1)

    def broken(*_: object) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(CheckpointSync, "planned", broken)
    with pytest.raises(OSError, match="Input/output"):
        driver.run(2)
    assert newest_entry(disk, PRIMARY).batch == newest_entry(disk, SECONDARY).batch == 1


def test_a_failure_is_kept_for_the_session_and_the_batch_can_come_again(disk: Disk, start: Start) -> None:
    def topic_gone() -> None:
        assert driver.pipeline.in_batch, "known outside"
        raise OffsetsLost("topic things was deleted")

    driver = start()
    driver.before_commit = topic_gone
    assert not driver.pipeline.in_batch
    with pytest.raises(OffsetsLost):
        driver.run(0)
    assert isinstance(driver.pipeline.failure, OffsetsLost)
    assert not driver.pipeline.in_batch
    assert driver.log[-2:] == [f"close {PRIMARY}", "unpersist"]
    start().run(0)
    assert numbers(disk, PRIMARY) == [2, 4]


def test_a_table_that_others_keep_committing_to_is_tried_again(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    driver = start()

    def refuse(*_: object) -> None:
        raise CommitRefused("by others")

    monkeypatch.setattr(driver.pipeline.sinks.primary, "append_files", refuse)
    with pytest.raises(TransientError):
        driver.run(0)


@pytest.mark.parametrize(
    ("newest", "watermark_ms", "dropped_behind", "late"),
    [
        (7_000_000, 6_000, 6_000, 6),
        (7_000_000, 6_000, 4_000, 4),  # Spark judges late rows by the watermark of the batch before
        (7_000_000, 6_000, None, 0),  # behind the watermark, and nothing was dropped: their windows are open
        (7_000_000, 0, 0, 0),  # no watermark yet
        (None, 6_000, 6_000, 0),  # no good record
    ],
)
def test_records_behind_the_watermark_are_counted_when_state_dropped_some(
    disk: Disk, start: Start, newest: int | None, watermark_ms: int, dropped_behind: int | None, late: int
) -> None:
    driver = start()
    driver.pipeline.traits = STATE
    driver.newest, driver.watermark = newest, dropped_behind
    disk.plan(0)
    path = disk.folder / "offsets" / "0"
    path.write_text(path.read_text().replace('"batchWatermarkMs": 0', f'"batchWatermarkMs": {watermark_ms}'))
    driver.run(0)
    assert driver.reports[-1].entry.late_rows == newest_entry(disk, PRIMARY).rows.get("late", 0) == late
    line = disk.ledger_file.newest(STREAM)
    assert line is not None and line[0].rows.get("late", 0) == late
    assert driver.reports[-1].newest_record == newest
    possible = newest is not None and watermark_ms > 0
    assert ("ask for dropped rows" in driver.log) == possible, "the plan is looked through only if there may be some"


def after_the_first(longest: float) -> Pause:
    """The pause of a stream that has made its first batch."""
    pause = Pause(timedelta(seconds=longest))
    assert pause.after(1, time.monotonic()) == 0.0
    return pause


def test_a_batch_of_few_records_is_followed_by_a_pause_that_a_stop_ends(start: Start) -> None:
    driver = start()
    waits: list[float] = []
    driver.stop.wait = waits.append  # type: ignore[method-assign,assignment]
    driver.run(0)
    assert waits == [], "no pace, no pause: a replay goes on at once"
    driver.pipeline.pause = after_the_first(0.001)
    driver.run(1)
    assert waits == [pytest.approx(0.001, rel=0.1)]
    assert driver.log[-1] == "upkeep", "the pause comes after everything that the batch does"
    driver.pipeline.settings = StreamSettings(max_offsets_per_trigger=15)  # a batch here reads 15 offsets
    driver.run(2)
    assert len(waits) == 1, "a batch that is full says that more is waiting"
    driver.pipeline.settings = StreamSettings(max_offsets_per_trigger=16)
    driver.run(3)
    assert len(waits) == 2
    driver = start()
    driver.pipeline.pause = after_the_first(3600)
    driver.report = lambda _: driver.stop.set()
    driver.run(4)  # returns at once: the stop ends the pause


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
    driver.pipeline.sinks = replace(driver.pipeline.sinks, external=[topic])
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
def test_the_plan_of_a_stream_of_batches_only_runs_even_if_they_have_the_batch(
    start: Start, topic: Topic, has: bool
) -> None:
    """Otherwise neither its state nor the counts of its records would be computed."""
    driver = with_topic(start(), topic)
    sinks = driver.pipeline.stream.topic_sinks
    driver.pipeline.stream = replace(parity, function=lambda things: things, sinks=sinks, topic_sinks={})
    driver.pipeline.sinks = replace(driver.pipeline.sinks, secondary=[], batches_only=True)
    if has:
        driver.disk.plan(0)
        topic.append(pa.table({"n": [1]}), replace(driver.disk.entry(0), table=NAME, code=driver.pipeline.code))
    driver.run(0)
    assert ("write noop" in driver.log) == has
    assert (f"stage {NAME}" in driver.log) != has


def test_the_phases_of_a_batch_add_up_to_its_time_and_writing_counts_in_whatever_step_it_happens(start: Start) -> None:
    driver = start()
    driver.times = BatchReadTimes(ReadTimes(5.0, 3.0), ReadTimes())
    driver.run(0)
    (report,) = driver.reports
    phase_s = report.phase_s
    assert (phase_s["read"], phase_s["decode"], report.read_in_plan_s) == (5.0, 3.0, 8.0), "before the batch"
    inside = {phase: phase_s[phase] for phase in ("function", "write", "commit")}
    assert min(inside.values()) > 0 and sum(inside.values()) * 1000 <= report.milliseconds + 1
    assert not driver.pipeline._writes, "the rows of a batch are not held until the next one"


def test_what_tasks_did_at_the_same_time_is_never_longer_than_the_stage() -> None:
    tasks = BatchReadTimes(ReadTimes(), ReadTimes(3.0, 1.0))
    seen = phases(tasks, computed=4.0, staged=4.0, committed=2.0, written=4.5)
    assert seen == {"read": 1.5, "decode": 0.5, "function": 0.0, "write": 2.5, "commit": 1.5}
    seen = phases(tasks, computed=6.0, staged=1.0, committed=2.0, written=1.0)
    assert seen == {"read": 3.0, "decode": 1.0, "function": 1.0, "write": 1.0, "commit": 2.0}
