"""The decisions of the sensors, without Dagster: from the state of a job's runs and streams to a verdict in words."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from orchestration.sessions.ownership import FAILURE_TAG, FINGERPRINT_TAG, STOPPED_BY_TAG
from streaming_jobs.platform.back_off import OF_SESSIONS
from streaming_jobs.state.health import Reason
from streaming_jobs.state.status import Status

FIRST_SESSION = 300.0
"""Deadline for the first session of a job, counted from the load of the code location (s)."""
CLOCKS_DIFFER = 5.0
"""Seconds by which the clock of Dagster's storage may be ahead of ours."""

IN_PROGRESS = ("QUEUED", "NOT_STARTED", "MANAGED", "STARTING", "STARTED", "CANCELING", "SUSPENDED")


@dataclass(frozen=True)
class RunSeen:
    """One run as Dagster's storage has it; times in seconds since 1970."""

    run_id: str
    status: str
    created: float
    started: float | None = None
    ended: float | None = None
    updated: float = 0.0
    tags: Mapping[str, str] = field(default_factory=dict)

    @property
    def lasted(self) -> float:
        """Seconds from start to end; 0 if it never started."""
        return max(0.0, (self.ended or 0.0) - self.started) if self.started else 0.0


@dataclass(frozen=True)
class JobSeen:
    """A continuous job at one moment: its runs, newest first, and its streams.

    `asked_to_start`: the time of the newest start request (seconds since 1970) for a stream that is to run.
    """

    runs: Sequence[RunSeen]
    streams: Sequence[str]
    stopped_on_purpose: frozenset[str] = frozenset()
    held_by: Mapping[str, str] = field(default_factory=dict)
    fingerprint: str = ""
    recovering: Mapping[str, str] = field(default_factory=dict)
    """Streams that a recovery has stopped, each with the plan in words."""
    asked_to_start: float | None = None


@dataclass(frozen=True)
class StartSession:
    """Start a session; `run_key` keeps two ticks from starting two."""

    run_key: str
    reason: ClassVar[str] = "starts a session"
    for_good: ClassVar[bool] = False


@dataclass(frozen=True)
class KeepWaiting:
    """Start nothing, for this reason. `for_good`: until a person acts. `beside`: recoveries of the job's streams."""

    reason: str
    for_good: bool = False
    beside: tuple[str, ...] = ()

    @property
    def words(self) -> str:
        return "; ".join([self.reason, *self.beside])


def keepalive(seen: JobSeen, now: float) -> StartSession | KeepWaiting:
    """The decision on a continuous job now: start a session, or wait, with the reason."""
    runs = without_duplicates(seen.runs)
    newest = newest_session(seen.runs)
    if in_progress := [run for run in runs if run.status in IN_PROGRESS]:
        return KeepWaiting(_in_progress(seen.runs[0], in_progress), beside=tuple(_recovering(seen)))
    if seen.recovering and seen.stopped_on_purpose.issuperset(seen.streams):
        return KeepWaiting("; ".join([*_recovering(seen), "the session starts when that is over"]))
    if seen.streams and seen.stopped_on_purpose.issuperset(seen.streams):
        return KeepWaiting("every stream was stopped on purpose; launch the job to start them again", for_good=True)
    asked = seen.asked_to_start
    if asked is not None and not seen.held_by and (newest is None or asked > _heard_until(newest)):
        return StartSession(f"asked-{asked:.3f}")
    if newest and newest.status == "CANCELED" and newest.tags.get(STOPPED_BY_TAG) != "shutdown":
        stopped = f"run {newest.run_id[:8]}" if newest.started else f"run {newest.run_id[:8]} before it began"
        verb = "stopped" if newest.started else "cancelled"
        return KeepWaiting(f"an operator {verb} {stopped}; launch the job to start it again", for_good=True)
    if seen.held_by:
        holders = ", ".join(f"{stream} by {who}" for stream, who in sorted(seen.held_by.items()))
        return KeepWaiting(f"a driver outside this job runs: {holders}")
    if newest is None:
        return StartSession("first")
    if gave_up(newest, seen.fingerprint):
        return KeepWaiting(
            f"gave up: run {newest.run_id[:8]} failed and would fail again; correct what it names, then launch the job",
            for_good=True,
        )
    rest = back_off(runs) - passed(newest.ended or newest.updated, now)
    if rest > 0:
        return KeepWaiting(f"run {newest.run_id[:8]} ended; the next try is in {rest:.0f} s")
    return StartSession(f"after-{newest.run_id}")


