"""The request to stop a stream: for the file `<state>/<stream>/stop`, its session stops it at a batch border.

While the file exists, no supervisor starts the stream. A start by a person removes a request that is older than the
start, once preflight has passed; a newer request holds. The request of a recovery is removed by that recovery alone,
when it is over.

The file holds JSON: `who` made the request, in words, and `plan` for a recovery. In plain text, written by hand or by
an earlier version, the text is `who`.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from streaming_jobs.platform.files import sync, write_atomic
from streaming_jobs.settings import Settings
from streaming_jobs.state.stream_folder import StreamFolder

_RECOVERY = "stopped for recovery plan "
"""The text before the plan's id in `who`, and in a request of an earlier version."""


@dataclass(frozen=True)
class StopRequest:
    """A stop request: `who` made it, in words, `since` when (seconds since 1970), and the recovery plan it is for.

    `file` is the marker's inode and time: a repetition of the same request is another one.
    """

    who: str
    since: float
    file: tuple[int, int] = (0, 0)
    plan: str | None = None


def marker(settings: Settings, stream: str) -> Path:
    return StreamFolder.of(settings, stream).stop


def asked(settings: Settings, stream: str) -> bool:
    """True if the stream is to stop, or to stay stopped."""
    return marker(settings, stream).exists()


def request(settings: Settings, stream: str) -> StopRequest | None:
    try:
        with marker(settings, stream).open(encoding="utf-8") as file:
            stat = os.fstat(file.fileno())
            who, plan = _parsed(file.read().strip())
            return StopRequest(who, stat.st_mtime, (stat.st_ino, stat.st_mtime_ns), plan)
    except FileNotFoundError:
        return None


def requests(settings: Settings) -> dict[str, StopRequest]:
    names = [path.parent.name for path in settings.state.glob("*/stop")]
    return {name: pending for name in names if (pending := request(settings, name)) is not None}


def ask(settings: Settings, stream: str, who: str) -> None:
    """Request a stop; the file is on disk when this returns."""
    with _alone(settings, stream) as path:
        write_atomic(path, f"{json.dumps({'who': who})}\n")


def clear(settings: Settings, stream: str, only: StopRequest) -> None:
    """Remove the request `only`, durably, so that the stream may start again; a newer request stays."""
    with _alone(settings, stream) as path:
        if request(settings, stream) == only:
            path.unlink()
            sync(path.parent)


def for_recovery(settings: Settings, stream: str) -> bool:
    """True if the stop request is of a recovery."""
    try:
        pending = request(settings, stream)
    except OSError:  # without the right to read it, only its existence is known
        return False
    return pending is not None and pending.plan is not None


def ask_for(settings: Settings, stream: str, plan: str) -> None:
    """Request a stop for a recovery; an existing request, of anybody, stays as it is."""
    with _alone(settings, stream) as path:
        if not path.exists():
            write_atomic(path, f"{json.dumps({'who': f'{_RECOVERY}{plan}', 'plan': plan})}\n")


def clear_for(settings: Settings, stream: str, plan: str) -> None:
    """Remove the request if it is of this recovery, so that the stream may start again."""
    pending = request(settings, stream)
    if pending is not None and pending.plan == plan:
        clear(settings, stream, pending)


@contextmanager
def _alone(settings: Settings, stream: str) -> Iterator[Path]:
    """The path of the file, locked: no other process writes or removes the file within the block."""
    with StreamFolder.of(settings, stream).alone():
        yield marker(settings, stream)


def _parsed(text: str) -> tuple[str, str | None]:
    """The text of the file as `who` and `plan`."""
    try:
        value = json.loads(text)
    except ValueError:
        value = None
    if isinstance(value, dict):
        return str(value.get("who", "")), value.get("plan")
    return text, text.removeprefix(_RECOVERY) if text.startswith(_RECOVERY) else None
