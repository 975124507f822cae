"""The operator of a plan, and a stream that runs meanwhile, without Kafka or Spark."""

from __future__ import annotations

import dataclasses
import fcntl
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from reprocessing import executor
from reprocessing.plan import registry
from reprocessing.plan.plan import StreamRecoveryPlan
from reprocessing.plan.plan_file import folder
from reprocessing.plan.replay_range import rebuilt_since
from reprocessing.plan.targets import Target
from reprocessing.stages import beside, stopped_streams
from reprocessing.stages.publish import fence
from streaming_jobs.errors import LeaseBusy, PreflightRefused, UsageError
from streaming_jobs.sources.topics import TopicInfo
from streaming_jobs.state.lease import take
from streaming_jobs.state.requests import STOP
from streaming_jobs.state.slice_requests import SliceCommitRequest, SliceRequests
from tests.support.life import STREAM, Life, Topics, plan_one, recovery, undo_one


@pytest.fixture
def life(tmp_path: Path) -> Life:
    return Life.of_batches(tmp_path, 4)


@pytest.fixture
def plan(life: Life) -> StreamRecoveryPlan:
    return plan_one(life.snapshot(Topics(end=40)), Target("batch", "1"))


def stop_of(life: Life) -> Path:
    return life.settings.state / STREAM.name / "stop"


def act(life: Life, plan: StreamRecoveryPlan, what: str, topics: Topics | None = None) -> object:
    whole = dataclasses.replace(recovery(life, plan.id, topics or Topics(end=40)), patience=-60.0)  # nobody stops here
    stop_first = {} if what == "give_up" else {"stop_first": True}
    return getattr(executor, what)(whole, **stop_first)


@pytest.mark.parametrize(("stage", "what"), [("clean_up", "resume"), ("clean_up", "give_up"), ("abort", "resume")])
def test_a_plan_that_is_over_stops_no_stream(life: Life, plan: StreamRecoveryPlan, stage: str, what: str) -> None:
    executor.journal_of(life.settings, plan.id).write(stage, "done")
    with take(life.settings, STREAM.name, purpose="session", wait=0):
        if (stage, what) == ("clean_up", "resume"):
            act(life, plan, what)
        else:
            with pytest.raises(UsageError, match=f"plan {plan.id} is"):
                act(life, plan, what)
        assert not stop_of(life).exists()


@pytest.mark.parametrize(
    ("noted", "fenced", "stays"),
    [
        (None, False, False),
        (("take_savepoint", "done"), False, False),  # its savepoint is taken again before the fence
        (("fence", "begun"), False, False),  # whoever is to finish its batch first has to be able to start it
        (("fence", "begun"), True, True),
        (("fence", "begun"), None, True),
    ],
)
def test_a_stream_that_does_not_stop_in_time_stays_asked_to_stop_if_a_table_is_or_may_be_fenced(
    life: Life,
    plan: StreamRecoveryPlan,
    monkeypatch: pytest.MonkeyPatch,
    noted: tuple[str, Any] | None,
    fenced: bool | None,
    stays: bool,
) -> None:
    """`fenced` None: its tables cannot be looked at."""

    def unreadable(*_: object) -> bool:
        raise OSError("no such disk")

    monkeypatch.setattr(beside, "_READY_WITHIN", 0.0)  # nobody answers here either
    if noted is not None:
        executor.journal_of(life.settings, plan.id).write(*noted)
    if fenced:
        fence(life.settings, STREAM, plan.id, plan.generation)
    if fenced is None:
        monkeypatch.setattr(stopped_streams, "fenced_by", unreadable)
    with take(life.settings, STREAM.name, purpose="session", wait=0), pytest.raises(LeaseBusy):
        act(life, plan, "resume")
    request = STOP.request(life.settings, STREAM.name)
    assert (request.plan if request else None) == (plan.id if stays else None)
    assert (executor.journal_of(life.settings, plan.id).outcome == "planned") == (noted is None)


@pytest.mark.parametrize(
    ("stage", "what", "marker", "stays"),
    [
        (None, "give_up", "by hand", True),
        (None, "give_up", "stopped for recovery plan things-0099\n", True),
        (None, "give_up", "stopped for recovery plan things-0001\n", False),
        ("clean_up", "resume", "stopped for recovery plan things-0001\n", False),
        ("abort", "give_up", "stopped for recovery plan things-0001\n", False),
    ],
)
def test_a_plan_that_ends_takes_its_own_marker_along_also_one_that_a_kill_has_left(
    life: Life, plan: StreamRecoveryPlan, stage: str | None, what: str, marker: str, stays: bool
) -> None:
    journal = executor.journal_of(life.settings, plan.id)
    if stage is not None:
        journal.write(stage, "done")
    stop_of(life).write_text(marker)
    with take(life.settings, STREAM.name, purpose="recovery things-0099", wait=0), suppress(UsageError):
        act(life, plan, what)  # it stops no stream, so it needs no lease
    assert (stop_of(life).read_text() if stop_of(life).exists() else "") == (marker if stays else "")
    assert journal.outcome == ("published" if stage == "clean_up" else "aborted")


