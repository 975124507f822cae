"""The rebuild of one slice, from the records to the commit. Read `rebuild`; it works in this order.

1. The base: the table's version and the offsets that go with it (`base.py`).
2. The stream's own function on a batch read of these records; its rows are staged beside the table.
3. The difference from the rows that are there. If there is none, or it is a dry run, it ends here.
4. The change waits as a file beside the stream's state. The stream's driver commits it at its next batch border; if no
   driver runs, this process takes the stream's lease and commits it itself.
5. If the table was compacted meanwhile, the slice is rebuilt on the newest version, a few times.

A kill at any moment leaves the table with the old slice or with the new one; what is staged, the next rebuild removes.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from reprocessing.planning.sliceable import Sliceable, check_plan
from reprocessing.rebuild.audit import Difference, compare
from reprocessing.slices.base import Base, SliceOpen, column_kind, entry_of, late_records, take_base
from streaming_jobs.declare.slices import SliceRange, slice_range
from streaming_jobs.errors import CommitRefused, LeaseBusy, PreflightRefused, UsageError
from streaming_jobs.platform.failures import classify, function_raised
from streaming_jobs.preflight.torn_files import mend
from streaming_jobs.runtime.code_version import loaded_code
from streaming_jobs.runtime.crash_points import crash_point
from streaming_jobs.runtime.slice_commits import carry_out
from streaming_jobs.settings import Settings
from streaming_jobs.sinks.sliced import Rebuilt, StagedSlice, sliced
from streaming_jobs.sinks.tables import open_tables
from streaming_jobs.sources.base import TopicReader
from streaming_jobs.sources.connection import client_file
from streaming_jobs.state.lease import take
from streaming_jobs.state.slice_requests import SliceRequest, SliceRequests
from streaming_jobs.stream import Stream
from streaming_jobs.table_sources.archives import Archives
from streaming_jobs.text import commands

if TYPE_CHECKING:
    from pyspark.sql import Column, SparkSession

_TRIES = 5
_LOOK = 0.1
_MARGIN = 60.0
"""Seconds after the end of the wait for which a waiting change is still valid: the wait ends, then it is withdrawn."""

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

    `late` are the records, of all those that were read, that the stream had dropped behind its watermark.
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


def rebuild(tools: Tools, made: Sliceable, begin: str, end: str | None, *, dry_run: bool = False) -> SliceReport:
    """Rebuild the slice between two days or times; raises the refusal's error if it cannot be, or is not, rebuilt."""
    kind = column_kind(tools.settings, made)
    chosen = slice_range(made.slices, kind, begin, end)
    requests = SliceRequests.of(tools.settings, made.stream.name)
    with requests.running(tools.waits.other):
        began, reason = time.monotonic(), ""
        _mend(tools.settings, made.stream)
        for attempt in range(1, _TRIES + 1):
            base = _closed_base(tools, made, chosen)
            name = _name(made, attempt)
            table = sliced(base.table)
            table.remove_staged({request.id for request in requests.waiting()})
            staged = table.stage(name)
            try:
                done = _attempt(_Attempt(tools, made, chosen, base, name, requests, began, attempt), staged, dry_run)
            finally:
                if requests.outcome(name) is not None or name not in {each.id for each in requests.waiting()}:
                    staged.remove()
            if isinstance(done, SliceReport):
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
    base: Base
    name: str
    requests: SliceRequests
    began: float
    number: int

    def report(self, outcome: str, version: int | None, rebuilt: Rebuilt, difference: Difference) -> SliceReport:
        return SliceReport(
            id=self.name,
            stream=self.made.stream.name,
            table=self.made.table.name,
            words=self.chosen.words,
            outcome=outcome,
            base=self.base.version,
            version=version,
            records=self.base.offsets.records,
            taken_out=rebuilt.taken_out,
            refused=rebuilt.refused,
            late=late_records(self.tools.settings, self.base.record, self.base.offsets),
            tries=self.number,
            seconds=round(time.monotonic() - self.began, 2),
            difference=difference,
        )


