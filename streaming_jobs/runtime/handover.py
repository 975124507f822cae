"""The reasons of a supervised session to start a stream again: a recovery that is over, other code on disk.

`fresh_starts.py` acts on them: in the running session if its code and settings are still those on disk, else in another
process, because corrected code needs a new one.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from typing import Protocol

from streaming_jobs.runtime.code_watch import DiskCode
from streaming_jobs.settings import Settings
from streaming_jobs.state import stop_request
from streaming_jobs.state.status import Status


class Watch(Protocol):
    """The code and the settings on disk against those of this process; `code_watch.py` has the real one."""

    def untouched(self) -> bool:
        """True if no file has changed since the session began."""

    @property
    def answers(self) -> int:
        """How often other files were found and could be loaded."""

    def newer(self, streams: Iterable[str]) -> bool:
        """True if a session started now would run these streams with other code or settings."""

    def on_disk(self, stream: str) -> DiskCode | None:
        """The code and settings that a session started now would run the stream with; None if they are the same."""

    def close(self) -> None:
        """Stop watching."""


class Handover:
    """The reasons to start streams again; a recovery had stopped those `recovering` before it began."""

    def __init__(
        self,
        settings: Settings,
        recovering: Iterable[str] = (),
        watch: Watch | None = None,
        *,
        left_out: Iterable[str] = (),
        began: float | None = None,
    ) -> None:
        """`left_out`: streams that somebody else had stopped before it began.

        `began`: the moment before this process loaded its code, in seconds since 1970; None: now.

        Without a `watch`, every start needs a new process, and changed code never is a reason.
        """
        self.left_out = frozenset([*recovering, *left_out])
        self.began = time.time() if began is None else began
        self._settings = settings
        self._watch = watch
        self._recovering = set(recovering)
        self._failures: dict[str, int] = {}

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
        """Forget the stream's recovery, and its failure: it runs again."""
        self._recovering.discard(stream)
        self._failures.pop(stream, None)

    def same_code(self) -> bool:
        """True if this process has the code and the settings that are on disk."""
        return self._watch is not None and self._watch.untouched()

    def other_code(self, streams: Iterable[str]) -> bool:
        """True if these streams would run other code, or with other settings, in a session started now."""
        return self._watch is not None and self._watch.newer(streams)

    def changed_since_failure(self, stream: str) -> bool:
        """True if other code was loaded since the first call for this stream: it has failed in another process."""
        if self._watch is None:
            return False
        self._watch.newer([])
        return self._failures.setdefault(stream, self._watch.answers) != self._watch.answers

    def note_disk(self, statuses: Iterable[Status]) -> None:
        """Note in the statuses whether the code on disk is the code that runs."""
        if self._watch is None:
            return
        for status in statuses:
            disk = self._watch.on_disk(status.stream)
            status.disk_code = disk.code if disk is not None else None
            status.disk_code_since = disk.since if disk is not None else None
            status.disk_code_error = disk.error if disk is not None else None
            status.disk_settings = disk is not None and disk.settings

    def close(self) -> None:
        """Stop watching."""
        if self._watch is not None:
            self._watch.close()
