"""Asset events without a run: storing them, bounding them, and keeping tables from being shown as "Materializing".

Figures, materialisations and verdicts are reported without a run, for three reasons: they would bury the few useful
lines of a run's log; Dagster counts a check for the newest materialisation only if both belong to one run (or to
none); and it shows a table of a run in progress as "Materializing", whatever its checks say.
"""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime

import dagster as dg
import sqlalchemy as sql
from dagster._core.events import AssetMaterializationPlannedData
from dagster._core.storage.asset_check_execution_record import AssetCheckExecutionRecordStatus
from dagster._core.storage.event_log.schema import AssetCheckExecutionsTable, SqlEventLogStorageTable
from dagster._core.storage.event_log.sql_event_log import SqlEventLogStorage

NO_RUN = ""
"""The run id of events without a run."""
DELETE_AT_ONCE = 1000
"""Rows deleted from one table at once: the storage is locked meanwhile."""


def report_without_run(
    instance: dg.DagsterInstance, event: dg.AssetMaterialization | dg.AssetObservation | dg.AssetCheckEvaluation
) -> None:
    """Store an asset event that belongs to no run."""
    instance.report_runless_asset_event(event)


def belongs_to_no_run(instance: dg.DagsterInstance, check: dg.AssetCheckKey, run: str) -> None:
    """Let the verdict that a run's step has given count as one without a run; the run keeps its own event of it."""
    storage, checks = instance.event_log_storage, AssetCheckExecutionsTable.c
    if isinstance(storage, SqlEventLogStorage):
        given = sql.and_(
            checks.asset_key == check.asset_key.to_string(),
            checks.check_name == check.name,
            checks.run_id == run,
            checks.execution_status != AssetCheckExecutionRecordStatus.PLANNED.value,
        )
        with storage.index_connection() as connection:
            connection.execute(AssetCheckExecutionsTable.update().where(given).values(run_id=NO_RUN))


def not_being_made(instance: dg.DagsterInstance, tables: Iterable[dg.AssetKey]) -> None:
    """Withdraw Dagster's plan that a run materialises the tables once, at its end: a session does so all the time."""
    for table in tables:
        instance.report_dagster_event(
            dg.DagsterEvent(
                dg.DagsterEventType.ASSET_MATERIALIZATION_PLANNED.value,
                job_name=NO_RUN,
                event_specific_data=AssetMaterializationPlannedData(table, partition=None, partitions_subset=None),
            ),
            run_id=NO_RUN,
        )


def delete_older(instance: dg.DagsterInstance, limit: datetime) -> int:
    """Delete events without a run from before `limit` (with zone), some at a time; returns how many were deleted.

    The newest event of each kind of each asset stays, and the newest verdict of each check.
    """
    storage = instance.event_log_storage
    if not isinstance(storage, SqlEventLogStorage):
        return 0
    before = limit.replace(tzinfo=None) - (limit.utcoffset() or limit - limit)
    events, checks = SqlEventLogStorageTable.c, AssetCheckExecutionsTable.c
    deleted = 0
    newest_events = sql.select(sql.func.max(events.id)).group_by(events.asset_key, events.dagster_event_type)
    newest_checks = sql.select(sql.func.max(checks.id)).group_by(checks.asset_key, checks.check_name)
    old_events = sql.and_(events.run_id == NO_RUN, events.timestamp < before, events.id.not_in(newest_events))
    # Also those of runs: Dagster leaves them when it deletes the run.
    old_checks = sql.and_(checks.evaluation_event_timestamp < before, checks.id.not_in(newest_checks))
    # SQLite keeps two copies: one for all assets, and one as if "no run" were a run.
    for connection in (storage.index_connection, lambda: storage.run_connection(NO_RUN)):
        with connection() as open_connection:
            deleted = max(deleted, _delete(open_connection, SqlEventLogStorageTable, old_events))
    with storage.index_connection() as open_connection:
        _delete(open_connection, AssetCheckExecutionsTable, old_checks)
    return deleted


def _delete(connection: sql.Connection, table: sql.Table, which: sql.ColumnElement[bool]) -> int:
    some = [row[0] for row in connection.execute(sql.select(table.c.id).where(which).limit(DELETE_AT_ONCE))]
    for start in range(0, len(some), 500):  # SQLite's bound on variables of a statement is 999 in old versions
        connection.execute(table.delete().where(table.c.id.in_(some[start : start + 500])))
    return len(some)
