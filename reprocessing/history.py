"""What a stream has done: its batches in the order of its life, over all generations.

A recovery opens a generation that goes on after a batch of an older one. The life of the stream is therefore a path:
the batches of the current generation, before them those of the generation it came from up to that batch, and so on.
What was left behind is not on the path. Lines come from the ledger beside the state; the newest may be missing there
after a crash, so the last batch is the table's.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from streaming_jobs.generation import Generation
from streaming_jobs.ledger import CodeVersion, Txn
from streaming_jobs.ledger_file import LedgerLine

Offsets = Mapping[str, Mapping[int, int]]


@dataclass(frozen=True)
class Batch:
    """One batch on the path: where it ended by topic and partition, when, with which code; tables' versions then."""

    txn: Txn
    at: float
    starts: Offsets
    ends: Offsets
    code: CodeVersion
    versions: Mapping[str, int]
    records: int


@dataclass(frozen=True)
class History:
    """The path, oldest batch first, as far back as the ledger is kept.

    `reached` is where the stream is, if that is not where its last batch ended: records were skipped after it.
    """

    batches: Sequence[Batch]
    reached: Offsets | None = None

    @property
    def position(self) -> Offsets:
        """Where the next batch begins; empty before the first one."""
        if self.reached is not None:
            return self.reached
        return self.batches[-1].ends if self.batches else {}

    def last_within(self, wanted: Offsets) -> Batch | None:
        """The last batch that read nothing from `wanted` on; None when already the first one did."""
        at = bisect.bisect_left(self.batches, True, key=lambda batch: not _within(batch.ends, wanted))
        return self.batches[at - 1] if at else None

    def find(self, txn: Txn) -> Batch | None:
        """The batch at a position, if it is on the path."""
        at = self._position(txn)
        return self.batches[at] if at < len(self.batches) and self.batches[at].txn == txn else None

    def before(self, batch: Batch) -> Batch | None:
        """The batch before another one."""
        at = self._position(batch.txn)
        return self.batches[at - 1] if at else None

    def _position(self, txn: Txn) -> int:
        """Where a position is on the path, or would be: along it, positions only grow."""
        return bisect.bisect_left(self.batches, txn, key=lambda batch: batch.txn)

    def numbered(self, number: int) -> Batch | None:
        """The newest batch of that number."""
        return next((batch for batch in reversed(self.batches) if batch.txn.batch == number), None)

    def rate(self) -> float | None:
        """Records a second of its busiest batches, from how far apart in time they were written; None if unknown."""
        pairs = zip(self.batches, self.batches[1:], strict=False)
        rates = sorted(b.records / (b.at - a.at) for a, b in pairs if b.at > a.at and b.records)
        return rates[int(len(rates) * 0.9)] if rates else None


def path(generations: Sequence[Generation], lines: Iterable[LedgerLine]) -> History:
    """The path from all lines of a ledger; of a batch that was repeated, the newest line counts."""
    by_txn: dict[Txn, Batch] = {}
    for line in lines:
        entry = line.entry
        by_txn[entry.txn] = Batch(
            txn=entry.txn,
            at=line.at,
            starts={r.topic: dict(r.start) for r in entry.offsets},
            ends={r.topic: dict(r.end) for r in entry.offsets},
            code=entry.code,
            versions=line.versions,
            records=sum(r.records for r in entry.offsets),
        )
    found: list[Batch] = []
    for number, first, last in spans(generations):
        mine = [b for t, b in by_txn.items() if t.generation == number and first <= t.batch and t.batch <= last]
        found += sorted(mine, key=lambda batch: batch.txn)
    return History(tuple(found))


def spans(generations: Sequence[Generation]) -> Iterator[tuple[int, int, int]]:
    """(generation, first batch, last batch) along the path, oldest first; the current one has no last batch."""
    known = {g.number: g for g in generations}
    found: list[tuple[int, int, int]] = []
    number: int | None = generations[-1].number
    last = 1 << 32
    while number is not None and number in known:
        generation = known[number]
        found.append((number, generation.first_batch, last))
        number, last = generation.from_generation, generation.from_batch
    return iter(reversed(found))


def on_path(generations: Sequence[Generation], txn: Txn) -> bool:
    """Whether a position is on the path; the end of one generation's span counts, where the next one goes on."""
    return any(
        number == txn.generation and first - 1 <= txn.batch <= last for number, first, last in spans(generations)
    )


def _within(ends: Offsets, wanted: Offsets) -> bool:
    return all(end <= wanted[topic].get(p, end) for topic, offsets in ends.items() for p, end in offsets.items())
