"""The history of a stream: its batches in order, over all generations.

A recovery opens a generation that continues after a batch of an older one. The history is therefore a path:
the batches of the current generation, before them the batches of the generation that it continues, and so on.
Later batches of the older generation are not on the path. Lines come from the ledger beside the state; the newest may
be missing there after a crash, so the last batch is read from the table.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from streaming_jobs.ledger.entry import CodeVersion, LedgerEntry, TableVersion, Txn
from streaming_jobs.ledger.positions import TopicOffsets, ends_of, starts_of
from streaming_jobs.state.ledger_file import RawLine
from streaming_jobs.state.stream_record import CorrectedBatches, Generation

_PACE_OF, _PAIRED = 500, 200


@dataclass(frozen=True)
class CommittedBatch:
    """One batch on the path: its offsets (topic -> partition -> offset), its code, and the tables' versions after it.

    `at` is its time in seconds since 1970, `seconds` its duration; None if that is not known. `rows` are those written
    to the primary table, `lookups` the versions of the tables that it looked up.
    """

    txn: Txn
    at: float
    starts: TopicOffsets
    ends: TopicOffsets
    code: CodeVersion
    versions: Mapping[str, int]
    records: int
    seconds: float | None = None
    rows: int = 0
    lookups: Mapping[str, TableVersion] = field(default_factory=dict)

    @classmethod
    def of(
        cls, entry: LedgerEntry, at: float, versions: Mapping[str, int], seconds: float | None = None
    ) -> CommittedBatch:
        return cls(
            txn=entry.txn,
            at=at,
            starts=starts_of(entry.offsets),
            ends=ends_of(entry.offsets),
            code=entry.code,
            versions=versions,
            records=entry.records,
            seconds=seconds,
            rows=entry.rows.get("written", 0),
            lookups=entry.lookups,
        )


@dataclass(frozen=True)
class BatchPace:
    """The time that batches take: one per batch, and one per record, both in seconds."""

    per_batch: float
    per_record: float

    def rate(self, records: int, largest: int) -> float:
        """Records per second for so many records, in batches of `largest`."""
        return records / (math.ceil(records / largest) * self.per_batch + records * self.per_record)


class History:
    """The path: the newest batches are known, older ones are read from the ledger, day by day, when they are needed.

    After skipped records, the path has a batch without records that ends after them.
    """

    def __init__(
        self, batches: Iterable[CommittedBatch] = (), older: Iterator[Sequence[RawLine]] | None = None
    ) -> None:
        self._known: list[CommittedBatch | RawLine] = list(batches)  # oldest first; a line is decoded when it is needed
        self._older = older if older is not None else iter(())

    @property
    def last(self) -> CommittedBatch | None:
        while not self._known and self._load():
            pass
        return self._batch(len(self._known) - 1) if self._known else None

    @property
    def position(self) -> TopicOffsets:
        """The offsets at which the next batch begins; empty before the first one."""
        return self.last.ends if self.last else {}

    def append(self, batch: CommittedBatch) -> None:
        """Add the newest batch, which the ledger file does not have yet."""
        self._known.append(batch)

    def newest_first(self) -> Iterator[CommittedBatch]:
        """Yields every batch, back to the oldest in the ledger."""
        seen = 0
        while seen < len(self._known) or self._load():
            if seen < len(self._known):
                seen += 1
                yield self._batch(len(self._known) - seen)

    def last_within(self, wanted: TopicOffsets) -> CommittedBatch | None:
        """The last batch that read no record at or after `wanted`; None if already the first one did."""
        return self._last(lambda at: within(self._batch(at).ends, wanted))

    def first_covering(self, wanted: TopicOffsets) -> CommittedBatch | None:
        """The first batch after which every record before `wanted` was read; None if the last one has not read all."""
        before = self._last(lambda at: not _covers(self._batch(at).ends, wanted))
        after = self.between(before.txn if before else None, self.last.txn) if self.last else []
        return after[0] if after else None

    def at_version(self, table: str, version: int) -> CommittedBatch | None:
        """The last batch after which the table had at most that version; replayed batches have no version."""
        return next((b for b in self.newest_first() if b.versions.get(table, 1 << 62) <= version), None)

    def find(self, txn: Txn) -> CommittedBatch | None:
        """The batch at a position, if it is on the path."""
        batch = self._last(lambda at: self._known[at].txn <= txn)
        return batch if batch is not None and batch.txn == txn else None

    def before(self, txn: Txn) -> CommittedBatch | None:
        return self._last(lambda at: self._known[at].txn < txn)

    def between(self, after: Txn | None, up_to: Txn) -> list[CommittedBatch]:
        """The batches after one position and up to another, oldest first."""
        batches = []
        for batch in self.newest_first():
            if after is not None and batch.txn <= after:
                break
            if batch.txn <= up_to:
                batches.append(batch)
        return batches[::-1]

    def numbered(self, number: int, present: Callable[[Txn], bool] = lambda _: True) -> CommittedBatch | None:
        """The newest batch of that number whose rows are `present`.

        Only if there is no other, the empty one with which a generation begins after a skip or a bounded recovery.
        """
        border = None
        for batch in self.newest_first():
            if batch.txn.batch == number:
                if batch.versions or batch.starts != batch.ends:
                    return batch if border is None or present(batch.txn) else border
                border = border or batch
        return border

    def pace(self) -> BatchPace | None:
        """The pace of the newest batches, or None: the line through their sizes and times that most of them are near.

        Its slope is the median of those between pairs of batches, so that some slow batches do not tilt it.

        For a batch that began right after the one before, all the time since is counted, Spark's part included.
        """
        newest: list[CommittedBatch] = []
        for batch in self.newest_first():
            newest.append(batch)
            if len(newest) > _PACE_OF:
                break
        points = []
        for batch, earlier in zip(newest, [*newest[1:], None], strict=True):
            if batch.seconds is None or not batch.records:
                continue
            since = batch.at - earlier.at if earlier else math.inf
            points.append((batch.records, since if 0 < since <= batch.seconds + 0.5 else batch.seconds))
        if not points:
            return None
        slopes = [(t - u) / (n - m) for (n, t), (m, u) in itertools.combinations(points[:_PAIRED], 2) if n != m]
        per_record = max(statistics.median(slopes), 0.0) if slopes else 0.0
        per_record = min(per_record, statistics.median(t / n for n, t in points))
        return BatchPace(max(statistics.median(t - per_record * n for n, t in points), 0.001), per_record)

    def _last(self, holds: Callable[[int], bool]) -> CommittedBatch | None:
        """The last batch for which `holds` is true; it is true for all before that one."""
        while not (self._known and holds(0)):
            if not self._load():
                break
        low, high = 0, len(self._known)
        while low < high:
            middle = (low + high) // 2
            if holds(middle):
                low = middle + 1
            else:
                high = middle
        return self._batch(low - 1) if low else None

    def _load(self) -> bool:
        day = next(self._older, None)
        if day is None:
            return False
        first = self._known[0].txn if self._known else None
        self._known[:0] = day if first is None else [line for line in day if line.txn < first]
        return True

    def _batch(self, at: int) -> CommittedBatch:
        known = self._known[at]
        if isinstance(known, RawLine):
            line = known.read()
            known = CommittedBatch.of(line.entry, line.at, line.versions, line.seconds)
            if at == len(self._known) - 1:  # asked for again and again; all of them would not fit the memory
                self._known[at] = known
        return known


def lineage(generations: Sequence[Generation], days: Iterable[Sequence[RawLine]]) -> History:
    """The path from a ledger's days, newest day first; of a batch that was repeated, the newest line counts."""
    spans = generation_spans(generations)
    batches = {
        number: (first - 1, last) for number, first, last in spans
    }  # the empty batch after a skip is before the first

    def on_the_path() -> Iterator[Sequence[RawLine]]:
        for day in days:
            by_txn: dict[Txn, RawLine] = {}
            for line in day:
                first, last = batches.get(line.txn.generation, (1, 0))
                if first <= line.txn.batch <= last:
                    by_txn[line.txn] = line
            yield [by_txn[txn] for txn in sorted(by_txn)]

    return History(older=on_the_path())


