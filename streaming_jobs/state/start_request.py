"""The request to start a stream: the file `<state>/<stream>/start` requests a start newer than the file.

A session that runs the stream stops it at a batch border and starts it again; one that has stopped it starts it; if
none runs, the supervisor starts a session, also after an operator's stop or after a failure that it has given up on.
The start runs the code that is on disk. Then the session removes the file. A stop request is stronger: while there is
one, no process starts the stream.

The request states what shall be, so that nothing is lost if the one who made it is killed, and making it twice starts
the stream once.

The file holds JSON: `who` made the request, in words.
"""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import dataclass

from streaming_jobs.platform.files import sync, write_atomic
from streaming_jobs.settings import Settings
from streaming_jobs.state.stream_folder import StreamFolder


@dataclass(frozen=True)
class StartRequest:
    """A request: `who` made it, in words, and `since` when (seconds since 1970)."""

    who: str
    since: float


def request(settings: Settings, stream: str) -> StartRequest | None:
    path = StreamFolder.of(settings, stream).start
    try:
        since, text = path.stat().st_mtime, path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return None
    with suppress(ValueError):
        value = json.loads(text)
        if isinstance(value, dict):
            return StartRequest(str(value.get("who", "")), since)
    return StartRequest(text.strip(), since)


def pending(settings: Settings, stream: str, since: float) -> bool:
    """True if a start was requested after `since`, the moment from which the stream's code on disk was read."""
    try:
        return StreamFolder.of(settings, stream).start.stat().st_mtime > since
    except FileNotFoundError:
        return False


def ask(settings: Settings, stream: str, who: str) -> StartRequest:
    """Request a start from now on; the file is on disk when this returns."""
    folder = StreamFolder.of(settings, stream)
    with folder.alone():
        write_atomic(folder.start, f"{json.dumps({'who': who})}\n")
        return StartRequest(who, folder.start.stat().st_mtime)


def clear(settings: Settings, stream: str, until: float) -> None:
    """Remove a request that was made at `until` or before: the stream has started since. A newer one stays."""
    folder = StreamFolder.of(settings, stream)
    if not folder.start.exists():
        return
    with folder.alone(), suppress(FileNotFoundError):
        if folder.start.stat().st_mtime <= until:
            folder.start.unlink()
            sync(folder.path)
