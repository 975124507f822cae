"""Where a replay starts, and where a bounded one ends.

The start is the latest of: a savepoint at or before the target; the target's batch, while Spark's log and the table's
log still reach it (planning then takes a savepoint of it, which exists when the plan is applied); the very start
of the stream, if the topics still have every record since. Without any of them the plan is refused, unless it may
discard the state.

The end of a bounded recovery is the last batch that it corrects; rows after it stay as they are. That is right only
where no later row depends on an earlier record: for tables to which rows are appended, by a stream without state. It
also needs the rows as of that batch, to identify later rows: a savepoint of it, or Spark's log and the table's
log, from which one is then taken.

    batch N, table-version V, savepoint NAME    that batch
    code HASH                                   the last batch of that code
    offsets 0:120,1:98                          the first batch after which every record before that was read, so that
                                                all of them are corrected
    datetime TIME, duration '2 hours'           the same, for the offset of the first record at or after that time

For streams with windows, the refusal names the command that rebuilds slices instead. Spark's checkpoint has the
watermark of each batch. A record that a batch has read lies after the watermark before it (otherwise it was dropped),
and no later than the watermark after it plus the delay. So the windows that depend on a range of batches begin after
the first of these, less their length, and end before the second.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

from reprocessing.plan.history import CommittedBatch, has_present_rows, in_lineage
from reprocessing.plan.plan import BEFORE_ALL, Base, StreamRecoveryPlan, Until
from reprocessing.plan.snapshot import PlanningSnapshot
from reprocessing.plan.targets import (
    Resolved,
    Target,
    View,
    complete,
    instant,
    named_batch,
    named_code,
    named_savepoint,
    parse_offsets,
)
from streaming_jobs.errors import PreflightRefused, RecourseError, UsageError
from streaming_jobs.ledger.entry import Txn
from streaming_jobs.ledger.positions import OffsetBounds, TopicOffsets, first_after
from streaming_jobs.preflight.snapshot import TopicSnapshot
from streaming_jobs.runtime import output_plans
from streaming_jobs.runtime.sliceable import sliceable, tables_with_slices
from streaming_jobs.runtime.spark_plan import not_row_by_row
from streaming_jobs.settings import Settings
from streaming_jobs.sinks.tables import all_tables, existing_table, store_of
from streaming_jobs.sources.archived_ranges import gone
from streaming_jobs.state import savepoints
from streaming_jobs.state.checkpoint import Checkpoint, cuttable
from streaming_jobs.state.redrive_requests import RedriveRequests
from streaming_jobs.state.savepoints import Savepoint
from streaming_jobs.state.slice_requests import SliceRequests
from streaming_jobs.state.stream_folder import StreamFolder
from streaming_jobs.state.stream_record import StreamRecord
from streaming_jobs.stream import Stream
from streaming_jobs.table_sources.versions import gone_words
from streaming_jobs.text import commands

Start = tuple[Base, list[str], bool]
"""The base, notes about it, and True if state is discarded."""


KINDS = ("batch", "table-version", "savepoint", "code", "datetime", "duration", "offsets")
"""Kinds of targets at which a bounded recovery can end."""
_ORDINARY = "correct everything after the target too: leave --until out"


def replay_start(
    snapshot: PlanningSnapshot, resolved: Resolved, base: Savepoint | None, *, discard_state: bool
) -> Start:
    """The start of a replay for the target `resolved`, from `base` if given; raises UsageError with the ways out."""
    if base is None:
        return _base(snapshot, resolved, discard_state=discard_state)
    if gone := _lost(base.ends, snapshot):
        raise UsageError(f"savepoint {base.id} cannot be replayed from: {gone}", _ways_back(snapshot))
    start, notes = _from_savepoint(base, base.txn)
    generations = snapshot.record.generations
    if in_lineage(generations, base.txn) and not has_present_rows(generations, base.txn):
        notes.append(f"a bounded recovery has corrected rows of savepoint {base.id} since: they will be as they were")
    return start, notes, discard_state


def _base(snapshot: PlanningSnapshot, resolved: Resolved, *, discard_state: bool) -> Start:
    name, record = snapshot.stream.name, snapshot.record
    wanted = resolved.batch
    if wanted is not None:
        usable = [s for s in snapshot.savepoints if has_present_rows(record.generations, s.txn) and s.txn <= wanted]
        usable = [s for s in usable if not _lost(s.ends, snapshot)]
        if (not usable or usable[-1].txn < wanted) and (taken := taken_now(snapshot, wanted)) is not None:
            usable += [taken] if not _lost(taken.ends, snapshot) else []
        if usable:
            return *_from_savepoint(usable[-1], wanted), discard_state
    if record.adopted:
        raise UsageError(
            f"stream {name} cannot go back that far: no savepoint is as old as {wanted or 'its start'}, and a replay "
            "from its start would be without the rows of the job that it has adopted",
            f"choose a target that has a savepoint (`{commands.savepoints(name)}`)",
        )
    starts = record.starts
    gone = _lost(starts, snapshot)
    if not gone:
        notes = ["no savepoint is that old: everything is replayed from the stream's start"] if wanted else []
        return Base(None, record.generation, -1, starts), notes, False
    if discard_state:
        topics = {topic.name: topic for topic in snapshot.preflight.topics}
        begin = {
            name: {
                p: first_after(offset, p, topics[name].earliest, topics[name].continues) or offset
                for p, offset in each.items()
            }
            for name, each in resolved.wanted.items()
        }
        notes = [f"no savepoint is that old, and {gone}: the tables begin empty at the target"]
        if begin != resolved.wanted:
            notes.append("the target's own records are gone: it begins with the first that the topic still has")
        return Base(None, record.generation, -1, begin), notes, True
    raise UsageError(
        f"stream {name} cannot go back that far: no savepoint is as old as {wanted or 'its start'}, and {gone}",
        _ways_back(snapshot),
    )


def _ways_back(snapshot: PlanningSnapshot) -> str:
    """The oldest targets to which the stream can still return, in words."""
    ways = []
    generations, current = snapshot.record.generations, snapshot.record.generation
    for savepoint in snapshot.savepoints:
        if has_present_rows(generations, savepoint.txn) and not _lost(savepoint.ends, snapshot):
            ways.append(f"--savepoint {savepoint.id}")
            break
    cuts = cuttable(StreamFolder.of(snapshot.settings, snapshot.stream.name).checkpoint(current))
    for batch in snapshot.history.between(Txn(current, cuts.start - 1), Txn(current, cuts.stop - 2)):
        here = batch.txn.generation == current and batch.txn.batch in cuts
        if here and batch.versions and not _lost(batch.ends, snapshot):
            ways.append(f"--to-batch {batch.txn.batch}")
            break
    way = f"the oldest way back is {' or '.join(ways)}" if ways else "no way back is left"
    return way + (", or begin with empty state: --discard-state" if snapshot.record.state_fingerprint else "")


def _from_savepoint(savepoint: Savepoint, wanted: Txn) -> tuple[Base, list[str]]:
    notes = []
    if savepoint.txn < wanted:
        notes.append(f"the nearest savepoint before {wanted} is {savepoint.id}: the replay starts there")
    return Base(savepoint.id, savepoint.generation, savepoint.batch, savepoint.ends), notes


def taken_now(snapshot: PlanningSnapshot, wanted: Txn) -> Savepoint | None:
    """A savepoint of a batch, taken now; None if the logs no longer reach it."""
    checkpoint = StreamFolder.of(snapshot.settings, snapshot.stream.name).checkpoint(wanted.generation)
    if wanted.generation != snapshot.record.generation or wanted.batch not in cuttable(checkpoint):
        return None
    try:
        return savepoints.take(
            snapshot.settings, snapshot.stream, snapshot.record, wanted.batch, "recovery", "for a plan"
        )
    except PreflightRefused:  # a table's log no longer reaches back to it
        savepoints.drop(snapshot.settings, snapshot.stream, savepoints.name_of(wanted))
        return None


def _lost(ends: TopicOffsets, snapshot: PlanningSnapshot) -> str:
    return lost(ends, {topic.name: topic for topic in snapshot.preflight.topics})


def lost(begins: TopicOffsets, topics: Mapping[str, OffsetBounds | TopicSnapshot]) -> str:
    """The first range that a replay from these offsets would miss, in words; empty if there is none."""
    for name, topic in topics.items():
        for partition in topic.earliest:
            begin = begins.get(name, {}).get(partition)
            first = None if begin is None else first_after(begin, partition, topic.earliest, topic.continues)
            if begin is not None and first is not None:
                if topic.continues:
                    return gone_words(name, begin, first)
                return gone(topic.archived, name, partition, begin, first)
    return ""


def until_target(text: str) -> Target:
    """The end as a person writes it: a kind of target and its value. Raises UsageError for anything else."""
    kind, _, value = text.strip().partition(" ")
    if kind not in KINDS or not value.strip():
        raise UsageError(
            f"--until '{text}' is not the end of a bounded recovery",
            f"write a kind and its value, such as --until 'batch 41'; the kinds are {', '.join(KINDS)}",
        )
    return Target(kind, value.strip())  # type: ignore[arg-type]


@dataclass(frozen=True)
class LastBatch:
    """The last batch to correct, its end, and notes about how it was found."""

    txn: Txn
    ends: TopicOffsets
    notes: tuple[str, ...] = ()


def until_border(snapshot: PlanningSnapshot, target: Target, resolved: Resolved) -> LastBatch:
    """The last batch that a recovery to `resolved` corrects; raises UsageError for a stream or batch that cannot be.

    Nothing is changed, and no savepoint is needed yet.
    """
    if resolved.ahead:
        raise UsageError("a plan that skips forward corrects nothing", "leave --until out")
    border = _border(target, snapshot.view())
    last = snapshot.planned_against.txn
    if border.txn >= last:
        raise UsageError(
            f"{target} ends at {border.txn}, which is the stream's last batch: that is an ordinary recovery",
            "leave --until out",
        )
    if border.txn <= (resolved.batch or BEFORE_ALL):
        raise UsageError(
            f"{target} ends at {border.txn}, and the recovery begins after {resolved.batch}: there is nothing between",
            "name a later end",
        )
    _refuse_dependent_rows(snapshot, resolved.batch, border.txn)
    return border


def until_of(snapshot: PlanningSnapshot, target: Target, border: LastBatch, base: Base) -> Until:
    """The end of a plan whose replay starts from `base`; takes a savepoint of that batch if there is none.

    Raises UsageError if the rows as of that batch are no longer known, if there are rows of no batch
    (`rows_of_no_batch`), or if the replay begins with the whole content of a table that is read.
    """
    for table in snapshot.stream.tables_read:
        if not base.ends.get(table.name, {}).get(0, 0):
            raise UsageError(
                f"the replay begins with the whole content of table {table.name}, as it is now: where it was at the "
                f"end of {border.txn} is not kept",
                f"go back to a later batch, whose rows are kept; or {_ORDINARY}",
            )
    saved = _savepoint(snapshot, border.txn)
    if saved is None:
        raise UsageError(
            f"the rows of the tables as of {border.txn} are no longer kept, neither in a savepoint nor in their "
            "logs, so later rows cannot be told apart",
            _nearest(snapshot, border.txn, base.after),
        )
    start = savepoints.find(snapshot.settings, saved.stream, base.savepoint) if base.savepoint else None
    reason = rows_of_no_batch(snapshot.settings, snapshot.stream, snapshot.record, start, saved, waiting=True)
    if reason is not None:
        raise UsageError(reason[0], f"name a later end, or {_ORDINARY}" if reason[1] else _ORDINARY)
    return Until(saved.id, saved.generation, saved.batch, border.ends, str(target))


def _border(target: Target, view: View) -> LastBatch:
    if target.kind == "savepoint":
        saved = named_savepoint(target.value, view)
        if saved is None or not has_present_rows(view.record.generations, saved.txn):
            known = ", ".join(s.id for s in view.savepoints if has_present_rows(view.record.generations, s.txn))
            raise UsageError(
                f"stream {view.record.stream} has no savepoint '{target.value}' of its present rows",
                f"choose one: {known or 'there are none'}",
            )
        return LastBatch(saved.txn, saved.ends)
    if target.kind in ("batch", "table-version"):
        batch = named_batch(target, view)
        return LastBatch(batch.txn, batch.ends)
    if target.kind == "code":
        batch = _last_of_code(target.value, view)
        return LastBatch(batch.txn, batch.ends, (f"the last batch of code {target.value} is {batch.txn}",))
    wanted = _wanted(target, view)
    covering = view.history.first_covering(wanted) or view.history.last
    assert covering is not None  # a stream without a batch has no present state
    exact = all(covering.ends.get(t, {}).get(p) == end for t, each in wanted.items() for p, end in each.items())
    notes = [] if exact else [f"{target}: moved to the end of {covering.txn}, the first batch that has read all of it"]
    if target.kind in ("datetime", "duration"):
        notes.append(
            f"{target} means every record up to the first one at or after it; where timestamps are not in order, "
            "earlier records may come after that one, and stay as they are"
        )
    return LastBatch(covering.txn, covering.ends, tuple(notes))


def _wanted(target: Target, view: View) -> TopicOffsets:
    if target.kind == "offsets":
        return complete(parse_offsets(target.value, [topic.name for topic in view.topics]), view)
    at = int(instant(target, view.now) * 1000)
    wanted = {}
    for topic in view.topics:  # a partition without a record at or after that time: all of its records
        here = view.position.get(topic.name, {})
        found = view.for_time(topic.name, at)
        if any(found.get(p) == 0 for p, first in topic.continues.items() if first):  # versions of a table that is read
            raise UsageError(
                f"the log of table {topic.name}, which the stream reads, does not reach back to {target}",
                "name a batch: --until 'batch N'",
            )
        wanted[topic.name] = {p: min(offset, here.get(p, 0)) for p, offset in found.items()}
    return wanted


def _last_of_code(text: str, view: View) -> CommittedBatch:
    """The last batch of the newest unbroken run of a version of the code."""
    codes = view.record.code
    begun = codes.index(named_code(text, view.record))
    later = next((code for code in codes[begun:] if not code.version.same_code(codes[begun].version)), None)
    batch = view.history.last if later is None else view.history.before(later.since)
    if batch is None:
        raise UsageError(f"the last batch of code {text} is no longer in the ledger", "name a batch: --until 'batch N'")
    return batch


def _refuse_dependent_rows(snapshot: PlanningSnapshot, after: Txn | None, end: Txn) -> None:
    """Raise UsageError if a row after the end may depend on a record before it."""
    name = snapshot.stream.name
    for table in snapshot.planned_against.tables:
        if table.mode == "upsert":
            raise UsageError(
                f"table {table.name} is an upsert: a row depends on all records of its key, so rows after {end} depend "
                "on those to be corrected",
                _ORDINARY,
            )
    if snapshot.record.state_fingerprint:
        command = slices_command(snapshot, after, end)
        raise UsageError(
            f"stream {name} keeps state: rows after {end} may depend on records before it",
            f"rebuild the time that these records belong to: {command}; or {_ORDINARY}" if command else _ORDINARY,
        )
    plans = StreamFolder.of(snapshot.settings, name).output_plans
    ran = snapshot.record.code
    since = max((at for at, code in enumerate(ran) if code.since <= end), default=0)
    codes = snapshot.planned_against.code.names.union(*(code.version.names for code in ran[since:]))
    if others := not_row_by_row(output_plans.nodes(plans, codes), len(snapshot.stream.sources)):
        raise UsageError(
            f"stream {name} has operators that may keep state ({', '.join(others)}): rows after {end} may depend on "
            "records before it",
            _ORDINARY,
        )


def _savepoint(snapshot: PlanningSnapshot, txn: Txn) -> Savepoint | None:
    """The savepoint of a batch, which is taken now if it does not exist; None if the logs do not reach the batch."""
    saved = savepoints.find(snapshot.settings, snapshot.stream.name, savepoints.name_of(txn))
    if saved is not None and has_present_rows(snapshot.record.generations, txn):
        return saved
    return taken_now(snapshot, txn)


def _nearest(snapshot: PlanningSnapshot, wanted: Txn, after: Txn) -> str:
    """The nearest batches whose rows are kept, in words."""
    kept = {txn: words for txn, words in _kept(snapshot) if after < txn < snapshot.planned_against.txn}
    later = min((txn for txn in kept if txn > wanted), default=None)
    earlier = max((txn for txn in kept if txn < wanted), default=None)
    ways = [f"{kept[each]} ({which})" for each, which in ((later, "after it"), (earlier, "before it")) if each]
    if not ways:
        return f"no batch between is kept; {_ORDINARY}"
    return f"the nearest whose rows are kept: {' or '.join(ways)}; or {_ORDINARY}"


def _kept(snapshot: PlanningSnapshot) -> Iterator[tuple[Txn, str]]:
    """Yields the batches whose rows are kept, each with the option that names it."""
    generations, current = snapshot.record.generations, snapshot.record.generation
    cuts = cuttable(StreamFolder.of(snapshot.settings, snapshot.stream.name).checkpoint(current))
    primary = existing_table(snapshot.settings, snapshot.stream.primary, snapshot.stream.name)
    in_log = {commit.version for commit in primary.commits()}
    for batch in snapshot.history.between(Txn(current, cuts.start - 1), Txn(current, cuts.stop - 1)):
        if batch.versions.get(primary.name) in in_log:
            yield batch.txn, f"--until 'batch {batch.txn.batch}'"
    for saved in snapshot.savepoints:
        if has_present_rows(generations, saved.txn):
            yield saved.txn, f"--until 'savepoint {saved.id}'"


def rows_of_no_batch(
    settings: Settings, stream: Stream, record: StreamRecord, start: Savepoint | None, end: Savepoint, *, waiting: bool
) -> tuple[str, bool] | None:
    """Why a bounded recovery cannot tell rows apart, and True if a later end helps; None if it can.

    These are changes of somebody else that were accepted since the replay's start (None: ever), whose rows belong to no
    batch, and slices that were rebuilt, or records that were redriven, since the last batch to correct: their rows are
    of earlier batches. With `waiting`, changes that wait for their commit count too: a driver that runs commits them at
    its next batch border.
    """
    versions = {table.name: table.version for table in start.tables} if start is not None else {}
    since = [each for each in record.accepted if each.version > versions.get(each.table, -1)]
    if since:
        changes = "; ".join(f"version {each.version} of table {each.table} was accepted ({each.why})" for each in since)
        return f"{changes}: whether its rows belong to the batches to correct or to later ones is not known", False
    saved = {table.name: table.version for table in end.tables}
    slices = list(_rebuilt(settings, stream, saved, f"after {end.txn}"))
    slices += [
        f"slice {each.summary.get('slice', each.id)} of table {each.table} waits for its commit"
        for each in (SliceRequests.of(settings, stream.name).waiting() if waiting else ())
    ]
    slices += [
        f"redrive {each.id} waits for its commit"
        for each in (RedriveRequests.of(settings, stream.name).waiting() if waiting else ())
    ]
    if slices:
        return f"{'; '.join(dict.fromkeys(slices))}: rows from before it are no longer in the table", True
    return None


def rebuilt_since(settings: Settings, stream: Stream, plan: StreamRecoveryPlan) -> list[str]:
    """The slices and redrives since a plan was made, in words: it would publish their rows as they were before."""
    if plan.skips or plan.until is not None:  # nothing is published, or `rows_of_no_batch` is asked
        return []
    versions = {table.name: table.version for table in plan.saw.tables}
    return list(_rebuilt(settings, stream, versions, "since, and the plan would publish its rows from before that"))


def _rebuilt(settings: Settings, stream: Stream, versions: Mapping[str, int], when: str) -> Iterator[str]:
    """Yields the slices that were rebuilt, and the redrives, after these versions of the tables, in words."""
    noted = set()
    for each in SliceRequests.of(settings, stream.name).history():
        if each.version is not None and each.version > versions.get(each.table, -1):
            noted.add((each.table, each.version))
            yield f"slice {each.summary.get('slice', each.id)} of table {each.table} was rebuilt {when}"
    for declared, _ in all_tables(stream):
        for commit in store_of(declared).commits(settings, declared):
            if commit.version <= versions.get(declared.name, -1):
                break
            entry, at = commit.entry, (declared.name, commit.version)
            if entry is not None and entry.kind == "slice" and at not in noted:
                yield f"a slice of table {declared.name} was rebuilt {when}, in version {commit.version}"
            if entry is not None and entry.kind == "redrive":
                yield f"{entry.note} were redriven into table {declared.name} {when}, in version {commit.version}"


def slices_command(snapshot: PlanningSnapshot, after: Txn | None, end: Txn) -> str:
    """The command that rebuilds what depends on the records of the batches after one and up to another.

    Empty if no table of the stream has slices that can be rebuilt. Days are those of the slices' calendar.
    """
    tables = tables_with_slices(snapshot.stream)
    if not tables:
        return ""
    try:
        made = sliceable(snapshot.stream, tables[0])
    except UsageError:
        return ""
    zone, reach = made.slices.calendar, made.slices.distance
    lateness = snapshot.settings.for_stream(snapshot.stream.name).lateness
    delay = lateness if lateness is not None else made.topic.delay or timedelta(0)
    begin = made.slices.first_day
    if after is not None and (before := _watermark_until(snapshot, after)):
        begin = (_moment(before) - reach).astimezone(zone).date().isoformat()
    last = (_moment(_watermark_since(snapshot, end)) + delay).astimezone(zone).date() + timedelta(days=1)
    return commands.rebuild_slice(snapshot.stream.name, made.table.name, begin, last.isoformat())


def _watermark_until(snapshot: PlanningSnapshot, txn: Txn) -> int:
    """The watermark of a batch, or of the nearest one before it that is known; 0 without any. In ms since 1970."""
    checkpoint = StreamFolder.of(snapshot.settings, snapshot.stream.name).checkpoint(txn.generation)
    with suppress(RecourseError):
        return _watermark(checkpoint, txn.batch)
    for saved in reversed(snapshot.savepoints):
        if saved.txn <= txn and has_present_rows(snapshot.record.generations, saved.txn):
            return _watermark(Checkpoint(savepoints.checkpoint_of(snapshot.settings, saved)), saved.batch)
    return 0


def _watermark_since(snapshot: PlanningSnapshot, txn: Txn) -> int:
    """The watermark of the batch after a position, or, if that is not known, of the stream's newest one."""
    folder = StreamFolder.of(snapshot.settings, snapshot.stream.name)
    with suppress(RecourseError):
        return _watermark(folder.checkpoint(txn.generation), txn.batch + 1)
    checkpoint = folder.checkpoint(snapshot.record.generation)
    return _watermark(checkpoint, checkpoint.last_planned or 0)


def _watermark(checkpoint: Checkpoint, batch: int) -> int:
    return int(checkpoint.metadata(batch).get("batchWatermarkMs", 0))


def _moment(ms: int) -> datetime:
    return datetime(1970, 1, 1, tzinfo=UTC) + timedelta(milliseconds=ms)
