"""The rebuild of one slice, from the records to the commit. Read `rebuild`; it works in this order.

1. The base: the table's version, and the records that the stream has read up to that version; the stream adds later
   records itself. Kafka's look-up by timestamp gives the lower bound: an event time is at most `max_ahead` after its
   record's timestamp. If needed offsets are gone from Kafka, or a recovery has skipped them, the slice is impossible.
2. The stream's own function on a batch read of these records; its rows are staged beside the table, and those that
   rules set aside beside its quarantine (`quarantine.py`).
3. The difference from the rows that are there. If there is none, or it is a dry run, it ends here.
4. The change waits as a file beside the stream's state. The stream's driver commits it at its next batch border; if no
   driver runs, this process takes the stream's lease and commits it itself.
5. If the table was compacted meanwhile, the slice is rebuilt on the newest version, a few times.

A kill at any moment leaves the table with the old slice or with the new one; the next rebuild removes staged files. A
kill between the commits to the quarantine and to the table leaves the change waiting: the next driver ends it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Set
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from functools import partial
from typing import TYPE_CHECKING

from reprocessing.replay.commit_wait import committed_or_withdrawn
from reprocessing.replay.difference import Difference, compare
from reprocessing.slices.base import SliceBase, SliceOpen, column_kind, late_records, take_base
from reprocessing.slices.quarantine import FIGURES, MOST, SettledRows, StagedQuarantine, staged_quarantine
from streaming_jobs.declare.slices import SliceRange, slice_range
from streaming_jobs.errors import CommitRefused, LeaseBusy, PreflightRefused, UsageError
from streaming_jobs.ledger.entry import CodeVersion, LedgerEntry, change_name
from streaming_jobs.ledger.positions import OffsetRange
from streaming_jobs.platform.failures import classify, function_raised
from streaming_jobs.preflight.truncated_files import repair
from streaming_jobs.runtime.code_version import loaded_code
from streaming_jobs.runtime.crash_points import crash_point
from streaming_jobs.runtime.slice_commits import carry_out
from streaming_jobs.runtime.sliceable import Sliceable, check_plan
from streaming_jobs.settings import Settings
from streaming_jobs.sinks.sliced import Rebuilt, StagedSlice, sliced
from streaming_jobs.sinks.tables import open_tables
from streaming_jobs.sources.base import Aside, TopicReader
from streaming_jobs.sources.connection import client_file, remove_client_file
from streaming_jobs.state import stream_record
from streaming_jobs.state.lease import take
from streaming_jobs.state.set_aside import of_letters
from streaming_jobs.state.slice_requests import SliceCommitRequest, SliceRequests
from streaming_jobs.state.stream_history import note_slice
from streaming_jobs.storage.locations import local_scratch
from streaming_jobs.stream import Stream
from streaming_jobs.table_sources.archives import Archives
from streaming_jobs.text import commands
from streaming_jobs.text.spelling import counted

if TYPE_CHECKING:
    from pyspark.sql import Column, SparkSession


_TRIES = 5
_MARGIN = 60.0
"""Seconds after the end of the wait for which a waiting change is still valid: the wait ends, then it is withdrawn."""


def note_lost(settings: Settings, made: Sliceable, day: str, why: str) -> None:
    """Keep as an outcome that the slice of a day cannot be rebuilt, since records that it needs are gone."""
    record = stream_record.load(settings, made.stream.name)
    assert record is not None, "a stream without one is refused before"
    chosen, name = slice_range(made.slices, "timestamp", day, None), change_name(made.table.name, datetime.now(UTC))
    entry = LedgerEntry("slice", made.stream.name, made.table.name, record.generation, -1, plan=name, note=chosen.words)
    lost = SliceCommitRequest(
        id=name,
        stream=made.stream.name,
        table=made.table.name,
        entry=entry.encode(),
        change={},
        expires=0.0,
        summary={"slice": chosen.words},
        begin=chosen.begin.timestamp(),
        end=chosen.end.timestamp(),
    )
    SliceRequests.of(settings, made.stream.name).end(lost.ended("failed", reason=why))


def entry_of(
    base: SliceBase, table: str, plan: str, words: str, code: CodeVersion, rows: Mapping[str, int]
) -> LedgerEntry:
    return LedgerEntry(
        kind="slice",
        stream=base.record.stream,
        table=table,
        generation=base.record.generation,
        batch=base.entry.batch,
        offsets=(base.offsets,),
        rows=rows,
        code=code,
        plan=plan,
        note=words,
    )


Tell = Callable[[str], None]


@dataclass(frozen=True)
class Waits:
    """Waits in seconds: for another rebuild of the stream, for the slice to be closed, and for the commit."""

    other: float = 600.0
    closed: float = 0.0
    commit: float = 300.0


@dataclass(frozen=True)
class Tools:
    """The services of a rebuild: settings, topics and their address, Spark when it is needed, and words for people."""

    settings: Settings
    topics: TopicReader
    bootstrap: str
    spark: Callable[[], SparkSession]
    tell: Tell = lambda _: None
    waits: Waits = Waits()
    despite_accepted: bool = False


@dataclass(frozen=True)
class SliceReport:
    """The outcome of one rebuild. `version` is that of the commit; None without one: `outcome` says why.

    `late` are the records, of all those that were read (`offsets`), that the stream had dropped behind its watermark.
    `quarantine` is what the table's quarantine has of the slice, if the table has one.
    """

    id: str
    stream: str
    table: str
    words: str
    outcome: str
    base: int
    version: int | None
    records: int
    taken_out: int
    refused: int
    late: int
    tries: int
    seconds: float
    difference: Difference
    offsets: OffsetRange
    quarantine: SettledRows | None = None

    @property
    def text(self) -> str:
        rows = f"{self.difference.old_rows:,} rows before, {self.difference.new_rows:,} after"
        version = f" as version {self.version}" if self.version is not None else ""
        return f"slice {self.words} of table {self.table} rebuilt{version}: {rows}{self.aside_text}"

    @property
    def aside_text(self) -> str:
        """What changes in the quarantine, in words behind others; empty if nothing does."""
        if self.quarantine is None or not self.quarantine.changes:
            return ""
        gone, came = self.quarantine.gone, self.quarantine.came
        return f"; {counted(gone, 'row', 'leaves', 'leave')} its quarantine, {counted(came, 'row', 'comes', 'come')}"

    @property
    def figures(self) -> dict[str, int]:
        """The numbers of the slice's rows by their names."""
        difference, aside = self.difference, self.quarantine
        return {
            "rows_before": difference.old_rows,
            "rows_after": difference.new_rows,
            **difference.counts._asdict(),
            **({f"quarantine_{name}": number for name, number in aside.figures.items()} if aside is not None else {}),
        }


