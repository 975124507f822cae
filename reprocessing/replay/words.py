"""The rows that differ, in words: the same for recoveries, previews and slices. Imports nothing heavy."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from streaming_jobs.text.spelling import counted

if TYPE_CHECKING:
    from reprocessing.replay.difference import Difference


class RowCounts(NamedTuple):
    """Rows with other values, rows that appear, and rows that vanish."""

    corrected: int
    new: int
    gone: int

    @classmethod
    def of(cls, gone: int, came: int, changed: int, *, keyed: bool) -> RowCounts:
        """Without keys, a row that vanishes and one that appears count as one corrected row."""
        both = 0 if keyed else min(gone, came)
        return cls(changed + both, came - both, gone - both)

    def words(self) -> str:
        each = (f"{count:,} {kind}" for kind, count in self._asdict().items() if count)
        return ", ".join(each) or "no difference"


def difference_lines(d: Difference) -> Iterator[str]:
    """The changes of a table: counts, counts by time, and sample rows."""
    if d.unknown:
        yield f"  {d.table}: the rows were not compared: {d.unknown}"
        return
    sums = [f"{c} {o} -> {n}" for c, (o, n) in d.totals.items() if o != n]
    totals = f"; sums over {d.read_words()}: {', '.join(sums)}" if sums else ""
    yield f"  {d.table}: {counted(d.old_rows, 'row')} published, {d.new_rows:,} rebuilt; {d.counts.words()}{totals}"
    for since, *counts in d.by_time:
        yield f"    {d.time_column} from {since}: {RowCounts.of(*counts, keyed=d.keyed).words()}"
    for row in d.sample:
        yield f"    {row_words(_differing_first(row, d.sample))}"


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
