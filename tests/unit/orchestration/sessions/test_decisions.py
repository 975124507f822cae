"""The decisions of keepalive, watchdog and alerts, as tables: no Dagster, no process, no clock."""

from __future__ import annotations

from dataclasses import replace

import pytest

from orchestration.sessions.decisions import (
    FIRST_DELAY,
    HEALTHY_AFTER,
    IN_PROGRESS,
    LONGEST_DELAY,
    JobSeen,
    KeepWaiting,
    RunSeen,
    SessionSeen,
    StartSession,
    StreamSeen,
    alert_of,
    back_off,
    keepalive,
    presumed_dead,
)
from orchestration.sessions.ownership import FAILURE_TAG, FINGERPRINT_TAG, STOPPED_BY_TAG
from streaming_jobs.platform.failures import ErrorReport

NOW = 1_000_000.0
STREAMS = ("a", "b")


def run(status: str, *, ago: float = 3600, lasted: float = 1, run_id: str = "run-1", **tags: str) -> RunSeen:
    return RunSeen(
        run_id,
        status,
        created=NOW - ago - lasted,
        started=NOW - ago - lasted,
        ended=None if status in IN_PROGRESS else NOW - ago,
        updated=NOW - ago,
        tags=tags,
    )


def seen(*runs: RunSeen, **more: object) -> JobSeen:
    return replace(JobSeen(runs, STREAMS), **more)  # type: ignore[arg-type]


def waits(verdict: StartSession | KeepWaiting) -> str:
    assert isinstance(verdict, KeepWaiting)
    return verdict.reason


def test_the_first_session_is_started() -> None:
    assert keepalive(seen(), NOW) == StartSession("first")


@pytest.mark.parametrize("status", IN_PROGRESS)
def test_one_run_in_progress_is_enough(status: str) -> None:
    assert status.lower() in waits(keepalive(seen(run(status)), NOW))


def test_a_failed_session_is_started_again_once_for_each_run() -> None:
    assert keepalive(seen(run("FAILURE", run_id="r7")), NOW) == StartSession("after-r7")


def test_a_session_that_ended_by_itself_is_started_again() -> None:
    assert keepalive(seen(run("SUCCESS", run_id="r7")), NOW) == StartSession("after-r7")


def test_a_session_that_an_operator_stopped_stays_stopped() -> None:
    assert "operator" in waits(keepalive(seen(run("CANCELED"), run("SUCCESS")), NOW))


def duplicate(run_id: str, *, ago: float, waited: float) -> RunSeen:
    """A run that was cancelled in the queue: it never started."""
    return RunSeen(run_id, "CANCELED", created=NOW - ago - waited, started=None, ended=NOW - ago, updated=NOW - ago)


def test_a_queued_duplicate_that_was_cancelled_is_no_stop_of_the_session() -> None:
    running = run("STARTED", ago=0, lasted=300, run_id="session-of-now")
    cancelled = duplicate("duplicate", ago=100, waited=20)
    reason = waits(keepalive(seen(cancelled, running), NOW))
    assert reason == "queued run duplicat was cancelled; session session- runs"
    ended = run("FAILURE", ago=50, lasted=250, run_id="session-of-now")
    assert keepalive(seen(cancelled, ended), NOW) == StartSession("after-session-of-now")


def test_a_duplicate_cancelled_together_with_the_session_leaves_it_stopped() -> None:
    stopped = run("CANCELED", ago=99, lasted=300, run_id="session-of-then")
    reason = waits(keepalive(seen(duplicate("duplicate", ago=100, waited=20), stopped), NOW))
    assert "an operator stopped run session-" in reason


def test_the_only_session_cancelled_before_it_began_stays_stopped() -> None:
    failed = run("FAILURE", ago=300, lasted=10, run_id="before")
    reason = waits(keepalive(seen(duplicate("the-next", ago=100, waited=20), failed), NOW))
    assert "an operator cancelled run the-next before it began" in reason


def test_a_queued_run_says_what_it_waits_for() -> None:
    running = run("STARTED", ago=0, lasted=300, run_id="session-of-now")
    queued = replace(run("QUEUED", ago=9, run_id="duplicate"), started=None)
    reason = waits(keepalive(seen(queued, running), NOW))
    assert reason == "run session- is started; run duplicat waits in the queue for its end"


def test_a_session_that_recourse_up_ended_is_started_again_at_once() -> None:
    stopped = run("CANCELED", ago=0.1, run_id="r3", **{STOPPED_BY_TAG: "shutdown"})
    assert keepalive(seen(stopped, run("FAILURE")), NOW) == StartSession("after-r3")


def test_streams_stopped_on_purpose_are_left_alone_when_it_is_all_of_them() -> None:
    all_of_them = seen(run("SUCCESS"), stopped_on_purpose=frozenset(STREAMS))
    assert "on purpose" in waits(keepalive(all_of_them, NOW))
    one = seen(run("SUCCESS", run_id="r"), stopped_on_purpose=frozenset({"a"}))
    assert keepalive(one, NOW) == StartSession("after-r")