@dataclass(frozen=True)
class CheckedLetters:
    """Dead letters of the slice's topic, by partition and offset, that the code of today was run on already.

    A slice is made without the records on which the function raised, by their dead letters. The `accepted` ones are
    read all the same, the `rejected` ones are left out too.
    """

    accepted: Set[tuple[int, int]] = frozenset()
    rejected: Set[tuple[int, int]] = frozenset()

    def aside(self, letters: Aside) -> Aside:
        """What a slice is made without."""
        return {place: None for place in (*letters, *self.rejected) if place not in self.accepted}


NO_LETTERS = CheckedLetters()


def slice_offsets(tools: Tools, made: Sliceable, begin: str, end: str | None) -> OffsetRange:
    """The offsets that the slice would be made from now; raises what `rebuild` raises before it starts Spark."""
    return _closed_base(tools, made, slice_range(made.slices, column_kind(tools.settings, made), begin, end)).offsets


def rebuild(
    tools: Tools,
    made: Sliceable,
    begin: str,
    end: str | None,
    *,
    dry_run: bool = False,
    letters: CheckedLetters = NO_LETTERS,
) -> SliceReport:
    """Rebuild the slice between two days or times; raises the refusal's error if it cannot be, or is not, rebuilt."""
    kind = column_kind(tools.settings, made)
    chosen = slice_range(made.slices, kind, begin, end)
    requests = SliceRequests.of(tools.settings, made.stream.name)
    with requests.running(tools.waits.other):
        began, reason = time.monotonic(), ""
        repair_idle(tools.settings, made.stream)
        for attempt in range(1, _TRIES + 1):
            base = _closed_base(tools, made, chosen)
            started = _Attempt(tools, made, chosen, base, datetime.now(UTC), requests, began, attempt, letters)
            needed = _waiting(requests)
            for each in (base.table, base.quarantine):
                if each is not None:
                    sliced(each).remove_staged(needed)
            staged = sliced(base.table).stage(started.name)
            try:
                done = _attempt(started, staged, dry_run)
            finally:
                if started.name not in _waiting(requests):
                    staged.remove()
            if isinstance(done, SliceReport):
                if done.outcome == "committed":
                    note_slice(tools.settings, done.stream, base.record.generation, done.text)
                return done
            reason = done
            tools.tell(f"{reason}: the slice is rebuilt on the newest version")
    raise CommitRefused(
        f"the slice {chosen.words} of table {made.table.name} was rebuilt {_TRIES} times, and each time the table had "
        f"changed before the commit: {reason}",
        "rebuild it at a quieter time, or while the stream is stopped",
    )


