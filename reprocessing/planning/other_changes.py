"""Changes of rows that are of no batch, and so make a bounded recovery impossible.

Rows of a change of somebody else belong to no batch. A rebuilt slice has new rows in the place of earlier ones, so the
rows of its version cannot be told apart by those of a version before it. A driver that is killed after a slice's commit
has not noted its outcome yet: therefore the tables' logs are read too.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from reprocessing.plans.plan import StreamPlan
from streaming_jobs.settings import Settings
from streaming_jobs.sinks.tables import all_tables, store_of
from streaming_jobs.state.savepoints import Savepoint
from streaming_jobs.state.slice_requests import SliceRequests
from streaming_jobs.state.stream_record import StreamRecord
from streaming_jobs.stream import Stream


def accepted_since(record: StreamRecord, start: Savepoint | None) -> str:
    """The changes of somebody else that were accepted since a savepoint (None: ever), in words; empty without any."""
    versions = {table.name: table.version for table in start.tables} if start is not None else {}
    since = [each for each in record.accepted if each.version > versions.get(each.table, -1)]
    return "; ".join(f"version {each.version} of table {each.table} was accepted ({each.why})" for each in since)


def slices_since(settings: Settings, stream: Stream, end: Savepoint, *, waiting: bool) -> str:
    """The slices that were rebuilt since a savepoint, in words; empty without any.

    With `waiting`, those that wait for their commit too: a driver that runs commits them at its next batch border.
    """
    return "; ".join(dict.fromkeys(_slices(settings, stream, end, waiting)))


def rebuilt_since(settings: Settings, stream: Stream, plan: StreamPlan) -> list[str]:
    """The slices that were rebuilt since a plan was made, in words: it would publish their rows as they were before."""
    if plan.skips or plan.until is not None:  # nothing is published, or `slices_since` is asked
        return []
    versions = {table.name: table.version for table in plan.saw.tables}
    return list(_rebuilt(settings, stream, versions, "since, and the plan would publish its rows from before that"))


def _slices(settings: Settings, stream: Stream, end: Savepoint, waiting: bool) -> Iterator[str]:
    yield from _rebuilt(settings, stream, {table.name: table.version for table in end.tables}, f"after {end.txn}")
    for each in SliceRequests.of(settings, stream.name).waiting() if waiting else ():
        yield f"slice {each.summary.get('slice', each.id)} of table {each.table} waits for its commit"


def _rebuilt(settings: Settings, stream: Stream, versions: Mapping[str, int], when: str) -> Iterator[str]:
    """Yields the slices that were rebuilt after these versions of the tables, in words."""
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
