"""The batches of a stream in the order of time, from the ledger file beside its state; quick for a hundred thousand."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

import msgspec

from streaming_jobs.ledger.entry import QUARANTINED, taken_out
from streaming_jobs.preflight.snapshot import ledger_file
from streaming_jobs.settings import Settings
from streaming_jobs.state.ledger_file import RawLine

MOST = 1_000_000
"""Batches at most that are read, the newest ones."""


_SPARE = 1_000
"""Lines of a day that are read beyond the batches asked for: some may be of one batch, or out of order."""


class _Offsets(msgspec.Struct, gc=False):
    start: dict[str, int]
    end: dict[str, int]


class _Line(msgspec.Struct, gc=False):
    """The fields of a ledger line that a timeline shows."""

    g: int
    b: int
    t: float
    table: str
    versions: dict[str, int]
    offsets: dict[str, _Offsets]
    rows: dict[str, int]
    code: list[str]
    ms: int | None = None


_DECODER = msgspec.json.Decoder(_Line)


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
        """True if a recovery's replay ran it."""
        return self.version is None

    @property
    def offsets(self) -> dict[str, Any]:
        """Its offsets: topic -> first offset, and the one after the last, by partition."""
        found = self.line.value()["offsets"]
        return {topic: {"start": each["start"], "end": each["end"]} for topic, each in found.items()}


@dataclass(frozen=True)
class Read:
    """Batches, oldest first; `newest` is the time of the newest one on file, also if it is before those asked for."""

    batches: tuple[BatchPoint, ...]
    newest: float | None


def read_batches(settings: Settings, stream: str, since: float, last: int | None = None) -> Read:
    """The batches that ended at `since` or later; with `last`, the newest of all, that many."""
    return of_days(ledger_file(settings, stream).days(stream), since, last)


def of_days(days: Iterable[Sequence[RawLine]], since: float, last: int | None = None) -> Read:
    """The same from the lines of a ledger, newest day first; of a batch that was repeated, the newer line counts."""
    points: dict[tuple[int, int], BatchPoint] = {}
    newest: float | None = None
    enough = last or MOST
    for day in days:
        latest = 0.0
        for raw in reversed(day if last is None else day[-(last - len(points)) - _SPARE :]):
            try:
                line = _DECODER.decode(raw.text)
            except msgspec.DecodeError:  # damaged
                continue
            latest = max(latest, line.t)
            if (last is not None or line.t >= since) and (line.g, line.b) not in points:
                points[line.g, line.b] = _point(line, raw)
        newest = max(newest or 0.0, latest) if latest else newest
        if len(points) >= enough or (last is None and latest and latest < since):
            break
    ordered = sorted(points.values(), key=attrgetter("at"))
    return Read(tuple(ordered[-enough:]), newest)


def _point(line: _Line, raw: RawLine) -> BatchPoint:
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
