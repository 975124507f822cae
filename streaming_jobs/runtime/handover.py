"""The end of a supervised session in favour of the next one, which loads the newest code and settings.

A stream whose recovery is over starts again: in the running session if its code and settings are still those on disk,
else in a session that replaces it (`restart_in_place.py`), because corrected code needs a new process. The same happens
when the code of a failed stream has changed on disk.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Protocol

from streaming_jobs.settings import Settings
from streaming_jobs.state import stop_request


class Watch(Protocol):
    """The code and the settings on disk against those of this process; `code_watch.py` has the real one."""

    def untouched(self) -> bool:
        """True if no file has changed since the session began."""

    def newer(self, streams: Iterable[str]) -> bool:
        """True if a session started now would run these streams with other code or settings."""

    def close(self) -> None:
        """Stop watching."""


class Handover:
    """The reasons of a supervised session to restart; a recovery stopped the streams `left_out` before it began."""

    def __init__(self, settings: Settings, left_out: Iterable[str] = (), watch: Watch | None = None) -> None:
        """Without a `watch`, every recovery restarts the session, and changed code never does."""
        self._settings = settings
        self._watch = watch
        self._recovering = set(left_out)

    def recovered(self, streams: Iterable[str]) -> Iterator[str]:
        """Yields the streams, of these and of those left out, whose recovery is over; each until `forget`."""
        for name in sorted(self._recovering.union(streams)):
            if stop_request.for_recovery(self._settings, name):
                self._recovering.add(name)
            elif name in self._recovering:
                if stop_request.asked(self._settings, name):  # somebody wants it to stay stopped
                    self._recovering.discard(name)
                else:
                    yield name

    def forget(self, stream: str) -> None:
        """Forget the stream's recovery: it runs again."""
        self._recovering.discard(stream)

    def same_code(self) -> bool:
        """True if this process has the code and the settings that are on disk."""
        return self._watch is not None and self._watch.untouched()

    def other_code(self, streams: Iterable[str]) -> bool:
        """True if these streams would run other code, or with other settings, in a session started now."""
        return self._watch is not None and self._watch.newer(streams)

    def close(self) -> None:
        """Stop watching."""
        if self._watch is not None:
            self._watch.close()
