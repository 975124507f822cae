"""Before the first bad row: which batch made it, and which code wrote that batch.

The primary table is asked as it was after each savepoint, oldest first, and between the last clean one and the first
bad one by halves, as far as the table's own log still shows the versions. The state of a stream may be wrong long
before a wrong row shows, so the way back goes before the first batch of the code that wrote the bad row's batch;
`exact` goes before that batch only.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from deltalake import CommitProperties, DeltaTable, QueryBuilder

from reprocessing.history import Batch, on_path
from reprocessing.situation import Situation
from reprocessing.targets import Resolved, Target, before
from reprocessing.workshop import table_of
from streaming_jobs import savepoints
from streaming_jobs.errors import PreflightRefused, UsageError
from streaming_jobs.files import private_folder
from streaming_jobs.ledger import walk
from streaming_jobs.savepoints import Savepoint
from streaming_jobs.settings import Settings
from streaming_jobs.sinks.table_files import on_disk, table_files


def before_first_bad(found: Situation, condition: str, *, exact: bool) -> tuple[Target, Resolved]:
    """Where to rewind to; raises UsageError when no row is bad, and for a condition that the table cannot be asked."""
    table = found.settings.tables / found.stream.primary.name
    bad_now = bad_rows(DeltaTable(table), condition)
    if not bad_now:
        raise UsageError(f"no row of table {table.name} is bad: {condition}", "there is nothing to put right")
    batch = _first(found, table, condition)
    code = _first_of_code(found, batch)
    start = batch if exact else code
    view = found.view()
    txn, ends = before(start.txn, view)
    ran = f"written by code {batch.code.hash}, which ran since {code.txn}"
    notes = [f"{bad_now:,} rows are bad now; the first came with {batch.txn}, {ran}"]
    if exact and code.txn != batch.txn:
        notes.append(f"--exact: what code {batch.code.hash} wrote from {code.txn} to {batch.txn} stays as it is")
    words = f"{txn.batch if txn else -1} (before the first bad row: {condition})"
    return Target("batch", words), Resolved(txn, ends, tuple(notes))


def bad_rows(table: DeltaTable, condition: str) -> int:
    """How many rows meet the condition."""
    try:
        data = (
            QueryBuilder().register("t", table).execute(f'SELECT count(*) AS n FROM "t" WHERE ({condition})').read_all()
        )
    except Exception as error:  # what a condition meets while it runs, deltalake raises as a plain Exception
        raise UsageError(
            f"the condition '{condition}' cannot be asked: {str(error).splitlines()[-1][:300]}",
            "write a SQL condition on the table's columns",
        ) from error
    return int(data.column(0)[0].as_py())


def _first(found: Situation, table: Path, condition: str) -> Batch:
    """The first batch after which the table holds a bad row, as near as savepoints and the log can tell."""
    last = found.history.last
    assert last is not None
    clean, bad = None, last.txn  # positions: clean after the one, bad after the other
    for savepoint in found.savepoints:
        if savepoint.txn >= bad or not on_path(found.record.generations, savepoint.txn):
            continue
        with as_table(found.settings, savepoint, table.name) as path:
            is_bad = bad_rows(DeltaTable(path), condition)
        if is_bad:
            bad = savepoint.txn
            break
        clean = savepoint.txn
    batches = found.history.between(clean, bad)
    if not batches:
        raise UsageError(
            f"the first bad row came before {bad}, and the ledger no longer tells with which batch",
            f"go back to --savepoint {savepoints.name_of(clean)}" if clean else "choose another target",
        )
    low, high = -1, len(batches) - 1
    kept = {commit.version for commit in walk(table)}
    while high - low > 1:
        seen = [p for p in range(low + 1, high) if _readable(table, batches[p].versions.get(table.name), kept)]
        if not seen:
            break
        middle = seen[len(seen) // 2]
        if bad_rows(DeltaTable(table, version=batches[middle].versions[table.name]), condition):
            high = middle
        else:
            low = middle
    # Where nothing shows what lies between, the first batch after the last clean moment may be the one.
    return batches[low + 1]


def _readable(table: Path, version: int | None, kept: set[int]) -> bool:
    """Whether a version is in the log and all of its files are still there."""
    if version is None or version not in kept:
        return False
    try:
        for path in table_files(table, version):
            on_disk(table, path)
    except PreflightRefused:
        return False
    return True


def _first_of_code(found: Situation, batch: Batch) -> Batch:
    """The first of the batches in a row, up to this one, that the same code wrote."""
    first = batch
    while (earlier := found.history.before(first.txn)) is not None and earlier.code == batch.code:
        first = earlier
    return first


@contextmanager
def as_table(settings: Settings, savepoint: Savepoint, name: str) -> Iterator[Path]:
    """A savepoint's table as an ordinary Delta table, for as long as it is looked at."""
    saved = next(table for table in savepoint.tables if table.name == name)
    links = savepoints.links(settings, savepoint.stream, name, savepoint.id)
    path = private_folder(settings.tables / "_staging") / f"look-{savepoint.stream}-{savepoint.id}-{name}"
    shutil.rmtree(path, ignore_errors=True)
    try:
        files = savepoints.files_of(settings, savepoint)[name]
        table_of(path, saved, files, links, stream=savepoint.stream, how=CommitProperties())
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)
