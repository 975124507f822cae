"""The verifier: checks that every record of the topics is in the tables exactly once. Read `verify`; it works alone.

It reads the tables (Delta's log and Parquet), the topics, and from the streams' state the ledger file and the record of
generations, for what the logs no longer hold. It shares no code with what writes: not the ledger's own reader, not the
checkpoint's, not the batch pipeline.

For each stream it compares the offset ranges of all ledger entries with the offsets that the topic holds: an offset in
no range is *lost*, in two ranges *doubled*, after the last range *unread*. Then the rows of each table are compared
with what is known of them; each `Comparison` says what was compared and what was not.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from streaming_jobs.storage.locations import Location
from streaming_jobs.verification.comparisons import compare_tables
from streaming_jobs.verification.dead_letters import Refusals
from streaming_jobs.verification.delta_log import Entry, commit_file, read_commit, versions
from streaming_jobs.verification.examination import Examination
from streaming_jobs.verification.ledger_chain import Chain, Kind, TableFault, assumed
from streaming_jobs.verification.lineage import NO_VOID, Batch, Coverage, VoidOffsets, coverage
from streaming_jobs.verification.offset_ranges import Span, merged, of_partition, sweep, total
from streaming_jobs.verification.state_evidence import StateEvidence
from streaming_jobs.verification.subject import Comparison, Subject
from streaming_jobs.verification.topic import CommittedTopic


def newest_versions(subjects: Sequence[Subject], tables: Location) -> dict[str, int]:
    """The newest version of each subject's table, -1 without one; call it before the ends of the topics are read."""
    return {subject.table: max(versions(tables / subject.table), default=-1) for subject in subjects}


def verify(
    subjects: Sequence[Subject],
    tables: Location,
    topics: Mapping[str, CommittedTopic],
    *,
    finished: bool = False,
    at: Mapping[str, int] | None = None,
    state: Location | None = None,
    refusals: Mapping[str, Refusals] | None = None,
    void_before: Mapping[str, str | None] | None = None,
    tell: Callable[[str, int, int], None] = lambda *_: None,
) -> OverallVerdict:
    """Judge each subject by its tables and its topics.

    With `finished`, a stream must have read everything: an offset that it has not read is lost. `at` names the versions
    to judge, the newest ones if it is left out; the topics must have been read after these versions were there. `state`
    is the folder of the streams' state. `refusals` has by stream the verdicts of its formats on the records; without
    it the dead letters are not compared. `void_before` is what `recorded` gave before `at`; what has changed since is
    not proved. `tell` is called with progress: the activity, streams done, streams in all.
    """
    at = newest_versions(subjects, tables) if at is None else at
    refused = refusals or {}
    verdicts = []
    for number, s in enumerate(subjects):
        tell("comparing tables with topics, streams", number, len(subjects))
        void = NO_VOID if s.reads_void else VoidOffsets.read(state, topics, s.topics, void_before or {})
        beside = StateEvidence.read(state, s.stream) if state is not None else None
        judge = _Judge(s, tables, void.left(topics), finished, at[s.table], beside, refused.get(s.stream), void)
        verdicts.append(judge.verdict())
    read = {name for subject in subjects for name in subject.topics}
    return OverallVerdict(sum(topics[name].records for name in read if name in topics), tuple(verdicts))


