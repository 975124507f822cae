"""What the report of a recovery shows, as data from its plan and its journal; bounded in size.

The batches of a replay and those that it replaced are joined to columns, which the journal stores: the page can be made
again when tables and ledger have moved on.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import msgspec

from reprocessing.plan.journal import Journal, PlanOutcome
from reprocessing.plan.plan import RecoveryPlan, StreamRecoveryPlan
from reprocessing.replay.difference import Difference
from streaming_jobs.ledger.positions import Place, by_place, decode

COLUMNS = 100
"""Columns at most."""
READ = 50_000
"""Batches at most that are read from a ledger, the newest ones."""


PARTITIONS = 24
"""Partitions at most that are shown, those with the most records to replay or to skip."""


@dataclass(frozen=True)
class BatchRows:
    """One batch: its time (seconds since 1970), its number, the rows written to the primary table, the records read."""

    at: float
    batch: int
    rows: int
    records: int


@dataclass(frozen=True)
class BatchColumn:
    """Consecutive batches: times and numbers of the first and last, their rows and records, rows of the largest."""

    since: float
    until: float
    first: int
    last: int
    batches: int
    rows: int
    records: int
    largest: int

    @property
    def mean(self) -> float:
        return self.rows / self.batches


@dataclass(frozen=True)
class BatchSeries:
    """Batches in at most `COLUMNS` columns, oldest first; `cut` is True if older ones were left out."""

    columns: tuple[BatchColumn, ...] = ()
    cut: bool = False

    @property
    def batches(self) -> int:
        return sum(each.batches for each in self.columns)

    @property
    def rows(self) -> int:
        """Rows written to the primary table."""
        return sum(each.rows for each in self.columns)

    @property
    def records(self) -> int:
        return sum(each.records for each in self.columns)

    @property
    def seconds(self) -> float:
        """Seconds from the end of the first batch to the end of the last."""
        return self.columns[-1].until - self.columns[0].since if self.columns else 0.0

    @classmethod
    def of(cls, batches: Sequence[BatchRows], *, cut: bool = False) -> BatchSeries:
        """The series of batches, oldest first; each column but the last has the same number of them."""
        size = max(math.ceil(len(batches) / COLUMNS), 1)
        parts = [batches[begin : begin + size] for begin in range(0, len(batches), size)]
        return cls(tuple(_column(part) for part in parts), cut)


def _column(batches: Sequence[BatchRows]) -> BatchColumn:
    return BatchColumn(
        since=round(batches[0].at, 3),
        until=round(batches[-1].at, 3),
        first=batches[0].batch,
        last=batches[-1].batch,
        batches=len(batches),
        rows=sum(each.rows for each in batches),
        records=sum(each.records for each in batches),
        largest=max(each.rows for each in batches),
    )


Span = tuple[int, int]
"""First offset, and the one after the last."""


@dataclass(frozen=True)
class PartitionRanges:
    """One partition: the offsets whose rows the tables held before, those replayed or skipped, those held now.

    `replayed` or `skipped` is an empty span, at the offset where the other one begins.
    """

    topic: str
    partition: int
    before: Span
    replayed: Span
    skipped: Span
    now: Span

    @property
    def pivot(self) -> int:
        """The offset at which the recovery begins to change something."""
        return self.replayed[0]

    @property
    def moved(self) -> int:
        return self.replayed[1] - self.replayed[0] + self.skipped[1] - self.skipped[0]


@dataclass(frozen=True)
class LeftOut:
    """The partitions beyond the bound: how many, and how many records of them are replayed or skipped."""

    partitions: int = 0
    records: int = 0


@dataclass(frozen=True)
class StreamFacts:
    """One stream of a recovery; no partitions are known before it was stopped.

    `done`: its replay (or skip) is over; if not, the ranges to replay or to skip are those of the plan.
    """

    stream: str
    skips: bool
    done: bool
    published: bool
    partitions: tuple[PartitionRanges, ...]
    left_out: LeftOut
    replaced: BatchSeries
    replayed: BatchSeries


@dataclass(frozen=True)
class ReportFacts:
    """One recovery: its outcome, its streams in the plan's order, and the differences of their tables."""

    plan: str
    outcome: PlanOutcome
    streams: tuple[StreamFacts, ...]
    differences: tuple[Difference, ...]


def facts_of(plan: RecoveryPlan, journal: Journal, differences: Sequence[Difference] = ()) -> ReportFacts:
    """The facts of a recovery; `differences` are those of an audit just made; if empty, the journal's."""
    return ReportFacts(
        plan.id,
        journal.outcome,
        tuple(_of_stream(each, journal.of(each.stream), aborted=journal.outcome == "aborted") for each in plan.streams),
        tuple(differences) or _noted(journal),
    )


def _noted(journal: Journal) -> tuple[Difference, ...]:
    for line in reversed(journal.lines()):
        if line.is_of("audit") and "differences" in line.found:
            return tuple(Difference.decode(each) for each in line.found["differences"])
    return ()


def _of_stream(plan: StreamRecoveryPlan, journal: Journal, *, aborted: bool) -> StreamFacts:
    keep, replay = journal.done("take_savepoint") or {}, journal.done("replay")
    published = journal.done("skip" if plan.skips else "publish") is not None and not aborted
    batches = (replay or {}).get("batches", {})
    reached = by_place(decode((replay or {}).get("ends", {})))
    position = by_place(decode(keep.get("position", {})))
    starts = by_place(decode(keep.get("starts", {})))
    every = _partitions(plan, starts, position, reached, published=published) if position else []
    shown = sorted(every, key=lambda each: -each.moved)[:PARTITIONS]
    rest = len(every) - len(shown)
    return StreamFacts(
        plan.stream,
        plan.skips,
        published if plan.skips else replay is not None,
        published,
        tuple(sorted(shown, key=lambda each: (each.topic, each.partition))),
        LeftOut(rest, sum(each.moved for each in every) - sum(each.moved for each in shown)) if rest else LeftOut(),
        *(msgspec.convert(batches.get(name, {}), BatchSeries) for name in ("replaced", "replayed")),
    )


def _partitions(
    plan: StreamRecoveryPlan,
    starts: Mapping[Place, int],
    position: Mapping[Place, int],
    reached: Mapping[Place, int],
    *,
    published: bool,
) -> list[PartitionRanges]:
    """The ranges of every partition that the plan saw, by the findings of the stages that are done."""
    base, wanted = by_place(plan.base.ends), by_place(plan.wanted)
    until = None if plan.until is None else by_place(plan.until.ends)
    ranges = []
    for topic in plan.saw.topics:
        for partition, latest in sorted(topic.latest.items()):
            place, earliest = (topic.name, partition), topic.earliest.get(partition, 0)
            begin = base.get(place, earliest)
            end = position.get(place, begin)
            first = min(starts.get(place, min(begin, earliest)), end)
            last = latest if until is None else until.get(place, begin)
            replayed = (end, end) if plan.skips else (begin, max(reached.get(place, last), begin))
            skipped = (end, max(wanted.get(place, end), end)) if plan.skips else (begin, begin)
            # Without a savepoint the rebuilt tables begin empty: rows from before the replay are no longer there.
            since = begin if plan.base.savepoint is None else first
            now = (since, replayed[1] if until is None else end) if published and not plan.skips else (first, end)
            ranges.append(PartitionRanges(topic.name, partition, (first, end), replayed, skipped, now))
    return ranges
