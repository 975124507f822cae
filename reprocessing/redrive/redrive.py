"""The redrive of what a stream has set aside, from the choice to the commit. Read `redrive`; it works in this order.

1. Redrives that wait are given their outcome first, so that nothing is chosen that is under way already.
2. The records of what is chosen, from dead letters, the topic or its archive. What cannot be read is left as it is.
3. The stream's own code on these records, on folders of its own. For a stream of windows, the slices that the records
   belong to are rebuilt now (`windows.py`), and no row is added later. A dry run commits nothing, and ends here.
4. The rows, and what became of each record, wait as files beside the stream's state. The stream's driver commits them
   at its next batch border; if no driver runs, this process takes the stream's lease and commits them itself.

The tables of the rows take a redrive first, the table of what was set aside last, each of them once. A kill before the
redrive waits leaves everything as it was; after that it is committed by whoever comes next, or expires untouched.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

from reprocessing.redrive.records import gather
from reprocessing.redrive.refusals import check_quarantined, check_stream, refused_rows, with_state
from reprocessing.redrive.run import Made, outcomes, run, slice_outcomes
from reprocessing.redrive.selection import Choice, SetAside, quarantined_table, set_aside
from reprocessing.redrive.windows import Windows, rebuild_rows, rebuild_windows, set_aside_again, sliced_tables
from reprocessing.replay.commit_wait import committed_or_withdrawn
from reprocessing.slices.base import newest_entry
from reprocessing.slices.quarantine import in_columns_of, of_batch
from reprocessing.slices.rebuild import SliceReport, Tools, repair_idle
from reprocessing.trace import first_reading
from streaming_jobs.errors import PreflightRefused, UsageError
from streaming_jobs.ledger.entry import READ, LedgerEntry, change_name
from streaming_jobs.ledger.positions import OffsetRange
from streaming_jobs.runtime.code_version import loaded_code
from streaming_jobs.runtime.crash_points import crash_point
from streaming_jobs.runtime.redrive_commits import carry_out_redrives
from streaming_jobs.runtime.slice_commits import carry_out as carry_out_slices
from streaming_jobs.runtime.sliceable import Sliceable
from streaming_jobs.settings import Settings
from streaming_jobs.sinks.redriven import Kind, Outcome, Place, RedrivenRecord, RedrivenRow
from streaming_jobs.sinks.tables import existing_table, open_tables
from streaming_jobs.state import stream_record
from streaming_jobs.state.lease import Lease
from streaming_jobs.state.redrive_requests import RedrivePart, RedriveRequest, RedriveRequests
from streaming_jobs.state.slice_requests import SliceRequests
from streaming_jobs.state.stream_folder import local_folder
from streaming_jobs.state.stream_record import StreamRecord
from streaming_jobs.storage.files import private_folder
from streaming_jobs.storage.locations import remove_tree
from streaming_jobs.stream import Stream
from streaming_jobs.text.spelling import counted

if TYPE_CHECKING:
    import pyarrow as pa

MOST = 10_000
"""Records of one redrive, at most."""
_MARGIN = 60.0
"""Seconds after the end of the wait for which a redrive is still valid: the wait ends, then it is withdrawn."""


@dataclass(frozen=True)
class RedriveReport:
    """The outcome of a redrive; `id` is None if nothing was committed. `left` are chosen and not redriven, with why.

    `rows` are those that each table gets. `more`: so many were chosen beyond the limit. `slices`, of a stream of
    windows, are those that were rebuilt; `windows` are the quarantined rows of these slices. `known`: so many were
    chosen whose slices the code of today has rebuilt already.
    """

    stream: str
    table: str
    outcome: str
    records: tuple[RedrivenRecord, ...] = ()
    rows: Mapping[str, int] = field(default_factory=dict)
    left: tuple[tuple[SetAside, str], ...] = ()
    id: str | None = None
    more: int = 0
    known: int = 0
    seconds: float = 0.0
    slices: tuple[SliceReport, ...] = ()
    windows: tuple[RedrivenRow, ...] = ()

    @property
    def counts(self) -> dict[Outcome, int]:
        return dict(Counter(each.outcome for each in self.redriven))

    @property
    def redriven(self) -> tuple[RedrivenRecord | RedrivenRow, ...]:
        return (*self.records, *self.windows)


def redrive(
    tools: Tools,
    stream: Stream,
    kind: Kind,
    choice: Choice,
    *,
    table: str | None = None,
    limit: int = MOST,
    dry_run: bool = False,
) -> RedriveReport:
    """Redrive what is set aside and chosen; `table` names the table of whose quarantine.

    Raises UsageError for a stream that cannot be redriven, PreflightRefused for a redrive that was not committed.
    """
    settings, began = tools.settings, time.monotonic()
    of = quarantined_table(stream, table) if kind == "quarantine" else ""
    aside = stream.quarantines[of] if of else stream.dead_letters
    requests = RedriveRequests.of(settings, stream.name)
    with requests.running(tools.waits.other):
        finish_waiting(tools, stream, requests)
        chosen = set_aside(settings, stream, kind, choice, table=table)
        record = checked(settings, stream, kind, lambda: chosen, table=table)
        sliced = sliced_tables(stream, of) if record.state_fingerprint else []
        repair_idle(settings, stream)
        entry = _base(settings, stream, record, kind, of)
        known = set_aside_again(settings, record, sliced[0], chosen) if of and sliced else set()
        chosen = [row for number, row in enumerate(chosen) if number not in known]
        rows, more = chosen[:limit], max(len(chosen) - limit, 0)
        if of and sliced:
            report = RedriveReport(stream.name, aside, "nothing to redrive", more=more, known=len(known))
            done = _redriven_rows(tools, record, requests, sliced[0], rows, report, dry_run=dry_run)
            return replace(done, seconds=_since(began))
        left = list(refused_rows(stream, rows, of_windows=bool(sliced)))
        rows = _without(rows, left)
        gathered = gather(settings, stream, record, rows, tools.topics, tools.bootstrap)
        left += [(row, gathered.lost[row.place]) for row in rows if row.place in gathered.lost]
        rows = _without(rows, left)
        report = RedriveReport(stream.name, aside, "nothing to redrive", left=tuple(left), more=more)
        if not rows:
            return replace(report, seconds=_since(began))
        tools.tell(f"starting Spark, which runs the stream's function on {counted(len(rows), 'record')}")
        with _empty_folder(local_folder(settings) / "_redrives" / stream.name) as folder:
            of_rows = any(not row.is_whole for row in rows)
            made = run(
                settings, stream, record, gathered.records, tools.spark(), folder, of_rows=of_rows, sliced=sliced
            )
        if sliced:
            places, dead = {row.place for row in rows if row.place is not None}, made.places(stream.dead_letters, kind)
            windows = rebuild_windows(tools, record, sliced, made, places, dead, dry_run=dry_run)
            crash_point("redrive_rebuilt", stream.name, 0)
            left += _left_by(settings, stream, record, windows, rows)
            rows = _without(rows, left)
            report = replace(report, left=tuple(left), slices=tuple(windows.slices))
        if of:
            check_quarantined(stream, made.reasons(stream.dead_letters))
        records = tuple(_became(stream, kind, of, made, rows, in_slices=bool(sliced)))
        added = {} if sliced else dict(_added(settings, stream, kind, of, made, entry))
        request = _request(tools, stream, kind, aside, entry, records, added)
        report = replace(report, records=records, rows=request.rows)
        done = _ended(tools, stream, requests, request, added, report, dry_run=dry_run)
        return replace(done, seconds=_since(began))


def _redriven_rows(
    tools: Tools,
    record: StreamRecord,
    requests: RedriveRequests,
    table: Sliceable,
    rows: Sequence[SetAside],
    report: RedriveReport,
    *,
    dry_run: bool,
) -> RedriveReport:
    """Redrive quarantined rows of windows: the rebuild of their slices settles the quarantine too."""
    stream, column = table.stream, table.slices.column
    windows = rebuild_rows(tools, record, table, [row.values.get(column) for row in rows], dry_run=dry_run)
    crash_point("redrive_rebuilt", stream.name, 0)
    now = f", or {stream.rebuild_step()}"
    left = [
        (row, f"{column} {row.values.get(column)}: {windows.left[number]}{now if number in windows.open else ''}")
        for number, row in enumerate(rows)
        if number in windows.left
    ]
    aside = [each.quarantine for each in windows.slices if each.quarantine is not None]
    report = replace(
        report,
        left=tuple(left),
        slices=tuple(windows.slices),
        windows=tuple(row for each in aside for row in each.outcomes(column)),
        rows={report.table: came} if (came := sum(each.came for each in aside)) else {},
    )
    if dry_run or not any(each.outcome == "committed" for each in windows.slices):
        unchanged = "nothing has changed" if windows.slices else report.outcome
        return replace(report, outcome="dry run" if dry_run and windows.slices else unchanged)
    name = change_name(report.table, datetime.now(UTC))
    done = RedriveRequest(name, stream.name, "quarantine", report.table, (), (), 0.0, report.rows, report.windows)
    requests.end(done.committed({}))  # the slices have the commits; this says what became of the rows
    return replace(report, outcome="committed", id=name)


def _ended(
    tools: Tools,
    stream: Stream,
    requests: RedriveRequests,
    request: RedriveRequest,
    kept: Mapping[str, pa.Table],
    report: RedriveReport,
    *,
    dry_run: bool,
) -> RedriveReport:
    """The report with its outcome, committed unless it is a dry run or changes nothing; `kept` are rows by table."""
    if dry_run or not request.parts:
        return replace(report, outcome="dry run" if dry_run else "nothing has changed")
    return _committed(tools, stream, requests, request, kept, report)


@contextmanager
def _empty_folder(folder: Path) -> Iterator[Path]:
    """A folder for one run, without what a killed one has left; it has records, and goes with the run."""
    remove_tree(folder)
    try:
        yield private_folder(folder)
    finally:
        remove_tree(folder)


def _since(began: float) -> float:
    return round(time.monotonic() - began, 2)


def finish_waiting(tools: Tools, stream: Stream, requests: RedriveRequests) -> None:
    """Wait until each redrive that a killed command has left is committed, or has expired."""
    for request in requests.waiting():
        tools.tell(f"redrive {request.id} waits for its commit: it goes first")
        committed_or_withdrawn(
            tools.settings, requests, request, _carry_out(tools, stream, requests), tools.waits.commit, tools.tell
        )


def _carry_out(tools: Tools, stream: Stream, requests: RedriveRequests) -> Callable[[Lease], None]:
    def carry_out(lease: Lease) -> None:
        tables = open_tables(tools.settings, stream)
        generation = stream_record.existing(tools.settings, stream.name).generation
        for table in tables.values():
            table.under(lease, generation)
        carry_out_slices(SliceRequests.of(tools.settings, stream.name), tables)  # one that was begun goes first
        carry_out_redrives(requests, tables)

    return carry_out


def checked(
    settings: Settings,
    stream: Stream,
    kind: Kind,
    chosen: Callable[[], Sequence[SetAside]] = list,
    *,
    table: str | None = None,
) -> StreamRecord:
    """The stream's record; raises UsageError for a stream whose records cannot be redriven, as far as files say.

    `chosen` is called only for a stream with state that is refused: the refusal names a plan from before these records.
    `table` names the table of whose quarantine.
    """
    record = stream_record.load(settings, stream.name)
    if record is None:
        raise UsageError(f"stream {stream.name} has never run", "there is nothing to redrive")
    of = quarantined_table(stream, table) if kind == "quarantine" else ""
    if record.state_fingerprint and (why := _without_slices(stream, of)):
        raise with_state(stream, _last_before(settings, stream, record, chosen()), why)
    check_stream(stream)
    return record


def _without_slices(stream: Stream, of: str) -> str:
    """The reason why no slices are rebuilt for what is set aside, of one table or of all; empty if they can be."""
    try:
        sliced_tables(stream, of)
    except UsageError as error:
        return error.found
    return ""


def _left_by(
    settings: Settings, stream: Stream, record: StreamRecord, windows: Windows[Place], rows: Sequence[SetAside]
) -> Iterator[tuple[SetAside, str]]:
    """Yields the records that no slice was rebuilt for, with the reason; of open windows also what needs no wait."""
    is_open = [row for row in rows if row.place in windows.open]
    now = f", or {stream.rebuild_step(_last_before(settings, stream, record, is_open))}" if is_open else ""
    for row in rows:
        if row.place in windows.left:
            yield row, windows.left[row.place] + (now if row.place in windows.open else "")


def _last_before(settings: Settings, stream: Stream, record: StreamRecord, rows: Sequence[SetAside]) -> int:
    """The last batch before those that read the records; -1 if it is not known, or of an earlier generation."""
    first = first_reading(settings, stream, {row.place for row in rows if row.place is not None})
    return -1 if first is None or first.generation != record.generation else first.batch - 1


def _base(settings: Settings, stream: Stream, record: StreamRecord, kind: Kind, of: str) -> LedgerEntry:
    """The entry of the stream's newest batch; refuses tables that a recovery or another program changes."""
    found = []
    for name, table in open_tables(settings, stream).items():
        table.check_one_commit()
        if name == (stream.quarantines[of] if kind == "quarantine" else stream.dead_letters):
            table.check_removable()
        found.append(newest_entry(table, record))
    existing_table(settings, stream.primary, stream.name)
    reached = [entry for entry in found if entry is not None and entry.batch >= 0]
    if not reached:
        raise UsageError(f"stream {stream.name} has not finished a batch yet", "there is nothing to redrive")
    return max(reached, key=lambda entry: entry.txn)