@dataclass
class _Judge:
    subject: Subject
    tables: Location
    topics: Mapping[str, CommittedTopic]
    finished: bool
    newest: int
    beside: StateEvidence | None = None
    refusals: Refusals | None = None
    void: VoidOffsets = NO_VOID
    faults: list[TableFault] = field(default_factory=list)
    lost: list[Span] = field(default_factory=list)
    doubled: list[Span] = field(default_factory=list)
    unproved: int = 0
    unread: int = 0
    verified: int = 0
    skipped: int = 0
    why: str = ""
    _position: Batch | None = None
    _logged: dict[tuple[int, int], Entry] = field(default_factory=dict)

    def verdict(self) -> StreamVerdict:
        path = self.tables / self.subject.table
        logged = versions(path)
        there = [version for version in logged if version <= self.newest]
        if logged and not there and self.newest >= 0:
            return self._unproved("its version was cleaned up while the topics were read: verify again")
        for topic, plan in (self.void.under_way or {}).items():
            return self._unproved(
                f"plan {plan} is appending corrected records to topic {topic}: verify when it is over"
            )
        for topic in self.void.changed:
            return self._unproved(f"a recovery of topic {topic} came while the topics were read: verify again")
        chain = self._chain(path, there)
        covered = self.void.taken_out(self._coverage(chain, there))
        for name in self.subject.topics:
            self._topic(covered, name)
        compared: list[Comparison] = []
        rows = 0
        position = self._position
        if there and self.subject.tables:
            known = Examination(
                self.subject,
                self.tables,
                self.topics,
                covered,
                self.beside,
                position,
                there[-1],
                self.refusals,
            )
            compared, lost, doubled, rows = compare_tables(known)
            self.lost += lost
            self.doubled += doubled
        return StreamVerdict(
            stream=self.subject.stream,
            table=self.subject.table,
            version=there[-1] if there else -1,
            log_from=there[0] if there else 0,
            batches=len(covered.entries) if self.beside is not None else chain.batches,
            rows=rows,
            verified=self.verified,
            lost=tuple(merged(self.lost)),
            doubled=tuple(merged(self.doubled)),
            unproved=self.unproved,
            unread=self.unread,
            faults=tuple(self.faults),
            why=self.why if self.unproved else "",
            skipped=self.skipped,
            comparisons=tuple(compared),
            coverage=covered,
            position=position,
            accepted=frozenset(t for t, changes in self.beside.accepted.items() if changes)
            if self.beside
            else frozenset(),
        )

    def _unproved(self, text: str) -> StreamVerdict:
        """The verdict where nothing can be proved, for the reason `text`."""
        table = self.subject.table
        comparisons = (Comparison(table, "rows", "unproved", text),)
        return StreamVerdict(self.subject.stream, table, self.newest, comparisons=comparisons)

    def _chain(self, path: Location, there: Sequence[int]) -> Chain:
        chain = Chain(self.subject.stream, self.subject.table, cut=bool(there) and there[0] > 0)
        accepted = self.beside.accepted.get(self.subject.table, frozenset()) if self.beside is not None else frozenset()
        for place, version in enumerate(there):
            if place and version != there[place - 1] + 1:
                self._fault(version, "entry", f"the log has no version {there[place - 1] + 1} to {version - 1}")
            try:
                commit = read_commit(path, version)
                faults = chain.take(commit)
            except (OSError, ValueError) as error:
                if commit_file(path, version).exists():
                    self._fault(version, "unreadable", f"its commit cannot be read: {error}")
                chain.cut = True  # a running stream has cleaned it up
                continue
            self.faults += [fault for fault in faults if not (fault.kind == "foreign" and version in accepted)]
            if commit.entry is not None and commit.entry.kind == "batch":
                self._logged[commit.entry.generation, commit.entry.batch] = commit.entry
        if not there:
            self._fault(None, "unreadable", "there is no such table")
        elif chain.last is not None:
            self._ids(chain.last)
        return chain

    def _ids(self, last: Entry) -> None:
        for read in last.ranges:
            now = self.topics[read.topic].topic_id if read.topic in self.topics else read.topic_id
            if read.topic_id != now:
                self._fault(None, "topic", f"was made from topic {read.topic} with id {read.topic_id}, now {now}")

    def _coverage(self, chain: Chain, there: Sequence[int]) -> Coverage:
        """The offsets that the rows were made from, by stream record and ledger file, or by the log alone."""
        last = chain.last
        self._position = (last.generation, last.batch) if last is not None else None
        if self.beside is None or not there:
            return self._by_the_log(chain, there)
        if last is None:
            last = self._before_the_log()
            if last is None:
                return Coverage(begins=self.beside.begins)
            self._position = last.generation, last.batch
        if self.beside.life(last.generation) is None:
            self.why = f"a recovery has opened generation {last.generation} and is not finished"
            return self._by_the_log(chain, there)
        published = last if last.kind == "publish" else None
        covered = coverage(self.beside, self._logged, (last.generation, last.batch), published)
        for text in covered.faults:
            self._fault(None, "entry", text)
        if covered.missing:
            self.why = f"the entries of {covered.missing:,} batches are neither in its log nor in the ledger's file"
        return covered

    def _before_the_log(self) -> Entry | None:
        """The newest batch of the ledger file, for a log without batches: it was shortened, or there is none yet."""
        assert self.beside is not None
        newest = max(self.beside.lines, default=None)
        return self.beside.lines[newest] if newest is not None else None

    def _by_the_log(self, chain: Chain, there: Sequence[int]) -> Coverage:
        begins = self.beside.begins if self.beside is not None else {}
        covered = Coverage(begins, proved=list(chain.spans), skipped=list(chain.skipped), missing=0)
        if chain.believed:
            covered.unproved = list(chain.believed)
            self.why = self.why or "a recovery has published their rows, and what it replayed is in another log"
        elif there and there[0] > 0 and (first := chain.first or chain.last) is not None:
            ended = chain.first is None
            covered.unproved = assumed(first, ended=ended)
            self.why = self.why or f"the log of table {self.subject.table} begins at version {there[0]}"
        covered.missing = 1 if covered.unproved else 0
        return covered

    def _topic(self, covered: Coverage, name: str) -> None:
        content = self.topics.get(name)
        if content is None:
            self._fault(None, "topic", f"topic {name} does not exist")
            return
        for number, part in sorted(content.partitions.items()):
            begin = max(part.low, min(covered.begins.get((name, number), 0), part.high))
            self._partition(covered, Span(name, number, begin, part.high))

    def _partition(self, covered: Coverage, whole: Span) -> None:
        """Compare the entries' ranges of one partition with its offsets in the topic."""

        def within(spans: Sequence[Span]) -> int:
            return sum(max(0, min(s.end, whole.end) - max(s.start, whole.start)) for s in spans)

        spans, skipped = of_partition(covered.spans, whole), of_partition(covered.skipped, whole)
        swept = sweep([*spans, *skipped], whole)
        ends = max((span.end for span in spans), default=whole.start)
        for span in swept.missing:
            if span.start >= ends and not self.finished:
                self.unread += span.offsets
            else:
                self.lost.append(span)
        self.doubled += swept.doubled
        for span in swept.beyond:
            self._fault(None, "offsets", f"its entries cover {span}, which the topic does not hold")
        unproved = within(of_partition(covered.unproved, whole))
        self.unproved += unproved
        self.skipped += within(skipped)
        left = total(swept.missing) + within(swept.doubled) + unproved + within(skipped)
        self.verified += whole.offsets - left

    def _fault(self, version: int | None, kind: Kind, text: str) -> None:
        self.faults.append(TableFault(self.subject.table, version, kind, text))


