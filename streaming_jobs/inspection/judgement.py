"""The judgement of one table and the checkpoints that wrote it: from histories to findings, without reading a file.

A batch that the checkpoint has committed must have its rows in the table, and once. Its writes are looked up here; its
offsets go into the coverage, which says what is missing and what is doubled.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from streaming_jobs.inspection.attribution import Attribution, BatchWrite, attribute
from streaming_jobs.inspection.beside_batches import beside_batches
from streaming_jobs.inspection.checkpoint_history import CheckpointHistory, PlannedBatch
from streaming_jobs.inspection.coverage import READ_ONCE, Cause, OffsetCoverage
from streaming_jobs.inspection.findings import InspectionFinding, Kind, numbers_words
from streaming_jobs.inspection.table_history import TableCommit, TableHistory
from streaming_jobs.text.spelling import counted
from streaming_jobs.verification.offset_ranges import Span


@dataclass(frozen=True)
class JudgedTable:
    """A table with the checkpoints that wrote it, the writer of each commit, and what was found.

    `covered` are the offsets whose rows are in the table, once for each time; `read` those that the checkpoints have
    passed.
    """

    history: TableHistory
    checkpoints: tuple[CheckpointHistory, ...]
    attribution: Attribution
    covered: tuple[Span, ...]
    read: tuple[Span, ...]
    findings: tuple[InspectionFinding, ...]


def judge_all(
    tables: Sequence[TableHistory], checkpoints: Sequence[CheckpointHistory], settled: Sequence[int]
) -> list[JudgedTable]:
    """Judge the tables of a job; `settled`: the newest version of each from before the checkpoints were read.

    A checkpoint without a commit in any table counts for the tables of checkpoints that it may have followed; for the
    only table in any case.
    """
    attributions = [attribute(table, checkpoints, newest) for table, newest in zip(tables, settled, strict=True)]
    nowhere = without_a_commit(checkpoints, attributions)
    judged = []
    for table, attribution in zip(tables, attributions, strict=True):
        alone = len(tables) == 1
        mine = [
            each
            for each in checkpoints
            if attribution.how(each) is not None
            or (each in nowhere and (alone or _predecessor(each, checkpoints, attribution) is not None))
        ]
        mine.sort(key=lambda checkpoint: checkpoint.begun)
        judged.append(_judge(table, tuple(mine), attribution))
    return judged


def without_a_commit(
    checkpoints: Sequence[CheckpointHistory], attributions: Sequence[Attribution]
) -> list[CheckpointHistory]:
    """The checkpoints with batches of which no table has a commit."""
    return [each for each in checkpoints if each.batches and all(a.how(each) is None for a in attributions)]


def _predecessor(
    checkpoint: CheckpointHistory, checkpoints: Sequence[CheckpointHistory], attribution: Attribution
) -> CheckpointHistory | None:
    """The newest earlier checkpoint that read one of the topics and wrote the table."""
    earlier = [
        each
        for each in checkpoints
        if each.begun < checkpoint.begun
        and attribution.how(each) is not None
        and set(each.topics) & set(checkpoint.topics)
    ]
    return max(earlier, key=lambda each: each.begun, default=None)


def _judge(table: TableHistory, mine: tuple[CheckpointHistory, ...], attribution: Attribution) -> JudgedTable:
    court = _Batches(table, attribution, mine)
    found = [each for checkpoint in mine for each in court.judge(checkpoint)]
    court.cover_by_ledger()
    found += court.coverage.findings(mine, attribution)
    found += beside_batches(table, mine, attribution)
    covered = tuple(span for span, _ in court.coverage.covers)
    return JudgedTable(table, mine, attribution, covered, tuple(court.coverage.read), tuple(found))


class _Batches:
    """What the batches of a checkpoint have left in the table."""

    def __init__(self, table: TableHistory, attribution: Attribution, checkpoints: Sequence[CheckpointHistory]) -> None:
        self.table, self.attribution, self.checkpoints = table, attribution, checkpoints
        self.coverage = OffsetCoverage(table.name)
        self._finding = partial(InspectionFinding, table=table.name)

    def judge(self, checkpoint: CheckpointHistory) -> Iterator[InspectionFinding]:
        """Collect the coverage of a checkpoint's batches; yields what is not a matter of coverage."""
        writes = self.attribution.of(checkpoint)
        yield from self._old(checkpoint, writes)
        for batch in checkpoint.in_order:
            made = writes.get(batch.number, [])
            yield from self._set_back(checkpoint, batch, bool(made))
            spans = [self.coverage.life(span) for span in batch.spans]
            if not batch.committed and batch.number == checkpoint.last_planned:
                yield from self._pending(checkpoint, batch, made, spans)
                continue
            self.coverage.read += spans
            alive = [write for write in made if self._in_table(write)]
            self.coverage.covers += [(span, write) for write in alive for span in spans]
            if spans and not alive and (cause := self._why(checkpoint, batch, made, spans)) is not None:
                self.coverage.causes.append(cause)
            elif not alive:
                self.coverage.blind += spans
        yield from self._ahead(checkpoint)

    def cover_by_ledger(self) -> None:
        """Commits of Recourse whose checkpoint was not given: their entries have the offsets."""
        for write in self.attribution.writes:
            if write.checkpoint is None and self._in_table(write):
                self.coverage.covers += [(span, write) for span in write.spans or ()]

    def _set_back(
        self, checkpoint: CheckpointHistory, batch: PlannedBatch, written: bool
    ) -> Iterator[InspectionFinding]:
        """Partitions whose offsets went back: with a new topic if the batch has a commit, else by hand.

        Without signatures that is not known, since a program commits no batch without rows.
        """
        how = self.attribution.how(checkpoint)
        by_hand = not written and how not in (None, "time")
        found = partial(self._finding, checkpoint=checkpoint.folder, batches=[batch.number])
        for topic, partition, start, end in batch.set_back:
            where = f"batch {batch.number} moved partition {partition} of topic {topic} from {start} back to {end}"
            if by_hand:
                words = f"{where} without a commit in the table: the checkpoint was set back by hand, and later batches"
                yield found("unknown", "likely", "set_back_by_hand", words=f"{words} read these offsets again")
                continue
            self.coverage.lives[topic, partition] = self.coverage.lives.get((topic, partition), 0) + 1
            unread = [self.coverage.life(Span(topic, partition, 0, end))] if end else []
            self.coverage.blind += unread
            words = f"{where}: the topic was created again"
            if written:
                words += f", and Spark passes over the first {counted(end, 'record')} of the new topic"
                kind: Kind = "missing" if unread else "unknown"
                yield found(kind, "likely", "recreated", words=words, next_step=READ_ONCE, spans=unread)
                continue
            if unread:
                words += (
                    f", whose first {counted(end, 'record')} Spark passes over; or the checkpoint was set back by hand"
                )
                yield found("missing", "unclear", "set_back", words=words, spans=unread, within=True)
            again = [Span(topic, partition, end, start)]
            words = f"{where}: if that was by hand, later batches have read these offsets again"
            yield found("doubled", "unclear", "set_back", words=words, spans=again, within=True)

    def _in_table(self, write: BatchWrite) -> bool:
        """True if its rows are in the table, or the job itself has replaced them, as in output mode Complete."""
        return not list(self._taken_out(write))

    def _taken_out(self, write: BatchWrite) -> Iterator[TableCommit]:
        """The commits that took its rows out, without the job's own overwrites."""
        gone = (self.table.gone[version].by for version in write.versions if version in self.table.gone)
        own = self.attribution.by_version
        return (by for by in gone if not (by.version in own and by.replaces_all and by.entry is None))

    def _why(
        self, checkpoint: CheckpointHistory, batch: PlannedBatch, made: Sequence[BatchWrite], spans: Sequence[Span]
    ) -> Cause | None:
        """Why a committed batch has no rows in the table; None if nothing tells."""
        number, how = batch.number, self.attribution.how(checkpoint)
        if made:
            by = [by for write in made for by in self._taken_out(write)][-1]
            reason = "restored" if by.operation == "RESTORE" else "taken_out"
            return Cause(reason, "certain" if made[-1].certain else "likely", checkpoint, number, tuple(spans), by)
        earlier = [w.commits[0] for w in self.attribution.earlier if w.checkpoint is checkpoint and w.batch >= number]
        if how is None:  # the application of another checkpoint, if the program has a constant one
            earlier = [
                commit
                for commit in self.table.commits.values()
                if commit.epoch is None and commit.at < batch.planned and any(n >= number for n in commit.txns.values())
            ]
        before = max((n for app, n in self.table.before.items() if app == checkpoint.query_id), default=-1)
        if self.table.cut and (before >= number or batch.planned < self.table.begun):
            return None
        if earlier:
            return Cause("skipped", "likely", checkpoint, number, tuple(spans), earlier[-1])
        if how in ("epoch", "ledger"):
            return Cause("not_written", "certain", checkpoint, number, tuple(spans))
        like = checkpoint if how is not None else _predecessor(checkpoint, self.checkpoints, self.attribution)
        if like is None:
            return None
        each = self.attribution.how(like) != "time" or self._writes_each(like)
        return Cause("not_written", "likely" if each else "unclear", checkpoint, number, tuple(spans))

    def _writes_each(self, checkpoint: CheckpointHistory) -> bool:
        """True if a job without signatures writes a row for each record, as all of its batches say.

        Otherwise a batch without a commit may be one whose rows were all filtered: Delta makes no empty commit then.
        """
        rows = {n: sum(c.rows or 0 for c in each[0].commits) for n, each in self.attribution.of(checkpoint).items()}
        return bool(rows) and all(count == checkpoint.batches[number].records for number, count in rows.items())

    def _old(
        self, checkpoint: CheckpointHistory, writes: Mapping[int, Sequence[BatchWrite]]
    ) -> Iterator[InspectionFinding]:
        """Batches whose offsets the checkpoint no longer has: their numbers alone can be judged."""
        first = checkpoint.first
        known = next((batch for batch in checkpoint.in_order if batch.start is not None), None)
        if first is None or (known is not None and known.number == 0):
            return
        begin = {} if known is None or known.start is None else known.start
        places = [
            self.coverage.life(Span(topic, p, 0, offset)) for topic, each in begin.items() for p, offset in each.items()
        ]
        self.coverage.blind += [place for place in places if place.offsets]
        at = first if known is None else known.number
        shown = ", ".join(f"{s.topic}-{s.partition} {s.end}" for s in places[:4]) + (" ..." if len(places) > 4 else "")
        yield self._finding(
            "unknown",
            "certain",
            "retained",
            f"the checkpoint has the offsets of batches {at} to {checkpoint.last_planned}; of those before, "
            "only the commits in the table tell" + (f". Known from {shown} on" if shown else ""),
            checkpoint=checkpoint.folder,
        )
        if self.attribution.how(checkpoint) not in ("epoch", "transaction"):
            return
        begun = min(writes, default=at) if self.table.cut else 0
        absent = [number for number in range(begun, at) if not any(self._in_table(w) for w in writes.get(number, ()))]
        gone = [number for number in absent if writes.get(number)]
        never = [number for number in absent if not writes.get(number)]
        if gone:
            bys = {by.version for number in gone for write in writes[number] for by in self._taken_out(write)}
            words = (
                f"the rows of {numbers_words(gone, 'batch')} were taken out by {numbers_words(sorted(bys), 'version')}"
            )
            restored = all(self.table.commits[version].operation == "RESTORE" for version in bys)
            yield self._finding(
                "missing" if restored else "removed",
                "certain",
                "restored" if restored else "taken_out",
                f"{words}; their offsets are not known any more",
                checkpoint=checkpoint.folder,
                batches=gone,
                versions=sorted(bys),
            )
        if never:
            yield self._finding(
                "missing",
                "certain" if self.attribution.how(checkpoint) == "epoch" else "likely",
                "not_written",
                f"{numbers_words(never, 'batch')} of the checkpoint have no commit in the table; their offsets are not "
                "known any more",
                checkpoint=checkpoint.folder,
                batches=never,
            )

    def _pending(
        self, checkpoint: CheckpointHistory, batch: PlannedBatch, made: Sequence[BatchWrite], spans: Sequence[Span]
    ) -> Iterator[InspectionFinding]:
        """The last batch, which was planned and not committed: the next start runs it again."""
        alive = [write for write in made if self._in_table(write)]
        self.coverage.covers += [(span, write) for write in alive for span in spans]
        self.coverage.read += spans if alive else ()
        if not spans:
            return
        gone = [write for write in made if not self._in_table(write)]
        skips = [w for w in self.attribution.earlier if w.checkpoint is checkpoint and w.batch >= batch.number]
        skips += [write for write in gone if write.how in ("epoch", "transaction")]
        if skips and not alive:
            yield self._finding(
                "will_lose",
                "certain",
                "will_skip",
                f"batch {batch.number} runs again at the next start, and Delta skips it: the table has its transaction "
                f"since version {skips[-1].versions[0]}, without its rows",
                "start with a new checkpoint at these offsets",
                spans=spans,
                checkpoint=checkpoint.folder,
                batches=[batch.number],
                versions=skips[-1].versions,
            )
        elif alive and alive[-1].how == "time" and not alive[-1].upserts:
            yield self._finding(
                "will_double",
                "likely",
                "will_repeat",
                f"batch {batch.number} is in the table ({numbers_words(alive[-1].versions, 'version')}), and not "
                "committed in the checkpoint: unless the job runs now, its next start writes the batch once more",
                "delete the rows of that version before the start, or set txnAppId and txnVersion in the job",
                spans=spans,
                checkpoint=checkpoint.folder,
                batches=[batch.number],
                versions=alive[-1].versions,
            )

    def _ahead(self, checkpoint: CheckpointHistory) -> Iterator[InspectionFinding]:
        """Batches in the table that the checkpoint does not know: it is an older copy."""
        ahead = [write for write in self.attribution.ahead if write.checkpoint is checkpoint]
        if not ahead:
            return
        numbers = sorted({write.batch for write in ahead})
        yield self._finding(
            "will_lose",
            "certain",
            "ahead",
            f"the table has {numbers_words(numbers, 'batch')}, the checkpoint ends at batch {checkpoint.last_planned}: "
            "it was put back to an older copy. The next start plans these numbers again with other offsets, and Delta "
            "skips them as written: records are lost",
            "put the newest copy of the checkpoint back, or start with a new checkpoint behind the table's last record",
            checkpoint=checkpoint.folder,
            batches=numbers,
            versions=[version for write in ahead for version in write.versions],
        )
