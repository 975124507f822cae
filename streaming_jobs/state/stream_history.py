"""The deploys of a stream, and its starts and ends in sessions: one JSON line each, the oldest first.

    <state>/<stream>/deploys.jsonl    {"at":1795440000.0,"from":"0a1b2c3d4e5f","to":"5f4e3d2c1b0a","by":"anna"}
    <state>/<stream>/sessions.jsonl   {"at":1795440000.0,"what":"started","pid":41,...}

`at` in seconds since 1970, `from` and `to` the hashes of the code. A deploy is written before the start that it is
about, so that none is missing, and once, even if it is repeated after a kill. The events of sessions are for people who
look back: nothing depends on them, so a full disk stops no stream. A session that was killed leaves its start without
an end.
"""

from __future__ import annotations

import os
import time
from contextlib import suppress
from dataclasses import asdict, dataclass, fields
from typing import Literal

import structlog

from streaming_jobs.errors import RecourseError
from streaming_jobs.platform import json_lines
from streaming_jobs.settings import Settings
from streaming_jobs.state.status import Status
from streaming_jobs.state.stream_folder import StreamFolder

log = structlog.get_logger()


@dataclass(frozen=True)
class Deploy:
    """A deploy: the code that ran `before`, the code `after` it, and `by` whom."""

    at: float
    before: str
    after: str
    by: str


def record_deploy(settings: Settings, stream: str, before: str, after: str, by: str) -> None:
    """Append a deploy, durable when this returns; a repetition of the newest deploy changes nothing."""
    last = deploys(settings, stream)[-1:]
    if not last or (last[0].before, last[0].after) != (before, after):
        line = {"at": round(time.time(), 3), "from": before, "to": after, "by": by}
        json_lines.add(StreamFolder.of(settings, stream).deploys, line)


def deploys(settings: Settings, stream: str) -> list[Deploy]:
    every = []
    for line in json_lines.read(StreamFolder.of(settings, stream).deploys):
        with suppress(ValueError, KeyError, TypeError):
            every.append(Deploy(float(line["at"]), str(line["from"]), str(line["to"]), str(line["by"])))
    return every


What = Literal["started", "restarted", "stopped", "failed", "slice"]

LIMIT = 256 * 1024
"""Bytes beyond which the older half of the session events is dropped: about a thousand events stay."""
_REASON = 300


@dataclass(frozen=True)
class SessionEvent:
    """One event at `at` (seconds since 1970): `restarted` is a new query in the same session, after a failure.

    `slice`: a process beside the session has rebuilt a slice. `reason` is the error that led to the event, or the
    slice; `code` the version of the code as text.
    """

    at: float
    what: What
    pid: int = 0
    run_id: str | None = None
    generation: int = 0
    batch: int | None = None
    code: str = ""
    reason: str = ""


def note_session_event(settings: Settings, status: Status, what: What, reason: str = "") -> None:
    """Append an event of the session that has this status; a file that cannot be written is only logged."""
    pid, code = status.pid or os.getpid(), status.code_version
    event = SessionEvent(time.time(), what, pid, status.run_id, status.generation, status.batch, code, reason)
    _add(settings, status.stream, event)


def note_slice(settings: Settings, stream: str, generation: int, words: str) -> None:
    """Append that a slice was rebuilt, by this process; a file that cannot be written is only logged."""
    _add(settings, stream, SessionEvent(time.time(), "slice", os.getpid(), None, generation, reason=words))


def _add(settings: Settings, stream: str, event: SessionEvent) -> None:
    line = {**asdict(event), "at": round(event.at, 3), "reason": event.reason[:_REASON]}
    try:
        json_lines.add(StreamFolder.of(settings, stream).sessions, line, limit=LIMIT)
    except (OSError, RecourseError) as error:
        log.warning("a session event could not be written", stream=stream, reason=str(error))


def session_events(settings: Settings, stream: str) -> list[SessionEvent]:
    """The events of a stream's sessions that are on file, oldest first."""
    known, events = {field.name for field in fields(SessionEvent)}, []
    for line in json_lines.read(StreamFolder.of(settings, stream).sessions):
        with suppress(TypeError):
            events.append(SessionEvent(**{name: value for name, value in line.items() if name in known}))
    return sorted(events, key=lambda event: event.at)
