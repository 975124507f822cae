"""Which commit of a table wrote which batch of a checkpoint, and how certain that is.

- *ledger*: a commit of Recourse has its offsets with it.
- *epoch*: Delta's streaming sink signs each commit with query id and batch.
- *transaction*: the `txnAppId` and `txnVersion` of a program's own. They count if the version is the number of a batch
  that ran at the time of the commit.
- *time*: a commit without a signature belongs to the batch that ran at its time, if batches of this checkpoint usually
  have such a commit. That is likely, not certain.

Batches of one query run one after the other, so at any time at most one batch of a checkpoint runs.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal

from streaming_jobs.inspection.checkpoint_history import CheckpointHistory
from streaming_jobs.inspection.table_history import TableCommit, TableHistory
from streaming_jobs.ledger.entry import LedgerEntry, epoch_id
from streaming_jobs.verification.offset_ranges import Span

How = Literal["ledger", "epoch", "transaction", "time"]
_SKEW = 1.0
"""Seconds by which the clocks of two drivers may differ."""
_USUAL = 0.8
"""Share of the batches of a program that have a commit, from which on each of them is believed to make such commits."""
_OF_BATCHES = ("WRITE", "CREATE TABLE AS SELECT", "MERGE", "DELETE", "UPDATE")
_STATEMENTS = _OF_BATCHES[:3]
"""What a program's only batch is believed to have done; a DELETE beside it would be somebody else's."""


@dataclass(frozen=True)
class BatchWrite:
    """One run of a batch, with its commits to a table. `spans` None: its offsets are not known.

    `checkpoint` is None for a commit of Recourse whose checkpoint was not given.
    """

    checkpoint: CheckpointHistory | None
    batch: int
    how: How
    commits: tuple[TableCommit, ...]
    spans: tuple[Span, ...] | None = None

    @property
    def versions(self) -> tuple[int, ...]:
        return tuple(commit.version for commit in self.commits)

    @property
    def folder(self) -> str:
        """The checkpoint's folder; empty without one."""
        return self.checkpoint.folder if self.checkpoint is not None else ""

    @property
    def upserts(self) -> bool:
        return all(commit.upserts for commit in self.commits)

    @property
    def certain(self) -> bool:
        return self.how != "time"


@dataclass(frozen=True)
class Attribution:
    """The commits of a table by their writers.

    `earlier` have the signature of a checkpoint, but were made before it planned the batch: by a checkpoint that was
    there before, whose offsets are not known. `ahead` are of batches that the checkpoint does not know yet. `others`
    are by query or application those of other checkpoints. `foreign` changed rows, and are of no batch.
    """

    writes: tuple[BatchWrite, ...] = ()
    earlier: tuple[BatchWrite, ...] = ()
    ahead: tuple[BatchWrite, ...] = ()
    others: Mapping[str, tuple[TableCommit, ...]] = field(default_factory=dict)
    foreign: tuple[TableCommit, ...] = ()

    def of(self, checkpoint: CheckpointHistory) -> dict[int, list[BatchWrite]]:
        """The writes of a checkpoint's batches, by batch."""
        found: dict[int, list[BatchWrite]] = defaultdict(list)
        for write in self.writes:
            if write.checkpoint is checkpoint:
                found[write.batch].append(write)
        return found

    @cached_property
    def by_version(self) -> dict[int, BatchWrite]:
        """The write of each version."""
        return {version: write for write in self.writes for version in write.versions}

    def how(self, checkpoint: CheckpointHistory) -> How | None:
        """How the checkpoint's batches were recognised; None if the table has no commit of it."""
        signed = (w for w in (*self.writes, *self.earlier, *self.ahead) if w.checkpoint is checkpoint)
        return next((write.how for write in signed), None)


def attribute(table: TableHistory, checkpoints: Sequence[CheckpointHistory], settled: int | None = None) -> Attribution:
    """Find the writer of each commit that changes rows or sets a transaction.

    `settled` is the newest version from before the checkpoints were read: later ones may be of batches that a running
    job has planned since.
    """
    found = _Found(tuple(checkpoints))
    by_app: dict[str, list[TableCommit]] = defaultdict(list)
    unsigned: list[TableCommit] = []
    for commit in table.commits.values():
        signed = commit.epoch or next(((a, n) for a, n in commit.txns.items() if found.with_id(a)), None)
        if commit.entry is not None:
            if commit.entry.kind == "batch" or (commit.entry.kind == "publish" and commit.changes_data):
                found.ledger(commit, commit.entry)
        elif signed is not None and found.with_id(signed[0]):
            found.signed(commit, *signed)
        elif signed is not None:
            found.others[signed[0]].append(commit)
        elif apps := [app for app in commit.txns if not app.startswith(epoch_id(""))]:
            by_app[apps[0]].append(commit)
        elif commit.changes_data or commit.operation in _OF_BATCHES:
            unsigned.append(commit)
    for app, commits in by_app.items():
        found.application(app, commits)
    found.by_time(unsigned)
    last = max(table.commits, default=0) if settled is None else settled
    return Attribution(
        tuple(sorted(found.writes, key=lambda write: write.versions)),
        tuple(found.earlier),
        tuple(write for write in found.ahead if write.versions[0] <= last),
        {query: tuple(commits) for query, commits in found.others.items()},
        tuple(sorted((c for c in found.foreign if c.version <= last), key=lambda commit: commit.version)),
    )