def test_a_stream_that_does_not_run_is_not_started_while_a_plan_is_at_it(life: Life, plan: StreamRecoveryPlan) -> None:
    seen = []

    class Looking(Topics):
        def describe(self, _: str) -> TopicInfo:
            seen.append(STOP.request(life.settings, STREAM.name))
            raise RuntimeError("enough")

    with pytest.raises(RuntimeError):
        act(life, plan, "resume", Looking(end=40))
    assert [request.plan for request in seen] == [plan.id], "it is at it"
    assert not stop_of(life).exists(), "it has failed before the fence"
    act(life, plan, "give_up")
    assert not stop_of(life).exists()


def test_a_plan_of_one_stream_that_cannot_be_read_is_in_nobody_elses_way(life: Life, plan: StreamRecoveryPlan) -> None:
    path = folder(life.settings, plan.id) / "plan.json"
    path.write_text(path.read_text().replace('"rate"', '"pace"'))
    executor.journal_of(life.settings, plan.id).write("take_savepoint", "begun")
    assert registry.under_way(life.settings, "others") is None
    with pytest.raises(UsageError, match="cannot be read"):
        registry.under_way(life.settings, STREAM.name)
    executor.journal_of(life.settings, plan.id).write("abort", "done")
    assert registry.under_way(life.settings, STREAM.name) is None


def test_a_second_plan_waits_until_the_first_is_over(life: Life, plan: StreamRecoveryPlan) -> None:
    other = plan_one(life.snapshot(Topics(end=40)), Target("batch", "0"))
    executor.journal_of(life.settings, plan.id).write("take_savepoint", "begun")
    with pytest.raises(UsageError, match=f"plan {plan.id} of stream things is under way"):
        act(life, other, "resume")
    assert registry.needed_savepoints(life.settings, STREAM.name) == {plan.base.savepoint: plan.id}


def test_a_plan_for_other_code_is_not_replayed_with_this(
    life: Life, plan: StreamRecoveryPlan, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("streaming_jobs.runtime.code_version.package_version", lambda: "2")
    with pytest.raises(UsageError, match="no longer holds"):
        act(life, plan, "apply")
    executor.journal_of(life.settings, plan.id).write("take_savepoint", "begun")
    with pytest.raises(UsageError, match="deploy that code again|no longer holds"):
        act(life, plan, "resume")
    assert not stop_of(life).exists()


@pytest.mark.parametrize("what", ["apply", "resume", "give_up"])
def test_a_plan_that_another_process_works_on_is_waited_for(life: Life, plan: StreamRecoveryPlan, what: str) -> None:
    executor.journal_of(life.settings, plan.id).write("take_savepoint", "begun", stream=STREAM.name)
    with (folder(life.settings, plan.id) / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(LeaseBusy, match="another process is working") as refused:
            act(life, plan, what)
        assert refused.value.next_step == "wait until it has ended"
        with pytest.raises(LeaseBusy):
            undo_one(life, plan.id, Topics(end=40))
    with pytest.raises(UsageError, match="was applied already: it is applying"):
        act(life, plan, "apply")


def test_a_slice_that_was_rebuilt_after_the_plan_ends_it(life: Life, plan: StreamRecoveryPlan) -> None:
    """The plan would publish its rows from before; whether it waits to be applied, or was begun already."""
    rebuilt = SliceCommitRequest("s-1", STREAM.name, "things", "", {}, 0.0, {"slice": "2013-03-01"})
    requests = SliceRequests.of(life.settings, STREAM.name)
    requests.end(rebuilt.ended("committed", version=plan.saw.tables[0].version))
    assert rebuilt_since(life.settings, STREAM, plan) == []
    requests.end(replace(rebuilt, id="s-2").ended("committed", version=plan.saw.tables[0].version + 1))
    for what in ("apply", "resume"):
        with pytest.raises((UsageError, PreflightRefused), match="slice 2013-03-01 of table things was rebuilt since"):
            act(life, plan, what)
