"""Bounding Dagster's storage: old runs of this code location, and old events of its tables and topics.

Dagster has no call that deletes single events, so they are deleted by SQL: only in an instance that is Recourse's own
(`dagster.own_instance`), and only events of this location's assets and checks. Runs are deleted through Dagster.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

import dagster as dg
import sqlalchemy as sql
from dagster._core.storage.event_log.schema import AssetCheckExecutionsTable, SqlEventLogStorageTable
from dagster._core.storage.event_log.sql_event_log import SqlEventLogStorage

from orchestration.sessions.ownership import KIND_TAG, KINDS, LOCATION_TAG, location_id
from orchestration.sessions.reporting import NO_RUN
from orchestration.sessions.runs import ENDED
from streaming_jobs.settings import Settings

RUNS_AT_ONCE = 100
ROWS_AT_ONCE = 1000
_VARIABLES = 500
"""Of a statement; SQLite's bound is 999 in old versions."""


@dataclass(frozen=True)
class Owned:
    """The assets and checks of this code location."""

    assets: Collection[dg.AssetKey]
    checks: Collection[dg.AssetCheckKey]


def delete_runs(
    instance: dg.DagsterInstance, settings: Settings, limit: datetime, keep: Collection[str], deadline: float
) -> int:
    """Delete our runs that ended before `limit`, but those in `keep`, until `deadline` (monotonic); their number."""
    ours: list[Mapping[str, str | Sequence[str]]] = [{LOCATION_TAG: location_id(settings)}]
    if settings.dagster.own_instance:  # also those of a version without that tag
        ours.append({KIND_TAG: KINDS})
    deleted = 0
    for tags in ours:
        old = dg.RunsFilter(tags=tags, statuses=ENDED, updated_before=limit)
        while doomed := _but(keep, instance.get_runs(old, limit=RUNS_AT_ONCE + len(keep), ascending=True)):
            for run_id in doomed:
                if time.monotonic() > deadline:
                    return deleted
                delete_run(instance, run_id)
                deleted += 1
    return deleted


def _but(keep: Collection[str], runs: Iterable[dg.DagsterRun]) -> list[str]:
    return [run.run_id for run in runs if run.run_id not in keep]


def delete_run(instance: dg.DagsterInstance, run_id: str) -> None:
    """Delete a run and its events; Dagster's SQLite storage would leave the run's own file behind."""
    instance.delete_run(run_id)
    for suffix in (".db", ".db-wal", ".db-shm"):
        (Path(instance.root_directory) / "history" / "runs" / f"{run_id}{suffix}").unlink(missing_ok=True)


def delete_events(
    instance: dg.DagsterInstance, settings: Settings, owned: Owned, limit: datetime, deadline: float
) -> int:
    """Delete our events without a run from before `limit` (with zone), until `deadline` (monotonic); their number.

    The newest event of each kind of each asset and partition stays, and the newest verdict of each check and partition.
    """
    storage = instance.event_log_storage
    if not settings.dagster.own_instance or not isinstance(storage, SqlEventLogStorage):
        return 0
    before = limit.replace(tzinfo=None) - (limit.utcoffset() or limit - limit)
    events, checks = SqlEventLogStorageTable.c, AssetCheckExecutionsTable.c
    deleted = 0
    verdicts = events.dagster_event_type == dg.DagsterEventType.ASSET_CHECK_EVALUATION.value  # their asset is not noted
    for ours in (verdicts, *(events.asset_key == key.to_string() for key in owned.assets)):
        newest = sql.select(sql.func.max(events.id)).where(ours).group_by(events.dagster_event_type, events.partition)
        old = sql.and_(ours, events.run_id == NO_RUN, events.timestamp < before, events.id.not_in(newest))
        deleted += _delete(storage.index_connection, SqlEventLogStorageTable, old, deadline)
        # SQLite keeps a second copy, as if "no run" were a run.
        _delete(lambda: storage.run_connection(NO_RUN), SqlEventLogStorageTable, old, deadline)
    for check in sorted(owned.checks):
        # Also those of runs: Dagster leaves them when it deletes the run.
        this = sql.and_(checks.asset_key == check.asset_key.to_string(), checks.check_name == check.name)
        newest = sql.select(sql.func.max(checks.id)).where(this).group_by(checks.partition)
        given_up = sql.and_(this, checks.evaluation_event_timestamp < before, checks.id.not_in(newest))
        _delete(storage.index_connection, AssetCheckExecutionsTable, given_up, deadline)
    return deleted


def _delete(
    connect: Callable[[], AbstractContextManager[sql.Connection]],
    table: sql.Table,
    which: sql.ColumnElement[bool],
    deadline: float,
) -> int:
    """Delete rows until none is left or the deadline has passed, some at a time: the storage is locked meanwhile."""
    deleted = 0
    while time.monotonic() < deadline:
        with connect() as connection:
            some = [row[0] for row in connection.execute(sql.select(table.c.id).where(which).limit(ROWS_AT_ONCE))]
            for start in range(0, len(some), _VARIABLES):
                connection.execute(table.delete().where(table.c.id.in_(some[start : start + _VARIABLES])))
        deleted += len(some)
        if len(some) < ROWS_AT_ONCE:
            break
    return deleted
