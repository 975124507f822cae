"""The stages beside running streams: how far a replay follows, when streams stop, and what an abort leaves."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from reprocessing import executor
from reprocessing.executor import recovery_of
from reprocessing.plan.plan import StreamRecoveryPlan
from reprocessing.plan.plan_file import load
from reprocessing.plan.targets import Target
from reprocessing.report.page import report_of
from reprocessing.stages import beside
from reprocessing.stages.beside import CannotCatchUp, LiveBatches, Paced, follow, goal_of, reason_to_stop_first
from reprocessing.stages.recovery import Recovery, RecoveryContext, RecoveryEvents
from reprocessing.stages.stages import AuditRefused, stages_now
from streaming_jobs.errors import PreflightRefused, UsageError
from streaming_jobs.ledger.entry import Txn
from streaming_jobs.preflight.snapshot import ledger_file
from streaming_jobs.state.lease import acquire
from streaming_jobs.state.requests import STAND_BY, STOP
from tests.support.life import STREAM, TOPIC, Life, recovery
from tests.support.waiting import meanwhile

pytestmark = pytest.mark.slow


@pytest.fixture
def life(tmp_path: Path) -> Life:
    return Life.of_batches(tmp_path, 6, wrong=range(3, 6), code="aaaxxx")


@pytest.fixture
def plan(life: Life) -> StreamRecoveryPlan:
    life.savepoint(2)
    return life.plan_to(Target("batch", "2"))


def context_of(life: Life, plan: StreamRecoveryPlan) -> RecoveryContext:
    return recovery(life, plan.id).of(STREAM.name)


def test_the_replay_follows_to_the_last_batch_but_one_and_never_over_the_streams_own(
    life: Life, plan: StreamRecoveryPlan
) -> None:
    context = context_of(life, plan)
    goal = goal_of(context)
    assert goal is not None and goal.batch == Txn(1, 4)
    assert (goal.began, goal.ends) == ({TOPIC: {0: 40}}, {TOPIC: {0: 50}})
    empty = replace(life.entry(6), offsets=(replace(life.offsets(5), start={0: 60}, end={0: 60}),))
    ledger_file(life.settings, STREAM.name).append(empty, {})
    ledger_file(life.settings, STREAM.name).append(replace(empty, batch=7), {})
    goal = goal_of(context)
    assert goal is not None and goal.batch == Txn(1, 5), "batches without records are passed over"
    ledger_file(life.settings, STREAM.name).append(life.entry(6, generation=2), {})
    assert goal_of(context) == goal, "what another generation has read is not the plan's to follow"


def test_there_is_nothing_to_follow_before_the_beginning_of_the_replay(life: Life) -> None:
    life.savepoint(4)
    assert goal_of(context_of(life, life.plan_to(Target("batch", "4")))) is None


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({}, None),
        ({"kind": "skip"}, "nothing is replayed"),
        ({"until": object()}, "a bounded recovery adds the rows that the stopped stream has"),
    ],
)
def test_plans_that_need_their_streams_stopped_say_why(
    life: Life, plan: StreamRecoveryPlan, change: dict[str, Any], reason: str | None
) -> None:
    whole = load(life.settings, plan.id)
    assert reason_to_stop_first(replace(whole, streams=(replace(plan, **change),))) == reason


def test_rounds_end_with_a_short_one_and_a_replay_that_falls_behind_is_told(
    life: Life, plan: StreamRecoveryPlan, monkeypatch: pytest.MonkeyPatch
) -> None:
    now, rounds, yields, times = [0.0], list[int](), list[bool](), iter([300.0, 40.0, 5.0, 20.0, 21.0, 22.0, 23.0])

    def run_to(context: RecoveryContext, ends: Any, replan: Any, steps: Any, **_: Any) -> tuple[None, int]:
        assert steps == replan.then.steps and steps[-1] == ends, "sources end batches where they are compared"
        now[0] += next(times)
        rounds.append(ends[TOPIC][0])
        yields.append(replan.slow_down is not None)
        life.batch(6 + len(rounds) - 1)
        return None, ends[TOPIC][0]

    monkeypatch.setattr(beside, "run_to", run_to)
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    found = follow(context_of(life, plan))
    assert rounds == [50, 60, 70] and (found["rounds"], found["batch"]) == (3, 6)
    with pytest.raises(CannotCatchUp, match="does not catch up"):
        follow(context_of(life, plan))
    assert yields[3:] == [True, True, False, False], "a replay that falls behind no longer yields"


def test_a_paced_replay_pauses_as_long_as_it_has_worked_but_never_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    now, pauses = [0.0], list[float]()
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    monkeypatch.setattr("time.sleep", pauses.append)
    paced = Paced(None, 0.25)
    for worked in (0.0, 1.0, 60.0):
        now[0] += worked
        assert not paced(None, 1)  # type: ignore[arg-type]
    assert pauses == [3.0, 10.0]


@pytest.mark.parametrize(
    ("slower", "shares"),
    [
        ([None, 1.2, 1.0], [0.5, 0.5, 0.5]),
        ([2.0, 2.0, 2.0, 2.0, 2.0], [0.4, 0.32, 0.256, 0.25, 0.25]),
        ([2.0, 1.2, 1.0, 1.0], [0.4, 0.4, 0.5, 0.5]),
        ([2.0, None], [0.4, 0.5]),
    ],
)
def test_a_replay_yields_while_the_streams_batches_are_slower_and_never_below_half_its_pace(
    monkeypatch: pytest.MonkeyPatch, slower: list[float | None], shares: list[float]
) -> None:
    now, pauses, found = [0.0], list[float](), iter(slower)
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    monkeypatch.setattr("time.sleep", pauses.append)
    paced = Paced(None, 0.5, lambda: next(found))
    assert not paced(None, 0)  # type: ignore[arg-type]
    for _ in slower:
        now[0] += 1.0
        paced(None, 1)  # type: ignore[arg-type]
    assert pauses == pytest.approx([1 / share - 1 for share in shares])
    assert Paced(None, 1.0, lambda: 9.0)._next_share() == 1.0, "a replay that need not wait does not"


def test_a_streams_batches_are_compared_with_those_before_the_replay_was_begun(
    life: Life, plan: StreamRecoveryPlan
) -> None:
    context, ledger = context_of(life, plan), ledger_file(life.settings, STREAM.name)

    def batches(first: int, seconds: float, count: int, records: int = 10) -> None:
        for number in range(first, first + count):
            offsets = replace(life.offsets(5), start={0: 0}, end={0: records})
            ledger.append(replace(life.entry(6), batch=number, offsets=(offsets,)), {}, seconds=seconds)

    batches(10, 9.0, 20)
    batches(30, 2.0, 30)
    time.sleep(0.01)
    context.journal.write("follow", "begun")
    assert LiveBatches.of(context).slow_down() is None
    batches(60, 3.0, 40)
    batches(100, 50.0, 9, records=11)
    context.journal.write("follow", "begun")
    assert LiveBatches.of(context).slow_down() == 1.5, "a replay that is resumed knows them, larger ones do not count"
    batches(109, 2.0, 15)
    assert LiveBatches.of(context).slow_down() == 1.0, "only the newest ones"
    batches(124, 4.0, 1_100)
    assert LiveBatches.of(context).slow_down() == 2.0, "also after an hour"


@contextmanager
def running(life: Life) -> Iterator[None]:
    """A session holds the stream until it is asked to stop, and for the block at most."""
    lease = acquire(life.settings, STREAM.name, purpose="session")

    def session(over: threading.Event) -> None:
        while not over.wait(0.02) and not STOP.asked(life.settings, STREAM.name):
            pass
        lease.release()

    with meanwhile(session):
        yield


@pytest.fixture
def followed(life: Life, plan: StreamRecoveryPlan, monkeypatch: pytest.MonkeyPatch) -> Recovery:
    """The recovery of a plan whose replay writes the right rows of batch 3 and 4, then of the rest."""

    def write(context: RecoveryContext, upto: int) -> None:
        staged = Life(context.replay_settings, context.stream)
        at = staged.at()
        assert at is not None
        for number in range(at.batch + 1, upto + 1):
            staged.batch(number, generation=context.plan.generation, code="right")

    def catch_up(context: RecoveryContext) -> dict[str, Any]:
        assert not STOP.asked(life.settings, STREAM.name), "the stream runs meanwhile"
        write(context, 4)
        return {"generation": 1, "batch": 4, "ends": {TOPIC: {"0": 50}}, "rounds": 1, "records": 20, "seconds": 0.1}

    def rest(context: RecoveryContext) -> dict[str, Any]:
        assert STOP.asked(life.settings, STREAM.name)
        write(context, 5)
        return {"batch": 5, "seconds": 0.1, "records": 30, "since": 0}

    monkeypatch.setattr("reprocessing.stages.stages.follow", catch_up)
    monkeypatch.setattr(beside, "_READY_WITHIN", 0.1)
    return recovery(life, plan.id, replay=rest)


def done(whole: Recovery) -> list[str]:
    return [line.stage for line in whole.journal.lines() if line.state == "done"]


RIGHT = list(range(60))


def test_a_running_stream_stops_when_its_replay_has_been_followed_compared_and_confirmed(
    life: Life, followed: Recovery
) -> None:
    asked: list[list[int]] = []
    events = RecoveryEvents(confirm=lambda whole: bool(asked.append([d.old_rows for d in whole.differences]) or 1))
    followed.events = events
    with running(life):
        executor.apply(followed)
    assert life.ids() == RIGHT and life.record.generation == 2
    assert list(dict.fromkeys(done(followed))) == [
        "prepare", "follow", "compare", "take_savepoint", "fence", "replay", "audit", "publish", "switch_generation",
        "clean_up",
    ]  # fmt: skip
    assert done(followed).count("follow") == 2, "once more, when the session is ready for the next start"
    assert done(followed).count("take_savepoint") == 1, "it has not run on before the fence"
    assert len(asked) == 1 and asked[0][0] == 50, "once, of the rows up to the batch that the replay has followed to"
    assert not STOP.asked(life.settings, STREAM.name)


def test_a_stream_that_has_run_on_between_its_savepoint_and_the_fence_is_saved_again(
    life: Life, followed: Recovery, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unwritable(*_: object, **__: object) -> None:
        raise OSError("no space left")

    monkeypatch.setattr("reprocessing.stages.stages.begin_late", unwritable)  # the first that a fence writes
    for run, batch in ((executor.apply, 5), (executor.resume, 6)):
        with pytest.raises(OSError, match="no space left"):
            run(followed)
        assert followed.of(STREAM.name).result("take_savepoint")["batch"] == batch
        life.batch(batch + 1)
    assert done(followed).count("take_savepoint") == 2


def test_a_stream_that_does_not_run_or_is_to_stop_first_is_stopped_before_its_replay(
    life: Life, followed: Recovery, plan: StreamRecoveryPlan
) -> None:
    text = executor.explained(life.settings, load(life.settings, plan.id))
    assert "follow" not in text
    with running(life):
        text = executor.explained(life.settings, load(life.settings, plan.id))
        assert text.index("follow ") < text.index("take_savepoint") and "the stream runs meanwhile" in text
        executor.apply(followed, stop_first=True)
    assert "follow" not in done(followed) and life.ids() == RIGHT


def test_without_a_confirmation_the_stream_runs_on_and_an_abort_is_not_noticed(life: Life, followed: Recovery) -> None:
    followed.events = RecoveryEvents(confirm=lambda _: False)
    before = life.ids()
    with running(life):
        with pytest.raises(AuditRefused, match="not confirmed"):
            executor.apply(followed)
        assert followed.journal.outcome == "waits for confirmation"
        assert not STOP.asked(life.settings, STREAM.name) and STAND_BY.request(life.settings, STREAM.name) is None
        executor.give_up(followed)
        assert not STOP.asked(life.settings, STREAM.name)
    assert followed.journal.outcome == "aborted" and life.ids() == before and life.record.generation == 1
    assert not followed.of(STREAM.name).replay_settings.tables_folder.exists(), "nothing is left of its staging tables"


def test_a_stream_that_another_plan_has_moved_meanwhile_is_not_followed(life: Life, plan: StreamRecoveryPlan) -> None:
    for number in range(20):
        ledger_file(life.settings, STREAM.name).append(life.entry(number, generation=2), {})
    with pytest.raises(PreflightRefused, match="could follow"):
        follow(context_of(life, plan))


def test_a_reader_that_has_begun_since_the_plan_was_made_is_noticed_before_the_stop(
    life: Life, plan: StreamRecoveryPlan, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("reprocessing.stages.void_ranges.left_out", lambda *_: ["late"])
    with pytest.raises(UsageError, match="stream late reads what plan .* changes, and has begun since") as refused:
        follow(context_of(life, plan))
    assert "recover abort" in refused.value.next_step


STOPPED = ["take_savepoint", "fence", "void_records", "prepare", "replay", "audit"]
BESIDE = ["prepare", "follow", "compare", "take_savepoint", "fence", "void_records", "append_records", "replay"]
FOLLOWED = ["take_savepoint", "fence", "void_records", "prepare", "append_records", "replay", "audit"]


@pytest.mark.parametrize(
    ("journaled", "now", "stopping"),
    [
        ([], STOPPED, STOPPED),
        (["prepare"], BESIDE, STOPPED),
        (["prepare", "follow"], BESIDE, FOLLOWED),
        (["prepare", "follow", "take_savepoint"], FOLLOWED, FOLLOWED),
        (["prepare", "follow", "compare"], BESIDE, BESIDE),
        (["prepare", "follow", "compare", "take_savepoint"], BESIDE, BESIDE),
        (["take_savepoint", "fence", "prepare"], STOPPED, STOPPED),
    ],
)
def test_plan_and_report_list_the_stages_that_run_also_if_the_stream_is_stopped_after_it_was_followed(
    life: Life, plan: StreamRecoveryPlan, journaled: list[str], now: list[str], stopping: list[str]
) -> None:
    whole = load(life.settings, plan.id)
    whole = replace(whole, streams=(replace(plan, wrong_from={"out": {0: 5}}, ends_written={"out": {0: 9}}),))
    applied = recovery_of(life.settings, [life.stream], life.topics, whole, RecoveryEvents())
    for stage in journaled:
        applied.journal.write(stage, "done", stream=None if stage == "compare" else STREAM.name)
    assert [stage.name for stage in stages_now(whole, applied.journal)][: len(now)] == now
    assert [stage.name for stage in stages_now(whole, applied.journal, stopping=True)][: len(stopping)] == stopping
    executor._report(applied)
    for text in (executor.explained(life.settings, whole), report_of(life.settings, plan.id).read_text()):
        steps = text[text.index("What will happen") :]
        assert re.findall(r"^ +\d+\. (\w+)", steps, re.MULTILINE)[: len(now)] == now
