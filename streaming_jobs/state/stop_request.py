"""The file `<state>/<stream>/stop`: whoever writes it asks the stream's session to stop at a batch border.

While it is there, nothing that works by itself starts the stream. It says who has asked. A start with intent removes a
request that was there when the start was made, once preflight has let the stream start: one that is made later is the
newer word. A recovery's own is removed by the recovery alone, when it is over.

The file holds JSON: `who`, in words, and `plan` for a recovery. Plain text, written by hand or by an earlier version,
names who.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from streaming_jobs.files import private_folder, sync, write_atomic
from streaming_jobs.settings import Settings
from streaming_jobs.state.stream_folder import StreamFolder

_RECOVERY = "stopped for recovery plan "
"""Before the plan's id, in the words for people; and in a request of an earlier version."""


@dataclass(frozen=True)
class Request:
    """A stop that was asked for: by whom, in words, since when (seconds since 1970), and for which recovery plan.

    `file` is the marker's inode and time: the same words asked for again are another request.
    """

    who: str
    since: float
    file: tuple[int, int] = (0, 0)
    plan: str | None = None


def marker(settings: Settings, stream: str) -> Path:
    """The file."""
    return StreamFolder.of(settings, stream).stop


def asked(settings: Settings, stream: str) -> bool:
    """True if the stream is to stop, or to stay stopped."""
    return marker(settings, stream).exists()


def request(settings: Settings, stream: str) -> Request | None:
    """The stop that was asked for, or None."""
    try:
        with marker(settings, stream).open(encoding="utf-8") as file:
            stat = os.fstat(file.fileno())
            who, plan = _said(file.read().strip())
            return Request(who, stat.st_mtime, (stat.st_ino, stat.st_mtime_ns), plan)
    except FileNotFoundError:
        return None


def requests(settings: Settings) -> dict[str, Request]:
    """The stops that are asked for now, by stream."""
    names = [path.parent.name for path in settings.state.glob("*/stop")]
    return {name: found for name in names if (found := request(settings, name)) is not None}


def ask(settings: Settings, stream: str, who: str) -> None:
    """Ask for a stop; it is on disk when this returns."""
    with _alone(settings, stream) as path:
        write_atomic(path, f"{json.dumps({'who': who})}\n")


def clear(settings: Settings, stream: str, only: Request) -> None:
    """Let the stream start again, also after a power cut, unless another stop was asked for since that one."""
    with _alone(settings, stream) as path:
        if request(settings, stream) == only:
            path.unlink()
            sync(path.parent)


def for_recovery(settings: Settings, stream: str) -> bool:
    """True if it is a recovery that has asked."""
    try:
        found = request(settings, stream)
    except OSError:  # whoever may not read it knows only that it is there
        return False
    return found is not None and found.plan is not None


def ask_for(settings: Settings, stream: str, plan: str) -> None:
    """Ask for a recovery; a request that is there already, whosever it is, stays as it is."""
    with _alone(settings, stream) as path:
        if not path.exists():
            write_atomic(path, f"{json.dumps({'who': f'{_RECOVERY}{plan}', 'plan': plan})}\n")


def clear_for(settings: Settings, stream: str, plan: str) -> None:
    """Let the stream start again, if it was this recovery that has asked."""
    found = request(settings, stream)
    if found is not None and found.plan == plan:
        clear(settings, stream, found)


@contextmanager
def _alone(settings: Settings, stream: str) -> Iterator[Path]:
    """The marker, which nobody else writes or removes within the block."""
    path = marker(settings, stream)
    descriptor = os.open(private_folder(path.parent), os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield path
    finally:
        os.close(descriptor)


def _said(text: str) -> tuple[str, str | None]:
    """Who asked, and for which plan, as the file says."""
    try:
        value = json.loads(text)
    except ValueError:
        value = None
    if isinstance(value, dict):
        return str(value.get("who", "")), value.get("plan")
    return text, text.removeprefix(_RECOVERY) if text.startswith(_RECOVERY) else None