def _without(rows: Sequence[SetAside], left: Sequence[tuple[SetAside, str]]) -> list[SetAside]:
    refused = {id(row) for row, _ in left}
    return [row for row in rows if id(row) not in refused]


def _became(
    stream: Stream, kind: Kind, of: str, made: Made, rows: Sequence[SetAside], *, in_slices: bool
) -> Iterator[RedrivenRecord]:
    places = [row.place for row in rows if row.place is not None]
    found = slice_outcomes(stream, made, places) if in_slices else outcomes(stream, kind, of, made, places)
    letters: dict[Place, tuple[str, str]] = {}
    if stream.dead_letters in made.tables:
        for letter in made.tables[stream.dead_letters].to_pylist():
            place = letter["topic"], letter["partition"], letter["offset"]
            letters.setdefault(place, (letter["reason"] or "", letter["detail"] or ""))
    for row in rows:
        assert row.place is not None, "those without one are refused"
        outcome = found[row.place]
        reason, detail = letters.get(row.place, ("", "")) if outcome == "dead again" else ("", "")
        changed = kind == "dead letters" and reason != row.reason
        now = (reason, detail) if changed else ("", "")
        yield RedrivenRecord(*row.place, row.reason, outcome, *now)


def _added(
    settings: Settings, stream: Stream, kind: Kind, of: str, made: Made, entry: LedgerEntry
) -> Iterator[tuple[str, pa.Table]]:
    """Yields the rows that each table gets, in its columns, the primary table last."""
    tables = open_tables(settings, stream)
    for quarantine in stream.quarantines.values() if kind == "dead letters" else ():
        if (rows := made.tables.get(quarantine)) is not None:
            yield quarantine, in_columns_of(tables.get(quarantine), quarantine, of_batch(rows, entry.txn))
    for sink in (*stream.secondary, stream.primary):
        if of in ("", sink.name) and sink.name in made.tables:
            yield sink.name, in_columns_of(tables.get(sink.name), sink.name, made.tables[sink.name])


