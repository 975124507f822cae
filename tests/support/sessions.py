"""A session without Spark: its queries end at once, or run until the test ends them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from streaming_jobs.runtime.stream_queries import Preflight
from streaming_jobs.session import Patience, Session
from streaming_jobs.settings import Settings
from streaming_jobs.state.status import read_status
from streaming_jobs.stream import Stream
from streaming_jobs.testing import MemoryQueries, MemoryQuery, MemoryRuntime

QUICK = Patience(lease=0, look=0.001, jvm=0)


class LookedAt(MemoryQuery):
    """A query that runs until the test ends it, and calls the test whenever the session looks at it."""

    def __init__(self, look: Callable[[MemoryQuery], None]) -> None:
        super().__init__()
        self._look = look

    @property
    def isActive(self) -> bool:
        self._look(self)
        return super().isActive


@dataclass
class Queries(MemoryQueries):
    """Queries that end as soon as they are started, or run for those streams that `look` has something for."""

    at_preflight: Callable[[Stream], object] = lambda _: None
    look: dict[str, Callable[[MemoryQuery], None]] = field(default_factory=dict)

    def preflight(self, stream: Stream) -> Preflight:
        self.at_preflight(stream)
        return super().preflight(stream)

    def query(self, stream: Stream) -> MemoryQuery:
        return LookedAt(self.look[stream.name]) if stream.name in self.look else super().query(stream)


def session_of(home: Settings, streams: Sequence[Stream], **options: Any) -> Session:
    """A session without Spark."""
    options = {"runtime": MemoryRuntime(), "queries": Queries(home), "patience": QUICK, **options}
    return Session(home, streams, **options)


def marker(home: Settings) -> Path:
    path = home.state / "plain" / "stop"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.touch()
    return path


def state(home: Settings, stream: str) -> str:
    status = read_status(home, stream)
    assert status is not None
    return status.state