@dataclass(frozen=True)
class _Attempt:
    tools: Tools
    made: Sliceable
    chosen: SliceRange
    base: SliceBase
    at: datetime
    requests: SliceRequests
    began: float
    number: int
    letters: CheckedLetters

    @property
    def name(self) -> str:
        return change_name(self.made.table.name, self.at)

    def report(
        self,
        outcome: str,
        version: int | None,
        rebuilt: Rebuilt,
        difference: Difference,
        quarantine: StagedQuarantine | None,
    ) -> SliceReport:
        return SliceReport(
            id=self.name,
            stream=self.made.stream.name,
            table=self.made.table.name,
            words=self.chosen.words,
            outcome=outcome,
            base=self.base.table.version,
            version=version,
            records=self.base.offsets.records,
            taken_out=rebuilt.taken_out,
            refused=rebuilt.refused,
            late=late_records(self.tools.settings, self.base.record, self.base.offsets),
            tries=self.number,
            seconds=round(time.monotonic() - self.began, 2),
            difference=difference,
            offsets=self.base.offsets,
            quarantine=quarantine.rows if quarantine is not None else None,
        )

    def request(self, table: str, plan: str, rows: Mapping[str, int]) -> SliceCommitRequest:
        """The request for the slice of a table, without its change; `plan` names the commits that belong together."""
        code, words = loaded_code(self.made.stream, self.tools.settings.flows), self.chosen.words
        numbers = {name: rows[name] for name in ("before", "after")}
        return SliceCommitRequest(
            id=plan,
            stream=self.made.stream.name,
            table=table,
            entry=entry_of(self.base, table, plan, words, code, numbers).encode(),
            change={},
            expires=time.time() + self.tools.waits.commit + _MARGIN,
            summary={"slice": words, **rows},
            begin=self.chosen.begin.timestamp(),
            end=self.chosen.end.timestamp(),
        )


def _attempt(at: _Attempt, staged: StagedSlice, dry_run: bool) -> SliceReport | str:
    """One attempt: the report, or the reason why the slice has to be rebuilt on a newer version."""
    try:
        staged.split(at.chosen)  # first: links keep the version's files while the function runs
    except PreflightRefused as error:
        return f"version {at.base.table.version} is gone: {error.found}"
    rebuilt = _compute(at, staged)
    with local_scratch(staged.folder) as scratch:
        difference = compare(at.made.table.name, staged.before(), staged.after(), (), scratch / "compared")
    quarantine = _quarantine(at, staged)
    try:
        return _ended(at, staged, rebuilt, difference, quarantine, dry_run=dry_run)
    finally:
        if quarantine is not None and quarantine.name not in _waiting(at.requests):
            quarantine.staged.remove()


def _quarantine(at: _Attempt, staged: StagedSlice) -> StagedQuarantine | None:
    """The quarantine's side of the slice; None for a table without one, or without rows for it."""
    today, table = staged.quarantined(MOST), at.base.quarantine
    if today is None or (table is None and not today.num_rows):
        return None
    if table is None:
        name = at.made.stream.quarantines[at.made.table.name]
        raise PreflightRefused(f"there is no table {name} yet", "start the stream once with the code of today")
    return staged_quarantine(table, change_name(table.name, at.at), at.chosen, today, at.base.entry.txn)


def _ended(
    at: _Attempt,
    staged: StagedSlice,
    rebuilt: Rebuilt,
    difference: Difference,
    quarantine: StagedQuarantine | None,
    *,
    dry_run: bool,
) -> SliceReport | str:
    report = partial(at.report, rebuilt=rebuilt, difference=difference, quarantine=quarantine)
    if dry_run:
        return report(nothing_committed(difference, dry_run), None)
    figures = difference.old_rows, difference.new_rows, difference.only_old, difference.only_new
    request = at.request(at.made.table.name, at.name, dict(zip(FIGURES, figures, strict=True)))
    differs, asked = bool(difference.only_old or difference.only_new), list[SliceCommitRequest]()
    if quarantine is not None and quarantine.rows.changes:
        aside = at.request(quarantine.table, at.name if differs else quarantine.name, quarantine.rows.figures)
        asked.append(replace(aside, id=quarantine.name, change=quarantine.staged.change()))
    if differs:
        asked = [replace(request, change=staged.change(), quarantine=asdict(asked[0]) if asked else None)]
    if asked:
        crash_point("slice_staged", request.stream, 0)
        ended = _committed(at, asked[0])
        if ended.state == "outdated":
            return ended.reason
        if ended.state != "committed":
            raise PreflightRefused(f"the slice {at.chosen.words} was not committed: {ended.reason}", "rebuild it again")
    if differs:
        return report("committed", ended.version)
    at.requests.end(request.ended("unchanged"))  # the table has the records, those that were late included
    return report("committed" if asked else nothing_committed(difference, dry_run), None)


