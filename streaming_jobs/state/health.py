"""The health of a stream, decided from what lies on disk: status file, lease, stop marker, settings.

    health(settings, "orders").red          one look, one verdict; no Spark, no broker, no Dagster

`look` reads the files, `judge` decides and reads nothing. A reason makes the stream red; a note does not.
A disk that is filling up is a warning first: the stream is yellow. So is a table that gets no rows because its topics
bring nothing: it is stale, and the stream is not to blame.

| reason | the stream |
|---|---|
| dead | runs according to its status, and no driver holds its lease |
| not_running | should run, or ended although nobody asked for that, and no driver holds its lease |
| silent | has a driver that lives and has not written the status for `dagster.stale_after` |
| failed | has ended with an error |
| failing | has failed and is tried again, or has failed several times in a row |
| stuck | has unread records and has not finished a batch for `stream.stuck_after`, or has been starting for that long |
| late | has not read what came to its topics before `stream.late_after`; not with the trigger `available-now` |
| blocked | has waited for the end of another program's transaction for `stream.late_after` |
| run_failed | is of a scheduled job whose newest run failed (Dagster's check says so) |
| overdue | is of a scheduled job that nothing has started since the last tick (Dagster's check says so) |
| blind | has not seen the end of its topics for `dagster.stale_after`: no broker answers |
| stale | has a table that is older than `fresh_within`, for no reason above; yellow if nothing is unread |
| disk | has a session, or is red, and the disk of home, state or tables is nearly full (`quality.free_disk_mb`) |

Stopped on purpose, being recovered and never started are notes. A stream that was asked to start, or that ended less
than `dagster.stale_after` ago, is `restarting`: neither red nor well. `settled` is False from a start until the stream
has committed a batch, or has seen that nothing is unread.

A time stamp in the future is from before the clock was
set back: it counts as old, since a running driver writes new ones.
"""

from __future__ import annotations

import math
import shutil
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Literal

from streaming_jobs.errors import PreflightRefused
from streaming_jobs.settings import Settings
from streaming_jobs.state import stream_record, supervisors
from streaming_jobs.state.lease import Owner, holder
from streaming_jobs.state.requests import START, STOP, StreamRequest
from streaming_jobs.state.status import ENDED, Status, read_status
from streaming_jobs.state.stream_folder import StreamFolder
from streaming_jobs.text import commands
from streaming_jobs.text.durations import format_duration
from streaming_jobs.text.spelling import counted

# The free space of the disks of home and tables, judged before they are full: a full one stops everything at once.

_RED = 4
"""Red is a fourth of the bound for yellow."""


@dataclass(frozen=True)
class Space:
    """The least free space of these disks, and what it means."""

    colour: Literal["green", "yellow", "red"]
    text: str