def _attempt(at: _Attempt, staged: StagedSlice, dry_run: bool) -> SliceReport | str:
    """One attempt: the report, or the reason why the slice has to be rebuilt on a newer version."""
    try:
        staged.split(at.chosen)  # first: links keep the version's files while the function runs
    except PreflightRefused as error:
        return f"version {at.base.version} is gone: {error.found}"
    rebuilt = _compute(at, staged)
    difference = compare(at.made.table.name, staged.before(), staged.after(), (), staged.folder / "compared")
    if dry_run or not (difference.only_old or difference.only_new):
        return at.report(nothing_committed(difference, dry_run), None, rebuilt, difference)
    rows = {"before": difference.old_rows, "after": difference.new_rows}
    code = loaded_code(at.made.stream, at.tools.settings.flows)
    entry = entry_of(at.base, at.name, at.chosen, code, rows)
    request = SliceRequest(
        id=at.name,
        stream=at.made.stream.name,
        table=at.made.table.name,
        entry=entry.encode(),
        change=staged.change(),
        expires=time.time() + at.tools.waits.commit + _MARGIN,
        summary={"slice": at.chosen.words, **rows, "gone": difference.only_old, "came": difference.only_new},
    )
    crash_point("slice_staged", request.stream, 0)
    at.requests.ask(request)
    crash_point("slice_asked", request.stream, 0)
    ended = _ended(at, request)
    if ended.state == "outdated":
        return ended.reason
    if ended.state != "committed":
        raise PreflightRefused(f"the slice {at.chosen.words} was not committed: {ended.reason}", "rebuild it again")
    return at.report("committed", ended.version, rebuilt, difference)


def _mend(settings: Settings, stream: Stream) -> None:
    """Remove what a power cut has torn, as a start of the stream would, if no driver runs: it looks itself."""
    try:
        with take(settings, stream.name, purpose="slice", wait=0.0):
            mend(settings, stream)
    except LeaseBusy:
        return


def _compute(at: _Attempt, staged: StagedSlice) -> Rebuilt:
    """Run the function on the slice's records, and stage its rows."""
    from pyspark.errors import PySparkException
    from pyspark.sql import functions as F

    from streaming_jobs.runtime.spark_plan import analysed
    from streaming_jobs.sources.kafka import KafkaSource

    made, stream, offsets = at.made, at.made.stream, at.base.offsets
    spark = at.tools.spark()
    client = client_file(at.tools.settings, at.tools.bootstrap)
    try:
        readable = Archives(at.tools.settings)
        archive = readable.of(stream, offsets.topic, offsets.topic_id)
        void = readable.void_of(stream, offsets.topic, offsets.topic_id)
        source = KafkaSource(made.parameter, made.topic, client, made.topic.delay, archive, void)
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
        client.unlink(missing_ok=True)


def _lit(at: datetime) -> Column:
    from pyspark.sql import functions as F

    return F.timestamp_micros(F.lit(int(at.timestamp()) * 1_000_000 + at.microsecond))


def _ended(at: _Attempt, request: SliceRequest) -> SliceRequest:
    """Wait until the driver has carried the change out, or do it here if no driver runs; withdraw it in the end."""
    deadline, told = time.monotonic() + at.tools.waits.commit, False
    while True:
        if (ended := at.requests.outcome(request.id)) is not None:
            return ended
        try:
            with take(at.tools.settings, request.stream, purpose="slice", wait=0.0):
                carry_out(at.requests, open_tables(at.tools.settings, at.made.stream))
        except LeaseBusy as busy:
            if not told:
                at.tools.tell("the stream runs: its driver commits the slice at its next batch border")
                told = True
            if time.monotonic() > deadline:
                with at.requests.alone():
                    if at.requests.outcome(request.id) is None:
                        at.requests.end(request.ended("expired", reason=f"not committed in time: {busy.found}"))
            time.sleep(_LOOK)


def _closed_base(tools: Tools, made: Sliceable, chosen: SliceRange) -> Base:
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


def _name(made: Sliceable, attempt: int) -> str:
    return f"{made.table.name}-{datetime.now(UTC):%Y%m%dT%H%M%S%f}-{attempt}"


def nothing_committed(made: Difference, dry_run: bool) -> str:
    """The outcome of a rebuild without a commit; a slice without a row is told apart from one that is right."""
    if not (made.old_rows or made.new_rows or made.unknown):
        return f"{'dry run' if dry_run else 'unchanged'}: no row is in the slice, before or after"
    return "dry run" if dry_run else "unchanged"


def difference_rows(report: SliceReport) -> Sequence[tuple[str, int]]:
    """The numbers of a report by their names, as people read them."""
    made = report.difference
    return (
        ("rows before", made.old_rows),
        ("rows after", made.new_rows),
        ("corrected", made.corrected),
        ("new", made.new),
        ("gone", made.gone),
    )