class _Found:
    """The writers found so far."""

    def __init__(self, checkpoints: tuple[CheckpointHistory, ...]) -> None:
        self.checkpoints = checkpoints
        self.writes: list[BatchWrite] = []
        self.earlier: list[BatchWrite] = []
        self.ahead: list[BatchWrite] = []
        self.others: dict[str, list[TableCommit]] = defaultdict(list)
        self.foreign: list[TableCommit] = []

    def with_id(self, query: str) -> list[CheckpointHistory]:
        """The checkpoints of a query; more than one, if one of them is a copy."""
        return [each for each in self.checkpoints if each.query_id == query]

    def ledger(self, commit: TableCommit, entry: LedgerEntry) -> None:
        """A batch of Recourse, or a recovery, which has the offsets of all batches that it replaced."""
        ends = {read.topic: dict(read.end) for read in entry.offsets}
        known = [(each, each.batches.get(entry.batch)) for each in self.checkpoints]
        same = (c for c, batch in known if entry.kind == "batch" and batch is not None and _same(batch.end, ends))
        spans = tuple(
            Span(read.topic, partition, read.start.get(partition, 0), end)
            for read in entry.offsets
            for partition, end in read.end.items()
            if read.start.get(partition, 0) < end
        )
        self.writes.append(BatchWrite(next(same, None), entry.batch, "ledger", (commit,), spans))

    def signed(self, commit: TableCommit, query: str, number: int) -> None:
        candidates = self.with_id(query)
        fresh = [each for each in candidates if _ran(each, number, commit.at)]
        self._note(commit, (fresh or candidates)[0], number, "epoch")

    def application(self, app: str, commits: Sequence[TableCommit]) -> None:
        """The commits of a program that chose its own application id."""
        matches: dict[int, CheckpointHistory] = {}
        for commit in commits:
            number = commit.txns[app]
            running = (c for c in self.checkpoints if number in c.batches and _within(c, number, commit.at))
            if (one := next(running, None)) is not None:
                matches[commit.version] = one
        owners = [c for c in self.checkpoints if c in matches.values()]
        if not owners:  # a checkpoint all of whose batches were skipped, as the application had them already
            free = [c for c in self.checkpoints if not self._has(c)]
            last = max(commit.at for commit in commits)
            owners = [c for c in free if c.batches and last < c.begun and min(c.batches) <= commits[-1].txns[app]][:1]
        for commit in commits:
            if not owners:
                self.others[app].append(commit)
            else:
                self._note(commit, matches.get(commit.version, owners[-1]), commit.txns[app], "transaction")

    def by_time(self, commits: Sequence[TableCommit]) -> None:
        """Commits without a signature, for checkpoints without signed commits."""
        free = [c for c in self.checkpoints if c.batches and not self._has(c)]
        ran: dict[int, tuple[CheckpointHistory, int]] = {}
        for commit in commits:
            running = [(batch.planned, c, batch.number) for c in free if (batch := c.batch_at(commit.at)) is not None]
            if running:
                ran[commit.version] = max(running, key=lambda each: each[0])[1:]
        plain = _writes_records([(commit, *ran[commit.version]) for commit in commits if commit.version in ran])
        for checkpoint in free:
            runs: list[tuple[int, tuple[TableCommit, ...]]] = []
            mine = [(c, ran[c.version][1]) for c in commits if c.version in ran and ran[c.version][0] is checkpoint]
            if plain:
                runs = [(number, (commit,)) for commit, number in mine if _has_as_many(commit, checkpoint, number)]
            else:
                runs = _runs(_usual(mine))
            known = {commit.version for _, each in runs for commit in each}
            self.foreign += [commit for commit, _ in mine if commit.version not in known]
            for number, each in runs:
                self.writes.append(BatchWrite(checkpoint, number, "time", each, _spans(checkpoint, number)))
        self.foreign += [c for c in commits if c.version not in ran and not self._may_be_forgotten(c)]

    def _may_be_forgotten(self, commit: TableCommit) -> bool:
        """True for a commit like those of the batches, from before the oldest batch that a checkpoint still knows."""
        alike = any(commit.signature == c.signature for w in self.writes if w.how == "time" for c in w.commits)
        return alike and any(c.first and commit.at < c.begun for c in self.checkpoints)

    def _note(self, commit: TableCommit, checkpoint: CheckpointHistory, number: int, how: How) -> None:
        write = BatchWrite(checkpoint, number, how, (commit,), _spans(checkpoint, number))
        first, last = checkpoint.first, checkpoint.last_planned
        if first is None or last is None:
            self.earlier.append(write)
        elif number > last:
            newest = checkpoint.batches[last].planned
            (self.ahead if commit.at >= newest - _SKEW else self.earlier).append(write)
        elif number < first:
            (self.writes if commit.at <= checkpoint.begun + _SKEW else self.earlier).append(write)
        elif number in checkpoint.batches and not _ran(checkpoint, number, commit.at):
            self.earlier.append(write)
        else:
            self.writes.append(write)

    def _has(self, checkpoint: CheckpointHistory) -> bool:
        return any(w.checkpoint is checkpoint for w in (*self.writes, *self.earlier, *self.ahead))


