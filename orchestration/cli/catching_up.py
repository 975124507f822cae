"""Progress of streams towards the end of their topics: a bar per stream on a terminal, otherwise lines.

Position and end are measured from the first second on: the ends of the topics are read once from the broker, the
positions from the streams' checkpoints. A rate and a remaining time are shown after the first batch.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from orchestration.cli.output import ago, number, say, stderr_console
from streaming_jobs.table_sources.topics import TABLE, end_names
from streaming_jobs.table_sources.versions import TableVersions

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

    from streaming_jobs.settings import Settings
    from streaming_jobs.stream import Stream

_WINDOW = 15.0


@dataclass(frozen=True)
class Standing:
    """One stream: records read, records in all, the batch under way, the rate of the last 15 s, seconds left."""

    stream: str
    done: int
    total: int
    batch: int | None
    rate: float | None
    left: float | None

    def __str__(self) -> str:
        batch = "no batch yet" if self.batch is None else f"batch {self.batch}"
        pace = "-" if self.rate is None else number(round(self.rate))
        left = "-" if self.left is None else ago(self.left)
        return (
            f"{self.stream}: {number(self.done)} of {number(self.total)} records, {batch}, {pace} records/s, "
            f"lag {number(self.total - self.done)}, {left} left"
        )


class Positions(Protocol):
    """Reads the position of a stream from its files."""

    def __call__(self, stream: str) -> tuple[Mapping[str, Mapping[int, int]], int | None]:
        """The committed position by topic and partition, and the batch under way or, between two, the last one."""


@dataclass
class Pace:
    """Measures a rate: records read over the last 15 seconds, by a monotonic clock."""

    _seen: deque[tuple[float, int]] = field(default_factory=deque)

    def add(self, now: float, done: int) -> float | None:
        """Record a position and return the rate, or None before the first batch is done."""
        if not self._seen or done != self._seen[-1][1]:
            self._seen.append((now, done))
        while len(self._seen) > 2 and now - self._seen[1][0] > _WINDOW:
            self._seen.popleft()
        (begun, first), (_, last) = self._seen[0], self._seen[-1]
        return (last - first) / (now - begun) if last > first and now > begun else None


class CatchingUp:
    """The progress of one session's streams from `starts` to `ends`, both topic -> partition -> offset.

    Of a table, `table:NAME`, the offsets are versions.
    """

    def __init__(
        self,
        streams: Sequence[Stream],
        positions: Positions,
        starts: Mapping[str, Mapping[int, int]],
        ends: Mapping[str, Mapping[int, int]],
    ) -> None:
        self._streams, self._positions, self._starts, self._ends = streams, positions, starts, ends
        self._paces = {stream.name: Pace() for stream in streams}

    def look(self, now: float) -> list[Standing]:
        """The standing of each stream at `now`, in seconds of a monotonic clock."""
        return [self._standing(stream, now) for stream in self._streams]

    def _standing(self, stream: Stream, now: float) -> Standing:
        position, batch = self._positions(stream.name)
        done = total = 0
        for name in end_names(stream):
            for partition, end in self._ends.get(name, {}).items():
                start = self._starts.get(name, {}).get(partition, 0)
                at = position.get(name.removeprefix(TABLE), {}).get(partition, start)
                total += max(end - start, 0)
                done += max(min(at, end) - start, 0)
        rate = self._paces[stream.name].add(now, done)
        left = (total - done) / rate if rate else (0.0 if done == total else None)
        return Standing(stream.name, done, total, batch, rate, left)


def catching_up(settings: Settings, streams: Sequence[Stream]) -> CatchingUp:
    """The progress of these streams to the present ends of their topics; raises BrokerUnreachable."""
    from streaming_jobs.errors import PreflightRefused
    from streaming_jobs.platform.broker import bootstrap_servers
    from streaming_jobs.runtime.lag import position_on_disk
    from streaming_jobs.sources.topics import Topics
    from streaming_jobs.state import stream_record
    from streaming_jobs.state.stream_folder import StreamFolder

    starts: dict[str, Mapping[int, int]] = {}
    ends: dict[str, Mapping[int, int]] = {}
    if names := {topic.name for stream in streams for topic in stream.topics}:
        topics = Topics.of(settings.kafka, bootstrap_servers(settings))
        offsets = {name: topics.offsets(name) for name in names}
        starts |= {name: each.earliest for name, each in offsets.items()}
        ends |= {name: each.latest for name, each in offsets.items()}
    for table in {table.name for stream in streams for table in stream.tables_read}:
        newest = TableVersions(settings.tables / table).newest()
        ends[f"{TABLE}{table}"] = {0: 0 if newest is None else newest + 1}

    def position(stream: str) -> tuple[Mapping[str, Mapping[int, int]], int | None]:
        try:
            record = stream_record.load(settings, stream)
            at = position_on_disk(settings, stream) or {}
            planned = StreamFolder.of(settings, stream).checkpoint(record.generation).last_planned if record else None
        except PreflightRefused:  # the session reports the damage, and fails with it
            return {}, None
        return at, planned

    return CatchingUp(streams, position, starts, ends)


class Bars:
    """Draws on stderr: a bar per stream on a terminal, otherwise a line per stream every `every` seconds."""

    def __init__(self, *, every: float = 5.0) -> None:
        self._every, self._next = every, 0.0
        self._progress = _progress()
        self._tasks: dict[str, TaskID] = {}

    def __enter__(self) -> Bars:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def show(self, standings: Sequence[Standing], *, last: bool = False) -> None:
        """Draw the present state; `last` draws it without waiting for the interval."""
        if self._progress.disable:
            if last or time.monotonic() >= self._next:
                self._next = time.monotonic() + self._every
                for standing in standings:
                    say(str(standing))
            return
        for standing in standings:
            fields: dict[str, Any] = {
                "batch": "-" if standing.batch is None else str(standing.batch),
                "rate": "-" if standing.rate is None else number(round(standing.rate)),
                "lag": number(standing.total - standing.done),
                "left": "-" if standing.left is None else ago(standing.left),
            }
            if standing.stream not in self._tasks:
                self._tasks[standing.stream] = self._progress.add_task(standing.stream, total=standing.total, **fields)
            self._progress.update(self._tasks[standing.stream], completed=standing.done, **fields)


def _progress() -> Progress:
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

    console = stderr_console()
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("batch {task.fields[batch]}, {task.fields[rate]} records/s, lag {task.fields[lag]}"),
        TextColumn("{task.fields[left]} left"),
    )
    return Progress(*columns, console=console, disable=not console.is_terminal)
