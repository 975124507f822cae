"""Starting streams from outside: the request, the process that will obey it, and the progress of start or deploy.

Nothing here starts a process. A start is a request (`streaming_jobs.state.requests`) that a running session or
Dagster's keepalive obeys, so it is neither lost nor done twice if this process is killed.

A deploy is recorded, requested in the same way stream by stream, and watched until every stream runs the new code. A
second deploy requests only streams that do not run the code on disk, and none of them twice.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, TypeVar

from streaming_jobs.platform.failures import ErrorReport
from streaming_jobs.settings import Settings
from streaming_jobs.state import supervisors
from streaming_jobs.state.health import HealthFacts, look, state_of
from streaming_jobs.state.requests import START, STOP
from streaming_jobs.state.status import ENDED, Status, read_status, streams_with_status
from streaming_jobs.text import commands

if TYPE_CHECKING:
    from orchestration.deploys.plan import StreamDeploy

AT_WORK = ("running", "idle")
_SESSION_ACTS = 20.0
"""Seconds in which a session that has the stream, perhaps in a process of its own, has begun to start it."""
Outcome = Literal["runs", "started", "restarted", "failed", "recovering", "waits", "nobody", "stopped"]
Result = Literal["deployed", "failed", "not yet", "stopped"]
_Outcome = TypeVar("_Outcome")


@dataclass(frozen=True)
class RequestedStart:
    """A start and the state `was` of the stream before it; `asked` is None if no request was needed."""

    stream: str
    was: HealthFacts
    asked: float | None


@dataclass(frozen=True)
class StartOutcome:
    """The outcome of one start: a word, and a sentence with the next step if there is one."""

    stream: str
    outcome: Outcome
    text: str
    seconds: float | None = None

    @property
    def ok(self) -> bool:
        return self.outcome in ("runs", "started", "restarted")


def runs(seen: HealthFacts) -> bool:
    """True if a session runs the stream, and it is not about to stop."""
    live = seen.session is not None and seen.lives == "driver" and seen.stop is None
    return live and seen.status is not None and seen.status.state not in (*ENDED, "stopping")


def ask(settings: Settings, stream: str, who: str, *, again: bool) -> RequestedStart:
    """Ask for a start; with `again`, a stream that runs is to start once more. A recovery's stop request stays."""
    was = look(settings, stream)
    if was.plan is not None or (runs(was) and not again):
        return RequestedStart(stream, was, None)
    asked = START.ask(settings, stream, who)
    if was.stop is not None:
        STOP.clear(settings, stream, was.stop)
    return RequestedStart(stream, was, asked.since)


def wait(
    settings: Settings, begun: Sequence[RequestedStart], timeout: float, say: Callable[[str], None]
) -> list[StartOutcome]:
    """Wait for each start, `timeout` seconds at most in all; `say` gets a line where something new is known."""
    starts = {begin.stream: begin for begin in begun}

    def outcome(stream: str, now: HealthFacts, waited: float) -> StartOutcome | None:
        begin = starts[stream]
        return _outcome(begin, now) or _nobody(settings, begin, now, waited)

    def too_late(stream: str, now: HealthFacts) -> StartOutcome:
        text = (
            f"not running after {timeout:g} s: {progress(settings, now)}; the request stays, look at "
            f"`{commands.status()}`"
        )
        return StartOutcome(stream, "waits", text)

    return _watch(settings, list(starts), timeout, say, outcome, too_late)


def _watch(
    settings: Settings,
    streams: Sequence[str],
    timeout: float,
    say: Callable[[str], None],
    outcome: Callable[[str, HealthFacts, float], _Outcome | None],
    too_late: Callable[[str, HealthFacts], _Outcome],
) -> list[_Outcome]:
    """Look at streams until each has an outcome, which gets the seconds since the beginning, or its time is over."""
    since = time.monotonic()
    outcomes: dict[str, _Outcome] = {}
    said: dict[str, str] = {}
    while True:
        waited = time.monotonic() - since
        for stream in streams:
            if stream in outcomes:
                continue
            now = look(settings, stream)
            if (known := outcome(stream, now, waited)) is not None:
                outcomes[stream] = known
            elif (text := progress(settings, now)) != said.get(stream):
                said[stream] = text
                say(f"{stream}: {text}")
        if len(outcomes) == len(streams) or waited > timeout:
            return [outcomes.get(stream) or too_late(stream, look(settings, stream)) for stream in streams]
        time.sleep(0.1)