def _request(
    tools: Tools,
    stream: Stream,
    kind: Kind,
    aside: str,
    entry: LedgerEntry,
    records: tuple[RedrivenRecord, ...],
    added: Mapping[str, pa.Table],
) -> RedriveRequest:
    number = len(records)
    name = change_name(aside, datetime.now(UTC))
    base = replace(
        entry,
        kind="redrive",
        offsets=tuple(_ranges(entry, records)),
        txns={},
        code=loaded_code(stream, tools.settings.flows),
        plan=name,
        note=counted(number, "dead letter" if kind == "dead letters" else "quarantined row"),
        rules={},
        new=None,
        written=(),
        lookups={},
    )

    def part(table: str, before: int, after: int) -> str:
        return replace(base, table=table, rows={READ: number, "before": before, "after": after}).encode()

    parts = [RedrivePart(table, "add", part(table, 0, rows.num_rows)) for table, rows in added.items()]
    request = RedriveRequest(
        id=name,
        stream=stream.name,
        kind=kind,
        table=aside,
        records=records,
        parts=(),
        expires=time.time() + tools.waits.commit + _MARGIN,
        rows={table: rows.num_rows for table, rows in added.items()},
    )
    if out := request.taken_out:
        stay = sum(1 for each in out if each.reason_now)
        parts.append(RedrivePart(aside, "take_out", part(aside, len(out), stay)))
    return replace(request, parts=tuple(parts))