@dataclass(frozen=True)
class StreamVerdict:
    """The verdict on one stream; all offsets are offsets that the topics hold now.

    `verified` are in exactly one range, `unproved` belong to entries that are gone, for the reason `why`; `unread` come
    after the stream's last batch, `skipped` were left out by a recovery. `log_from` is the oldest version in the log
    of the table. `coverage` has the offsets that the rows were made from, up to `position` (generation and batch).
    `accepted` are the tables with an accepted foreign commit. `begun`: the stream has state or tables here.
    """

    stream: str
    table: str
    version: int = -1
    log_from: int = 0
    batches: int = 0
    rows: int = 0
    verified: int = 0
    lost: tuple[Span, ...] = ()
    doubled: tuple[Span, ...] = ()
    unproved: int = 0
    unread: int = 0
    faults: tuple[TableFault, ...] = ()
    why: str = ""
    skipped: int = 0
    comparisons: tuple[Comparison, ...] = ()
    coverage: Coverage = field(default_factory=Coverage, repr=False)
    position: tuple[int, int] | None = None
    accepted: frozenset[str] = frozenset()
    begun: bool = True

    @property
    def ok(self) -> bool:
        """True if nothing is wrong; `whole` also requires that everything was proved."""
        return not (self.lost or self.doubled or self.faults) and all(c.verdict != "wrong" for c in self.comparisons)

    @property
    def whole(self) -> bool:
        """True if every offset up to the stream's position was judged, and no comparison was lacking evidence.

        Without a position no batch is known, so nothing is proved.
        """
        judged = self.position is not None and not self.unproved
        return self.ok and judged and all(c.verdict != "unproved" for c in self.comparisons)


@dataclass(frozen=True)
class OverallVerdict:
    """The verdict on all streams; `records` is the number of records in their topics."""

    records: int
    streams: tuple[StreamVerdict, ...]

    @property
    def ok(self) -> bool:
        """True if nothing is wrong with any stream."""
        return all(stream.ok for stream in self.streams)

    @property
    def whole(self) -> bool:
        """True if nothing is wrong, and nothing was left unjudged."""
        return all(stream.whole for stream in self.streams)

    @property
    def begun(self) -> bool:
        """True if at least one of the streams has ever run."""
        return any(stream.begun for stream in self.streams)

    @property
    def verified(self) -> int:
        """Offsets that are in exactly one range, over all streams."""
        return sum(stream.verified for stream in self.streams)

    @property
    def lost(self) -> int:
        return sum(total(stream.lost) for stream in self.streams)

    @property
    def doubled(self) -> int:
        return sum(total(stream.doubled) for stream in self.streams)

    @property
    def unread(self) -> int:
        return sum(stream.unread for stream in self.streams)