def test_a_recovery_is_named_by_every_tick_that_starts_nothing() -> None:
    recovering = {"a": "is being recovered by plan a-0001"}
    beside = seen(run("STARTED"), stopped_on_purpose=frozenset({"a"}), recovering=recovering)
    waiting = keepalive(beside, NOW)
    assert isinstance(waiting, KeepWaiting) and waiting.reason == "run run-1 is started"
    assert waiting.words == "run run-1 is started; stream a is being recovered by plan a-0001"
    all_of_them = seen(run("SUCCESS"), stopped_on_purpose=frozenset(STREAMS), recovering=recovering)
    words = waits(keepalive(all_of_them, NOW))
    assert words == "stream a is being recovered by plan a-0001; the session starts when that is over"


def test_nothing_is_started_beside_a_driver_that_somebody_else_runs() -> None:
    assert "a by process 7" in waits(keepalive(seen(run("FAILURE"), held_by={"a": "process 7"}), NOW))


def test_a_permanent_failure_is_given_up_until_something_changes() -> None:
    tags = {FAILURE_TAG: "permanent", FINGERPRINT_TAG: "f1"}
    failed = run("FAILURE", run_id="r", **tags)
    assert "gave up" in waits(keepalive(seen(failed, fingerprint="f1"), NOW))
    assert keepalive(seen(failed, fingerprint="f2"), NOW) == StartSession("after-r")
    launched_again = (run("FAILURE", run_id="r2"), failed)
    assert keepalive(seen(*launched_again, fingerprint="f1"), NOW) == StartSession("after-r2")


@pytest.mark.parametrize(
    ("ends", "delay"),
    [
        (["FAILURE"], FIRST_DELAY),
        (["FAILURE"] * 2, 2 * FIRST_DELAY),
        (["FAILURE"] * 4, 8 * FIRST_DELAY),
        (["SUCCESS", "FAILURE"], 2 * FIRST_DELAY),
        (["FAILURE"] * 12, LONGEST_DELAY),
        (["FAILURE", "CANCELED", "FAILURE"], FIRST_DELAY),
        (["CANCELED", "FAILURE"], 0.0),
    ],
)
def test_the_delay_doubles_with_each_quick_end_in_a_row(ends: list[str], delay: float) -> None:
    assert back_off([run(status) for status in ends]) == delay


def test_a_session_that_lasted_resets_the_delay() -> None:
    healthy = run("FAILURE", lasted=HEALTHY_AFTER)
    quick = run("FAILURE")
    assert back_off([healthy, quick, quick, quick]) == FIRST_DELAY
    assert back_off([quick, healthy, quick, quick]) == 2 * FIRST_DELAY


def test_a_failed_session_rests_before_it_is_started_again() -> None:
    assert "next try is in 4 s" in waits(keepalive(seen(run("FAILURE", ago=1.0)), NOW))
    assert isinstance(keepalive(seen(run("FAILURE", ago=FIRST_DELAY)), NOW), StartSession)


def test_an_end_of_before_the_clock_was_set_back_keeps_nothing_waiting() -> None:
    assert isinstance(keepalive(seen(run("FAILURE", ago=-7200)), NOW), StartSession)
    ended = replace(run("STARTED", ago=0), started=NOW + 7200)
    lost = SessionSeen(ended, worker_lives=False, held=False, heartbeat=NOW + 7000)
    assert presumed_dead(lost, NOW, stale_after=60, patience=45) is not None
    begins = replace(run("STARTING", ago=-7200), started=None)
    assert presumed_dead(replace(lost, run=begins), NOW, stale_after=60, patience=45) is not None


def test_a_wait_until_a_person_acts_is_told_from_one_that_ends() -> None:
    for_good = seen(run("CANCELED")), seen(run("SUCCESS"), stopped_on_purpose=frozenset(STREAMS))
    assert all(getattr(keepalive(each, NOW), "for_good", False) for each in for_good)
    assert not getattr(keepalive(seen(run("FAILURE", ago=1.0)), NOW), "for_good", True)


DEAD = SessionSeen(run("STARTED", ago=500), worker_lives=False, held=False, heartbeat=NOW - 400)


