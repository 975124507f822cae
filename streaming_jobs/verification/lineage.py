"""The batches that made a table's present rows, over all recoveries, and the offsets that they cover.

A recovery opens a generation that continues after a batch of an older one. So the rows come from a path: the batches of
the current generation, before them those of the generation it continues up to that batch, and so on. Batches that a
recovery discarded are not on the path. A bounded recovery corrects batches in the middle of it: in their place is one
entry for all of them, in the stream's record. Each other batch is known from the table's log, or from the ledger file
where the log is shorter; where neither has it, the offsets up to the next known batch are *unproved*.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby

import numpy as np

from streaming_jobs.storage.locations import Location
from streaming_jobs.verification.delta_log import Entry
from streaming_jobs.verification.offset_ranges import Span, merged, of_partition, without
from streaming_jobs.verification.state_evidence import CorrectedBatches, Life, StateEvidence
from streaming_jobs.verification.topic import CommittedPartition, CommittedTopic

Place = tuple[str, int]
Batch = tuple[int, int]
"""Generation and batch."""
_SHOWN = 5


@dataclass
class Coverage:
    """The offsets of all topics according to the entries.

    `proved` are the ranges of entries, `unproved` those of batches whose entry is gone, `skipped` were left out by a
    recovery, and offsets before `begins` were never read. `void` were taken out of all ranges and count as skipped,
    but entries still read over them. `faults` say where entries contradict each other.
    """

    begins: dict[Place, int] = field(default_factory=dict)
    proved: list[Span] = field(default_factory=list)
    unproved: list[Span] = field(default_factory=list)
    skipped: list[Span] = field(default_factory=list)
    entries: list[Entry] = field(default_factory=list)
    missing: int = 0
    faults: list[str] = field(default_factory=list)
    void: tuple[Span, ...] = ()

    @property
    def spans(self) -> list[Span]:
        """All ranges that the rows were made from."""
        return [*self.proved, *self.unproved]

    @property
    def written(self) -> Mapping[str, int] | None:
        """Rows by the name under which the entries count them; None when an entry is missing."""
        if self.missing:
            return None
        counted: dict[str, int] = {}
        for entry in self.entries:
            for name, count in entry.rows.items():
                counted[name] = counted.get(name, 0) + count
        return counted

    @property
    def late(self) -> int:
        """Number of records dropped behind the watermark, according to the entries that are left."""
        return sum(entry.rows.get("late", 0) for entry in self.entries)

    def read_by(self, code: Collection[str]) -> list[Span]:
        """The ranges that the code of these hashes has read, according to the entries that are left."""
        spans = (span for entry in self.entries if entry.code in code for span in entry.spans if span.offsets > 0)
        return [part for span in spans for part in without(span, of_partition(self.void, span))]

    def others(self, code: Collection[str]) -> str:
        """The batches of other code in words, and those whose entry is gone; empty where there are none."""
        numbers = sorted((entry.generation, entry.batch) for entry in self.entries if entry.code not in code)
        which = "batch" if len(numbers) == 1 else "batches"
        parts = [f"{which} {_in_words(numbers)} of other code"] if numbers else []
        if self.missing or not self.entries:
            parts.append("batches whose entry is gone")
        return " and ".join(parts)


def path(beside: StateEvidence, at: Batch) -> list[tuple[Life, int, int]]:
    """(generation, first batch, last batch) of the rows at a position, oldest first; none for an unknown generation."""
    steps: list[tuple[Life, int, int]] = []
    number: int | None = at[0]
    last = at[1]
    while number is not None and (life := beside.life(number)) is not None:
        steps.append((life, life.first_batch, last))
        number, last = life.from_generation, life.from_batch
    return steps[::-1]


def coverage(
    beside: StateEvidence, logged: Mapping[Batch, Entry], at: Batch, published: Entry | None = None
) -> Coverage:
    """The coverage of a table at a position.

    `logged` are the batches that its log still has; other offsets in the ledger file are a fault. `published` is the
    entry of the newest recovery: its end is used where the batch that it names is not known.
    """
    steps = path(beside, at)
    corrections = [life.corrected for life, _, _ in steps if life.corrected is not None]
    walk = _Walk(beside, logged, list(_never_read(beside, {life.number for life, _, _ in steps})), corrections)
    before: Batch | None = None
    for life, first, last in steps:
        if before is not None and life.reason.startswith("skip ") and (before[0], before[1] + 1) in logged:
            # The tables had one batch more than the checkpoint recorded; a recovery that skips ahead keeps its rows.
            one_more = before[0], before[1] + 1
            if not any(each.after < one_more <= each.up_to for each in corrections):
                walk.join(logged[one_more])
        walk.generation(life.number, first, last)
        before = (life.number, last)
    walk.end(published)
    return walk.result


def _never_read(beside: StateEvidence, on_path: set[int]) -> Iterator[Span]:
    """Yields the offsets that these generations have skipped, unless a later correction has read them."""
    for generation, span in beside.skipped:
        if generation in on_path:
            read = [
                each
                for life in beside.lives
                if life.corrected is not None and life.number in on_path and life.number > generation
                for each in life.corrected.entry.spans
            ]
            yield from without(span, of_partition(read, span))


class _Walk:
    """Adds entry after entry to `result`; `_broken` while entries are missing since the last known one."""

    def __init__(
        self,
        beside: StateEvidence,
        logged: Mapping[Batch, Entry],
        holes: list[Span],
        corrections: list[CorrectedBatches],
    ) -> None:
        begins = beside.begins
        self.result = Coverage(begins=begins, skipped=holes)
        self._beside, self._logged, self._ends, self._broken = beside, logged, dict(begins), False
        self._corrections, self._joined = corrections, list[CorrectedBatches]()

    def generation(self, number: int, first: int, last: int) -> None:
        replaced = list(self._replaced(number, first, last))
        known = {b for g, b in (*self._logged, *self._beside.lines) if g == number and first <= b <= last}
        kept = [b for b in known if not any(low <= b <= high for low, high, _ in replaced)]
        due = first
        for low, high, by in sorted([*((b, b, None) for b in kept), *replaced], key=lambda each: each[0]):
            self._miss(low - due)
            if by is None:
                self.join(self._entry((number, low)))
            else:
                self._correct(by, high + 1 - low)
            due = high + 1
        self._miss(last + 1 - due)

    def _replaced(self, number: int, first: int, last: int) -> Iterator[tuple[int, int, CorrectedBatches]]:
        """Yields the runs of batches of a generation that were corrected, each with the newest correction of them."""
        newest: dict[int, int] = {}
        for number_of, each in enumerate(self._corrections):
            newest |= dict.fromkeys(_within(each, number, first, last), number_of)
        for by, run in groupby(sorted(newest), key=newest.__getitem__):
            batches = list(run)
            yield batches[0], batches[-1], self._corrections[by]

    def _correct(self, by: CorrectedBatches, batches: int) -> None:
        """Add the entry of a correction, once; it is missing if a later correction has a part of its batches."""
        later = self._corrections[self._corrections.index(by) + 1 :]
        if any(other.after < by.up_to and by.after < other.up_to for other in later):
            self._miss(batches)
        elif by not in self._joined:
            self._joined.append(by)
            self.join(by.entry)

    def join(self, entry: Entry) -> None:
        """Add one entry; after missing entries, the offsets up to its start are unproved."""
        for span in entry.spans:
            if self._broken:
                self._believe(span.topic, span.partition, span.start)
            if span.offsets >= 0:
                self.result.proved.append(span)
            self._ends[span.topic, span.partition] = span.end
        self.result.entries.append(entry)
        self._broken = False

    def end(self, published: Entry | None) -> None:
        """End the path: if the newest batch is not known, use the end of `published`, or note a fault."""
        if self._broken and published is not None:
            for span in published.spans:
                self._believe(span.topic, span.partition, span.end)
        elif self._broken:
            self.result.faults.append("its newest batch is neither in its log nor in the ledger's file")

    def _miss(self, batches: int) -> None:
        if batches > 0:
            self.result.missing += batches
            self._broken = True

    def _believe(self, topic: str, partition: int, end: int) -> None:
        due = self._ends.get((topic, partition), 0)
        if end > due:
            span = Span(topic, partition, due, end)
            self.result.unproved += without(span, of_partition(self.result.skipped, span))

    def _entry(self, batch: Batch) -> Entry:
        entry, line = self._logged.get(batch), self._beside.lines.get(batch)
        if entry is not None and line is not None and _offsets(entry) != _offsets(line):
            self.result.faults.append(f"{entry} has other offsets in the ledger's file than in the table's log")
        known = entry if entry is not None else line
        assert known is not None
        return known


def _within(corrected: CorrectedBatches, number: int, first: int, last: int) -> range:
    """Those of the batches `first` to `last` of a generation that were corrected."""
    after, up_to = corrected.after, corrected.up_to
    if not after[0] <= number <= up_to[0]:
        return range(0)
    begin = max(first, after[1] + 1) if number == after[0] else first
    return range(begin, (min(last, up_to[1]) if number == up_to[0] else last) + 1)


def _in_words(batches: list[Batch]) -> str:
    """Batches in order, consecutive ones as a range; the generation is named where there are several."""
    runs: list[tuple[Batch, int]] = []
    for generation, batch in batches:
        if runs and (generation, batch) == (runs[-1][0][0], runs[-1][1] + 1):
            runs[-1] = (runs[-1][0], batch)
        else:
            runs.append(((generation, batch), batch))
    several = len({generation for generation, _ in batches}) > 1
    ranges = [
        (f"g{generation:04d} " if several else "") + (f"{first}" if first == last else f"{first} to {last}")
        for (generation, first), last in runs
    ]
    return ", ".join(ranges[:_SHOWN]) + (f" and {len(ranges) - _SHOWN:,} more ranges" if len(ranges) > _SHOWN else "")


def _offsets(entry: Entry) -> dict[str, tuple[dict[int, int], dict[int, int]]]:
    return {read.topic: (dict(read.start), dict(read.end)) for read in entry.ranges}


# Void ranges of topics, which a verification leaves out: no stream reads these offsets, so no row is due for them.
#
#     <state>/_topics/<topic>.json    all ranges ever, each with the generation of the writer that declared it, and the
#                                     path of the writer's generations: those on it hold
#
# The verifier has its own reader of this file too. Archives copy void records like all others.


@dataclass(frozen=True)
class VoidOffsets:
    """The void ranges of some topics, and by topic the plan that appends to it now, which may not be over.

    `changed` are the topics whose ranges are others than before.
    """

    spans: tuple[Span, ...] = ()
    under_way: Mapping[str, str] | None = None
    changed: tuple[str, ...] = ()

    @classmethod
    def read(
        cls,
        state: Location | None,
        topics: Mapping[str, CommittedTopic],
        names: Sequence[str],
        before: Mapping[str, str | None] | None = None,
    ) -> VoidOffsets:
        """Those of these topics; an earlier topic of the same name does not count. Raises ValueError if damaged.

        `before` is what `recorded` has given.
        """
        found: list[Span] = []
        under_way: dict[str, str] = {}
        for name in names:
            path = None if state is None else state / "_topics" / f"{name}.json"
            if path is None or name not in topics or not path.exists():
                continue
            try:
                value = json.loads(path.read_text(encoding="utf-8"))
                if value["topic_id"] != topics[name].topic_id:
                    continue
                holds = {0, *value["path"]}  # 0: of an earlier writer, for ever
                found += [
                    Span(name, int(v["partition"]), int(v["begin"]), int(v["end"]))
                    for v in value["void"]
                    if v["generation"] in holds and v["begin"] < v["end"]
                ]
                if value["under_way"] is not None:
                    under_way[name] = str(value["under_way"])
            except (KeyError, TypeError) as error:
                raise ValueError(f"{path} has no {error}") from error
        now = recorded(state, before or ())
        changed = tuple(name for name in names if name in now and now[name] != (before or {})[name])
        return cls(tuple(merged(found)), under_way, changed)

    def left(self, topics: Mapping[str, CommittedTopic]) -> Mapping[str, CommittedTopic]:
        """The topics without the void records; their first and last offsets stay."""
        if not self.spans:
            return topics
        return {
            name: replace(topic, partitions={p: self._left(name, p, part) for p, part in topic.partitions.items()})
            for name, topic in topics.items()
        }

    def taken_out(self, covered: Coverage) -> Coverage:
        """The coverage without void offsets, which count as skipped."""
        if not self.spans:
            return covered
        skipped = [part for span in self.spans for part in without(span, of_partition(covered.skipped, span))]
        return replace(
            covered,
            proved=self._without(covered.proved),
            unproved=self._without(covered.unproved),
            skipped=[*covered.skipped, *skipped],
            void=self.spans,
        )

    def _without(self, spans: Sequence[Span]) -> list[Span]:
        return [part for span in spans for part in without(span, of_partition(self.spans, span))]

    def _left(self, topic: str, partition: int, part: CommittedPartition) -> CommittedPartition:
        kept = np.ones(len(part.offsets), dtype=bool)
        for span in self.spans:
            if (span.topic, span.partition) == (topic, partition):
                kept &= (part.offsets < span.start) | (part.offsets >= span.end)
        return replace(part, offsets=part.offsets[kept])


NO_VOID = VoidOffsets()


def recorded(state: Location | None, names: Iterable[str]) -> dict[str, str | None]:
    """What the files of these topics hold now, None without one: read before the versions of the tables."""
    paths = {} if state is None else {name: state / "_topics" / f"{name}.json" for name in names}
    return {name: path.read_text(encoding="utf-8") if path.exists() else None for name, path in paths.items()}
