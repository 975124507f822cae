"""The decisions of keepalive, watchdog and alerts, as tables: no Dagster, no process, no clock."""

from __future__ import annotations

from dataclasses import replace

import pytest

from orchestration.sessions.decisions import (
    IN_PROGRESS,
    JobSeen,
    KeepWaiting,
    RunSeen,
    SessionSeen,
    StartSession,
    alert_of,
    back_off,
    keepalive,
    presumed_dead,
)
from orchestration.sessions.ownership import FAILURE_TAG, FINGERPRINT_TAG, STOPPED_BY_TAG
from streaming_jobs.platform.back_off import OF_SESSIONS
from streaming_jobs.platform.failures import ErrorReport
from streaming_jobs.state.status import Status

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


def duplicate(run_id: str, *, ago: float = 100, waited: float = 20) -> RunSeen:
    """A run that was cancelled in the queue: it never started."""
    return RunSeen(run_id, "CANCELED", created=NOW - ago - waited, started=None, ended=NOW - ago, updated=NOW - ago)


SESSION = run("STARTED", ago=0, lasted=300, run_id="session-of-now")
ALL = frozenset(STREAMS)
RECOVERING = {"a": "is being recovered by plan a-0001"}
GAVE_UP = run("FAILURE", run_id="r", **{FAILURE_TAG: "permanent", FINGERPRINT_TAG: "f1"})


QUEUED = replace(run("QUEUED", ago=9, run_id="duplicate"), started=None)
SHUT_DOWN = run("CANCELED", ago=0.1, run_id="r3", **{STOPPED_BY_TAG: "shutdown"})
THEN = run("CANCELED", ago=99, lasted=300, run_id="session-of-then")
KEEPALIVE: dict[str, tuple[JobSeen, StartSession | str]] = {
    "the first session": (seen(), StartSession("first")),
    "once for each failed run": (seen(run("FAILURE", run_id="r7")), StartSession("after-r7")),
    "it ended by itself": (seen(run("SUCCESS", run_id="r7")), StartSession("after-r7")),
    "an operator's stop": (seen(run("CANCELED"), run("SUCCESS")), "an operator stopped run run-1"),
    "a cancelled duplicate is no stop of the session": (
        seen(duplicate("duplicate"), SESSION),
        "queued run duplicat was cancelled; session session- runs",
    ),
    "nor of the next one": (
        seen(duplicate("duplicate"), run("FAILURE", ago=50, lasted=250, run_id="session-of-now")),
        StartSession("after-session-of-now"),
    ),
    "a duplicate cancelled together with the session": (
        seen(duplicate("duplicate"), THEN),
        "an operator stopped run session-",
    ),
    "the only session cancelled before it began": (
        seen(duplicate("the-next"), run("FAILURE", ago=300, lasted=10, run_id="before")),
        "an operator cancelled run the-next before it began",
    ),
    "a queued run says what it waits for": (
        seen(QUEUED, SESSION),
        "run session- is started; run duplicat waits in the queue for its end",
    ),
    "a session that recourse up ended, at once": (seen(SHUT_DOWN, run("FAILURE")), StartSession("after-r3")),
    "all streams stopped on purpose": (seen(run("SUCCESS"), stopped_on_purpose=ALL), "on purpose"),
    "one stream stopped on purpose": (
        seen(run("SUCCESS", run_id="r"), stopped_on_purpose=frozenset({"a"})),
        StartSession("after-r"),
    ),
    "a recovery of all that is left": (
        seen(run("SUCCESS"), stopped_on_purpose=ALL, recovering=RECOVERING),
        "stream a is being recovered by plan a-0001; the session starts when that is over",
    ),
    "beside somebody else's driver": (seen(run("FAILURE"), held_by={"a": "process 7"}), "a by process 7"),
    "a permanent failure": (seen(GAVE_UP, fingerprint="f1"), "gave up"),
    "until something changes": (seen(GAVE_UP, fingerprint="f2"), StartSession("after-r")),
    "or a person launches it again": (
        seen(run("FAILURE", run_id="r2"), GAVE_UP, fingerprint="f1"),
        StartSession("after-r2"),
    ),
    "a failed session rests": (seen(run("FAILURE", ago=1.0)), "next try is in 4 s"),
    "and is started again": (seen(run("FAILURE", ago=OF_SESSIONS.first, run_id="r")), StartSession("after-r")),
    "an end of before the clock was set back keeps nothing waiting": (
        seen(run("FAILURE", ago=-7200, run_id="r")),
        StartSession("after-r"),
    ),
    **{f"one run {status}": (seen(run(status)), status.lower()) for status in IN_PROGRESS},
}


@pytest.mark.parametrize(("job", "decision"), KEEPALIVE.values(), ids=KEEPALIVE)
def test_keepalive_starts_one_session_unless_there_is_a_reason_not_to(
    job: JobSeen, decision: StartSession | str
) -> None:
    made = keepalive(job, NOW)
    if isinstance(decision, StartSession):
        assert made == decision
    else:
        assert isinstance(made, KeepWaiting) and decision in made.reason