@pytest.mark.parametrize(
    ("session", "dead"),
    [
        (DEAD, True),
        (replace(DEAD, worker_lives=None), True),
        (replace(DEAD, heartbeat=None), True),
        (replace(DEAD, worker_lives=True), False),
        (replace(DEAD, held=True), False),
        (replace(DEAD, heartbeat=NOW - 59), False),
        (replace(DEAD, run=run("STARTED", ago=0, lasted=30), heartbeat=None), False),
        (replace(DEAD, run=run("STARTING", ago=119)), True),
        (replace(DEAD, run=run("STARTING", ago=100)), False),
        (replace(DEAD, run=run("CANCELING", ago=119)), True),
        (replace(DEAD, run=run("CANCELING", ago=100)), False),
        (replace(DEAD, run=run("QUEUED", ago=5000)), False),
    ],
)
def test_a_run_is_declared_dead_only_when_nothing_of_it_lives(session: SessionSeen, dead: bool) -> None:
    verdict = presumed_dead(session, NOW, stale_after=60, patience=45)
    assert (verdict is not None) is dead


ELSEWHERE = replace(DEAD, worker_lives=None, elsewhere=True, heartbeat=None, reported=NOW - 20)


@pytest.mark.parametrize(
    ("session", "dead"),
    [
        (ELSEWHERE, False),
        (replace(ELSEWHERE, reported=None), False),
        (replace(ELSEWHERE, reported=NOW + 7200), False),
        (replace(ELSEWHERE, reported=NOW - 104), False),
        (replace(ELSEWHERE, reported=NOW - 106), True),
        (replace(ELSEWHERE, worker_lives=False), True),
        (replace(ELSEWHERE, run=run("STARTING", ago=5000), reported=None), False),
        (replace(ELSEWHERE, elsewhere=False), True),
    ],
)
def test_a_worker_that_cannot_be_seen_from_here_is_judged_by_its_own_reports_alone(
    session: SessionSeen, dead: bool
) -> None:
    verdict = presumed_dead(session, NOW, stale_after=60, patience=45)
    assert (verdict is not None) is dead


def test_a_worker_that_starts_has_at_least_the_time_that_dagster_gives_it() -> None:
    starting = replace(DEAD, run=run("STARTING", ago=200))
    assert presumed_dead(starting, NOW, stale_after=60, patience=45, start_timeout=180) is None
    assert presumed_dead(starting, NOW, stale_after=60, patience=45, start_timeout=100) is not None


LIVE = StreamSeen("a", "running", started_at=NOW - 100)


def test_a_healthy_stream_raises_no_alert() -> None:
    assert alert_of(LIVE) is None
    assert alert_of(replace(LIVE, state="stopped")) is None


def test_a_failed_stream_raises_one_alert_a_session() -> None:
    failed = replace(LIVE, state="failed", error={"code": "REC-021", "found": "wrong table"})
    first = alert_of(failed)
    assert first is not None
    assert "REC-021 wrong table" in first.text
    next_session = alert_of(replace(failed, started_at=NOW))
    assert next_session is not None
    assert next_session.key != first.key


def test_a_session_that_lives_and_says_nothing_raises_an_alert() -> None:
    silent = alert_of(replace(LIVE, silent="process 7 lives and has not written its status"))
    assert silent is not None
    assert silent.text == "stream a is silent: process 7 lives and has not written its status"


def test_a_stream_that_is_tried_again_every_ten_minutes_is_an_alert_and_one_that_failed_once_is_none() -> None:
    error: ErrorReport = {"code": "REC-012", "found": "no broker", "lasting": True}
    alert = alert_of(replace(LIVE, state="failing", error=error))
    assert alert is not None and "REC-012 no broker" in alert.text
    assert alert_of(replace(LIVE, state="failing", error={**error, "lasting": False})) is None


def test_a_start_that_somebody_asked_for_ends_a_stop_a_rest_and_a_failure_for_good() -> None:
    """If it is newer than the end of the session, and no driver runs the stream already."""
    ended = RunSeen("r1", "CANCELED", NOW - 100, NOW - 90, NOW - 50)
    for run in (
        ended,
        replace(ended, status="FAILURE", tags={FAILURE_TAG: "permanent", FINGERPRINT_TAG: ""}),
        replace(ended, ended=NOW),
    ):
        before = JobSeen([run], STREAMS)
        assert isinstance(keepalive(before, NOW), KeepWaiting)
        asked = NOW + 0.5 if run.ended == NOW else NOW - 10
        assert keepalive(replace(before, asked_to_start=asked), NOW) == StartSession(f"asked-{asked:.3f}")
        assert isinstance(keepalive(replace(before, asked_to_start=NOW - 95), NOW), KeepWaiting), "that session had it"
        while_it_ended = replace(before, asked_to_start=NOW - 51)
        assert isinstance(keepalive(while_it_ended, NOW), StartSession) == (run.status == "FAILURE")
    held = JobSeen([ended], STREAMS, held_by={STREAMS[0]: "process 7"}, asked_to_start=NOW - 10)
    assert isinstance(keepalive(held, NOW), KeepWaiting)
    all_stopped = JobSeen([ended], STREAMS, stopped_on_purpose=frozenset(STREAMS), asked_to_start=NOW - 10)
    assert isinstance(keepalive(all_stopped, NOW), KeepWaiting)
