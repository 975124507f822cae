"""The verifier: are the records of the topic in the tables exactly once? Read `verify`; it can be used alone.

It reads two things: the tables (Delta's log and Parquet) and the topic. It takes nothing from the streams' state, and
nothing of the code that writes: not the ledger's own reader, not the checkpoint's, not the batch pipeline.

For each stream it lays the offset ranges of all ledger entries over what the topic holds: an offset in no range is
*lost*, in two ranges *doubled*, after the last range *unread*. Then the rows of the newest version are compared with
the covered records by the rule of the table (`subjects.py`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import pyarrow as pa
from deltalake.exceptions import DeltaError

from streaming_jobs.proof.chain import Chain, Fault
from streaming_jobs.proof.log import Entry, read_commit, versions
from streaming_jobs.proof.reader import assumed
from streaming_jobs.proof.rows import VersionRows, all_places, places
from streaming_jobs.proof.spans import Span, merged, sweep, total
from streaming_jobs.proof.subjects import Covered, Packed, Subject, of_spans, packed, shown, unpacked
from streaming_jobs.proof.topic import TopicContent


@dataclass(frozen=True)
class StreamVerdict:
    """What was found about one stream; all offsets are those that the topic holds now.

    `verified` are in exactly one range, `unproved` belong to entries that the log no longer has, `unread` come after
    the stream's last batch. `log_from` is the oldest version in the table's log.
    """

    stream: str
    table: str
    version: int
    log_from: int
    batches: int
    rows: int
    verified: int
    lost: tuple[Span, ...]
    doubled: tuple[Span, ...]
    unproved: int
    unread: int
    faults: tuple[Fault, ...]

    @property
    def ok(self) -> bool:
        """Nothing is wrong. Whether all of it could be proved is `whole`."""
        return not (self.lost or self.doubled or self.faults)

    @property
    def whole(self) -> bool:
        """Every offset of the topic up to the stream's position was judged."""
        return self.ok and not self.unproved


@dataclass(frozen=True)
class Verdict:
    """What was found about all streams; `records` are the topic's."""

    records: int
    streams: tuple[StreamVerdict, ...]

    @property
    def ok(self) -> bool:
        """Nothing is wrong with any stream."""
        return all(stream.ok for stream in self.streams)

    @property
    def whole(self) -> bool:
        """Nothing is wrong, and nothing was left unjudged."""
        return all(stream.whole for stream in self.streams)

    @property
    def verified(self) -> int:
        """Offsets that are in exactly one range, over all streams."""
        return sum(stream.verified for stream in self.streams)

    @property
    def lost(self) -> int:
        """Offsets lost, over all streams."""
        return sum(total(stream.lost) for stream in self.streams)

    @property
    def doubled(self) -> int:
        """Offsets doubled, over all streams."""
        return sum(total(stream.doubled) for stream in self.streams)

    @property
    def unread(self) -> int:
        """Offsets after the last batch, over all streams."""
        return sum(stream.unread for stream in self.streams)


def newest_versions(subjects: Sequence[Subject], tables: Path) -> dict[str, int]:
    """The newest version of each subject's table; ask before reading a topic, while streams go on reading it."""
    return {subject.table: max(versions(tables / subject.table), default=-1) for subject in subjects}


def verify(
    subjects: Sequence[Subject],
    tables: Path,
    topics: Mapping[str, TopicContent],
    *,
    finished: bool = False,
    at: Mapping[str, int] | None = None,
) -> Verdict:
    """Judge each subject by its table and its topic.

    With `finished`, a stream has to have read everything: what it has not read is lost. `at` names the versions to
    judge, the newest ones if it is left out; they have to be no newer than what is known of the topics.
    """
    at = newest_versions(subjects, tables) if at is None else at
    found = tuple(_Judge(s, tables, topics[s.topic], finished, at[s.table]).verdict() for s in subjects)
    return Verdict(sum(content.records for content in topics.values()), found)