def _outcome(begin: RequestedStart, now: HealthFacts) -> StartOutcome | None:
    """The outcome, as far as it is known by now."""
    if begin.asked is None:
        if (plan := begin.was.plan) is None:
            return StartOutcome(begin.stream, "runs", "runs already")
        text = f"is being recovered: {commands.resume(plan)}, or {commands.abort(plan)}"
        return StartOutcome(begin.stream, "recovering", text)
    if now.stop is not None:
        return StartOutcome(begin.stream, "stopped", f"somebody asked it to stop meanwhile: {now.stop.who}")
    status = now.status
    if status is None or now.session is None or status.pid != now.session.pid:
        return _failed_since(begin, status)
    if (status.begun_at or 0.0) < begin.asked:
        return None if status.state != "failed" else _failed_since(begin, status)
    if status.state in AT_WORK:
        word: Outcome = "restarted" if runs(begin.was) else "started"
        how = f"{status.state} in process {status.pid}, code {status.code_hash}"
        return StartOutcome(begin.stream, word, how, round(now.at - begin.asked, 1))
    return _failed_since(begin, status)


def _failed_since(begin: RequestedStart, status: Status | None) -> StartOutcome | None:
    if status is None or status.state not in ("failed", "failing") or status.last_error is None or begin.asked is None:
        return None
    if status.last_start < begin.asked:
        return None
    return StartOutcome(begin.stream, "failed", _failure(status, status.error or status.last_error))


def _failure(status: Status, error: ErrorReport) -> str:
    how = "failed" if status.state == "failed" else "fails, and is tried again"
    return f"{how}: {error.get('found', '')}" + (f"\n  next: {error['next']}" if error.get("next") else "")


def _nobody(settings: Settings, begin: RequestedStart, now: HealthFacts, waited: float) -> StartOutcome | None:
    """The outcome if no process would obey the request.

    Any session of this home may have left the stream out, and gets some time to start it.
    """
    if begin.asked is None or now.session is not None or any(who_starts(settings, now)):
        return None
    sessions = any(look(settings, name).session is not None for name in streams_with_status(settings))
    if waited < (_SESSION_ACTS if sessions else 0.0):
        return None
    text = (
        f"nothing that would start it runs here; start one: `{commands.up()}`, your Dagster, or "
        f"`{commands.run(begin.stream)}`. It is no longer stopped on purpose"
    )
    return StartOutcome(begin.stream, "nobody", text)


def who_starts(settings: Settings, seen: HealthFacts) -> Iterator[str]:
    """Yields who would start the stream: the session that had it and still runs, jobs that Dagster keeps running."""
    if seen.status is not None and (others := sessions_with(settings, seen.status)):
        yield f"the session of {', '.join(others)}"
    for note in supervisors.notes(settings, seen.stream):
        yield f"Dagster's job {note.job}: {note.verdict}"


def sessions_with(settings: Settings, status: Status) -> list[str]:
    """The streams that run in the process, or in the Dagster run, that this stream was last in."""
    return [
        each.stream
        for each in (look(settings, name) for name in streams_with_status(settings))
        if each.stream != status.stream
        and each.session is not None
        and each.status is not None
        and (each.session.pid == status.pid or (status.run_id is not None and each.status.run_id == status.run_id))
    ]


def progress(settings: Settings, seen: HealthFacts) -> str:
    """What is known of a start that is not done, in words."""
    if seen.session is not None and seen.status is not None:
        return state_of(seen, 60.0)
    return "; ".join(who_starts(settings, seen)) or "waits for a session"


