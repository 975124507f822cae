"""Starting streams from outside: the request, who will obey it, and how far the start has come.

Nothing here starts a process. A start is a request (`streaming_jobs.state.start_request`) that a running session or
Dagster's keepalive obeys, so it is neither lost nor done twice if this process is killed.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from streaming_jobs.settings import Settings
from streaming_jobs.state import start_request, stop_request, supervisors
from streaming_jobs.state.health import Seen, look, state_of
from streaming_jobs.state.status import Status

AT_WORK = ("running", "idle")
_SESSION_ACTS = 20.0
"""Seconds in which a session that has the stream, perhaps in a process of its own, has begun to start it."""
Outcome = Literal["runs", "started", "restarted", "failed", "recovering", "waits", "nobody", "stopped"]


@dataclass(frozen=True)
class Begin:
    """A start that was asked for: `asked` is None if nothing had to be asked. `was` is the stream before it."""

    stream: str
    was: Seen
    asked: float | None


@dataclass(frozen=True)
class Started:
    """The outcome of one start: a word, and a sentence that says what to do if there is something to do."""

    stream: str
    outcome: Outcome
    text: str
    seconds: float | None = None

    @property
    def ok(self) -> bool:
        """True if the stream runs."""
        return self.outcome in ("runs", "started", "restarted")


def runs(seen: Seen) -> bool:
    """True if a session runs the stream, and it is not about to stop."""
    live = seen.session is not None and seen.lives == "driver" and seen.stop is None
    return live and seen.status is not None and seen.status.state not in ("stopped", "failed", "stopping")


def ask(settings: Settings, stream: str, who: str, *, again: bool) -> Begin:
    """Ask for a start; with `again`, a stream that runs is to start once more. A recovery's stop request stays."""
    was = look(settings, stream)
    if was.plan is not None or (runs(was) and not again):
        return Begin(stream, was, None)
    asked = start_request.ask(settings, stream, who)
    if was.stop is not None:
        stop_request.clear(settings, stream, was.stop)
    return Begin(stream, was, asked.since)


def wait(settings: Settings, begun: Sequence[Begin], timeout: float, say: Callable[[str], None]) -> list[Started]:
    """Wait for each start, `timeout` seconds at most in all; `say` gets a line where something new is known."""
    since = time.monotonic()
    deadline = since + timeout
    outcomes: dict[str, Started] = {}
    said: dict[str, str] = {}
    while True:
        for each in begun:
            if each.stream in outcomes:
                continue
            now = look(settings, each.stream)
            if (outcome := _outcome(each, now)) is not None:
                outcomes[each.stream] = outcome
            elif (nobody := _nobody(settings, each, now, time.monotonic() - since)) is not None:
                outcomes[each.stream] = nobody
            elif (words := progress(settings, now)) != said.get(each.stream):
                said[each.stream] = words
                say(f"{each.stream}: {words}")
        if len(outcomes) == len(begun) or time.monotonic() > deadline:
            break
        time.sleep(0.1)
    for each in begun:
        if each.stream not in outcomes:
            words = progress(settings, look(settings, each.stream))
            text = f"not running after {timeout:g} s: {words}; the request stays, look at `recourse streams status`"
            outcomes[each.stream] = Started(each.stream, "waits", text)
    return [outcomes[each.stream] for each in begun]


def _outcome(begin: Begin, now: Seen) -> Started | None:
    """The outcome, as far as it is known by now."""
    if begin.asked is None:
        return _without_request(begin)
    if now.stop is not None:
        return Started(begin.stream, "stopped", f"somebody asked it to stop meanwhile: {now.stop.who}")
    status = now.status
    if status is None or now.session is None or status.pid != now.session.pid:
        return _failed_since(begin, status)
    if (status.begun_at or 0.0) < begin.asked:
        return None if status.state != "failed" else _failed_since(begin, status)
    if status.state in AT_WORK:
        again = runs(begin.was)
        seconds = now.at - begin.asked
        return Started(begin.stream, "restarted" if again else "started", _how(status), round(seconds, 1))
    return _failed_since(begin, status)


def _without_request(begin: Begin) -> Started:
    if begin.was.plan is not None:
        plan = begin.was.plan
        text = f"is being recovered: recourse recover resume {plan}, or recourse recover abort {plan}"
        return Started(begin.stream, "recovering", text)
    return Started(begin.stream, "runs", "runs already")


def _failed_since(begin: Begin, status: Status | None) -> Started | None:
    if status is None or status.state not in ("failed", "failing") or status.last_error is None or begin.asked is None:
        return None
    if status.last_start < begin.asked:
        return None
    error = status.error or status.last_error
    text = f"{'failed' if status.state == 'failed' else 'fails, and is tried again'}: {error.get('found', '')}"
    return Started(begin.stream, "failed", text + (f"\n  next: {error['next']}" if error.get("next") else ""))


def _how(status: Status) -> str:
    return f"{status.state} in process {status.pid}, code {code_of(status)}"


def code_of(status: Status | None) -> str:
    """The hash of the code in a status."""
    return status.code_version.partition(" ")[0] if status is not None else ""


def _nobody(settings: Settings, begin: Begin, now: Seen, waited: float) -> Started | None:
    """The outcome if nobody is there who would obey the request.

    Any session of this home may be the one that the stream was left out of: it gets some time.
    """
    if begin.asked is None or now.session is not None or any(who_starts(settings, now)):
        return None
    sessions = any(look(settings, name).session is not None for name in streams_of(settings))
    if waited < (_SESSION_ACTS if sessions else 0.0):
        return None
    text = (
        "nothing that would start it runs here; start one: `recourse up`, your Dagster, or "
        f"`recourse streams run {begin.stream}`. It is no longer stopped on purpose"
    )
    return Started(begin.stream, "nobody", text)


def who_starts(settings: Settings, seen: Seen) -> Iterator[str]:
    """Yields who would start the stream: the session that had it and still runs, jobs that Dagster keeps running."""
    if seen.status is not None and (others := sessions_with(settings, seen.status)):
        yield f"the session of {', '.join(others)}"
    for note in supervisors.notes(settings, seen.stream):
        yield f"Dagster's job {note.job}: {note.verdict}"


def sessions_with(settings: Settings, status: Status) -> list[str]:
    """The streams that run in the process, or in the Dagster run, that this stream was last in."""
    return [
        each.stream
        for each in (look(settings, name) for name in streams_of(settings))
        if each.stream != status.stream
        and each.session is not None
        and each.status is not None
        and (each.session.pid == status.pid or (status.run_id is not None and each.status.run_id == status.run_id))
    ]


def streams_of(settings: Settings) -> list[str]:
    """All streams that have ever run in this home, by their folders."""
    return sorted(path.parent.name for path in settings.state.glob("*/status.json"))


def progress(settings: Settings, seen: Seen) -> str:
    """What is known of a start that is not done, in words."""
    if seen.session is not None and seen.status is not None:
        return state_of(seen, 60.0)
    return "; ".join(who_starts(settings, seen)) or "waits for a session"