def _heard_until(run: RunSeen) -> float:
    """When the session stopped taking requests: for a failed session its start, otherwise its end."""
    if run.status == "FAILURE" and run.started is not None:
        return run.started
    return run.ended or run.updated


def _recovering(seen: JobSeen) -> list[str]:
    return [f"stream {stream} {words}" for stream, words in sorted(seen.recovering.items())]


def without_duplicates(runs: Sequence[RunSeen]) -> list[RunSeen]:
    """The runs without those cancelled in the queue while another run was the session: that stopped nothing.

    A queued run that was cancelled while no other ran is a stop: it would have been the session.
    """
    return [run for run in runs if not (run.status == "CANCELED" and run.started is None and _another(run, runs))]


def newest_session(runs: Sequence[RunSeen]) -> RunSeen | None:
    """The run that determines a job's verdict: the newest, except cancelled duplicates."""
    return next(iter(without_duplicates(runs)), None)


def _another(queued: RunSeen, runs: Sequence[RunSeen]) -> bool:
    until = queued.ended or queued.updated
    return any(
        run.started is not None and run.started <= until and (run.ended is None or run.ended >= queued.created)
        for run in runs
        if run.run_id != queued.run_id
    )


def _in_progress(newest: RunSeen, in_progress: Sequence[RunSeen]) -> str:
    """The reason not to start a session while a run is in progress; names the run that is the session."""
    session = next((run for run in in_progress if run.status != "QUEUED"), in_progress[-1])
    if newest.status == "CANCELED" and newest.started is None:
        return f"queued run {newest.run_id[:8]} was cancelled; session {session.run_id[:8]} runs"
    state = f"run {session.run_id[:8]} is {session.status.lower()}"
    behind = [run.run_id[:8] for run in in_progress if run is not session and run.status == "QUEUED"]
    if not behind:
        return state
    waiting = f"run {behind[0]} waits" if len(behind) == 1 else f"{len(behind)} runs wait"
    return f"{state}; {waiting} in the queue for its end"


def should_run(runs: Sequence[RunSeen], now: float, *, patience: float, watched_since: float) -> bool | None:
    """True if a driver should run a continuous job's streams and has had `patience` seconds to start.

    False after an operator's stop. None if the runs do not decide it: while a run is in progress or about to start, and
    for `FIRST_SESSION` seconds from `watched_since` before the first run; then the streams' own files decide.
    """
    considered = without_duplicates(runs)
    if not considered:
        return True if now - watched_since > FIRST_SESSION else None
    if any(run.status in IN_PROGRESS and run.status != "QUEUED" for run in considered):
        return None
    newest = considered[0]
    if newest.status == "CANCELED" and newest.tags.get(STOPPED_BY_TAG) != "shutdown":
        return False
    return True if passed(newest.ended or newest.created, now) > patience else None


def missed(runs: Sequence[RunSeen], tick: float, now: float, *, patience: float, watched_since: float) -> Reason | None:
    """The reason why a scheduled job is red, if it is: its newest run failed, or its last `tick` has started nothing.

    Before the job's first run only ticks after `watched_since` count. A run that an operator stopped has not failed.
    """
    newest = newest_session(runs)
    if newest is not None and newest.status == "FAILURE":
        return Reason("run_failed", f"its newest run, {newest.run_id[:8]}, failed: the run's page says why")
    if newest is not None and newest.status in IN_PROGRESS and newest.status != "QUEUED":
        return None
    last = watched_since if newest is None else newest.created
    if tick <= last or passed(tick, now) <= patience:
        return None
    queued = f": run {newest.run_id[:8]} waits in the queue" if newest and newest.status == "QUEUED" else ""
    return Reason("overdue", f"nothing has begun since the schedule's last tick{queued}; is the schedule switched on?")


