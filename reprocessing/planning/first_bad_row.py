"""Before the first bad row: which batch made it, and which code wrote that batch.

The primary table is asked as it was after each savepoint, oldest first, and between the last clean one and the first
bad one by halves, as far as the table's own log still shows the versions. The state of a stream may be wrong long
before a wrong row shows, so the way back goes before the first batch of the code that wrote the bad row's batch;
`exact` goes before that batch only.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager

from deltalake import DeltaTable

from reprocessing.planning.conditions import added_columns, bad_rows
from reprocessing.planning.history import Batch, in_lineage
from reprocessing.planning.snapshot import PlanningSnapshot
from reprocessing.planning.targets import Resolved, Target, before
from streaming_jobs.errors import UsageError
from streaming_jobs.files import private_folder
from streaming_jobs.ledger import CodeVersion
from streaming_jobs.settings import Settings
from streaming_jobs.sinks.stored import StoredTable
from streaming_jobs.sinks.tables import existing_table, store_of
from streaming_jobs.state import savepoints
from streaming_jobs.state.savepoints import Savepoint
from streaming_jobs.stream import Stream


def before_first_bad(
    found: PlanningSnapshot, condition: str, *, exact: bool, same_code: bool = False
) -> tuple[Target, Resolved]:
    """Where to rewind to; raises UsageError when no row is bad, and for a condition that the table cannot be asked.

    Also where the code of today is what wrote the first bad row, unless with `same_code`: it would write it again.
    """
    table = existing_table(found.settings, found.stream.primary, found.stream.name)
    bad_now = bad_rows(table.readable(), condition)
    if not bad_now:
        raise UsageError(f"no row of table {table.name} is bad: {condition}", "there is nothing to put right")
    notes: list[str] = []
    batch = _first(found, table, condition, notes)
    said = refuse_same_code(found, batch.code, f"wrote the first bad row, with {batch.txn},", same_code=same_code)
    code = _first_of_code(found, batch)
    start = batch if exact else code
    view = found.view()
    txn, ends = before(start.txn, view)
    ran = f"written by code {batch.code.hash}, which ran since {code.txn}"
    are = "row is" if bad_now == 1 else "rows are"
    notes = [f"{bad_now:,} {are} bad now; the first came with {batch.txn}, {ran}", *said, *notes]
    if exact and code.txn != batch.txn:
        notes.append(f"--exact: what code {batch.code.hash} wrote from {code.txn} to {batch.txn} stays as it is")
    words = f"{txn.batch if txn else -1} (before the first bad row: {condition})"
    return Target("batch", words), Resolved(txn, ends, tuple(notes))


def refuse_same_code(found: PlanningSnapshot, code: CodeVersion, did: str, *, same_code: bool) -> list[str]:
    """Raise UsageError where that code is the one that would run the replay; with `same_code`, a note instead.

    It is the same function that makes it the same code; a newer version of the package alone corrects no function.
    """
    today = found.world.code
    if code.hash != today.hash:
        return []
    if same_code:
        return [f"--same-code: code {code.hash} {did} and it runs the replay too"]
    then = "" if code.package == today.package else f" then, {today.package} today"
    raise UsageError(
        f"code {code.hash} ({code.package}{then}) {did} and it is today's code: the replay would do the same again",
        "deploy the corrected function, then plan again; if the cause lay elsewhere: --same-code",
    )


def _first(found: PlanningSnapshot, table: StoredTable, condition: str, notes: list[str]) -> Batch:
    """The first batch after which the table holds a bad row, as near as savepoints and the log can tell."""
    last = found.history.last
    assert last is not None
    clean, bad = None, last.txn  # positions: clean after the one, bad after the other
    now = table.readable()
    added: dict[str, str] = {}  # columns that a savepoint has not, with the newest such savepoint
    for savepoint in found.savepoints:
        if savepoint.txn >= bad or not in_lineage(found.record.generations, savepoint.txn):
            continue
        with as_table(found.settings, found.stream, savepoint) as then:
            is_bad = bad_rows(then, condition, now=now)
            added.update((column, savepoint.id) for column in added_columns(then, now))
        if is_bad:
            bad = savepoint.txn
            break
        clean = savepoint.txn
    for column, savepoint_id in added.items():
        if re.search(rf"\b{re.escape(column)}\b", condition):
            notes.append(f"savepoints up to {savepoint_id} have no column {column}: it counts as null in their rows")
    batches = found.history.between(clean, bad)
    if not batches:
        raise UsageError(
            f"the first bad row came before {bad}, and the ledger no longer tells with which batch",
            f"go back to --savepoint {savepoints.name_of(clean)}" if clean else "choose another target",
        )
    low, high = -1, len(batches) - 1
    kept = {commit.version for commit in table.commits()}
    while high - low > 1:
        seen = [p for p in range(low + 1, high) if _readable(table, batches[p].versions.get(table.name), kept)]
        if not seen:
            break
        middle = seen[len(seen) // 2]
        if bad_rows(table.readable(batches[middle].versions[table.name]), condition, now=now):
            high = middle
        else:
            low = middle
    # Where nothing shows what lies between, the first batch after the last clean moment may be the one.
    return batches[low + 1]


def _readable(table: StoredTable, version: int | None, kept: set[int]) -> bool:
    """True if a version is in the log and all of its rows are still there."""
    return version is not None and version in kept and table.complete(version)


def _first_of_code(found: PlanningSnapshot, batch: Batch) -> Batch:
    """The first of the batches in a row, up to this one, that the same code wrote."""
    first = batch
    while (earlier := found.history.before(first.txn)) is not None and earlier.code.hash == batch.code.hash:
        first = earlier
    return first


@contextmanager
def as_table(settings: Settings, stream: Stream, savepoint: Savepoint) -> Iterator[DeltaTable]:
    """The primary table at a savepoint as DataFusion reads it, for as long as it is looked at."""
    declared = stream.primary
    place = private_folder(settings.tables / "_staging") / f"look-{stream.name}-{savepoint.id}-{declared.name}"
    shutil.rmtree(place, ignore_errors=True)
    try:
        content = savepoints.contents_of(settings, stream, savepoint)[declared.name]
        looking = settings.model_copy(update={"tables_dir": private_folder(place)})
        yield store_of(declared).create(looking, declared, stream.name, content, None).readable()
    finally:
        shutil.rmtree(place, ignore_errors=True)