def _committed(at: _Attempt, request: SliceCommitRequest) -> SliceCommitRequest:
    """The request with its outcome."""
    settings, stream = at.tools.settings, at.made.stream
    at.requests.ask(request)
    crash_point("slice_asked", request.stream, 0)
    return committed_or_withdrawn(
        settings,
        at.requests,
        request,
        lambda _: carry_out(at.requests, open_tables(settings, stream)),
        at.tools.waits.commit,
        at.tools.tell,
    )


def _waiting(requests: SliceRequests) -> set[str]:
    """The names of slices whose staged files are needed."""
    return {part.id for request in requests.waiting() for part in request.parts}


def repair_idle(settings: Settings, stream: Stream) -> None:
    """Remove what a power cut has truncated, as a start of the stream would, if no driver runs: it looks itself."""
    try:
        with take(settings, stream.name, purpose="repair", wait=0.0):
            repair(settings, stream)
    except LeaseBusy:
        return


def _compute(at: _Attempt, staged: StagedSlice) -> Rebuilt:
    from pyspark.errors import PySparkException
    from pyspark.sql import functions as F

    from streaming_jobs.runtime.spark_plan import analysed
    from streaming_jobs.sources.kafka import KafkaSource

    made, stream, offsets = at.made, at.made.stream, at.base.offsets
    if at.number == 1:
        at.tools.tell("starting Spark, which runs the stream's function on the slice's records")
    spark = at.tools.spark()
    client = client_file(at.tools.settings, at.tools.bootstrap)
    try:
        readable = Archives(at.tools.settings)
        archive = readable.of(stream, offsets.topic, offsets.topic_id)
        void = readable.void_of(stream, offsets.topic, offsets.topic_id)
        aside = at.letters.aside(of_letters(at.tools.settings.tables / stream.dead_letters, offsets.topic))
        source = KafkaSource(made.parameter, made.topic, client, made.topic.delay, archive, void, aside=aside)
        frame = source.batch(spark, offsets.start, offsets.end)
        if made.required:
            moment = F.col(f"`{made.event_time}`").cast("timestamp")
            first, last = at.chosen.begin - made.slices.distance, at.chosen.end + made.slices.distance
            frame = frame.where((moment >= _lit(first)) & (moment < _lit(last)))
        try:
            output = stream.outputs(**{made.parameter: frame})[made.sink]
            plan = analysed(output)
        except UsageError:
            raise
        except PySparkException as error:
            raise UsageError(
                f"the function of stream {stream.name} cannot run on a batch of records: {str(error).splitlines()[0]}",
                f"rebuild the whole table: {commands.plan(stream.name, to_earliest=True)}",
            ) from error
        except Exception as error:
            raise function_raised(stream.function, error) from error
        check_plan(made, plan)
        topics = [topic.name for topic in stream.sources.values()]
        try:
            return staged.write(output, at.chosen, topics, stream.rules_of(made.table.name))
        except PySparkException as error:
            raise classify(error) from error
    finally:
        remove_client_file(client)


def _lit(at: datetime) -> Column:
    from pyspark.sql import functions as F

    return F.timestamp_micros(F.lit(int(at.timestamp()) * 1_000_000 + at.microsecond))


def _closed_base(tools: Tools, made: Sliceable, chosen: SliceRange) -> SliceBase:
    """The base, once the slice is closed; raises SliceOpen if that takes longer than the wait."""
    deadline, told = time.monotonic() + tools.waits.closed, False
    while True:
        try:
            return take_base(tools.settings, made, chosen, tools.topics, despite_accepted=tools.despite_accepted)
        except SliceOpen as still_open:
            if time.monotonic() > deadline:
                raise
            if not told:
                tools.tell(f"waits: {still_open.found}")
                told = True
            time.sleep(1.0)


def nothing_committed(made: Difference, dry_run: bool) -> str:
    """The outcome of a rebuild without a commit; distinguishes an empty slice from an unchanged one."""
    if not (made.old_rows or made.new_rows or made.unknown):
        return f"{'dry run' if dry_run else 'unchanged'}: no row is in the slice, before or after"
    return "dry run" if dry_run else "unchanged"
