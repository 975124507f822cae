"""Rules for a table's rows, given the records that they were made from: one rule per kind of table.

| rule      | for a table with                    | says                                                             |
|-----------|-------------------------------------|------------------------------------------------------------------|
| `Places`  | one row per record, with its place  | every covered record is one row, and its key is the record's     |
| `Newest`  | a row per key, with its place       | no key twice, none goes back; each is the newest covered record  |
| `Total`   | a running count per key             | the counts add up to the covered records                         |
| `Windows` | a row per window, once it is over   | no window twice, none counts more than there is, none ever lost  |

A record may have its row elsewhere: in the dead letters, in a quarantine, or in another table of its stream. Those
tables commit before the primary one, so the rows of all covered records are there already. Or a row rule has dropped
its row: of these the entries have the number only.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from streaming_jobs.text.spelling import counted
from streaming_jobs.verification.offset_ranges import Span, merged, runs

_SHIFT = 48
Packed = NDArray[np.int64]
"""Places in a topic, each partition and offset in one number."""


def packed(partitions: Any, offsets: Any) -> Packed:
    """Partitions and offsets, two columns or arrays of one length, as one number each."""
    return np.asarray(partitions, dtype=np.int64) << _SHIFT | np.asarray(offsets, dtype=np.int64)


def place_of(partition: int, offset: int) -> int:
    return partition << _SHIFT | offset


def unpacked(topic: str, places: Iterable[int]) -> list[Span]:
    by_partition: dict[int, list[int]] = {}
    for place in places:
        by_partition.setdefault(place >> _SHIFT, []).append(place & ((1 << _SHIFT) - 1))
    return [span for partition, offsets in sorted(by_partition.items()) for span in runs(topic, partition, offsets)]


def of_spans(spans: Iterable[Span]) -> Packed:
    """Every offset of some ranges, packed and in order."""
    parts = [packed(np.full(s.offsets, s.partition), np.arange(s.start, s.end)) for s in spans if s.offsets > 0]
    return np.sort(np.concatenate(parts)) if parts else np.array([], dtype=np.int64)


def within(places: Packed, spans: Iterable[Span]) -> NDArray[np.bool_]:
    """True for each of the places that lies in one of the ranges of one topic; long ranges cost no more than short."""
    whole = list(merged(span for span in spans if span.offsets > 0))
    if not whole:
        return np.zeros(len(places), dtype=np.bool_)
    starts = np.array([place_of(span.partition, span.start) for span in whole], dtype=np.int64)
    ends = np.array([place_of(span.partition, span.end) for span in whole], dtype=np.int64)
    at = np.searchsorted(starts, places, side="right") - 1
    return np.asarray((at >= 0) & (places < ends[at]))


@dataclass(frozen=True)
class Covered:
    """The records that a table's entries cover and that are in no other table: their places, each once and in order.

    `keys` are the records' keys by place, where the topic has been read. `written` is the number of rows that the
    entries count; None when some of them are gone. `before` are the rows of the version before, if it was read.
    `dropped` is the number of rows that row rules have dropped, by the entries.
    """

    topic: str
    places: Packed
    written: int | None
    keys: Mapping[int, bytes | None] = field(default_factory=dict, repr=False)
    before: pa.Table | None = field(default=None, repr=False)
    dropped: int = 0


@dataclass(frozen=True)
class Finding:
    """A fault of a table's rows, in words; with the offsets missing or doubled, where they are known."""

    text: str
    missing: tuple[Span, ...] = ()
    doubled: tuple[Span, ...] = ()


class Rule(Protocol):
    """Judges the rows of one version of a table."""

    @property
    def columns(self) -> Sequence[str]:
        """The columns that the rule reads."""

    def findings(self, rows: pa.Table, covered: Covered) -> list[Finding]:
        """The faults of these rows."""


@dataclass(frozen=True)
class Places:
    """Every record is one row; `key` are the columns whose values, written one after the other, are its key."""

    partition: str
    offset: str
    key: tuple[str, ...] = ()

    @property
    def columns(self) -> Sequence[str]:
        return (self.partition, self.offset, *self.key)

    def findings(self, rows: pa.Table, covered: Covered) -> list[Finding]:
        """Compare the places of the rows with the covered ones, then each row's key with its record's."""
        actual = packed(rows[self.partition], rows[self.offset])
        unique, counts = np.unique(actual, return_counts=True)
        findings = []
        if len(twice := unique[counts > 1]):
            spans = tuple(unpacked(covered.topic, twice.tolist()))
            many = counted(len(twice), "offset", "is", "are")
            findings.append(Finding(f"{many} in more than one row: {shown(spans)}", doubled=spans))
        if len(absent := np.setdiff1d(covered.places, unique)) != covered.dropped:
            spans = tuple(unpacked(covered.topic, absent.tolist()))
            text = f"{counted(len(absent), 'offset', 'is', 'are')} covered by an entry and in no row: {shown(spans)}"
            if covered.dropped:  # which of them are lost, nothing says
                findings.append(Finding(f"{text}; the entries dropped {counted(covered.dropped, 'row')}"))
            else:
                findings.append(Finding(text, missing=spans))
        if len(extra := np.setdiff1d(unique, covered.places)):
            spans = tuple(unpacked(covered.topic, extra.tolist()))
            many = counted(len(extra), "offset", "is", "are")
            findings.append(Finding(f"{many} in a row and covered by no entry: {shown(spans)}"))
        return [*findings, *self._other_keys(rows, actual, covered)]

    def _other_keys(self, rows: pa.Table, actual: Packed, covered: Covered) -> list[Finding]:
        if not self.key or not covered.keys:
            return []
        other = [
            place
            for place, text in zip(actual.tolist(), _texts(rows, self.key), strict=True)
            if place in covered.keys and covered.keys[place] != text.encode()
        ]
        if not other:
            return []
        wrong = counted(len(other), "row", "is", "are")
        return [Finding(f"{wrong} not of the record named there: {shown(unpacked(covered.topic, other))}")]