def _ranges(entry: LedgerEntry, records: Sequence[RedrivenRecord]) -> Iterator[OffsetRange]:
    """Yields by topic the offsets from the first record to the last one of each partition."""
    ids = {read.topic: read.topic_id for read in entry.offsets}
    for topic in sorted({record.topic for record in records}):
        offsets: dict[int, list[int]] = {}
        for record in records:
            if record.topic == topic:
                offsets.setdefault(record.partition, []).append(record.offset)
        start, end = ({p: f(each) for p, each in offsets.items()} for f in (min, max))
        yield OffsetRange(topic, ids.get(topic, ""), start, {p: last + 1 for p, last in end.items()})


def _committed(
    tools: Tools,
    stream: Stream,
    requests: RedriveRequests,
    request: RedriveRequest,
    added: Mapping[str, pa.Table],
    report: RedriveReport,
) -> RedriveReport:
    requests.remove_rows([each.id for each in requests.waiting()])
    for table, rows in added.items():
        requests.keep_rows(request.id, table, rows)
    crash_point("redrive_staged", stream.name, 0)
    requests.ask(request)
    crash_point("redrive_asked", stream.name, 0)
    carry_out = _carry_out(tools, stream, requests)
    ended = committed_or_withdrawn(tools.settings, requests, request, carry_out, tools.waits.commit, tools.tell)
    requests.remove_rows([each.id for each in requests.waiting()])
    if ended.state != "committed":
        raise PreflightRefused(f"the redrive was not committed: {ended.reason}", "redrive again")
    return replace(report, outcome="committed", id=request.id)