def generation_spans(generations: Sequence[Generation]) -> Iterator[tuple[int, int, int]]:
    """(generation, first batch, last batch) along the path, oldest first; the current one has no last batch."""
    known = {g.number: g for g in generations}
    spans: list[tuple[int, int, int]] = []
    number: int | None = generations[-1].number
    last = 1 << 32
    while number is not None and number in known:
        generation = known[number]
        spans.append((number, generation.first_batch, last))
        number, last = generation.from_generation, generation.from_batch
    return iter(reversed(spans))


def in_lineage(generations: Sequence[Generation], txn: Txn) -> bool:
    """True if a position is on the path, including the one just before a generation's first batch."""
    return any(
        number == txn.generation and first - 1 <= txn.batch <= last
        for number, first, last in generation_spans(generations)
    )


def has_present_rows(generations: Sequence[Generation], txn: Txn) -> bool:
    """True if the rows of a position are on the path: no later recovery has discarded or corrected them."""
    on_path = {number for number, _, _ in generation_spans(generations)}
    return in_lineage(generations, txn) and not any(
        each.corrected is not None and each.corrected.after < txn <= Txn(each.from_generation or 0, each.from_batch)
        for each in generations
        if each.number in on_path
    )


def corrections(generations: Sequence[Generation]) -> list[CorrectedBatches]:
    """The bounded recoveries of the path whose rows are there, newest first: no later one has corrected all of them."""
    found: list[CorrectedBatches] = []
    on_path = {number for number, _, _ in generation_spans(generations)}
    for each in reversed([g.corrected for g in generations if g.number in on_path and g.corrected is not None]):
        if not any(later.after <= each.after and each.up_to <= later.up_to for later in found):
            found.append(each)
    return found


def _covers(ends: TopicOffsets, wanted: TopicOffsets) -> bool:
    return all(ends.get(topic, {}).get(p, 0) >= end for topic, offsets in wanted.items() for p, end in offsets.items())


def within(ends: TopicOffsets, wanted: TopicOffsets) -> bool:
    """True if a batch that ended at `ends` has read no record at or after `wanted`."""
    return all(end <= wanted[topic].get(p, end) for topic, offsets in ends.items() for p, end in offsets.items())