def test_a_recovery_is_named_by_every_tick_that_starts_nothing() -> None:
    waiting = keepalive(seen(run("STARTED"), stopped_on_purpose=frozenset({"a"}), recovering=RECOVERING), NOW)
    assert isinstance(waiting, KeepWaiting) and waiting.reason == "run run-1 is started"
    assert waiting.words == "run run-1 is started; stream a is being recovered by plan a-0001"


FAILED, ENDED, CANCELED = run("FAILURE"), run("SUCCESS"), run("CANCELED")
LASTED = run("FAILURE", lasted=OF_SESSIONS.healthy_after)


@pytest.mark.parametrize(
    ("ends", "delay"),
    [
        ([FAILED], OF_SESSIONS.first),
        ([FAILED] * 2, 2 * OF_SESSIONS.first),
        ([FAILED] * 4, 8 * OF_SESSIONS.first),
        ([ENDED, FAILED], 2 * OF_SESSIONS.first),
        ([FAILED] * 12, OF_SESSIONS.longest),
        ([FAILED, CANCELED, FAILED], OF_SESSIONS.first),
        ([CANCELED, FAILED], 0.0),
        ([LASTED, FAILED, FAILED, FAILED], OF_SESSIONS.first),
        ([FAILED, LASTED, FAILED, FAILED], 2 * OF_SESSIONS.first),
    ],
)
def test_the_delay_doubles_with_each_quick_end_in_a_row_until_a_session_lasts(
    ends: list[RunSeen], delay: float
) -> None:
    assert back_off(ends) == delay


def test_a_wait_until_a_person_acts_is_told_from_one_that_ends() -> None:
    for_good = seen(run("CANCELED")), seen(run("SUCCESS"), stopped_on_purpose=ALL)
    assert all(keepalive(each, NOW).for_good for each in for_good)
    waiting = keepalive(seen(run("FAILURE", ago=1.0)), NOW)
    assert isinstance(waiting, KeepWaiting) and not waiting.for_good


DEAD = SessionSeen(run("STARTED", ago=500), worker_lives=False, held=False, heartbeat=NOW - 400)
ELSEWHERE = replace(DEAD, worker_lives=None, elsewhere=True, heartbeat=None, reported=NOW - 20)


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
        # a worker that cannot be seen from here is judged by its own reports alone
        (ELSEWHERE, False),
        (replace(ELSEWHERE, reported=None), False),
        (replace(ELSEWHERE, reported=NOW + 7200), False),
        (replace(ELSEWHERE, reported=NOW - 104), False),
        (replace(ELSEWHERE, reported=NOW - 106), True),
        (replace(ELSEWHERE, worker_lives=False), True),
        (replace(ELSEWHERE, run=run("STARTING", ago=5000), reported=None), False),
        (replace(ELSEWHERE, elsewhere=False), True),
        # a run of before the clock was set back can be dead
        (replace(DEAD, run=replace(run("STARTED", ago=0), started=NOW + 7200), heartbeat=NOW + 7000), True),
        (replace(DEAD, run=replace(run("STARTING", ago=-7200), started=None), heartbeat=NOW + 7000), True),
    ],
)
def test_a_run_is_declared_dead_only_when_nothing_of_it_lives(session: SessionSeen, dead: bool) -> None:
    assert (presumed_dead(session, NOW, stale_after=60, patience=45) is not None) is dead


def test_a_worker_that_starts_has_at_least_the_time_that_dagster_gives_it() -> None:
    starting = replace(DEAD, run=run("STARTING", ago=200))
    assert presumed_dead(starting, NOW, stale_after=60, patience=45, start_timeout=180) is None
    assert presumed_dead(starting, NOW, stale_after=60, patience=45, start_timeout=100) is not None


LIVE = Status("a", "running", started_at=NOW - 100)
ERROR: ErrorReport = {"code": "REC-012", "found": "no broker"}


@pytest.mark.parametrize(
    ("status", "silent", "text"),
    [
        (LIVE, "", None),
        (replace(LIVE, state="stopped"), "", None),
        (replace(LIVE, state="failed", error=ERROR), "", "stream a failed: REC-012 no broker"),
        (LIVE, "process 7 lives", "stream a is silent: process 7 lives"),
        (replace(LIVE, state="failing", error={**ERROR, "lasting": True}), "", "stream a failed: REC-012 no broker"),
        (replace(LIVE, state="failing", error={**ERROR, "lasting": False}), "", None),
    ],
)
def test_a_stream_that_failed_or_says_nothing_is_an_alert(status: Status, silent: str, text: str | None) -> None:
    alert = alert_of(status, silent)
    assert (alert and alert.text) == text


def test_a_failed_stream_raises_one_alert_a_session() -> None:
    failed = replace(LIVE, state="failed", error=ERROR)
    first, next_session = alert_of(failed), alert_of(replace(failed, started_at=NOW))
    assert first == alert_of(failed)
    assert first is not None and next_session is not None and next_session.key != first.key


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