@dataclass(frozen=True)
class DeployOutcome:
    """The outcome for one stream: `stood_still` seconds without a running query, the savepoint of the old code."""

    stream: str
    result: Result
    text: str
    before: str
    after: str
    stood_still: float | None = None
    savepoint: str | None = None

    @property
    def ok(self) -> bool:
        return self.result == "deployed"


@dataclass
class _Watched:
    plan: StreamDeploy
    asked: float
    still_since: float | None = None


def request(settings: Settings, stream: str, by: str, newest: float) -> float:
    """Ask for the start of a stream whose deploy is recorded; the time from which it counts.

    A request that was made after the newest change on disk (`newest`, seconds since 1970) is not repeated, unless a
    session has begun since: a session that has begun and failed does not read the request again.
    """
    pending, status = START.request(settings, stream), read_status(settings, stream)
    if pending is not None and pending.since > max(newest, 0.0 if status is None else status.last_start):
        return pending.since
    return START.ask(settings, stream, f"{commands.deploy()} ({by})").since


def wait_for_code(
    settings: Settings,
    plans: Sequence[StreamDeploy],
    asked: Mapping[str, float],
    timeout: float,
    say: Callable[[str], None],
) -> list[DeployOutcome]:
    """Wait until each stream runs the new code and has committed a batch or is idle, `timeout` seconds in all."""
    watched = {plan.stream: _Watched(plan, asked[plan.stream]) for plan in plans}

    def too_late(stream: str, now: HealthFacts) -> DeployOutcome:
        who = "; ".join(who_starts(settings, now)) or "nothing that would start it runs here"
        text = f"not done after {timeout:g} s ({who}); the request stays: `{commands.deploy()}` once more waits on"
        return _result(watched[stream], "not yet", text)

    return _watch(
        settings, list(watched), timeout, say, lambda s, now, _: _deploy_outcome(settings, watched[s], now), too_late
    )


def _deploy_outcome(settings: Settings, watched: _Watched, now: HealthFacts) -> DeployOutcome | None:
    status, plan = now.status, watched.plan
    if now.stop is not None:
        return _result(watched, "stopped", f"somebody asked it to stop meanwhile: {now.stop.who}")
    working = (
        status is not None and now.session is not None and status.pid == now.session.pid and status.state in AT_WORK
    )
    if not working and watched.still_since is None:
        watched.still_since = time.time()
    if status is None or status.last_start < watched.asked:
        return None
    if working and status.code_hash == plan.after:
        committed = status.committed_at is not None and status.committed_at >= (status.begun_at or 0.0)
        if not (committed or status.state == "idle"):
            return None
        since = (status.committed_at if committed else status.begun_at) or 0.0
        still = None if watched.still_since is None else round(max(0.0, since - watched.still_since), 1)
        text = f"runs {plan.after} in process {status.pid}"
        return _result(watched, "deployed", text, still, _savepoint(settings, plan))
    if status.state in ("failed", "failing") and status.error is not None:
        back = f"or put the code {plan.before} back on disk, and: {commands.deploy(plan.stream)}"
        text = f"{_failure(status, status.error)}\n  {back}"
        return _result(watched, "failed", text, None, _savepoint(settings, plan))
    if working:
        text = f"runs {status.code_hash}: the code on disk has changed again; deploy once more"
        return _result(watched, "not yet", text)
    return None


def _savepoint(settings: Settings, plan: StreamDeploy) -> str | None:
    """The savepoint that the start with the new code has taken: of the last batch of the old code."""
    from streaming_jobs.state import savepoints

    note = f"before code {plan.after}"
    return next((s.id for s in reversed(savepoints.savepoints(settings, plan.stream)) if s.note == note), None)


def _result(
    watched: _Watched, result: Result, text: str, still: float | None = None, savepoint: str | None = None
) -> DeployOutcome:
    plan = watched.plan
    return DeployOutcome(plan.stream, result, text, plan.before, plan.after, still, savepoint)
