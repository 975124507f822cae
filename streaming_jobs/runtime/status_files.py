"""The status files of a session's streams: written at least once per second, also while the session waits."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import structlog

from streaming_jobs.runtime.stream_runner import StreamRunner
from streaming_jobs.settings import Settings
from streaming_jobs.state.status import Status, write_status

log = structlog.get_logger()

STATUS_EVERY = 1.0


class StatusFiles:
    """Writes the status files; a file that cannot be written (the disk is full) stops no stream."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._unwritten = False

    def write(self, status: Status) -> bool:
        """Write one; False if that failed, which is logged once until it works again."""
        try:
            write_status(self._settings, status)
            self._unwritten = False
        except OSError as error:
            if not self._unwritten:
                log.warning("the status could not be written", stream=status.stream, reason=str(error))
            self._unwritten = True
        return not self._unwritten

    def refresh(self, running: Sequence[StreamRunner]) -> None:
        """Write the status of each stream now; the file of a detached stream belongs to another session."""
        for each in running:
            if not each.detached:
                each.refresh_status()
                self.write(each.status)

    @contextmanager
    def beating(self, running: Sequence[StreamRunner]) -> Iterator[None]:
        """Keep the files fresh while the session's thread waits for the JVM and for the first plans."""
        ready = threading.Event()

        def beat() -> None:
            while not ready.wait(STATUS_EVERY):
                for each in running:
                    each.beat()
                    self.write(each.status)

        thread = threading.Thread(target=beat, daemon=True)
        thread.start()
        try:
            yield
        finally:
            ready.set()
            thread.join()
