"""The file `<state>/<stream>/stop`: whoever writes it asks the stream's session to stop at a batch border.

While it is there, nothing that works by itself starts the stream. It says who has asked. A start with intent removes it
once preflight has let the stream start; a recovery removes its own when it is over.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from streaming_jobs.files import private_folder, sync, write_atomic
from streaming_jobs.settings import Settings
from streaming_jobs.stream import checked_name

_RECOVERY = "stopped for recovery plan "


@dataclass(frozen=True)
class Request:
    """A stop that was asked for: by whom, in words, since when (seconds since 1970), and for which recovery plan."""

    who: str
    since: float

    @property
    def plan(self) -> str | None:
        """The recovery that has asked, if it was one."""
        return self.who.removeprefix(_RECOVERY) if self.who.startswith(_RECOVERY) else None


def marker(settings: Settings, stream: str) -> Path:
    """The file."""
    return settings.state / checked_name("stream", stream) / "stop"


def asked(settings: Settings, stream: str) -> bool:
    """Whether the stream is to stop, or to stay stopped."""
    return marker(settings, stream).exists()


def request(settings: Settings, stream: str) -> Request | None:
    """The stop that was asked for, or None."""
    path = marker(settings, stream)
    try:
        return Request(path.read_text(encoding="utf-8").strip(), path.stat().st_mtime)
    except FileNotFoundError:
        return None


def ask(settings: Settings, stream: str, who: str) -> None:
    """Ask for a stop; it is on disk when this returns."""
    path = marker(settings, stream)
    private_folder(path.parent)
    write_atomic(path, f"{who}\n")


def clear(settings: Settings, stream: str) -> None:
    """Let the stream start again, also after a power cut."""
    path = marker(settings, stream)
    if path.exists():
        path.unlink(missing_ok=True)
        sync(path.parent)


def for_recovery(settings: Settings, stream: str) -> bool:
    """Whether it is a recovery that has asked."""
    return _who(settings, stream).startswith(_RECOVERY)


def ask_for(settings: Settings, stream: str, plan: str) -> None:
    """Ask for a recovery; a request that is there already, whosever it is, stays as it is."""
    if not asked(settings, stream):
        ask(settings, stream, f"{_RECOVERY}{plan}")


def clear_for(settings: Settings, stream: str, plan: str) -> None:
    """Let the stream start again, if it was this recovery that has asked."""
    if _who(settings, stream) == f"{_RECOVERY}{plan}":
        clear(settings, stream)


def _who(settings: Settings, stream: str) -> str:
    with suppress(OSError):
        return marker(settings, stream).read_text(encoding="utf-8").strip()
    return ""
