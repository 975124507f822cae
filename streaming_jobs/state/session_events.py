"""Starts and ends of a stream in its sessions: `<state>/<stream>/sessions.jsonl`, one line each, the newest last.

The status file shows only the newest session. These lines are for people who look back: nothing depends on them, so a
disk that is full stops no stream, and a power cut may lose the last ones. A session that was killed leaves its start
without an end.
"""

from __future__ import annotations

import json
import os
import time
from dataclasses import asdict, dataclass, fields
from typing import Literal

import structlog

from streaming_jobs.platform.files import write_atomic
from streaming_jobs.settings import Settings
from streaming_jobs.state.status import Status
from streaming_jobs.state.stream_folder import StreamFolder

log = structlog.get_logger()

What = Literal["started", "restarted", "stopped", "failed"]

LIMIT = 256 * 1024
"""Bytes beyond which the older half of the file is dropped: about a thousand events stay."""
_REASON = 300


@dataclass(frozen=True)
class SessionEvent:
    """One event at `at` (seconds since 1970): `restarted` is a new query in the same session, after a failure.

    `reason` is the error that led to it; `code` the version of the code as text.
    """

    at: float
    what: What
    pid: int = 0
    run_id: str | None = None
    generation: int = 0
    batch: int | None = None
    code: str = ""
    reason: str = ""


def note(settings: Settings, status: Status, what: What, reason: str = "") -> None:
    """Add an event of the session that has this status; a file that cannot be written is only logged."""
    event = SessionEvent(
        round(time.time(), 3),
        what,
        status.pid or os.getpid(),
        status.run_id,
        status.generation,
        status.batch,
        status.code_version,
        reason[:_REASON],
    )
    path = StreamFolder.of(settings, status.stream).sessions
    try:
        StreamFolder.of(settings, status.stream).make()
        # A line that a kill cut off must not take this one along: it begins with the end of that line.
        with path.open("a", encoding="utf-8") as file:
            file.write("\n" + json.dumps(asdict(event), separators=(",", ":")))
        if path.stat().st_size > LIMIT:
            lines = path.read_text(encoding="utf-8", errors="replace").split("\n")
            write_atomic(path, "\n".join(lines[len(lines) // 2 :]), durable=False)
    except OSError as error:
        log.warning("a session event could not be written", stream=status.stream, reason=str(error))


def session_events(settings: Settings, stream: str) -> list[SessionEvent]:
    """The events of a stream that are on file, oldest first; lines that cannot be read are left out."""
    try:
        text = StreamFolder.of(settings, stream).sessions.read_text(encoding="utf-8", errors="replace")
    except FileNotFoundError:
        return []
    known, events = {field.name for field in fields(SessionEvent)}, []
    for line in text.split("\n"):
        try:
            value = json.loads(line)
            events.append(SessionEvent(**{key: each for key, each in value.items() if key in known}))
        except (ValueError, TypeError, AttributeError):  # empty, or cut off by a kill
            continue
    return sorted(events, key=lambda event: event.at)
