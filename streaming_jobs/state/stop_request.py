"""The file `<state>/<stream>/stop`: whoever writes it asks the stream's session to stop at a batch border.

While it is there, nothing that works by itself starts the stream. It says who has asked. A start with intent removes a
request that was there when the start was made, once preflight has let the stream start: one that is made later is the
newer word. A recovery's own is removed by the recovery alone, when it is over.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from streaming_jobs.files import private_folder, sync, write_atomic
from streaming_jobs.settings import Settings
from streaming_jobs.stream import checked_name

_RECOVERY = "stopped for recovery plan "


@dataclass(frozen=True)
class Request:
    """A stop that was asked for: by whom, in words, since when (seconds since 1970), and for which recovery plan.

    `file` is the marker's inode and time: the same words asked for again are another request.
    """

    who: str
    since: float
    file: tuple[int, int] = (0, 0)

    @property
    def plan(self) -> str | None:
        """The recovery that has asked, if it was one."""
        return self.who.removeprefix(_RECOVERY) if self.who.startswith(_RECOVERY) else None


def marker(settings: Settings, stream: str) -> Path:
    """The file."""
    return settings.state / checked_name("stream", stream) / "stop"


def asked(settings: Settings, stream: str) -> bool:
    """True if the stream is to stop, or to stay stopped."""
    return marker(settings, stream).exists()


def request(settings: Settings, stream: str) -> Request | None:
    """The stop that was asked for, or None."""
    try:
        with marker(settings, stream).open(encoding="utf-8") as file:
            stat = os.fstat(file.fileno())
            return Request(file.read().strip(), stat.st_mtime, (stat.st_ino, stat.st_mtime_ns))
    except FileNotFoundError:
        return None


def requests(settings: Settings) -> dict[str, Request]:
    """The stops that are asked for now, by stream."""
    names = [path.parent.name for path in settings.state.glob("*/stop")]
    return {name: found for name in names if (found := request(settings, name)) is not None}


def ask(settings: Settings, stream: str, who: str) -> None:
    """Ask for a stop; it is on disk when this returns."""
    with _alone(settings, stream) as path:
        write_atomic(path, f"{who}\n")


def clear(settings: Settings, stream: str, only: Request) -> None:
    """Let the stream start again, also after a power cut, unless another stop was asked for since that one."""
    with _alone(settings, stream) as path:
        if request(settings, stream) == only:
            path.unlink()
            sync(path.parent)


def for_recovery(settings: Settings, stream: str) -> bool:
    """True if it is a recovery that has asked."""
    return _who(settings, stream).startswith(_RECOVERY)


def ask_for(settings: Settings, stream: str, plan: str) -> None:
    """Ask for a recovery; a request that is there already, whosever it is, stays as it is."""
    with _alone(settings, stream) as path:
        if not path.exists():
            write_atomic(path, f"{_RECOVERY}{plan}\n")


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


def _who(settings: Settings, stream: str) -> str:
    with suppress(OSError):
        return marker(settings, stream).read_text(encoding="utf-8").strip()
    return ""
