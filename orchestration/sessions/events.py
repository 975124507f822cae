"""Asset events without a run: storing them, and keeping tables from being shown as "Materializing".

Figures, materialisations and verdicts are reported without a run, for three reasons: they would bury the few useful
lines of a run's log; Dagster counts a check for the newest materialisation only if both belong to one run (or to
none); and it shows a table of a run in progress as "Materializing", whatever its checks say.
"""

from __future__ import annotations

from collections.abc import Iterable

import dagster as dg
import sqlalchemy as sql
from dagster._core.events import AssetMaterializationPlannedData
from dagster._core.storage.asset_check_execution_record import AssetCheckExecutionRecordStatus
from dagster._core.storage.event_log.schema import AssetCheckExecutionsTable
from dagster._core.storage.event_log.sql_event_log import SqlEventLogStorage

NO_RUN = ""
"""The run id of events without a run."""


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