@dataclass(frozen=True)
class Newest:
    """Of each key the newest covered record; `key` are the columns whose values, one after the other, are its key."""

    partition: str
    offset: str
    key: tuple[str, ...]

    @property
    def columns(self) -> Sequence[str]:
        return (self.partition, self.offset, *self.key)

    def findings(self, rows: pa.Table, covered: Covered) -> list[Finding]:
        """Check keys and places, and with the version before; where the records are known, that each is the newest."""
        findings = _doubled(rows, self.key, "key")
        now = self._by_key(rows)
        if len(extra := np.setdiff1d(list(now.values()), covered.places)):
            spans = shown(unpacked(covered.topic, extra.astype(np.int64).tolist()))
            many = counted(len(extra), "offset", "is", "are")
            findings.append(Finding(f"{many} in a row and covered by no entry, or set aside: {spans}"))
        before = self._by_key(covered.before) if covered.before is not None else {}
        if back := sorted(key for key, place in before.items() if now.get(key, -1) < place):
            many = counted(len(back), "key", "is", "are")
            findings.append(Finding(f"{many} older than in the version before, or gone, first {back[0]}"))
        return [*findings, *self._not_newest(now, covered)]

    def _not_newest(self, now: Mapping[str, int], covered: Covered) -> list[Finding]:
        if not covered.keys:
            return []
        # A key is always in one partition, and places are in order: the last one of a key is its newest.
        known = (place for place in covered.places.tolist() if place in covered.keys)
        newest = {(covered.keys[place] or b"").decode(): place for place in known}
        other = sorted(key for key in now.keys() | newest.keys() if now.get(key) != newest.get(key))
        if not other:
            return []
        many = counted(len(other), "key", "has", "have")
        return [Finding(f"{many} another row than that of the newest record, or none, first {other[0]}")]

    def _by_key(self, rows: pa.Table) -> dict[str, int]:
        texts = _texts(rows, self.key)
        return dict(zip(texts, packed(rows[self.partition], rows[self.offset]).tolist(), strict=True))


@dataclass(frozen=True)
class Total:
    """The counts of all keys add up to the covered records, and no key has two rows."""

    key: str
    count: str

    @property
    def columns(self) -> Sequence[str]:
        return (self.key, self.count)

    def findings(self, rows: pa.Table, covered: Covered) -> list[Finding]:
        findings = _doubled(rows, (self.key,), "key")
        total = pc.sum(rows[self.count]).as_py() or 0
        if total != len(covered.places):
            findings.append(
                Finding(f"the sum of {self.count} is {total:,}, the entries cover {len(covered.places):,} records")
            )
        return findings


@dataclass(frozen=True)
class Windows:
    """One row per closed window: none twice, as many as the entries say, and none that disappears or changes."""

    key: tuple[str, ...]
    count: str

    @property
    def columns(self) -> Sequence[str]:
        return (*self.key, self.count)

    def findings(self, rows: pa.Table, covered: Covered) -> list[Finding]:
        """Check the rows, then that the rows of the version before are unchanged."""
        findings = _doubled(rows, self.key, "window")
        if covered.written is not None and rows.num_rows != covered.written:
            findings.append(
                Finding(f"{counted(rows.num_rows, 'row', 'is', 'are')} there, the entries wrote {covered.written:,}")
            )
        total = pc.sum(rows[self.count]).as_py() or 0
        if total > len(covered.places):
            findings.append(
                Finding(f"the sum of {self.count} is {total:,}, more than the {len(covered.places):,} records covered")
            )
        if covered.before is not None and (gone := _distinct(covered.before) - _distinct(rows)):
            first = ", ".join(str(value) for value in sorted(gone)[0])
            findings.append(
                Finding(f"gone or changed since the version before: {counted(len(gone), 'row')}, first {first}")
            )
        return findings


def shown(spans: Sequence[Span], most: int = 5) -> str:
    rest = f" and {len(spans) - most} more ranges" if len(spans) > most else ""
    return ", ".join(str(span) for span in spans[:most]) + rest


def _texts(rows: pa.Table, key: Sequence[str]) -> list[str]:
    """Of each row the values of its key columns, one after the other."""
    texts = pc.binary_join_element_wise(*(pc.cast(rows[name], pa.string()) for name in key), "")
    return [text or "" for text in texts.to_pylist()]


def _doubled(rows: pa.Table, key: Sequence[str], what: str) -> list[Finding]:
    groups = rows.group_by(list(key)).aggregate([([], "count_all")])
    twice = groups.filter(pc.field("count_all") > 1)
    if not twice.num_rows:
        return []
    first = ", ".join(str(value) for value in twice.select(list(key)).slice(0, 1).to_pylist()[0].values())
    return [Finding(f"{counted(twice.num_rows, what, 'is', 'are')} in more than one row, first {first}")]


def _distinct(rows: pa.Table) -> set[tuple[Any, ...]]:
    return set(zip(*(column.to_pylist() for column in rows.columns), strict=True))