def disk_space(settings: Settings) -> Space:
    """The disk with the least free space, of home, state and tables; the bound is `quality.free_disk_mb`."""
    bound = settings.quality.free_disk_mb
    folders = [each for each in (settings.home, settings.state, settings.tables) if isinstance(each, Path)]
    free, folder = min((shutil.disk_usage(existing_folder(each)).free // 2**20, str(each)) for each in folders)
    text = f"{free:,} MB are free on the disk of {folder}; yellow below {bound:,}, red below {bound // _RED:,}"
    return Space("green" if free >= bound else "yellow" if free >= bound // _RED else "red", text)


def existing_folder(folder: Path) -> Path:
    """The folder, or the nearest one above it that exists."""
    return next(each for each in (folder, *folder.parents) if each.exists())


NEITHER = ("stopped", "restarting", "recovering", "never started")
"""The states that are neither well nor red."""

_RECOVERY = "recovery "
_AHEAD = 5.0
"""Seconds that a time stamp may be in the future."""

Word = Literal[
    "dead",
    "not_running",
    "silent",
    "failed",
    "failing",
    "stuck",
    "late",
    "blocked",
    "blind",
    "run_failed",
    "overdue",
    "stale",
    "disk",
]


@dataclass(frozen=True)
class Due:
    """An expected start: `after` which event, as text, and `since` when (seconds since 1970)."""

    after: str
    since: float


@dataclass(frozen=True)
class HealthFacts:
    """One stream's files at one moment (`at`, seconds since 1970).

    `lives` is the part of the lease's owner that still runs: `driver`, or only the `jvm` of a killed driver.
    """

    stream: str
    at: float
    status: Status | None
    owner: Owner | None = None
    lives: str | None = None
    stop: StreamRequest | None = None
    start: Due | None = None
    supervisor: supervisors.Note | None = None
    """Dagster's keepalive's last note on the stream's job, if it watches the job."""
    disk: Space | None = None

    @property
    def session(self) -> Owner | None:
        """The holder of the lease, if it is a session; None for a recovery or a command."""
        return self.owner if self.owner is not None and self.owner.purpose == "session" else None

    @property
    def plan(self) -> str | None:
        """The recovery that has stopped the stream or holds its lease."""
        if self.owner is not None and self.owner.purpose.startswith(_RECOVERY):
            return self.owner.purpose.removeprefix(_RECOVERY)
        return self.stop.plan if self.stop is not None else None


@dataclass(frozen=True)
class HealthLimits:
    """The bounds of a verdict, in seconds; with 0 for `stuck_after` or `late_after` there is no such bound."""

    stale_after: float = 60.0
    stuck_after: float = 300.0
    late_after: float = 600.0

    @classmethod
    def of(cls, settings: Settings, stream: str) -> HealthLimits:
        stream_settings = settings.for_stream(stream)
        return cls(
            settings.dagster.stale_after.total_seconds(),
            stream_settings.stuck_after.total_seconds(),
            stream_settings.late_after.total_seconds(),
        )


@dataclass(frozen=True)
class Reason:
    """The reason why a stream is red: a stable word, and a sentence for a person."""

    word: Word
    text: str


@dataclass(frozen=True)
class Health:
    """The verdict on one stream; `state` is the state to show."""

    stream: str
    at: float
    state: str
    reasons: tuple[Reason, ...] = ()
    notes: tuple[str, ...] = ()
    asked_to_stop: bool = False
    settled: bool = True
    """False if a session runs the stream and has not shown yet that it works."""
    warnings: tuple[Reason, ...] = ()
    """The causes that will turn the stream red unless a person acts."""

    @property
    def red(self) -> bool:
        """True if the stream needs attention now."""
        return bool(self.reasons)

    @property
    def verdict(self) -> str:
        """One of `well`, `yellow`, `red`, and the states that are neither well nor red (`NEITHER`)."""
        if self.red:
            return "red"
        return self.state if self.state in NEITHER else "yellow" if self.warnings else "well"


def health(settings: Settings, stream: str, *, should_run: bool | None = None) -> Health:
    """The stream's health now, from its files; `should_run` as in `judge`."""
    return judge(look(settings, stream), HealthLimits.of(settings, stream), should_run=should_run)


def look(settings: Settings, stream: str) -> HealthFacts:
    # The status again if the lease is free: a session that has ended in between has written its last state by then.
    status, owner, now = read_status(settings, stream), holder(settings, stream), time.time()
    if owner is None:
        status = read_status(settings, stream)
    running_part = owner.alive() if owner is not None else None
    stop = STOP.request(settings, stream)
    note, disk = supervisors.newest(settings, stream), disk_space(settings)
    seen = HealthFacts(stream, now, status, owner, running_part, stop, supervisor=note, disk=disk)
    return seen if seen.session is not None else replace(seen, start=_due(settings, stream, status))


def _due(settings: Settings, stream: str, status: Status | None) -> Due | None:
    """The start that is to come: one that was asked for, or the first one after a recovery."""
    if (request := START.request(settings, stream)) is not None:
        return Due(f"a request: {request.who}", request.since)
    try:
        record = stream_record.load(settings, stream)
        if record is None or status is None or record.generation <= status.generation:
            return None
        written = StreamFolder.of(settings, stream).record.read()
        return None if written is None else Due(record.generations[-1].reason, written.at)
    except PreflightRefused:  # the next start says what is wrong with the record
        return None


def judge(seen: HealthFacts, limits: HealthLimits, *, should_run: bool | None = None) -> Health:
    """The verdict on the files of a stream.

    `should_run`: the caller knows that it is meant to run now (one that stopped, or never started, is red then), or
    that it is not. None: the files decide; a stream that ended although nobody asked for that should run, unless it had
    caught up with its topics (`available-now`).
    """
    state, stop_requested = state_of(seen, limits.stale_after), seen.stop is not None
    if state == "recovering":
        return Health(seen.stream, seen.at, state, notes=(recovery_words(seen),), asked_to_stop=stop_requested)
    stopped = seen.stop is not None and seen.session is None
    if stopped and state != "failed":
        note = f"was stopped on purpose {_since(seen.stop)}, and stays so until it is started again"
        died = (f"its session (pid {seen.status.pid}) ended without saying so",) if seen.status and _dead(seen) else ()
        return Health(seen.stream, seen.at, "stopped", notes=(note, *died), asked_to_stop=stop_requested)
    if seen.session is None and state in ENDED and (words := _restarting(seen, limits, should_run)):
        return Health(seen.stream, seen.at, "restarting", notes=(words,))
    blocked = _blocked(seen.status) if seen.status is not None and state in ("running", "idle") else None
    notes = (*_code_on_disk(seen), *([blocked[0]] if blocked is not None else []))
    if seen.session is None and state == "stopped" and seen.status is not None and seen.status.ended_by:
        notes = (f"was stopped {_when(seen.at, seen.status.heartbeat)} by {seen.status.ended_by}",)
    if seen.stop is not None:
        notes = ("was asked to stop and stays so until it is started again",)
    reasons = list(_reasons(seen, state, limits, should_run))
    warnings: list[Reason] = []
    if not reasons and (stale := _stale(seen)) is not None:
        (warnings if _has_read_all(seen) else reasons).append(stale)
    if seen.disk is not None and seen.disk.colour != "green" and (reasons or seen.session is not None):
        (reasons if seen.disk.colour == "red" else warnings).append(Reason("disk", seen.disk.text))
    return Health(
        seen.stream, seen.at, state, tuple(reasons), notes, stop_requested, _settled(seen), warnings=tuple(warnings)
    )


def _settled(seen: HealthFacts) -> bool:
    """False if a session runs the stream, and has neither committed since its start nor seen that nothing is unread."""
    status = seen.status
    if seen.session is None or status is None:
        return seen.session is None
    begun = status.last_start
    committed = status.committed_at is not None and status.committed_at >= begun
    return committed or (status.lag_at is not None and status.lag_at >= begun and not status.lag_records)


def _unasked(seen: HealthFacts, should_run: bool | None) -> bool:
    """True if a stream without a session ended without a request."""
    status = seen.status
    if should_run is not None or status is None or status.state != "stopped":
        return bool(should_run)
    return not status.ended_by and status.trigger != "available-now"


def _restarting(seen: HealthFacts, limits: HealthLimits, should_run: bool | None) -> str:
    """Why a stream without a session is about to start; empty if it is not, or if that takes too long."""
    status, due = seen.status, seen.start
    if status is None or should_run is False:
        return ""
    if due is not None and _age(seen.at, due.since) <= max(limits.stale_after, limits.stuck_after):
        return f"it is restarting after {due.after}, since {_time(due.since)}"
    if should_run is None and _unasked(seen, None) and _age(seen.at, status.heartbeat) <= limits.stale_after:
        return f"its session ended {_when(seen.at, status.heartbeat)}; nobody asked for that{_supervised(seen)}"
    return ""


def _supervised(seen: HealthFacts) -> str:
    """What its supervisor does about it."""
    return f"; Dagster's job {seen.supervisor.job}: {seen.supervisor.verdict}" if seen.supervisor is not None else ""


LAG_FRESH = 15.0
"""Age in seconds up to which the lag that a driver saw counts as present: a driver measures it every two seconds."""


def is_live(holder: Owner | None, state: str) -> bool:
    """True if a session runs the stream: `holder` has its lease, and `state` is that of a verdict."""
    return holder is not None and state not in ("dead", *ENDED)


def state_of(seen: HealthFacts, stale_after: float) -> str:
    """The state to show.

    It is the state in the status file, except: `dead` if the stream runs by that file and nobody holds its lease (or
    only the JVM of a killed driver does), `silent` if the holder's heartbeat is older than `stale_after` seconds,
    `starting` if the holder has written nothing yet, `recovering` while a recovery has stopped it, and `never started`.
    """
    if seen.plan is not None and (seen.session is None or seen.lives != "driver"):
        return "recovering"
    if seen.session is None:
        return "never started" if seen.status is None else "dead" if _dead(seen) else seen.status.state
    if seen.lives == "jvm":
        return "dead"
    if seen.status is None or seen.status.pid != seen.session.pid:
        return "silent" if _age(seen.at, seen.session.since) > stale_after else "starting"
    if seen.status.state not in ENDED and _age(seen.at, seen.status.heartbeat) > stale_after:
        return "silent"
    return seen.status.state


def _reasons(seen: HealthFacts, state: str, limits: HealthLimits, should_run: bool | None) -> Iterator[Reason]:
    status = seen.status
    if state == "dead":
        pid = f" (pid {status.pid})" if status is not None and status.pid else ""
        next_start = (
            _supervised(seen) or f"; a `{commands.up()}` or Dagster that runs starts it again in a minute or two"
        )
        yield Reason("dead", f"its session{pid} ended without saying so{_ago(seen, status)}{next_start}")
    elif state == "silent" and seen.session is not None:
        yield Reason("silent", f"process {seen.session.pid} lives and has not written its status{_ago(seen, status)}")
    elif state == "failed" and status is not None:
        starts_again = seen.session is None and seen.supervisor is not None and seen.supervisor.starts
        ended = f"it failed and is restarting{_supervised(seen)}" if starts_again else "it failed and was given up"
        yield Reason("failed", f"{ended}: {_error(status)}")
    elif state in ("stopped", "never started"):
        if _unasked(seen, should_run):
            yield Reason("not_running", _not_running(seen))
    elif status is not None and status.pid == (seen.session.pid if seen.session else None):
        yield from _at_work(seen.at, status, limits)


def _not_running(seen: HealthFacts) -> str:
    status = seen.status
    if status is None:
        switch = f"; start it: {commands.up()}, or in your Dagster the sensor keepalive of its job"
        return f"it should run, and never did{_supervised(seen) or switch}"
    again = f"; start it: {commands.up()}, or your Dagster"
    ended = f"it ended {_when(seen.at, status.heartbeat)}, nobody asked for that, and no driver runs it"
    return f"{ended}{_supervised(seen) or again}"


def _at_work(now: float, status: Status, limits: HealthLimits) -> Iterator[Reason]:
    """Yields the reasons of a stream whose driver runs and reports."""
    if status.error is not None:
        when = f" in {_span(status.next_try - now)}" if status.next_try else ""
        yield Reason("failing", f"it failed and is tried again{when}: {_error(status)}")
    elif status.failures > 1:
        yield Reason("failing", f"it failed {status.failures} times in a row and was started again each time")
    patience = max(limits.stuck_after, 2 * status.batch_every_s)
    begun = min(status.last_start, now)
    hangs = bool(limits.stuck_after and begun and status.state == "starting" and now - begun > patience)
    if hangs:
        yield Reason("stuck", f"it has been starting for {_span(now - begun)} and has not read anything yet")
    if status.lag_at is None:
        return
    if _age(now, max(status.lag_at, status.started_at)) > limits.stale_after:  # a new session has not looked yet
        yield Reason("blind", f"the end of its topics was last seen {_when(now, status.lag_at)}: no broker answers")
        return
    if (blocked := _blocked(status)) is not None:
        text, since = blocked
        if limits.late_after and now - since > limits.late_after:
            yield Reason("blocked", text)
        return
    lag = status.lag_records or 0
    unread = f"{counted(lag, 'record')} unread"
    progress = min(max(status.committed_at or 0.0, status.started_at), now)
    if limits.stuck_after and lag and status.started_at and not hangs and now - progress > patience:
        yield Reason("stuck", f"no batch was finished for {_span(now - progress)}, with {unread}")
    keeps_pace = status.trigger != "available-now"  # such a session catches up with the time since the last one
    if limits.late_after and lag and keeps_pace and (status.lag_s or 0.0) > limits.late_after + status.batch_every_s:
        yield Reason("late", f"{unread}, the oldest for up to {_span(status.lag_s or 0.0)}")


def _stale(seen: HealthFacts) -> Reason | None:
    """The tables whose newest rows are older than their objective; none of a stream that has only just started."""
    if not _settled(seen) and seen.session is not None:
        return None
    found = []
    for name, table in sorted(seen.status.tables.items()) if seen.status is not None else ():
        if table.is_stale(seen.at):
            age, within = _span(table.seconds(seen.at)), _span(table.fresh_within_s or 0.0)
            found.append(f"the newest rows of table {name} are {age} old, its objective is {within}")
    if not found:
        return None
    cause = "; nothing is unread: the topics have brought no rows" if _has_read_all(seen) else ""
    return Reason("stale", f"{', '.join(found)}{cause}")


def _has_read_all(seen: HealthFacts) -> bool:
    """True if a session runs the stream and has seen lately that nothing is unread."""
    status = seen.status
    return seen.session is not None and status is not None and status.lag_at is not None and not status.lag_records


def _code_on_disk(seen: HealthFacts) -> Iterator[str]:
    """Yields the note that the code on disk is not the code that runs, as the session has found."""
    status = seen.status
    if status is None or seen.session is None or status.disk_code_since is None:
        return
    runs, since = status.code_hash, _time(status.disk_code_since)
    if status.disk_code_error is not None:
        yield f"runs code {runs}; the code on disk, changed at {since}, cannot be loaded: {status.disk_code_error}"
    elif status.disk_code is not None:
        yield f"runs code {runs}; on disk is {status.disk_code} since {since}: {commands.deploy(seen.stream)}"
    elif status.disk_settings:
        yield f"runs with other settings than those on disk since {since}: {commands.deploy(seen.stream)}"


def _blocked(status: Status) -> tuple[str, float] | None:
    """The oldest transaction that the stream waits for, in words, and since when."""
    waits = [(since, topic, p) for topic, each in status.blocked.items() for p, since in each.items()]
    if not waits:
        return None
    since, topic, partition = min(waits)
    more = f", and in {counted(len(waits) - 1, 'more partition')}" if len(waits) > 1 else ""
    text = (
        f"blocked: a transaction is open in topic {topic} partition {partition} since {_time(since)}{more}; records "
        "behind it cannot be read until its producer, or kafka-transactions.sh, ends it"
    )
    return text, since


def _dead(seen: HealthFacts) -> bool:
    return seen.status is not None and seen.status.state not in ENDED


def recovery_words(seen: HealthFacts) -> str:
    """The recovery that has stopped the stream: its plan, since when, and the commands if no process works on it.

    Empty if there is none.
    """
    if seen.plan is None:
        return ""
    text = f"is being recovered by plan {seen.plan}"
    holder = seen.owner if seen.session is None else None  # a session that still runs began before the plan
    since = holder.since if holder is not None else seen.stop.since if seen.stop is not None else None
    if since is not None:
        text += f" since {_time(since)}"
    if seen.owner is None:
        text += f"; nobody works on it now: {commands.resume(seen.plan)}, or {commands.abort(seen.plan)}"
    return text


def _error(status: Status) -> str:
    error = status.error or {}
    return f"{error.get('code', '')} {error.get('found', 'no reason was written')}".strip()


def _since(request: StreamRequest | None) -> str:
    return f"at {_time(request.since)} ({request.who})" if request is not None else ""


def _ago(seen: HealthFacts, status: Status | None) -> str:
    return f"; its last sign of life was {_when(seen.at, status.heartbeat)}" if status and status.heartbeat else ""


def _age(now: float, stamp: float) -> float:
    return now - stamp if stamp <= now + _AHEAD else math.inf


def _when(now: float, stamp: float) -> str:
    age = _age(now, stamp)
    return f"{_span(age)} ago" if math.isfinite(age) else "before the clock was set back"


def _span(seconds: float) -> str:
    return format_duration(timedelta(seconds=round(max(seconds, 0.0))))


def _time(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