def _same(ends: Mapping[str, Mapping[int, int]], others: Mapping[str, Mapping[int, int]]) -> bool:
    return all(dict(ends.get(topic, {})) == dict(each) for topic, each in others.items())


def _spans(checkpoint: CheckpointHistory, number: int) -> tuple[Span, ...] | None:
    batch = checkpoint.batches.get(number)
    return None if batch is None or batch.start is None else tuple(batch.spans)


def _ran(checkpoint: CheckpointHistory, number: int, at: float) -> bool:
    """True if the batch had been planned at that time."""
    batch = checkpoint.batches.get(number)
    return batch is not None and at >= batch.planned - _SKEW


def _within(checkpoint: CheckpointHistory, number: int, at: float) -> bool:
    return _ran(checkpoint, number, at) and at <= checkpoint.until(number) + _SKEW


def _writes_records(commits: Sequence[tuple[TableCommit, CheckpointHistory, int]]) -> bool:
    """True for a program that writes a row for each record, as nearly all of its batches say.

    Then each commit with as many rows is a run of its batch, and one with other rows is not.
    """
    batches = {(checkpoint.folder, number) for _, checkpoint, number in commits}
    equal = {
        (checkpoint.folder, number)
        for commit, checkpoint, number in commits
        if checkpoint.batches[number].start is not None and _has_as_many(commit, checkpoint, number)
    }
    return len(equal) >= max(_USUAL * len(batches), 2)


def _has_as_many(commit: TableCommit, checkpoint: CheckpointHistory, number: int) -> bool:
    """True for a commit with as many rows as the batch has records, as far as that is known."""
    batch = checkpoint.batches[number]
    return commit.operation in _STATEMENTS and (batch.start is None or commit.rows == batch.records)


def _usual(commits: Sequence[tuple[TableCommit, int]]) -> list[tuple[TableCommit, int]]:
    """The commits that the batches of a program usually make, and the other ones.

    A batch without a usual one may have another: a program that merges has to create the table first.
    """
    batches: dict[tuple[str, str], set[int]] = defaultdict(set)
    for commit, number in commits:
        if commit.operation in _OF_BATCHES:
            batches[commit.signature].add(number)
    most = max(map(len, batches.values()), default=0)
    statements = {
        signature
        for signature, numbers in batches.items()
        if len(numbers) >= _USUAL * most and (len(numbers) > 1 or signature[0] in _STATEMENTS)
    }
    have = {number for commit, number in commits if commit.signature in statements}
    return [
        (commit, number)
        for commit, number in commits
        if commit.signature in statements or (number not in have and commit.operation in _STATEMENTS)
    ]


def _runs(commits: Sequence[tuple[TableCommit, int]]) -> list[tuple[int, tuple[TableCommit, ...]]]:
    """The runs of each batch with their commits; commits that do not look like a run are left out.

    A batch usually makes as many commits of each kind as most batches do. Further ones are a second run, if they wrote
    as many rows as the first one; otherwise another program made them.
    """
    by_batch: dict[int, dict[tuple[str, str], list[TableCommit]]] = defaultdict(lambda: defaultdict(list))
    for commit, number in commits:
        by_batch[number][commit.signature].append(commit)
    usual: dict[tuple[str, str], int] = {}
    for signature in {commit.signature for commit, _ in commits}:
        counts = Counter(len(kinds[signature]) for kinds in by_batch.values() if signature in kinds)
        usual[signature] = min(count for count, often in counts.items() if often == max(counts.values()))
    runs: list[tuple[int, tuple[TableCommit, ...]]] = []
    for number, kinds in sorted(by_batch.items()):
        first: list[TableCommit] = []
        again: list[TableCommit] = []
        for signature, made in kinds.items():
            first += made[: usual[signature]]
            rows = [commit.rows for commit in made[: usual[signature]]]
            further = made[usual[signature] :]
            again += [commit for commit in further if commit.upserts or commit.rows is None or commit.rows in rows]
        runs.append((number, tuple(first)))
        runs += [(number, each) for each in _parts(again, max(len(first), 1))]
    return runs


def _parts(commits: Sequence[TableCommit], size: int) -> Iterator[tuple[TableCommit, ...]]:
    in_order = sorted(commits, key=lambda commit: commit.version)
    for at in range(0, len(in_order), size):
        yield tuple(in_order[at : at + size])
