"""What the files of a home say at one moment, for all receivers of figures: read once, shared, within a deadline."""

from __future__ import annotations

import shutil
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from pathlib import Path

import structlog

from streaming_jobs.errors import TransientError
from streaming_jobs.settings import Settings
from streaming_jobs.state.health import Health, HealthLimits, existing_folder, is_live, judge, look
from streaming_jobs.state.status import Status, streams_with_status

log = structlog.get_logger()

DEADLINE = 8.0
"""Seconds for a scrape; Prometheus waits ten by default."""
SHARED_FOR = 1.0
"""Seconds after its end for which a scrape is shared: its cost does not follow the number of receivers."""
SHARED_ON_A_STORE = 10.0
"""The same for state on an object store, where each stream costs several requests."""
SERVED_FOR = 60.0
"""Seconds for which the last scrape stands in for one that takes longer than the deadline, or twice its own time.

The bound keeps figures of a disk that hangs from looking like figures of now.
"""
_AT_A_TIME = 8
"""Streams on an object store that are read at the same time."""


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
    """All streams of a home at the time `at`; `free`: bytes by folder; `seconds`: the time that reading took.

    `age`: seconds from the end of reading to the answer.
    """

    at: float
    streams: tuple[ScrapedStream, ...]
    free: Mapping[str, int] = field(default_factory=dict)
    free_objective: int = 0
    seconds: float = 0.0
    age: float = 0.0

    @property
    def well(self) -> bool:
        return all(stream.well for stream in self.streams)

    def as_json(self) -> dict[str, object]:
        """The answer of `/health`: the streams that are not well, and the number of the others."""
        ill = {stream.name: stream.as_json() for stream in self.streams if not stream.well}
        return {
            "well": self.well,
            "age_seconds": round(self.age, 1),
            "streams_well": len(self.streams) - len(ill),
            "streams": ill,
        }


def scrape(settings: Settings) -> ScrapedHome:
    """Read the files of all streams that have ever run in the home."""
    began = time.monotonic()
    names = sorted(streams_with_status(settings))
    at_a_time = 1 if isinstance(settings.state, Path) else _AT_A_TIME
    streams = _scraped_streams(settings, names, at_a_time)
    folders = {"home": settings.home, "state": settings.state, "tables": settings.tables}
    free = {
        name: shutil.disk_usage(existing_folder(folder)).free
        for name, folder in folders.items()
        if isinstance(folder, Path)
    }
    objective = settings.quality.free_disk_mb << 20
    return ScrapedHome(time.time(), streams, free, objective, time.monotonic() - began)


def _scraped_streams(settings: Settings, names: Sequence[str], at_a_time: int) -> tuple[ScrapedStream, ...]:
    """The streams in the order of their names; daemon threads, since a store that hangs must not keep the process."""
    if at_a_time == 1:
        return tuple(_scraped(settings, name) for name in names)
    found: dict[str, ScrapedStream] = {}
    left = iter(names)
    lock = threading.Lock()

    def read() -> None:
        while True:
            with lock:
                name = next(left, None)
            if name is None:
                return
            found[name] = _scraped(settings, name)

    threads = [threading.Thread(target=read, name="scrape", daemon=True) for _ in range(min(at_a_time, len(names)))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return tuple(found[name] for name in names)


def _scraped(settings: Settings, name: str) -> ScrapedStream:
    """One stream; whatever its files hold, the others are read all the same."""
    try:
        seen = look(settings, name)
        health = judge(seen, HealthLimits.of(settings, name))
    except Exception as error:  # noqa: BLE001 - a file of another version, or truncated: the figure says so
        log.info("the files of a stream cannot be read", stream=name, reason=repr(error)[:200])
        return ScrapedStream(name, time.time(), error=f"its files cannot be read: {type(error).__name__}")
    live = is_live(seen.session, health.state)
    missing = "" if seen.status is not None else "its status file is missing or truncated"
    return ScrapedStream(name, seen.at, seen.status, health, live, missing)


@dataclass
class Scrapes:
    """The newest scrape for all who ask. One scrape runs at a time, whether or not somebody still waits for its end.

    A scrape that takes longer than the deadline is the answer to a later request; until its end the one before is.
    """

    settings: Settings
    read: Callable[[Settings], ScrapedHome] = scrape
    deadline: float = DEADLINE
    _lock: threading.Lock = field(default_factory=threading.Lock, init=False, repr=False)
    _newest: Future[ScrapedHome] | None = field(default=None, init=False, repr=False)
    _last: ScrapedHome | None = field(default=None, init=False, repr=False)
    """The last scrape that has ended, at `_ended` by the monotonic clock."""
    _ended: float = field(default=0.0, init=False, repr=False)

    def newest(self) -> ScrapedHome:
        """The figures, with their age; raises what reading has raised, or TransientError if nothing is new enough."""
        with self._lock:
            shared_for = SHARED_FOR if isinstance(self.settings.state, Path) else SHARED_ON_A_STORE
            if self._last is not None and time.monotonic() - self._ended <= shared_for:
                return self._aged(self._last)
            if self._newest is None or self._newest.done():
                self._newest = Future()
                threading.Thread(target=self._fill, args=(self._newest,), name="scrape", daemon=True).start()
            newest = self._newest
        try:
            return newest.result(self.deadline)
        except TimeoutError:
            return newest.result() if newest.done() else self._before()

    def _before(self) -> ScrapedHome:
        """The last scrape, while a longer one runs."""
        with self._lock:
            last = None if self._last is None else self._aged(self._last)
        if last is not None and last.age <= max(SERVED_FOR, 2 * last.seconds):
            return last
        raise TransientError(
            f"the files of the streams in {self.settings.state} were not read within {self.deadline:g} s",
            "look at the disk or the store that holds them",
        )

    def _aged(self, home: ScrapedHome) -> ScrapedHome:
        return replace(home, age=max(time.monotonic() - self._ended, 0.0))

    def _fill(self, newest: Future[ScrapedHome]) -> None:
        try:
            home = self.read(self.settings)
        except BaseException as error:  # noqa: BLE001 - raised where the figures are asked for
            newest.set_exception(error)
        else:
            with self._lock:
                self._last, self._ended = home, time.monotonic()
            newest.set_result(home)
