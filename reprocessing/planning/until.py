"""The end of a bounded recovery: the last batch that it corrects, and the reasons why a stream cannot have one.

Rows after that batch stay as they are. That is right only where no later row depends on an earlier record: for tables
to which rows are appended, by a stream without state. It also needs the rows as of that batch, to tell the later ones
apart: a savepoint of it, or Spark's log and the table's log, from which one is then taken.

    batch N, table-version V, savepoint NAME    that batch
    code HASH                                   the last batch of that code
    offsets 0:120,1:98                          the first batch after which every record before that was read, so that
                                                all of them are corrected
    datetime TIME, duration '2 hours'           the same, for the offset of the first record at or after that time
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from reprocessing.planning.history import Batch, has_present_rows
from reprocessing.planning.offsets_text import parse_offsets
from reprocessing.planning.other_changes import accepted_since, slices_since
from reprocessing.planning.replay_start import taken_now
from reprocessing.planning.slices_instead import slices_command
from reprocessing.planning.snapshot import PlanningSnapshot
from reprocessing.planning.targets import (
    Resolved,
    Target,
    View,
    complete,
    instant,
    named_batch,
    named_code,
    named_savepoint,
)
from reprocessing.plans.plan import Base, Until
from streaming_jobs.errors import UsageError
from streaming_jobs.ledger.entry import Txn
from streaming_jobs.ledger.positions import TopicOffsets
from streaming_jobs.runtime import output_plans
from streaming_jobs.runtime.spark_plan import not_row_by_row
from streaming_jobs.sinks.tables import existing_table
from streaming_jobs.state import savepoints
from streaming_jobs.state.checkpoint import cuttable
from streaming_jobs.state.savepoints import Savepoint
from streaming_jobs.state.stream_folder import StreamFolder

KINDS = ("batch", "table-version", "savepoint", "code", "datetime", "duration", "offsets")
"""Kinds of targets at which a bounded recovery can end."""
_ORDINARY = "correct everything after the target too: leave --until out"
_START = Txn(0, -1)


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
class Border:
    """The last batch to correct, its end, and notes about how it was found."""

    txn: Txn
    ends: TopicOffsets
    notes: tuple[str, ...] = ()


def until_border(snapshot: PlanningSnapshot, target: Target, resolved: Resolved) -> Border:
    """The last batch that a recovery to `resolved` corrects; raises UsageError for a stream or batch that cannot be.

    Nothing is changed, and no savepoint is needed yet.
    """
    if resolved.ahead:
        raise UsageError("a plan that skips forward corrects nothing", "leave --until out")
    border = _border(target, snapshot.view())
    last = snapshot.world.txn
    if border.txn >= last:
        raise UsageError(
            f"{target} ends at {border.txn}, which is the stream's last batch: that is an ordinary recovery",
            "leave --until out",
        )
    if border.txn <= (resolved.batch or _START):
        raise UsageError(
            f"{target} ends at {border.txn}, and the recovery begins after {resolved.batch}: there is nothing between",
            "name a later end",
        )
    _refuse_dependent_rows(snapshot, resolved.batch, border.txn)
    return border


def until_of(snapshot: PlanningSnapshot, target: Target, border: Border, base: Base) -> Until:
    """The end of a plan whose replay starts from `base`; a savepoint of it is taken if there is none.

    Raises UsageError if the rows as of that batch are not known any more, if there are rows of no batch
    (`other_changes.py`), or if the replay begins with the whole content of a table that is read.
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
            f"the rows of the tables as of {border.txn} are not kept any more, neither in a savepoint nor in their "
            "logs, so later rows cannot be told apart",
            _nearest(snapshot, border.txn, Txn(base.generation, base.batch) if base.savepoint else _START),
        )
    _refuse_other_changes(snapshot, base, saved)
    return Until(saved.id, saved.generation, saved.batch, border.ends, str(target))


def _border(target: Target, view: View) -> Border:
    if target.kind == "savepoint":
        saved = named_savepoint(target.value, view)
        if saved is None or not has_present_rows(view.record.generations, saved.txn):
            known = ", ".join(s.id for s in view.savepoints if has_present_rows(view.record.generations, s.txn))
            raise UsageError(
                f"stream {view.record.stream} has no savepoint '{target.value}' of its present rows",
                f"choose one: {known or 'there are none'}",
            )
        return Border(saved.txn, saved.ends)
    if target.kind in ("batch", "table-version"):
        batch = named_batch(target, view)
        return Border(batch.txn, batch.ends)
    if target.kind == "code":
        batch = _last_of_code(target.value, view)
        return Border(batch.txn, batch.ends, (f"the last batch of code {target.value} is {batch.txn}",))
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
    return Border(covering.txn, covering.ends, tuple(notes))


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


def _last_of_code(text: str, view: View) -> Batch:
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
    for table in snapshot.world.tables:
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
    codes = snapshot.world.code.names.union(*(code.version.names for code in ran[since:]))
    if others := not_row_by_row(output_plans.nodes(plans, codes), len(snapshot.stream.sources)):
        raise UsageError(
            f"stream {name} has operators that may keep state ({', '.join(others)}): rows after {end} may depend on "
            "records before it",
            _ORDINARY,
        )


def _savepoint(snapshot: PlanningSnapshot, txn: Txn) -> Savepoint | None:
    """The savepoint of a batch: one that exists, or one that is taken now; None if the logs do not reach it."""
    saved = savepoints.find(snapshot.settings, snapshot.stream.name, savepoints.name_of(txn))
    if saved is not None and has_present_rows(snapshot.record.generations, txn):
        return saved
    return taken_now(snapshot, txn)


def _nearest(snapshot: PlanningSnapshot, wanted: Txn, after: Txn) -> str:
    """The nearest batches whose rows are kept, in words."""
    kept = {txn: words for txn, words in _kept(snapshot) if after < txn < snapshot.world.txn}
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


def _refuse_other_changes(snapshot: PlanningSnapshot, base: Base, saved: Savepoint) -> None:
    """Raise UsageError for accepted changes of somebody else since the base, and for slices rebuilt since the end."""
    name = snapshot.stream.name
    start = savepoints.find(snapshot.settings, name, base.savepoint) if base.savepoint else None
    if words := accepted_since(snapshot.record, start):
        raise UsageError(
            f"{words}: whether its rows belong to the batches to correct or to later ones is not known", _ORDINARY
        )
    if words := slices_since(snapshot.settings, snapshot.stream, saved, waiting=True):
        raise UsageError(
            f"{words}: rows from before it are not in the table any more", f"name a later end, or {_ORDINARY}"
        )