def passed(moment: float, now: float) -> float:
    """Seconds since a moment; infinite for a moment in the future, which means that the clock was set back."""
    return now - moment if moment <= now + CLOCKS_DIFFER else float("inf")


def gave_up(newest: RunSeen, fingerprint: str) -> bool:
    """True if the newest run failed for good and nothing has changed since."""
    return (
        newest.status == "FAILURE"
        and newest.tags.get(FAILURE_TAG) == "permanent"
        and newest.tags.get(FINGERPRINT_TAG) == fingerprint
    )


def back_off(runs: Sequence[RunSeen]) -> float:
    """Seconds to wait after the newest run; they double with each consecutive run that did not last."""
    newest = runs[0]
    if newest.status == "CANCELED":
        return 0.0
    in_a_row = 0
    for run in runs:
        if run.status not in ("FAILURE", "SUCCESS"):
            break
        in_a_row += 1
        if run.lasted >= OF_SESSIONS.healthy_after:
            break
    return OF_SESSIONS.delay(in_a_row)


@dataclass(frozen=True)
class SessionSeen:
    """A run in progress, with the state of its worker, its driver and its heartbeat on this machine.

    `elsewhere`: its worker may be on a host that cannot be seen from here, where only `reported` (the time of its last
    report in Dagster's storage, by its own clock) shows that it is alive.
    """

    run: RunSeen
    worker_lives: bool | None
    held: bool
    heartbeat: float | None
    elsewhere: bool = False
    reported: float | None = None


def presumed_dead(
    seen: SessionSeen, now: float, *, stale_after: float, patience: float, start_timeout: float = 0.0
) -> str | None:
    """The reason why a run in progress is dead, or None if it may still be alive.

    It is alive while its worker or a driver runs: these report what is wrong. A run whose worker may be elsewhere, and
    has never reported, is left to Dagster's own monitoring. `start_timeout`: the seconds that Dagster gives a worker to
    start.
    """
    if seen.worker_lives or seen.held:
        return None
    run = seen.run
    if seen.worker_lives is None and seen.elsewhere:
        silent = 0.0 if seen.reported is None else now - seen.reported
        if run.status not in ("STARTED", "CANCELING") or silent <= stale_after + patience:
            return None
        return f"its worker, on another host or in another container, has reported nothing for {silent:.0f} s"
    if run.status == "STARTED":
        last = max(seen.heartbeat or 0.0, run.started or run.updated)
        if passed(last, now) <= stale_after:
            return None
        return f"no heartbeat for {passed(last, now):.0f} s, no driver holds its streams, and its worker is gone"
    limit = stale_after + patience
    if run.status == "STARTING":
        limit = max(limit, start_timeout + stale_after)
    if run.status in ("STARTING", "CANCELING") and passed(run.updated, now) > limit:
        age = f"{run.status.lower()} for {passed(run.updated, now):.0f} s"
        return f"{age}, no driver holds its streams, and its worker is gone"
    return None


@dataclass(frozen=True)
class Alert:
    """A message for the operator; the same problem keeps its `key`."""

    key: str
    text: str


def alert_of(status: Status, silent: str = "") -> Alert | None:
    """The alert of a stream that failed, or whose session runs without heartbeat (`silent` says so); None otherwise."""
    error = status.error or {}
    if status.state == "failed" or error.get("lasting"):  # its quick tries are used up
        reason = f"{error.get('code', '')} {error.get('found', 'no reason was written')}".strip()
        key = f"failed {status.started_at:.0f} {error.get('code', '')}"
        return Alert(key, f"stream {status.stream} failed: {reason}")
    if silent:
        return Alert(f"silent {status.started_at:.0f}", f"stream {status.stream} is silent: {silent}")
    return None
