"""A timeline: batches joined to groups, with the marks between them, so that a day fits on a screen.

Batches come from the ledger file beside the stream's state; reading a hundred thousand of them is quick. A group ends
with its period (an hour, for a day), with its generation or its code, and at a mark. Savepoints taken by the clock, and
starts and ends of sessions beyond a few per period, are counted in a group instead of parting it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from operator import attrgetter
from typing import Any

import msgspec

from reprocessing.timeline.marks import Mark, as_json, marks_of
from streaming_jobs.ledger.entry import QUARANTINED, taken_out
from streaming_jobs.preflight.snapshot import ledger_file
from streaming_jobs.settings import Settings
from streaming_jobs.state.ledger_file import LineFields, RawLine
from streaming_jobs.text.spelling import instant_words

MOST = 1_000_000
"""Batches at most that are read, the newest ones."""


_SPARE = 1_000
"""Lines of a day that are read beyond the requested batches: some may be of one batch, or out of order."""


_PERIODS = (60, 300, 600, 900, 1800, 3600, 7200, 14_400, 28_800, 86_400, 7 * 86_400)
_LINES = 26
_RATE_OF = 10.0
_SESSIONS = 4
"""Starts and ends of sessions per period that are lines of their own."""


class BatchPoint(msgspec.Struct, frozen=True, gc=False):
    """One batch; `at` is the time of its end in seconds since 1970, `seconds` its duration (None: not known).

    `rows` are those of the primary table, `version` is that table's after it; None for the batches of a replay, which
    wrote beside the table.
    """

    at: float
    generation: int
    batch: int
    records: int
    rows: int
    dead_letters: int
    quarantined: int
    seconds: float | None
    version: int | None
    code: str
    line: RawLine

    @property
    def since(self) -> float:
        """The time at which it began, as far as that is known."""
        return self.at - (self.seconds or 0.0)

    @property
    def replay(self) -> bool:
        return self.version is None

    @property
    def offsets(self) -> dict[str, Any]:
        """Its offsets: topic -> first offset, and the one after the last, by partition."""
        found = self.line.value()["offsets"]
        return {topic: {"start": each["start"], "end": each["end"]} for topic, each in found.items()}


@dataclass(frozen=True)
class ReadBatches:
    """Batches, oldest first; `newest` is the time of the newest batch on file, even before the requested ones."""

    batches: tuple[BatchPoint, ...]
    newest: float | None


def read_batches(settings: Settings, stream: str, since: float, last: int | None = None) -> ReadBatches:
    """The batches that ended at `since` or later; with `last`, the newest of all, that many."""
    return of_days(ledger_file(settings, stream).days(stream), since, last)


def of_days(days: Iterable[Sequence[RawLine]], since: float, last: int | None = None) -> ReadBatches:
    """The same from the lines of a ledger, newest day first; of a batch that was repeated, the newer line counts."""
    points: dict[tuple[int, int], BatchPoint] = {}
    newest: float | None = None
    enough = last or MOST
    for day in days:
        latest = 0.0
        for raw in reversed(day if last is None else day[-(last - len(points)) - _SPARE :]):
            if (line := raw.fields()) is None:
                continue
            latest = max(latest, line.t)
            if (last is not None or line.t >= since) and (line.g, line.b) not in points:
                points[line.g, line.b] = _point(line, raw)
        newest = max(newest or 0.0, latest) if latest else newest
        if len(points) >= enough or (last is None and latest and latest < since):
            break
    ordered = sorted(points.values(), key=attrgetter("at"))
    return ReadBatches(tuple(ordered[-enough:]), newest)


def _point(line: LineFields, raw: RawLine) -> BatchPoint:
    records = 0  # a partition that a short line leaves out has none
    for each in line.offsets.values():
        for partition, end in each.end.items():
            records += end - each.start.get(partition, 0)
    return BatchPoint(
        line.t,
        line.g,
        line.b,
        records,
        line.rows.get("written", 0),
        line.rows.get("dead_letters", 0),
        taken_out(line.rows, QUARANTINED) if len(line.rows) > 1 else 0,
        None if line.ms is None else line.ms / 1000,
        line.versions.get(line.table),
        line.code[0] if line.code else "",
        raw,
    )


@dataclass(frozen=True)
class BatchGroup:
    """Consecutive batches of one generation and one code: times in seconds since 1970, first and last number.

    `seconds` is the mean duration, `slowest` the longest one; None if none is known. `versions`: the primary table's
    after the first and after the last batch; None for a replay. The last two count marks that are no lines.
    """

    since: float
    until: float
    generation: int
    first: int
    last: int
    batches: int
    records: int
    rows: int
    dead_letters: int
    quarantined: int
    seconds: float | None
    slowest: float | None
    versions: tuple[int, int] | None
    code: str
    replay: bool
    savepoints: int = 0
    session_events: int = 0

    @property
    def rows_per_minute(self) -> float | None:
        """Rows per minute from the beginning of the first batch to the end of the last; None below ten seconds."""
        span = self.until - self.since
        return self.rows * 60 / span if span >= _RATE_OF else None


Item = BatchGroup | Mark


@dataclass(frozen=True)
class Timeline:
    """The batches and marks of a stream from `since` to `until`, oldest first; times in seconds since 1970.

    `newest_batch` is the time of the newest one on file.
    """

    stream: str
    since: float
    until: float
    batches: tuple[BatchPoint, ...]
    marks: tuple[Mark, ...]
    newest_batch: float | None = None

    @property
    def period(self) -> int:
        """Seconds of a period, so that there are few of them."""
        span = self.until - self.since
        return next((each for each in _PERIODS if span / each <= _LINES), _PERIODS[-1])

    def items(self) -> list[Item]:
        return list(_items(self.batches, self.marks, self.period))


def timeline_of(settings: Settings, stream: str, *, since: float, until: float, last: int | None = None) -> Timeline:
    """The timeline since a time; with `last`, since the beginning of the newest batches, that many."""
    read = read_batches(settings, stream, since, last)
    if last is not None and read.batches:
        since = read.batches[0].since
    marks = tuple(mark for mark in marks_of(settings, stream) if since <= mark.at <= until)
    return Timeline(stream, since, until, read.batches, marks, read.newest)


@dataclass
class _Open:
    batches: list[BatchPoint] = field(default_factory=list)
    savepoints: int = 0
    session_events: int = 0

    def close(self) -> Iterator[BatchGroup]:
        if self.batches:
            yield group(self.batches, self.savepoints, self.session_events)
        self.batches, self.savepoints, self.session_events = [], 0, 0


def _items(batches: Iterable[BatchPoint], marks: Sequence[Mark], period: int) -> Iterator[Item]:
    often = Counter(mark.at // period for mark in marks if mark.kind == "session")
    merged: list[BatchPoint | Mark] = sorted([*batches, *marks], key=lambda each: each.at)
    opened = _Open()
    uncounted: list[Mark] = []
    """Marks to count in the next group."""
    for each in merged:
        if opened.batches and opened.batches[-1].at // period != each.at // period:
            yield from opened.close()
        if uncounted and uncounted[0].at // period != each.at // period:
            yield from _left_over(uncounted)
            uncounted = []
        if isinstance(each, Mark):
            if not _is_counted(each, often, period):
                yield from opened.close()
                yield each
            else:
                uncounted.append(each)
        else:
            if opened.batches and not _together(opened.batches[-1], each, period):
                yield from opened.close()
            opened.batches.append(each)
        if opened.batches and uncounted:
            opened.savepoints += sum(mark.kind == "savepoint" for mark in uncounted)
            opened.session_events += sum(mark.kind == "session" for mark in uncounted)
            uncounted = []
    yield from opened.close()
    yield from _left_over(uncounted)


def _left_over(marks: Sequence[Mark]) -> Iterator[Mark]:
    """Marks without a later batch: the last of each kind, with the number of the others."""
    for kind in ("savepoint", "session"):
        of_kind = [mark for mark in marks if mark.kind == kind]
        if of_kind:
            more = f" (and {len(of_kind) - 1:,} more before it)" if len(of_kind) > 1 else ""
            newest = of_kind[-1]
            yield Mark(newest.at, newest.kind, newest.what, newest.text + more, newest.plan)


def _is_counted(mark: Mark, often: Counter[float], period: int) -> bool:
    if mark.kind == "session":
        return often[mark.at // period] > _SESSIONS
    return mark.kind == "savepoint" and mark.what == "time"


def _together(one: BatchPoint, other: BatchPoint, period: int) -> bool:
    return (
        one.at // period == other.at // period
        and one.generation == other.generation
        and one.code == other.code
        and one.replay == other.replay
    )


def group(batches: Sequence[BatchPoint], savepoints: int = 0, session_events: int = 0) -> BatchGroup:
    first, last = batches[0], batches[-1]
    known = [each.seconds for each in batches if each.seconds is not None]
    versions = (first.version, last.version) if first.version is not None and last.version is not None else None
    return BatchGroup(
        since=first.since,
        until=last.at,
        generation=first.generation,
        first=first.batch,
        last=last.batch,
        batches=len(batches),
        records=sum(each.records for each in batches),
        rows=sum(each.rows for each in batches),
        dead_letters=sum(each.dead_letters for each in batches),
        quarantined=sum(each.quarantined for each in batches),
        seconds=sum(known) / len(known) if known else None,
        slowest=max(known, default=None),
        versions=versions,
        code=first.code,
        replay=first.replay,
        savepoints=savepoints,
        session_events=session_events,
    )


def item_json(item: Item) -> dict[str, Any]:
    if isinstance(item, Mark):
        return as_json(item)
    value = {"kind": "batches", "at": item.since, "time": instant_words(item.since), **asdict(item)}
    rate = item.rows_per_minute
    return {**value, "rows_per_minute": None if rate is None else round(rate, 1)}


def batch_json(batch: BatchPoint) -> dict[str, Any]:
    fields = msgspec.structs.asdict(batch)
    del fields["line"]
    return {
        "kind": "batch",
        "at": batch.at,
        "time": instant_words(batch.at),
        **fields,
        "replay": batch.replay,
        "offsets": batch.offsets,
    }
