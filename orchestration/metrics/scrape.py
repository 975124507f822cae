"""What the files of a home say at one moment, for all receivers of figures: read once, shared, within a deadline."""

from __future__ import annotations

import shutil
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path

import structlog

from streaming_jobs.errors import TransientError
from streaming_jobs.settings import Settings
from streaming_jobs.state.health import Health, HealthLimits, existing_folder, judge, look
from streaming_jobs.state.status import ENDED, Status, streams_with_status

log = structlog.get_logger()

DEADLINE = 8.0
"""Seconds for a scrape; Prometheus waits ten by default."""
SHARED_FOR = 1.0
"""Seconds for which a scrape is shared: its cost does not follow the number of receivers."""
SHARED_ON_A_STORE = 10.0
"""The same for state on an object store, where each stream costs several requests."""


@dataclass(frozen=True)
class ScrapedStream:
    """One stream at the time `at` (seconds since 1970); `status` is None if its file is missing or truncated."""

    name: str
    at: float
    status: Status | None = None
    health: Health | None = None
    live: bool = False
    """True if a session runs the stream."""
    error: str = ""
    """Why the stream's files could not be read."""

    @property
    def state(self) -> str:
        return "" if self.health is None else self.health.state

    @property
    def verdict(self) -> str:
        return "" if self.health is None else self.health.verdict

    @property
    def reasons(self) -> list[str]:
        """The words of all reasons for red and for yellow."""
        return [] if self.health is None else [each.word for each in (*self.health.reasons, *self.health.warnings)]

    @property
    def well(self) -> bool:
        """True if its files can be read and it is not red."""
        return self.status is not None and self.health is not None and not self.health.red

    def as_json(self) -> dict[str, object]:
        """The verdict with its reasons in words."""
        if self.health is None or self.status is None:
            return {"verdict": "unreadable", "reasons": [{"word": "unreadable", "text": self.error}]}
        reasons = (*self.health.reasons, *self.health.warnings)
        return {
            "verdict": self.health.verdict,
            "state": self.health.state,
            "reasons": [{"word": each.word, "text": each.text} for each in reasons],
        }


@dataclass(frozen=True)
class ScrapedHome:
    """All streams of a home at the time `at`; `free`: bytes by folder; `seconds`: the time that reading took."""

    at: float
    streams: tuple[ScrapedStream, ...]
    free: Mapping[str, int] = field(default_factory=dict)
    free_objective: int = 0
    seconds: float = 0.0

    @property
    def well(self) -> bool:
        return all(stream.well for stream in self.streams)

    def as_json(self) -> dict[str, object]:
        """The answer of `/health`: the streams that are not well, and the number of the others."""
        ill = {stream.name: stream.as_json() for stream in self.streams if not stream.well}
        return {"well": self.well, "streams_well": len(self.streams) - len(ill), "streams": ill}


def scrape(settings: Settings) -> ScrapedHome:
    """Read the files of all streams that have ever run in the home."""
    began = time.monotonic()
    streams = tuple(_scraped(settings, name) for name in sorted(streams_with_status(settings)))
    folders = {"home": settings.home, "state": settings.state, "tables": settings.tables}
    free = {
        name: shutil.disk_usage(existing_folder(folder)).free
        for name, folder in folders.items()
        if isinstance(folder, Path)
    }
    objective = settings.quality.free_disk_mb << 20
    return ScrapedHome(time.time(), streams, free, objective, time.monotonic() - began)


def _scraped(settings: Settings, name: str) -> ScrapedStream:
    """One stream; whatever its files hold, the others are read all the same."""
    try:
        seen = look(settings, name)
        health = judge(seen, HealthLimits.of(settings, name))
    except Exception as error:  # noqa: BLE001 - a file of another version, or truncated: the figure says so
        log.info("the files of a stream cannot be read", stream=name, reason=repr(error)[:200])
        return ScrapedStream(name, time.time(), error=f"its files cannot be read: {type(error).__name__}")
    live = seen.session is not None and health.state not in ("dead", *ENDED)
    missing = "" if seen.status is not None else "its status file is missing or truncated"
    return ScrapedStream(name, seen.at, seen.status, health, live, missing)


@dataclass
class Scrapes:
    """The newest scrape for all who ask. One thread reads at a time; while it hangs, everybody gets an error."""

    settings: Settings
    read: Callable[[Settings], ScrapedHome] = scrape
    deadline: float = DEADLINE
    _lock: threading.Lock = field(default_factory=threading.Lock, init=False, repr=False)
    _newest: Future[ScrapedHome] | None = field(default=None, init=False, repr=False)
    _begun: float = field(default=0.0, init=False, repr=False)

    def newest(self) -> ScrapedHome:
        """The figures now, at most `SHARED_FOR` seconds old; raises what reading has raised, or TransientError."""
        with self._lock:
            shared_for = SHARED_FOR if isinstance(self.settings.state, Path) else SHARED_ON_A_STORE
            old = time.monotonic() - self._begun > shared_for
            if self._newest is None or (self._newest.done() and (old or self._newest.exception() is not None)):
                self._newest, self._begun = Future(), time.monotonic()
                threading.Thread(target=self._fill, args=(self._newest,), name="scrape", daemon=True).start()
            newest = self._newest
        try:
            return newest.result(self.deadline)
        except TimeoutError:
            raise TransientError(
                f"the files of the streams in {self.settings.state} were not read within {self.deadline:g} s",
                "look at the disk or the store that holds them",
            ) from None

    def _fill(self, newest: Future[ScrapedHome]) -> None:
        try:
            newest.set_result(self.read(self.settings))
        except BaseException as error:  # noqa: BLE001 - raised where the figures are asked for
            newest.set_exception(error)
