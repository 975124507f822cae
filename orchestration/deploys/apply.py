"""Carrying a deploy out: it is recorded, requested stream by stream, and watched until every stream runs the new code.

The request is the same as that of `streams restart`, so the sessions finish a deploy whose command was killed; a second
one asks only for the streams that do not run the code on disk, and for none twice.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from orchestration.deploys.plan import StreamPlan
from orchestration.deploys.starting import AT_WORK, code_of, progress, who_starts
from streaming_jobs.settings import Settings
from streaming_jobs.state import savepoints, start_request
from streaming_jobs.state.health import Seen, look
from streaming_jobs.state.status import read_status

Result = Literal["deployed", "failed", "not yet", "stopped"]


@dataclass(frozen=True)
class Deployed:
    """The outcome for one stream. `stood_still`: seconds without a running query; `savepoint`: from before it."""

    stream: str
    result: Result
    text: str
    before: str
    after: str
    stood_still: float | None = None
    savepoint: str | None = None

    @property
    def ok(self) -> bool:
        """True if the stream runs the new code."""
        return self.result == "deployed"


@dataclass
class _Watched:
    plan: StreamPlan
    asked: float
    still_since: float | None = None


def request(settings: Settings, stream: str, by: str, newest: float) -> float:
    """Ask for the start of a stream whose deploy is recorded; the time from which it counts.

    A request that was made after the newest change on disk (`newest`, seconds since 1970) is not repeated, unless a
    session has begun since: one that has begun and failed does not look at it again.
    """
    pending, status = start_request.request(settings, stream), read_status(settings, stream)
    if pending is not None and pending.since > max(newest, 0.0 if status is None else status.last_start):
        return pending.since
    return start_request.ask(settings, stream, f"recourse deploy ({by})").since


def wait(
    settings: Settings,
    plans: Sequence[StreamPlan],
    asked: Mapping[str, float],
    timeout: float,
    say: Callable[[str], None],
) -> list[Deployed]:
    """Wait until each stream runs the new code and has committed a batch or is idle, `timeout` seconds in all."""
    deadline = time.monotonic() + timeout
    watched = [_Watched(plan, asked[plan.stream]) for plan in plans]
    outcomes: dict[str, Deployed] = {}
    said: dict[str, str] = {}
    while len(outcomes) < len(watched) and time.monotonic() < deadline:
        for each in watched:
            name = each.plan.stream
            if name in outcomes:
                continue
            now = look(settings, name)
            if (outcome := _outcome(settings, each, now)) is not None:
                outcomes[name] = outcome
            elif (words := progress(settings, now)) != said.get(name):
                said[name] = words
                say(f"{name}: {words}")
        time.sleep(0.1)
    for each in watched:
        if each.plan.stream not in outcomes:
            now = look(settings, each.plan.stream)
            who = "; ".join(who_starts(settings, now)) or "nothing that would start it runs here"
            text = f"not done after {timeout:g} s ({who}); the request stays: `recourse deploy` once more waits on"
            outcomes[each.plan.stream] = _result(each, "not yet", text)
    return [outcomes[each.plan.stream] for each in watched]


def _outcome(settings: Settings, watched: _Watched, now: Seen) -> Deployed | None:
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
    if working and code_of(status) == plan.after:
        committed = status.committed_at is not None and status.committed_at >= (status.begun_at or 0.0)
        if not (committed or status.state == "idle"):
            return None
        back = status.committed_at if committed else status.begun_at
        still = max(0.0, (back or 0.0) - watched.still_since) if watched.still_since is not None else None
        taken = _savepoint(settings, plan)
        text = f"runs {plan.after} in process {status.pid}"
        return _result(watched, "deployed", text, None if still is None else round(still, 1), taken)
    if status.state in ("failed", "failing") and status.error is not None:
        tried = "failed" if status.state == "failed" else "fails, and is tried again"
        next_step = f"\n  next: {status.error['next']}" if status.error.get("next") else ""
        text = (
            f"{tried}: {status.error.get('found', '')}{next_step}\n"
            f"  or put the code {plan.before} back on disk, and: recourse deploy {plan.stream}"
        )
        return _result(watched, "failed", text, None, _savepoint(settings, plan))
    if working and code_of(status) != plan.after:
        text = f"runs {code_of(status)}: the code on disk has changed again; deploy once more"
        return _result(watched, "not yet", text)
    return None


def _savepoint(settings: Settings, plan: StreamPlan) -> str | None:
    """The savepoint that the start with the new code has taken: of the last batch of the old code."""
    note = f"before code {plan.after}"
    return next((s.id for s in reversed(savepoints.savepoints(settings, plan.stream)) if s.note == note), None)


def _result(
    watched: _Watched, result: Result, text: str, still: float | None = None, savepoint: str | None = None
) -> Deployed:
    plan = watched.plan
    return Deployed(plan.stream, result, text, plan.before, plan.after, still, savepoint)
