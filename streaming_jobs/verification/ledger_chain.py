"""The chain of one stream's ledger entries on its primary table, checked in the order of the table's versions.

The rules for an entry: it names its own stream and table; it carries the table's transaction with the version that
belongs to its generation and batch; generations never decrease, batches increase by one; each topic and partition
continues exactly where the batch before ended. Any other commit that changes rows is a fault.

A rebuilt slice and a redrive change rows but are no batches: they move neither the stream's transaction nor offsets.

The chain restarts at the publish of a recovery: its rows were written elsewhere, so offsets up to there are trusted,
not verified. A publish that changes no rows skipped forward: the offsets between are neither lost nor read.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Literal

from streaming_jobs.verification.delta_log import Entry, LoggedCommit, Range
from streaming_jobs.verification.offset_ranges import Span, without
from streaming_jobs.verification.subject import DROPPED

Kind = Literal["entry", "order", "chain", "rows", "foreign", "unreadable", "offsets", "topic"]


@dataclass(frozen=True)
class TableFault:
    """One violation of a rule; `version` is the table's, None for the table as a whole."""

    table: str
    version: int | None
    kind: Kind
    text: str

    def __str__(self) -> str:
        where = self.table if self.version is None else f"{self.table} version {self.version}"
        return f"{where}: {self.text}"


@dataclass
class Chain:
    """The offsets that the entries so far cover; call `take` in the order of the versions."""

    stream: str
    table: str
    first: Entry | None = None
    last: Entry | None = None
    spans: list[Span] = field(default_factory=list)
    believed: list[Span] = field(default_factory=list)
    skipped: list[Span] = field(default_factory=list)
    batches: int = 0
    written: int = 0
    dropped: int = 0
    cut: bool = False
    """True if the log no longer has the table's first versions."""

    def take(self, commit: LoggedCommit) -> list[TableFault]:
        return [TableFault(self.table, commit.version, kind, text) for kind, text in self._taken(commit)]

    def _taken(self, commit: LoggedCommit) -> Iterator[tuple[Kind, str]]:
        entry = commit.entry
        if entry is None:
            if commit.changes_rows:
                yield "foreign", f"changed rows ({commit.operation or 'unknown operation'}) and carries no ledger entry"
            return
        if (entry.stream, entry.table) != (self.stream, self.table):
            yield "entry", f"carries the entry of stream {entry.stream} for table {entry.table}"
        if entry.kind == "publish":
            if entry.generation == 1 and not self.batches and not commit.changes_rows:
                self.last = None  # the adoption of a job; one before it was undone
            yield from self._placed(commit, entry)
            self._published(entry, rebuilt=commit.changes_rows)
            return
        if entry.kind == "slice" and not commit.txns:  # rows of a range were rebuilt; the stream's position stays
            return
        if entry.kind == "redrive" and f"recourse:{self.stream}:{self.table}" not in commit.txns:
            return
        if entry.kind != "batch":
            if commit.changes_rows:
                yield "entry", f"changed rows ({commit.operation}) under an entry of kind {entry.kind}"
            return
        yield from self._placed(commit, entry)
        for read in entry.ranges:
            yield from self._read(entry, read)
        if self.last is not None and (gone := self._topics(self.last) - self._topics(entry)):
            yield "chain", f"{entry} reads nothing of topic {', '.join(sorted(gone))}, which the batch before read"
        self.first, self.last = self.first or entry, entry
        self.batches += 1
        self.written += entry.rows.get("written", 0)
        self.dropped += entry.rows.get(f"{DROPPED}{self.table}", 0)

    def _published(self, entry: Entry, *, rebuilt: bool) -> None:
        seen: dict[tuple[str, int], int] = {}
        for span in (*self.believed, *self.spans, *self.skipped):
            place = span.topic, span.partition
            seen[place] = min(seen.get(place, span.start), span.start)
        ends = {(r.topic, p): end for r in (self.last.ranges if self.last else ()) for p, end in r.end.items()}
        believed, skipped = [], list(self.skipped)
        for read in entry.ranges:
            for partition, end in read.end.items():
                place, begin = (read.topic, partition), read.start.get(partition, 0)
                # Offsets before the first entry of a cut log are trusted from the topic's beginning on.
                whole = Span(read.topic, partition, 0 if self.cut else seen.get(place, begin), end)
                if rebuilt:
                    # Offsets skipped after `begin` have been read by this recovery.
                    skipped = [s for s in skipped if (s.topic, s.partition) != place or s.end <= begin]
                    believed += without(whole, [s for s in skipped if (s.topic, s.partition) == place])
                elif self.last is not None and ends.get(place, 0) < end:
                    skipped.append(replace(whole, start=ends.get(place, 0)))
        if rebuilt:
            self.believed, self.spans, self.first = believed, [], None
        self.skipped, self.last = skipped, entry

    def _placed(self, commit: LoggedCommit, entry: Entry) -> Iterator[tuple[Kind, str]]:
        due = entry.generation << 32 | (entry.batch + 1)
        actual = commit.txns.get(f"recourse:{self.stream}:{self.table}")
        if actual != due:
            yield "entry", f"{entry} carries the transaction {actual}, not {due}"
        if self.last is None:
            return
        before, now = (self.last.generation, self.last.batch), (entry.generation, entry.batch)
        if now <= before:
            yield "order", f"{entry} comes after {self.last}"
        elif now[0] == before[0] and now[1] != before[1] + 1:
            yield "order", f"{entry} comes right after {self.last}"

    def _read(self, entry: Entry, read: Range) -> Iterator[tuple[Kind, str]]:
        before = self._before(read.topic)
        if before is not None and before.topic_id != read.topic_id:
            yield (
                "chain",
                f"{entry} reads topic {read.topic} with id {read.topic_id}, the batch before {before.topic_id}",
            )
        if before is not None and (gone := before.end.keys() - read.end.keys()):
            yield "chain", f"{entry} reads nothing of partitions {sorted(gone)} of topic {read.topic}"
        for partition, end in sorted(read.end.items()):
            start = read.start.get(partition, 0)
            due = before.end.get(partition, 0) if before is not None else start
            if start != due:
                yield "chain", f"{entry} starts at {start} of {read.topic}-{partition}, the batch before ended at {due}"
            if end < start:
                yield "chain", f"{entry} ends at {end} of {read.topic}-{partition}, before its start {start}"
            else:
                self.spans.append(Span(read.topic, partition, start, end))

    def _before(self, topic: str) -> Range | None:
        return next((r for r in self.last.ranges if r.topic == topic), None) if self.last is not None else None

    @staticmethod
    def _topics(entry: Entry) -> set[str]:
        return {read.topic for read in entry.ranges}


def assumed(first: Entry, *, ended: bool = False) -> list[Span]:
    """The offsets before the first entry of a shortened log; with `ended`, the offsets of the entry too."""
    return [
        Span(read.topic, partition, 0, offset)
        for read in first.ranges
        for partition, offset in (read.end if ended else read.start).items()
    ]
