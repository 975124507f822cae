"""The target before the first bad row: the batch that made the row, and the code that wrote that batch.

The condition is evaluated on the primary table after each savepoint, oldest first, and of each only on the files that
the one before, which is clean, does not have: each file is read once. Then, by bisection, between the last clean
savepoint and the first bad one, as far as the table's log still has the versions. The state of a stream may be
wrong long before a wrong row shows, so the target is before the first batch of the code that wrote the bad row's batch;
with `exact` it is before that batch only.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

from deltalake import DeltaTable

from reprocessing.plan.conditions import added_columns, bad_rows
from reprocessing.plan.history import CommittedBatch, corrections, has_present_rows
from reprocessing.plan.snapshot import PlanningSnapshot
from reprocessing.plan.targets import Resolved, Target, before
from streaming_jobs.errors import UsageError
from streaming_jobs.ledger.entry import CodeVersion
from streaming_jobs.settings import Settings
from streaming_jobs.sinks.stored import Content, StoredTable
from streaming_jobs.sinks.tables import copied_table, existing_table
from streaming_jobs.state import savepoints
from streaming_jobs.state.savepoints import Savepoint
from streaming_jobs.storage.locations import made_folder, remove_tree
from streaming_jobs.stream import Stream


def before_first_bad(
    snapshot: PlanningSnapshot, condition: str, *, exact: bool, same_code: bool = False
) -> tuple[Target, Resolved]:
    """The target of a rewind; raises UsageError if no row is bad, and if the condition cannot be evaluated.

    Also if the present code wrote the first bad row, since it would write that row again; not with `same_code`.
    """
    table = existing_table(snapshot.settings, snapshot.stream.primary, snapshot.stream.name)
    bad_now = bad_rows(table.readable(), condition)
    if not bad_now:
        raise UsageError(f"no row of table {table.name} is bad: {condition}", "there is nothing to recover")
    notes: list[str] = []
    batch = _first(snapshot, table, condition, notes)
    wrote = _code_of(snapshot, batch)
    remarks = refuse_same_code(snapshot, wrote, f"wrote the first bad row, with {batch.txn},", same_code=same_code)
    code = _first_of_code(snapshot, batch)
    start = batch if exact else code
    view = snapshot.view()
    txn, ends = before(start.txn, view)
    ran = f"written by code {wrote.hash}, which ran since {code.txn}"
    are = "row is" if bad_now == 1 else "rows are"
    notes = [f"{bad_now:,} {are} bad now; the first came with {batch.txn}, {ran}", *remarks, *notes]
    if exact and code.txn != batch.txn:
        notes.append(f"--exact: what code {wrote.hash} wrote from {code.txn} to {batch.txn} stays as it is")
    words = f"{txn.batch if txn else -1} (before the first bad row: {condition})"
    return Target("batch", words), Resolved(txn, ends, tuple(notes))


def refuse_same_code(snapshot: PlanningSnapshot, code: CodeVersion, did: str, *, same_code: bool) -> list[str]:
    """Raise UsageError if the replay would run `code`; with `same_code`, return a note instead.

    Code with the same function is the same code; a newer version of the package alone corrects no function.
    """
    today = snapshot.planned_against.code
    if not code.same_code(today):
        return []
    if same_code:
        return [f"--same-code: code {code.hash} {did} and it runs the replay too"]
    then = "" if code.package == today.package else f" then, {today.package} today"
    raise UsageError(
        f"code {code.hash} ({code.package}{then}) {did} and it is today's code: the replay would do the same again",
        "deploy the corrected function, then plan again; if the cause lay elsewhere: --same-code",
    )


def _first(snapshot: PlanningSnapshot, table: StoredTable, condition: str, notes: list[str]) -> CommittedBatch:
    """The first batch after which the table has a bad row, as exactly as savepoints and the log show it."""
    last = snapshot.history.last
    assert last is not None
    clean, bad = None, last.txn  # positions: the table is clean after the first, bad after the second
    now = table.readable()
    added: dict[str, str] = {}  # columns that a savepoint does not have, with the newest such savepoint
    known: Content | None = None
    for savepoint in snapshot.savepoints:
        if savepoint.txn >= bad or not has_present_rows(snapshot.record.generations, savepoint.txn):
            continue
        content = savepoints.contents_of(snapshot.settings, snapshot.stream, savepoint)[table.name]
        unread = content if known is None else content.without(known)
        if known is None or unread.pieces:
            with as_table(snapshot.settings, snapshot.stream, savepoint, unread) as then:
                is_bad = bad_rows(then, condition, now=now)
                added.update((column, savepoint.id) for column in added_columns(then, now))
            if is_bad:
                bad = savepoint.txn
                break
        clean, known = savepoint.txn, content
    for column, savepoint_id in added.items():
        if re.search(rf"\b{re.escape(column)}\b", condition):
            notes.append(f"savepoints up to {savepoint_id} have no column {column}: it counts as null in their rows")
    batches = snapshot.history.between(clean, bad)
    if not batches:
        raise UsageError(
            f"the first bad row came before {bad}, and the ledger no longer shows with which batch",
            f"go back to --savepoint {savepoints.name_of(clean)}" if clean else "choose another target",
        )
    low, high = -1, len(batches) - 1
    in_log = {commit.version for commit in table.commits()}
    while high - low > 1:
        seen = [
            p
            for p in range(low + 1, high)
            if has_present_rows(snapshot.record.generations, batches[p].txn)
            and _readable(table, batches[p].versions.get(table.name), in_log)
        ]
        if not seen:
            break
        middle = seen[len(seen) // 2]
        if bad_rows(table.readable(batches[middle].versions[table.name]), condition, now=now):
            high = middle
        else:
            low = middle
    # If no version in between can be read, the first batch after the last clean one may have made the row.
    return batches[low + 1]


def _readable(table: StoredTable, version: int | None, in_log: set[int]) -> bool:
    """True if a version is in the log and all of its files still exist."""
    return version is not None and version in in_log and table.complete(version)


def _first_of_code(snapshot: PlanningSnapshot, batch: CommittedBatch) -> CommittedBatch:
    """The first batch of the unbroken run of the same code that includes this batch."""
    first, wrote = batch, _code_of(snapshot, batch)
    while (earlier := snapshot.history.before(first.txn)) is not None and wrote.same_code(_code_of(snapshot, earlier)):
        first = earlier
    return first


def _code_of(snapshot: PlanningSnapshot, batch: CommittedBatch) -> CodeVersion:
    """The code that wrote the present rows of a batch: of a corrected one, that of the correction."""
    for each in corrections(snapshot.record.generations):
        if each.after < batch.txn <= each.up_to:
            known = (code.version for code in reversed(snapshot.record.code) if code.hash == each.code)
            return next(known, CodeVersion(each.code, snapshot.planned_against.code.package))
    return batch.code


@contextmanager
def as_table(settings: Settings, stream: Stream, savepoint: Savepoint, content: Content) -> Iterator[DeltaTable]:
    """A content of the primary table at a savepoint, readable for DataFusion within the block."""
    declared = stream.primary
    place = made_folder(settings.tables / "_staging") / f"look-{stream.name}-{savepoint.id}-{declared.name}"
    remove_tree(place)
    try:
        yield copied_table(settings, made_folder(place), declared, stream.name, content).readable()
    finally:
        remove_tree(place)
