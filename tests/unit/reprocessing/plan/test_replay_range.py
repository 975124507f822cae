"""Where a replay starts and what it would miss; the end of a bounded one, and when a stream cannot have one."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import pytest
from pyspark.sql.types import StructField, StructType, TimestampType

from reprocessing.plan.history import has_present_rows
from reprocessing.plan.plan import Base, StreamRecoveryPlan
from reprocessing.plan.plan_file import load, names
from reprocessing.plan.replay_range import LastBatch, lost, until_border, until_of, until_target
from reprocessing.plan.snapshot import PlanningSnapshot, planning_snapshot
from reprocessing.plan.targets import Resolved, Target
from streaming_jobs.declare.slices import Slices
from streaming_jobs.declare.table_source import DeltaSource
from streaming_jobs.errors import BrokerUnreachable, UsageError
from streaming_jobs.formats import Json
from streaming_jobs.ledger.entry import LedgerEntry, Txn
from streaming_jobs.ledger.positions import OffsetBounds
from streaming_jobs.runtime import output_plans
from streaming_jobs.sinks.delta.log import noted
from streaming_jobs.state import savepoints
from streaming_jobs.state.redrive_requests import RedriveRequest, RedriveRequests
from streaming_jobs.state.slice_requests import SliceCommitRequest, SliceRequests
from streaming_jobs.state.stream_folder import StreamFolder
from streaming_jobs.state.stream_record import CorrectedBatches, Generation
from streaming_jobs.stream import DeltaTable as Declared
from streaming_jobs.stream import KafkaTopic
from tests.support.life import ROWS, STREAM, TOPIC, Life, Topics, plan_one

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(
    ("begin", "words"),
    [
        (0, ""),
        (1, "versions 1 to 9 of table numbers can no longer be read"),
        (9, "version 9 of table numbers can no longer be read"),
        (10, ""),
    ],
)
def test_a_replay_begins_with_the_whole_table_or_where_its_versions_are_left(begin: int, words: str) -> None:
    found = lost({"numbers": {0: begin}}, {"numbers": OffsetBounds({0: 0}, {}, continues={0: 10})})
    assert found.startswith(words) and bool(found) is bool(words)


def test_of_a_topic_only_its_first_offset_counts() -> None:
    topics = {"things": OffsetBounds({0: 5, 1: 0}, {})}
    assert lost({"things": {0: 4, 1: 0}}, topics).startswith("offsets 4 to 4 of topic")
    assert lost({"things": {0: 5, 1: 0}}, topics) == ""


SUM = {"0": "Aggregate [k], [k, sum(value) AS s]"}


@pytest.fixture
def life(tmp_path: Path) -> Life:
    """Nine batches; 3 to 5 are of wrong code."""
    return Life.of_batches(tmp_path, 9, wrong=range(3, 6), code="aaaxxxbbb").know_codes()


def plan(
    life: Life,
    until: str,
    target: Target = Target("batch", "2"),  # noqa: B008
    topics: Topics | None = None,
) -> StreamRecoveryPlan:
    snapshot = planning_snapshot(life.settings, life.stream, topics or Topics())
    return plan_one(snapshot, target, until=until_target(until))


@pytest.mark.parametrize(
    ("until", "batch"),
    [
        ("batch 5", 5),
        ("table-version 6", 5),
        ("code bug", 5),
        ("offsets 0:60", 5),
        ("offsets 0:51", 5),
        ("datetime 1970-01-01T00:00:60+00:00", 5),
        ("datetime 1970-01-01T00:00:41+00:00", 4),
        ("savepoint g0001-b000000004", 4),
    ],
)
def test_an_end_becomes_the_last_batch_to_correct(life: Life, until: str, batch: int) -> None:
    """A time or an offset within a batch means all of it, so that nothing before is left wrong."""
    life.savepoint(4)
    until = until.replace("00:00:60", "00:01:00")
    made = plan(life, until)
    assert made.until is not None and made.until.txn == Txn(1, batch) and made.until.ends == life.ends(batch)
    assert list(made.ranges()) == [(TOPIC, 0, 30, 10 * (batch + 1))] and made.records == 10 * (batch - 2)
    inside = until in ("offsets 0:51", "datetime 1970-01-01T00:00:41+00:00")
    assert any("moved to the end of g0001 batch" in note for note in made.notes) == inside
    assert any("up to the first one at or after it" in note for note in made.notes) == until.startswith("datetime")
    assert savepoints.find(life.settings, STREAM.name, made.until.savepoint) is not None
    assert load(life.settings, made.id).streams[0] == made
    assert load(life.settings, made.id).target == f"batch 2, until batch {batch}"


@pytest.mark.parametrize("text", ["", "5", "batch", "earliest", "first-bad id < 0", "batch "])
def test_what_is_no_end_says_which_there_are(text: str) -> None:
    with pytest.raises(UsageError, match="is not the end of a bounded recovery") as refused:
        until_target(text)
    assert "--until 'batch 41'" in refused.value.next_step


@pytest.mark.parametrize(
    ("until", "target", "words"),
    [
        ("batch 8", Target("batch", "2"), "that is an ordinary recovery"),
        ("code b", Target("batch", "2"), "that is an ordinary recovery"),
        ("datetime 2026-01-01T00:00:00+00:00", Target("batch", "2"), "that is an ordinary recovery"),
        ("batch 2", Target("batch", "2"), "there is nothing between"),
        ("batch 1", Target("batch", "2"), "there is nothing between"),
        ("batch 77", Target("batch", "2"), "not in the ledger"),
        ("savepoint g0001-b000000077", Target("batch", "2"), "has no savepoint"),
        ("batch 5", Target("offsets", "0:95"), "skips forward corrects nothing"),
    ],
)
def test_an_end_that_cannot_be_is_refused(life: Life, until: str, target: Target, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        plan(life, until, target, Topics(end=120))
    assert names(life.settings) == []


def test_upserts_are_refused(tmp_path: Path) -> None:
    life = Life.begin(tmp_path, replace(STREAM, sinks={"things": Declared("things", keys=["id"])})).run_three_codes()
    with pytest.raises(UsageError, match="things is an upsert: a row depends on all records of its key") as refused:
        plan(life, "batch 5")
    assert "leave --until out" in refused.value.next_step


def test_state_is_refused(life: Life) -> None:
    life.change(state_fingerprint=SUM)
    with pytest.raises(UsageError, match="keeps state") as refused:
        plan(life, "batch 5")
    assert "slices" not in refused.value.next_step


def watermark(life: Life, batch: int, at: datetime) -> None:
    entry = life.checkpoint().folder / "offsets" / str(batch)
    version, metadata, *rest = entry.read_text().split("\n")
    value = {**json.loads(metadata), "batchWatermarkMs": int(at.timestamp() * 1000)}
    entry.write_text("\n".join([version, json.dumps(value), *rest]))


def windowed(tmp_path: Path) -> Life:
    times = StructType([StructField("seen", TimestampType())])
    table = Declared("things", partition_by=["place"], slices=Slices("seen", reach="1 hour", zone="America/New_York"))
    topic = KafkaTopic(TOPIC, Json(times), event_time="seen", lateness="30 minutes")
    life = Life.begin(tmp_path, replace(STREAM, sources={"value": topic}, sinks={"things": table})).run_three_codes()
    life.change(state_fingerprint=SUM)
    return life


def test_windows_with_slices_are_offered_the_command_that_rebuilds_them(tmp_path: Path) -> None:
    """Midnight of the calendar is 05:00 UTC: a window of the day before may hold a record of 05:30."""
    life = windowed(tmp_path)
    watermark(life, 2, datetime(2026, 3, 2, 5, 30, tzinfo=UTC))
    watermark(life, 6, datetime(2026, 3, 4, 4, 45, tzinfo=UTC))
    with pytest.raises(UsageError, match="keeps state") as refused:
        plan(life, "batch 5")
    command = "recourse slices rebuild things --table things --from 2026-03-01 --to 2026-03-05"
    assert command in refused.value.next_step, refused.value.next_step


def test_where_no_watermark_before_is_known_all_earlier_days_are_offered(tmp_path: Path) -> None:
    life = windowed(tmp_path)
    for number in range(3):
        (life.checkpoint().folder / "offsets" / str(number)).unlink()
    watermark(life, 6, datetime(2026, 3, 6, 12, tzinfo=UTC))
    with pytest.raises(UsageError) as refused:
        plan(life, "batch 5")
    assert "--from 2020-01-01 --to 2026-03-07" in refused.value.next_step


def test_operators_that_may_keep_state_are_refused(life: Life) -> None:
    plans = StreamFolder.of(life.settings, STREAM.name).output_plans
    output_plans.write(plans, {"b": {"things": {"nodes": ["Filter", "Project"], "position": None}}})
    assert plan(life, "batch 5").until is not None
    output_plans.write(plans, {"b": {"things": {"nodes": ["Filter", "Mystery"], "position": None}}})
    with pytest.raises(UsageError, match=r"operators that may keep state \(Mystery\)"):
        plan(life, "batch 5")


@pytest.mark.parametrize(("code", "refused"), [("a", False), ("bug", True), ("b", True)])
def test_any_code_that_ran_since_the_end_counts(life: Life, code: str, refused: bool) -> None:
    """Batches 3 to 5 are of code bug, and those since of b: after batch 4 there are rows of both."""
    plans = StreamFolder.of(life.settings, STREAM.name).output_plans
    output_plans.write(plans, {code: {"things": {"nodes": ["Mystery"], "position": None}}})
    if refused:
        with pytest.raises(UsageError, match="operators that may keep state"):
            plan(life, "batch 4")
    else:
        assert plan(life, "batch 4").until is not None


def test_rows_that_are_not_kept_any_more_are_refused_with_the_nearest_that_are(life: Life) -> None:
    life.savepoint(2)
    life.savepoint(4)
    life.forget(4)
    with pytest.raises(UsageError, match="as of g0001 batch 5 are no longer kept") as refused:
        plan(life, "batch 5")
    step = refused.value.next_step
    assert "--until 'batch 7' (after it)" in step and "--until 'savepoint g0001-b000000004' (before it)" in step
    assert names(life.settings) == []
    assert plan(life, "batch 7").until is not None


def test_changes_of_somebody_else_after_the_start_are_refused(life: Life) -> None:
    life.accept(3, why="an old one")
    assert plan(life, "batch 5").until is not None, "version 3 is batch 2, from which the replay starts"
    life.accept(4, why="by hand")
    with pytest.raises(UsageError, match=r"version 4 of table things was accepted \(by hand\)"):
        plan(life, "batch 5")


def test_a_slice_that_was_rebuilt_after_the_end_is_refused(life: Life) -> None:
    requests = SliceRequests.of(life.settings, STREAM.name)

    def rebuilt(name: str, version: int) -> None:
        entry = LedgerEntry("slice", STREAM.name, "things", 1, 7).encode()
        request = SliceCommitRequest(name, STREAM.name, "things", entry, {}, time.time() + 60, {"slice": "a day"})
        requests.ask(request)
        requests.end(request.ended("committed", version=version))

    rebuilt("things-1", 6)
    assert plan(life, "batch 5").until is not None, "version 6 is batch 5"
    rebuilt("things-2", 8)
    with pytest.raises(UsageError, match="slice a day of table things was rebuilt after g0001 batch 5"):
        plan(life, "batch 5")


def test_a_redrive_after_the_end_or_one_that_waits_is_refused(life: Life) -> None:
    requests = RedriveRequests.of(life.settings, STREAM.name)
    waiting = RedriveRequest("r-1", STREAM.name, "dead letters", STREAM.dead_letters, (), (), time.time() + 60, {})
    requests.ask(waiting)
    with pytest.raises(UsageError, match="redrive r-1 waits for its commit"):
        plan(life, "batch 5")
    requests.end(waiting.committed({}))
    assert plan(life, "batch 5").until is not None
    entry = LedgerEntry("redrive", STREAM.name, "things", 1, 7, plan="r-1", note="3 dead letters")
    life.stored().commit_actions([], noted(entry))
    with pytest.raises(UsageError, match="3 dead letters were redriven into table things after g0001 batch 5"):
        plan(life, "batch 5")


def test_savepoints_with_rows_that_were_corrected_since_are_not_used(life: Life) -> None:
    for batch in (2, 4, 7):
        life.savepoint(batch)
    opened = Generation(2, 1.0, "recovery things-0001", 1, 8, corrected=CorrectedBatches(Txn(1, 2), Txn(1, 5)))
    life.change(generations=(*life.record.generations, opened))
    assert life.record.generations[-1] == opened, "it is read as it was written"
    generations = life.record.generations
    assert [has_present_rows(generations, Txn(1, batch)) for batch in (2, 3, 5, 8)] == [True, False, False, False]
    assert has_present_rows(generations, Txn(2, 8)) and not has_present_rows(generations, Txn(1, 9))
    undone = (*generations, Generation(3, 1.0, "recovery things-0002", 1, 8))
    assert has_present_rows(undone, Txn(1, 5)), "it was taken back"
    life.checkpoint(2).folder.mkdir()
    made = life.plan_to(Target("batch", "7"))
    assert made.base.savepoint == "g0001-b000000002"
    with pytest.raises(UsageError, match="has no savepoint 'g0001-b000000004' of its present rows"):
        plan(life, "savepoint g0001-b000000004")


def test_without_a_broker_an_end_that_is_a_batch_can_be_planned(life: Life) -> None:
    snapshot = life.snapshot()
    away = replace(snapshot, unreachable=BrokerUnreachable("no broker answered", "start it"))
    assert plan_one(away, Target("batch", "2"), until=Target("batch", "5")).until is not None
    with pytest.raises(BrokerUnreachable, match="only the broker knows"):
        plan_one(away, Target("batch", "2"), until=Target("datetime", "2026-01-01T00:00:00+00:00"))


def reading(life: Life, first: int) -> PlanningSnapshot:
    """A snapshot of the stream as if it read a table, whose log begins with a version, up to version 8."""
    snapshot = life.snapshot()
    stream = replace(STREAM, sources={"value": DeltaSource("numbers", ROWS)})
    (things,) = snapshot.preflight.topics
    numbers = replace(things, name="numbers", earliest={0: 0}, latest={0: 9}, continues={0: first})
    preflight = replace(snapshot.preflight, topics=(things, numbers))
    return replace(snapshot, stream=stream, preflight=preflight, topics=Reads())


class Reads(Topics):
    def offsets_for_time(self, name: str, ms: int) -> dict[int, int]:
        return {0: 0} if name == "numbers" else super().offsets_for_time(name, ms)


def test_a_replay_from_the_whole_content_of_a_table_has_no_end(life: Life) -> None:
    """The content is read as it is now, with rows from after the end."""
    snapshot, border = reading(life, 0), LastBatch(Txn(1, 5), life.ends(5))
    begin = Base(None, 1, -1, {TOPIC: {0: 0}, "numbers": {0: 0}})
    with pytest.raises(UsageError, match="begins with the whole content of table numbers"):
        until_of(snapshot, Target("batch", "5"), border, begin)
    assert not savepoints.savepoints(life.settings, STREAM.name)
    later = replace(begin, ends={TOPIC: {0: 30}, "numbers": {0: 2}})
    assert until_of(snapshot, Target("batch", "5"), border, later).txn == Txn(1, 5)


@pytest.mark.parametrize("first", [0, 3])
def test_a_time_before_the_log_of_a_table_that_is_read_is_refused(life: Life, first: int) -> None:
    target, snapshot = Target("datetime", "1970-01-01T00:01:00+00:00"), reading(life, first)
    resolved = Resolved(Txn(1, 2), life.ends(2))
    if first:
        with pytest.raises(UsageError, match="the log of table numbers, which the stream reads, does not reach back"):
            until_border(snapshot, target, resolved)
    else:
        assert until_border(snapshot, target, resolved).txn == Txn(1, 5)
