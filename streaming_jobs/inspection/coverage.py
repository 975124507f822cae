"""Coverage: the offsets whose rows are in a table, those that are missing or doubled, and the reason for each.

What a checkpoint has passed and nothing covers is missing, whatever the reason; what is covered twice is doubled. A
reason only names pieces: a batch that a RESTORE took out and another checkpoint has read again is not missing.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise

from streaming_jobs.inspection.attribution import Attribution, BatchWrite
from streaming_jobs.inspection.checkpoint_history import CheckpointHistory
from streaming_jobs.inspection.findings import Certainty, InspectionFinding, numbers_words
from streaming_jobs.inspection.table_history import TableCommit
from streaming_jobs.text.spelling import counted
from streaming_jobs.verification.offset_ranges import Span, merged, sweep, without

RECREATED = " (created again)"
"""Added to the name of a topic for offsets after its offsets have gone back."""
READ_ONCE = "read these offsets once by a batch job, and append them"


@dataclass(frozen=True)
class Cause:
    """Why offsets may be missing; it holds for the part of them that nothing else has covered."""

    reason: str
    certainty: Certainty
    checkpoint: CheckpointHistory
    batch: int
    spans: tuple[Span, ...]
    by: TableCommit | None = None


CauseLeft = tuple[Cause, list[Span]]
"""A cause, and what nothing has covered of its offsets."""


@dataclass
class OffsetCoverage:
    """The offsets of one table, collected batch by batch."""

    table: str
    covers: list[tuple[Span, BatchWrite]] = field(default_factory=list)
    causes: list[Cause] = field(default_factory=list)
    blind: list[Span] = field(default_factory=list)
    """Offsets of which nothing is known."""
    read: list[Span] = field(default_factory=list)
    """Offsets that the checkpoints have passed."""
    lives: dict[tuple[str, int], int] = field(default_factory=dict)
    """How often the offsets of a partition have gone back, as the topic was created again."""

    def __post_init__(self) -> None:
        self._finding = partial(InspectionFinding, table=self.table)

    def life(self, span: Span) -> Span:
        """The offsets in the present life of the topic."""
        lives = self.lives.get((span.topic, span.partition), 0)
        return replace(span, topic=span.topic + RECREATED * lives) if lives else span

    def findings(
        self, checkpoints: Sequence[CheckpointHistory], attribution: Attribution
    ) -> Iterator[InspectionFinding]:
        """What is missing and what is doubled, once all batches are collected."""
        yield from self._missing(checkpoints, attribution)
        yield from self._doubled()

    def _missing(
        self, checkpoints: Sequence[CheckpointHistory], attribution: Attribution
    ) -> Iterator[InspectionFinding]:
        covered = [*(span for span, _ in self.covers), *self.blind]
        reported: list[Span] = []
        groups: dict[tuple[object, ...], list[CauseLeft]] = defaultdict(list)
        for cause in self.causes:
            left = [part for span in cause.spans for part in outside(span, [*covered, *reported])]
            if left:
                reported += left
                by = cause.by.version if cause.by is not None else None
                groups[cause.reason, cause.certainty, cause.checkpoint.folder, by].append((cause, left))
        for each in groups.values():
            surplus = _surplus_before(each, attribution) if each[0][0].reason == "skipped" else None
            if surplus is None or surplus < 0:
                yield self._uncovered(each)
            elif surplus:
                yield self._read_further(each, surplus)
        yield from self._gaps(checkpoints, [*covered, *reported])

    def _read_further(self, causes: Sequence[CauseLeft], surplus: int) -> InspectionFinding:
        checkpoint, batches = causes[0][0].checkpoint, sorted(cause.batch for cause, _ in causes)
        later = [batch for batch in checkpoint.in_order if batch.number > batches[-1] and batch.committed]
        return self._finding(
            "doubled",
            "likely",
            "put_back",
            f"the checkpoint was put back before batch {batches[0]}: Delta skipped {numbers_words(batches, 'batch')}. "
            f"The commits of these numbers had {counted(surplus, 'record')} more, which later batches have read again",
            "inspect again with --offset-columns, if the rows have their offsets",
            spans=list(merged(self.life(span) for batch in later for span in batch.spans)),
            within=True,
            checkpoint=checkpoint.folder,
            batches=batches,
        )

    def _uncovered(self, causes: Sequence[CauseLeft]) -> InspectionFinding:
        cause = causes[0][0]
        batches = sorted(each.batch for each, _ in causes)
        named = numbers_words(batches, "batch")
        version, operation = (cause.by.version, cause.by.operation) if cause.by is not None else ("", "")
        spans = list(merged(span for _, left in causes for span in left))
        words = {
            "restored": f"version {version} restored the table to an older version, without the rows of {named}; the "
            "checkpoint did not go back with it",
            "taken_out": f"version {version} ({operation}) took the rows of {named} out",
            "skipped": f"{named} ran, and Delta skipped the write: the table had this transaction since version "
            f"{version}, before the batch was planned. The checkpoint was begun again, or put back, under the same id",
            "not_written": f"{named} committed in the checkpoint, without a commit in the table",
        }[cause.reason]
        return self._finding(
            "removed" if cause.reason == "taken_out" else "missing",
            cause.certainty,
            cause.reason,
            words,
            "nothing, if that was meant" if cause.reason == "taken_out" else READ_ONCE,
            spans=spans,
            within=cause.reason == "skipped",
            checkpoint=cause.checkpoint.folder,
            batches=batches,
            versions=[] if cause.by is None else [cause.by.version],
        )

    def _gaps(self, checkpoints: Sequence[CheckpointHistory], known: Sequence[Span]) -> Iterator[InspectionFinding]:
        """Offsets between those of two checkpoints that neither has read."""
        ends: dict[tuple[str, int], tuple[int, CheckpointHistory]] = {}
        groups: dict[tuple[str, str], tuple[list[Span], CheckpointHistory, CheckpointHistory]] = {}
        for checkpoint in checkpoints:
            start, end = _bounds(checkpoint)
            for place, begin in start.items():
                before = ends.get(place)
                if before is not None and before[0] < begin and checkpoint.first == 0:
                    parts = outside(Span(*place, before[0], begin), known)
                    key = before[1].folder, checkpoint.folder
                    groups.setdefault(key, ([], before[1], checkpoint))[0].extend(parts)
            for place, offset in end.items():
                if offset > ends.get(place, (-1, None))[0]:
                    ends[place] = offset, checkpoint
        for spans, one, other in groups.values():
            self.read += spans
            if spans:
                yield self._finding(
                    "missing",
                    "certain",
                    "reset",
                    f"checkpoint {one.name} ends before these offsets, and checkpoint {other.name} begins after them: "
                    "the job was started with a new checkpoint behind its last record",
                    READ_ONCE,
                    spans=spans,
                    checkpoint=other.folder,
                    batches=[0],
                )

    def _doubled(self) -> Iterator[InspectionFinding]:
        by_place: dict[tuple[str, int], list[tuple[Span, BatchWrite]]] = defaultdict(list)
        for span, write in self.covers:
            by_place[span.topic, span.partition].append((span, write))
        groups: dict[tuple[bool, bool, str, str], tuple[list[Span], list[BatchWrite]]] = {}
        for covers in by_place.values():
            spans = [span for span, _ in covers]
            whole = replace(spans[0], start=min(s.start for s in spans), end=max(s.end for s in spans))
            for part in sweep(spans, whole).doubled:
                for piece, writes in _pieces(part, covers):
                    folders = sorted({w.folder for w in writes})
                    certain = all(write.certain for write in writes)
                    key = all(w.upserts for w in writes), certain, folders[0], folders[-1]
                    held, by = groups.setdefault(key, ([], []))
                    held.append(piece)
                    by += [write for write in writes if write not in by]
        for (upserts, certain, one, other), (pieces, writes) in groups.items():
            yield self._twice(list(merged(pieces)), writes, upserts, certain, one == other)

    def _twice(
        self, spans: Sequence[Span], writes: Sequence[BatchWrite], upserts: bool, certain: bool, same: bool
    ) -> InspectionFinding:
        versions = sorted({version for write in writes for version in write.versions})
        batches = sorted({write.batch for write in writes})
        runs = len(writes) > len(batches)
        if same and runs:
            words = f"{numbers_words(batches, 'batch')} ran more than once: {numbers_words(versions, 'version')}"
        elif same:
            words = f"{numbers_words(batches, 'batch')} read the same offsets: {numbers_words(versions, 'version')}"
        else:
            names = ", ".join(dict.fromkeys(w.checkpoint.name if w.checkpoint else "Recourse" for w in writes))
            words = f"checkpoints {names} have read the same offsets: {numbers_words(versions, 'version')}"
        reason = "ran_again" if same and runs else "read_again"
        words += ", each by MERGE" if upserts else ""
        words += "" if certain else "; known by their times and their numbers of rows"
        return self._finding(
            "repeated" if upserts else "doubled",
            "certain" if certain else "likely",
            reason,
            words,
            "" if upserts else "delete the rows of the later versions, once their offsets are confirmed",
            spans=spans,
            checkpoint=writes[-1].folder,
            batches=batches,
            versions=versions,
        )


def _surplus_before(causes: Sequence[CauseLeft], attribution: Attribution) -> int | None:
    """How many rows the commits for which Delta skipped batches have beyond the records of these batches.

    None if that is not known. Counts tell for a job that writes a row for each record, if its checkpoint was put
    back: then both began where the batch before them ended.
    """
    checkpoint, first = causes[0][0].checkpoint, min(cause.batch for cause, _ in causes)
    known = [(w.commits[0].rows, sum(s.offsets for s in w.spans)) for w in attribution.writes if w.spans]
    if first == checkpoint.first or not known or any(rows != records for rows, records in known):
        return None
    earlier = [w for w in attribution.earlier if w.checkpoint is checkpoint and w.batch >= first]
    records = sum(span.offsets for _, left in causes for span in left)
    return sum(write.commits[0].rows or 0 for write in earlier) - records


def outside(span: Span, others: Iterable[Span]) -> list[Span]:
    """The parts of a range that no other range of its partition has."""
    return without(span, [o for o in others if (o.topic, o.partition) == (span.topic, span.partition)])


def _pieces(part: Span, covers: Sequence[tuple[Span, BatchWrite]]) -> Iterator[tuple[Span, list[BatchWrite]]]:
    """A doubled range in parts that the same writes cover."""
    cuts = {part.start, part.end}
    for span, _ in covers:
        cuts |= {offset for offset in (span.start, span.end) if part.start < offset < part.end}
    places = sorted(cuts)
    for start, end in pairwise(places):
        yield replace(part, start=start, end=end), [w for s, w in covers if s.start <= start and end <= s.end]


def _bounds(checkpoint: CheckpointHistory) -> tuple[dict[tuple[str, int], int], dict[tuple[str, int], int]]:
    """Where it began to read each partition, as far as it knows, and where its last committed batch ended."""
    first = next((batch for batch in checkpoint.in_order if batch.start is not None), None)
    last = next((batch for batch in reversed(checkpoint.in_order) if batch.committed), None)
    starts = {} if first is None or first.start is None else first.start
    ends = starts if last is None else last.end
    return (
        {(topic, p): offset for topic, each in starts.items() for p, offset in each.items()},
        {(topic, p): offset for topic, each in ends.items() for p, offset in each.items()},
    )
