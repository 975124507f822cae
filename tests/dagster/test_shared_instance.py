"""A Dagster instance that another team uses too: what its location runs and stores is none of our sensors' business."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import dagster as dg
import pytest

from orchestration.sessions.ownership import SESSION_TAG, WORKER_TAG, job_tags
from streaming_jobs.settings import Settings
from tests.dagster.ticks import DEAD_WORKER, Ticks
from tests.support.dagster_homes import stored_instance

BALANCE, LEDGER = dg.AssetKey(["finance", "balance"]), dg.AssetKey(["finance", "ledger"])
CHECK = dg.AssetCheckKey(BALANCE, "health")
DAYS = ("2026-11-01", "2026-11-02", "2026-11-03")


def finance(*, fails: bool = False) -> dg.JobDefinition:
    """Their job has the name of ours, its step that of our session's step, and its check that of our checks."""

    @dg.multi_asset(
        name="shop_session", specs=[dg.AssetSpec(BALANCE)], check_specs=[dg.AssetCheckSpec("health", asset=BALANCE)]
    )
    def balance() -> Iterator[Any]:
        if fails:
            raise ValueError("the books are closed")
        yield dg.MaterializeResult(BALANCE)
        yield dg.AssetCheckResult(passed=False, asset_key=BALANCE, check_name="health")

    jobs = [dg.define_asset_job("shop", dg.AssetSelection.assets(BALANCE))]
    return dg.Definitions(assets=[balance, dg.AssetSpec(LEDGER)], jobs=jobs).resolve_job_def("shop")


def stored(instance: dg.DagsterInstance) -> dict[str, object]:
    """All that the other team sees of its runs, tables and checks."""
    storage = instance.event_log_storage
    runs = instance.get_runs()
    return {
        "runs": {run.run_id: (run.status, dict(run.tags)) for run in runs},
        "logs": {run.run_id: len(instance.all_logs(run.run_id)) for run in runs},
        "days": sorted(storage.get_materialized_partitions(LEDGER)),
        "checks": [(each.id, each.status) for each in storage.get_asset_check_execution_history(CHECK, limit=99)],
    }


@pytest.mark.parametrize("own_instance", [False, True])
def test_runs_events_and_checks_of_a_second_location_are_left_alone(
    shop: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, own_instance: bool
) -> None:
    """It has a job of the same name and, if it is of Recourse too, the same tags but that of the home."""
    kept = {"keep_runs": timedelta(0), "own_instance": own_instance}
    settings = shop.model_copy(update={"dagster": shop.dagster.model_copy(update=kept)})
    with stored_instance(settings) as instance:
        for day in DAYS:
            instance.report_runless_asset_event(dg.AssetMaterialization(LEDGER, partition=day))
        for fails in (False, True, False, True):
            assert finance(fails=fails).execute_in_process(instance=instance, raise_on_error=False).success is not fails
        of_recourse = {
            **job_tags(shop.model_copy(update={"home": tmp_path / "other"}), "continuous"),
            SESSION_TAG: "shop",
        }
        for tags in [{}] if own_instance else [{}, {**of_recourse, WORKER_TAG: DEAD_WORKER}]:
            for status in ("STARTED", "CANCELED", "FAILURE"):
                instance.create_run_for_job(finance(), status=dg.DagsterRunStatus[status], tags=tags)
        before = stored(instance)
        assert before["days"] == sorted(DAYS) and len(before["runs"]) == (7 if own_instance else 10)  # type: ignore[arg-type]

        ticks = Ticks(settings, instance)
        monkeypatch.setattr("orchestration.sessions.definitions.time.time", lambda: 4e9)
        assert ticks.keepalive() is None, "no session of ours has been started"
        assert "0 old runs deleted" in str(ticks.tick("retention"))
        assert "every run in progress has a worker" in str(ticks.tick("watchdog"))
        assert not {table for table in ticks.look() if table.startswith("finance")}
        alerts = ticks.tick("check_alerts")
        assert isinstance(alerts, dg.SensorResult) and "finance" not in str(alerts.cursor)
        assert stored(instance) == before
