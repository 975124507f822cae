"""A recovery in words: the pace of its replay, and what it changes."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from streaming_jobs.text.spelling import counted

if TYPE_CHECKING:
    from reprocessing.replay.difference import Difference


WINDOW = 60.0
"""Seconds over which the rate of a replay is averaged, so that the start of Spark does not lower it for long."""


@dataclass
class ReplayPace:
    """The progress of a replay as text, with its current rate and the remaining time; `clock` gives seconds."""

    clock: Callable[[], float] = time.monotonic
    _seen: deque[tuple[float, int]] = field(default_factory=deque)

    def words(self, done: int, total: int) -> str:
        """Such as `1,200 of 30,000 records, 400 a second, about 72 s left`."""
        now, seen = self.clock(), self._seen
        if len(seen) == 1 and seen[0][1] == done:  # no record was read yet: the rate begins with the first one
            seen.clear()
        seen.append((now, done))
        while len(seen) > 2 and now - seen[1][0] >= WINDOW:
            seen.popleft()
        since, first = seen[0]
        rate = (done - first) / max(now - since, 0.001)
        pace = f", {rate:,.0f} a second" if rate else ""
        left = f", about {_span((total - done) / rate)} left" if rate and done < total else ""
        return f"{done:,} of {total:,} records{pace}{left}"


def _span(seconds: float) -> str:
    return f"{seconds:,.0f} s" if seconds < 180 else f"{seconds / 60:,.0f} min"


def difference_lines(difference: Difference) -> Iterator[str]:
    """The changes of a table: counts, counts by time, and sample rows."""
    from reprocessing.replay.difference import paired

    d = difference
    if d.unknown:
        yield f"  {d.table}: the rows were not compared: {d.unknown}"
        return
    sums = [f"{c} {o} -> {n}" for c, (o, n) in d.totals.items() if o != n]
    totals = f"; sums over {d.read_words()}: {', '.join(sums)}" if sums else ""
    words = counts_words(d.corrected, d.new, d.gone)
    yield f"  {d.table}: {counted(d.old_rows, 'row')} published, {d.new_rows:,} rebuilt; {words}{totals}"
    for since, *counts in d.by_time:
        yield f"    {d.time_column} from {since}: {counts_words(*paired(*counts, keyed=d.keyed))}"
    for row in map(partial(_differing_first, rows=d.sample), d.sample):
        yield f"    {row_words(row)}"


def counts_words(corrected: int, new: int, gone: int) -> str:
    counts = [(corrected, "corrected"), (new, "new"), (gone, "gone")]
    return ", ".join(f"{count:,} {what}" for count, what in counts if count) or "no difference"


def _differing_first(row: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    """A row that only one side has, with the columns first in which the most similar row of the other side differs."""
    other = {"published": "rebuilt", "rebuilt": "published"}
    side = next(iter(row)) if len(row) == 1 else ""
    if side not in other:
        return row
    values: Mapping[str, Any] = row[side]

    def equal(candidate: Mapping[str, Any]) -> list[str]:
        return [name for name, value in values.items() if name in candidate and candidate[name] == value]

    candidates = [each[other[side]] for each in rows if each.keys() == {other[side]}]
    same = max((equal(each) for each in candidates), key=len, default=[])
    return {side: {name: values[name] for name in sorted(values, key=lambda name: name in same)}}


def row_words(row: Mapping[str, Any]) -> str:
    """A row that differs: its keys and what changes, or which side has it."""
    for side in ("published", "rebuilt"):
        if row.keys() == {side}:
            return f"only {side}: " + ", ".join(f"{name} {value}" for name, value in row[side].items())
    names = [name.removesuffix(" published") for name in row if name.endswith(" published")]
    keys = [f"{name} {value}" for name, value in row.items() if not name.endswith((" published", " rebuilt"))]
    pairs = [(name, row[f"{name} published"], row[f"{name} rebuilt"]) for name in names]
    return f"{', '.join(keys)}: " + ", ".join(f"{name} {old} -> {new}" for name, old, new in pairs if old != new)
