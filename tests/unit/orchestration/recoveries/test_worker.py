"""The work of a launch, on a stream's life on disk: without Kafka, Spark or Dagster; and the process that does it."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

from orchestration.recoveries.events import Ended, Event, Failed, OffsetSpan, PlanShown, Said
from orchestration.recoveries.request import Launch, PlanRequest
from orchestration.recoveries.run import RecoveryProcess, recovery_command
from orchestration.recoveries.worker import Worker
from orchestration.sessions.bounded_log import BoundedLog
from reprocessing.plan.journal import journal_of
from reprocessing.plan.plan_file import load
from reprocessing.stages.recovery import StageBegun
from streaming_jobs.catalog.topology import Topology
from streaming_jobs.errors import UsageError
from streaming_jobs.platform.processes.child import ChildProcess
from streaming_jobs.settings import Settings
from streaming_jobs.state.requests import STOP
from tests.support import ROOT
from tests.support.life import STREAM, Life, Topics
from tests.support.waiting import wait_for

pytestmark = pytest.mark.slow

SKIP = PlanRequest((STREAM.name,), {"latest": ""})
"""A recovery that replays nothing: no Spark is needed to carry it out."""


@pytest.fixture
def life(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Life:
    monkeypatch.setattr("orchestration.recoveries.request.topics_of", lambda _: Topics(end=120))
    monkeypatch.setattr("orchestration.recoveries.worker.topics_of", lambda _: Topics(end=120))
    monkeypatch.setattr("streaming_jobs.runtime.code_version.package_version", lambda: "1")
    # Otherwise these would be the shipped flows, with their suites.
    flows = ModuleType("recoveries_test_flows")
    flows.STREAM = STREAM  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, flows.__name__, flows)
    monkeypatch.setenv("RECOURSE_FLOWS", f'["{flows.__name__}"]')
    return Life.of_batches(tmp_path, 9)


def work(life: Life, launch: Launch) -> list[Event]:
    """The events of one launch."""
    events: list[Event] = []
    Worker(life.settings, Topology.of([STREAM]), events.append).run(launch)
    return events


def ended(events: list[Event]) -> Ended:
    (end,) = [event for event in events if isinstance(event, Ended)]
    assert end is events[-1]
    return end


def planned(life: Life) -> str:
    events = work(life, Launch("plan", request=SKIP))
    assert isinstance(events[0], PlanShown) and "What will happen" in events[0].text
    assert ended(events).outcome == "planned" and not STOP.asked(life.settings, STREAM.name)
    return events[0].plan


def test_a_plan_is_applied_and_reports_its_stages_generation_and_offsets(life: Life) -> None:
    plan = planned(life)
    events = work(life, Launch("apply", plan))
    stages = [(event.number, event.stages, event.name) for event in events if isinstance(event, StageBegun)]
    assert stages == [(1, 5, "take_savepoint"), (2, 5, "fence"), (3, 5, "confirm"), (4, 5, "skip"), (5, 5, "clean_up")]
    assert ended(events) == Ended(
        plan, "published", {STREAM.name: 2}, [OffsetSpan(STREAM.name, "things", 0, 90, 120)], skips=True
    )
    with pytest.raises(UsageError, match="was applied already"):
        work(life, Launch("apply", plan))


def test_a_pause_before_publishing_is_an_end_in_order_and_the_next_apply_publishes(life: Life) -> None:
    plan = planned(life)
    assert ended(work(life, Launch("apply", plan, pause=True))).outcome == "waits for confirmation"
    assert ended(work(life, Launch("apply", plan))).outcome == "published"


def test_apply_continues_a_plan_that_was_cut_off(life: Life, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = planned(life)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr("reprocessing.executor._crash_point", cut_in("recover_skip_begun"))
        work(life, Launch("apply", plan))
    assert journal_of(life.settings, plan).outcome == "applying"
    events = work(life, Launch("apply", plan))
    assert any("was begun and is not over (stage skip)" in each.text for each in events if isinstance(each, Said))
    assert [each.name for each in events if isinstance(each, StageBegun)] == ["skip", "clean_up"]
    assert ended(events).outcome == "published"


def cut_in(where: str) -> Callable[..., None]:
    """Interrupts the recovery at a crash point."""

    def crash(_: object, point: str, stream: str | None = None) -> None:
        if point == where:
            raise KeyboardInterrupt

    return crash


def test_a_plan_is_given_up(life: Life) -> None:
    plan = planned(life)
    work(life, Launch("apply", plan, pause=True))
    assert ended(work(life, Launch("abort", plan))).outcome == "aborted"
    assert not STOP.asked(life.settings, STREAM.name)


def test_two_recoveries_of_one_stream_are_refused_with_the_words_of_the_command_line(life: Life) -> None:
    first, second = planned(life), planned(life)
    work(life, Launch("apply", first, pause=True))
    with pytest.raises(UsageError, match=f"plan {first} of stream {STREAM.name} is under way"):
        work(life, Launch("apply", second))
    assert journal_of(life.settings, second).outcome == "planned"


def test_suites_do_not_stand_in_the_way_of_a_plan_that_skips(life: Life, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are on by default, and there will be no rebuilt rows that they could judge."""
    suite = SimpleNamespace(name="things_rows", table="things")
    monkeypatch.setattr("orchestration.recoveries.suite_gate.suites_of", lambda *_: [suite])
    (stream,) = load(life.settings, planned(life)).streams
    assert stream.skips and not stream.checks.suites


def test_what_names_one_stream_is_refused_for_two(life: Life) -> None:
    request = PlanRequest((STREAM.name, STREAM.name), {"batch": "3"})
    with pytest.raises(UsageError, match="the target batch is about one stream, and 2 were given"):
        work(life, Launch("plan", request=request))


@contextmanager
def child(settings: Settings) -> Iterator[tuple[RecoveryProcess, ChildProcess]]:
    """The process of a recovery in this home; it has ended afterwards."""
    environment = {
        "RECOURSE_HOME": str(settings.home),
        "RECOURSE_FLOWS": "streaming_jobs.examples.shop.streams",
        "PYTHONPATH": str(ROOT),
    }
    process = RecoveryProcess(recovery_command(), environment, BoundedLog(settings.logs / "recovery.log"))
    running = process.start(Launch("apply", "things-0009"))
    try:
        yield process, running
    finally:
        running.kill()


def test_the_process_reports_a_refusal_as_an_event_and_by_its_exit_code(life: Life) -> None:
    with child(life.settings) as (process, running):
        (failed,) = wait_for(lambda: list(process.events()), "its event")
        assert failed == Failed("REC-001", "there is no plan things-0009", "see `recourse recover list`")
        assert wait_for(lambda: running.exit_code, "its end") == 2
        assert not [*process.rest()]
    assert "Traceback" not in (life.settings.logs / "recovery.log").read_text()


def test_the_process_ends_when_whoever_started_it_is_gone(life: Life) -> None:
    """Before it has read what to do, and afterwards; its standard input ends then, also after a kill -9."""
    environment = {**os.environ, "RECOURSE_HOME": str(life.settings.home), "PYTHONPATH": str(ROOT)}
    done = subprocess.run(recovery_command(), input=b"", env=environment, capture_output=True, timeout=60, check=False)
    assert done.returncode == 130