@dataclass
class _Judge:
    subject: Subject
    tables: Path
    topic: TopicContent
    finished: bool
    newest: int
    faults: list[Fault] = field(default_factory=list)
    lost: list[Span] = field(default_factory=list)
    doubled: list[Span] = field(default_factory=list)
    unproved: int = 0
    unread: int = 0
    verified: int = 0

    def verdict(self) -> StreamVerdict:
        path = self.tables / self.subject.table
        there = [version for version in versions(path) if version <= self.newest]
        chain = self._chain(path, there)
        before = self._gone(chain, there)
        for number, content in sorted(self.topic.partitions.items()):
            self._partition(chain, before, Span(self.topic.name, number, content.low, content.high))
        rows = self._rows(path, there, chain, before)
        self._elsewhere(chain, before)
        return StreamVerdict(
            stream=self.subject.stream,
            table=self.subject.table,
            version=there[-1] if there else -1,
            log_from=there[0] if there else 0,
            batches=chain.batches,
            rows=rows,
            verified=self.verified,
            lost=tuple(merged(self.lost)),
            doubled=tuple(merged(self.doubled)),
            unproved=self.unproved,
            unread=self.unread,
            faults=tuple(self.faults),
        )

    def _chain(self, path: Path, there: Sequence[int]) -> Chain:
        chain = Chain(self.subject.stream, self.subject.table)
        for place, version in enumerate(there):
            if place and version != there[place - 1] + 1:
                self._fault(version, "entry", f"the log has no version {there[place - 1] + 1} to {version - 1}")
            try:
                self.faults += chain.take(read_commit(path, version))
            except (OSError, ValueError) as error:
                self._fault(version, "unreadable", f"its commit cannot be read: {error}")
        if not there:
            self._fault(None, "unreadable", "there is no such table")
        elif chain.last is not None:
            self._ids(chain.last)
        return chain

    def _ids(self, last: Entry) -> None:
        for read in last.ranges:
            if read.topic == self.topic.name and read.topic_id != self.topic.topic_id:
                self._fault(
                    None,
                    "topic",
                    f"was made from topic {read.topic} with id {read.topic_id}, now {self.topic.topic_id}",
                )

    def _gone(self, chain: Chain, there: Sequence[int]) -> list[Span]:
        """What entries that the log no longer has must have covered, or a recovery has rebuilt: it is not looked at."""
        if chain.believed:
            return chain.believed
        if there and there[0] > 0 and chain.first is not None:
            return assumed(chain.first)
        return []

    def _partition(self, chain: Chain, before: list[Span], whole: Span) -> None:
        """Lay the entries' ranges of one partition over what the topic holds of it."""
        mine = [
            span for span in (*chain.spans, *before) if (span.topic, span.partition) == (whole.topic, whole.partition)
        ]
        skipped = [s for s in chain.skipped if (s.topic, s.partition) == (whole.topic, whole.partition)]
        found = sweep([*mine, *skipped], whole)
        ends = max((span.end for span in mine), default=whole.start)
        for span in found.missing:
            if span.start >= ends and not self.finished:
                self.unread += span.offsets
            else:
                self.lost.append(span)
        self.doubled += found.doubled
        for span in found.beyond:
            self._fault(None, "offsets", f"its entries cover {span}, which the topic does not hold")
        assumed_here = sum(
            max(0, min(s.end, whole.end) - max(s.start, whole.start))
            for s in before
            if (s.topic, s.partition) == (whole.topic, whole.partition)
        )
        self.unproved += assumed_here
        twice = sum(max(0, min(s.end, whole.end) - max(s.start, whole.start)) for s in found.doubled)
        left_out = sum(max(0, min(s.end, whole.end) - max(s.start, whole.start)) for s in skipped)
        self.verified += whole.offsets - total(found.missing) - twice - assumed_here - left_out

    def _rows(self, path: Path, there: Sequence[int], chain: Chain, before: list[Span]) -> int:
        """Judge the rows of the newest version; how many there are."""
        if not there:
            return 0
        try:
            rows = VersionRows(path, self.subject.rule.columns).at(there[-1])
            covered = self._covered(chain, before)
        except (DeltaError, OSError, ValueError, pa.ArrowException) as error:
            self._fault(there[-1], "unreadable", f"its rows cannot be read: {str(error)[:300]}")
            return 0
        for finding in self.subject.rule.findings(rows, covered):
            self.lost += finding.missing
            self.doubled += finding.doubled
            self._fault(there[-1], "rows", finding.text)
        return int(rows.num_rows)

    def _elsewhere(self, chain: Chain, before: list[Span]) -> None:
        """No record is twice in a further table, and none is there that the primary table's entries do not cover.

        Unless the streams have finished, the next batch may be in such a table already: it commits before the primary.
        """
        spans = [span for span in (*chain.spans, *before) if span.topic == self.topic.name]
        covered, ends = of_spans(spans), {span.partition: span.end for span in merged(spans)}
        for other in self.subject.elsewhere:
            unique, counts = np.unique(places(self.tables, other), return_counts=True)
            twice = unpacked(self.topic.name, unique[counts > 1].tolist())
            extra = unpacked(self.topic.name, np.setdiff1d(unique, covered).tolist())
            extra = [span for span in extra if self.finished or span.start < ends.get(span.partition, 0)]
            self.doubled += twice
            for found, what in ((twice, "are in more than one row of"), (extra, "are covered by no entry and in")):
                if found:
                    self._fault(None, "rows", f"{total(found):,} offsets {what} table {other.table}: {shown(found)}")

    def _covered(self, chain: Chain, before: list[Span]) -> Covered:
        """Covered records: offsets that hold none (transaction markers) are left out where the topic still knows."""
        spans = [span for span in (*chain.spans, *before) if span.topic == self.topic.name]
        covered = np.unique(of_spans(spans))
        known, keys = _known(self.topic)
        low = {number: content.low for number, content in self.topic.partitions.items()}
        past = of_spans([replace(s, end=min(s.end, low.get(s.partition, 0))) for s in spans])
        records = np.union1d(np.intersect1d(covered, known), past)
        records = np.setdiff1d(records, all_places(self.tables, self.subject.elsewhere))
        return Covered(self.topic.name, records, None if before else chain.written, keys)

    def _fault(self, version: int | None, kind: str, text: str) -> None:
        self.faults.append(Fault(self.subject.table, version, kind, text))  # type: ignore[arg-type]


def _known(topic: TopicContent) -> tuple[Packed, dict[int, bytes | None]]:
    """Places of the records that the topic holds, and their keys."""
    parts = [packed(np.full(len(c.offsets), number), c.offsets) for number, c in topic.partitions.items()]
    places = np.concatenate(parts) if parts else packed([], [])
    keys = [key for content in topic.partitions.values() for key in content.keys]
    return np.sort(places), dict(zip(places.tolist(), keys, strict=True))
