"""A Dagster instance that another team uses too: what its location runs and stores is none of our sensors' business.

Nor is what another location of Recourse runs, or a worker on another host.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import dagster as dg
import pytest

from orchestration.sessions.ownership import HEARTBEAT_TAG, KIND_TAG, SESSION_TAG, WORKER_TAG, identity, job_tags
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


def of_prefix(shop: Settings, home: Path, prefix: str) -> Settings:
    """The settings of a second location with the same streams and jobs."""
    values = {"key_prefix": [prefix], "keep_runs": timedelta(hours=6)}
    return shop.model_copy(update={"home": home, "dagster": shop.dagster.model_copy(update=values)})


def tick_all(ticks: Ticks, repository: dg.RepositoryDefinition, cursors: dict[str, str | None]) -> None:
    """One tick of every sensor and schedule, as the daemon does it; what they launch would be runs of theirs."""
    for sensor in repository.sensor_defs:
        if sensor.name.endswith("topics"):  # asks a broker, and reports assets of its own alone
            continue
        context = dg.build_sensor_context(
            instance=ticks.instance, repository_def=repository, cursor=cursors.get(sensor.name), sensor_name=sensor.name
        )
        done = sensor.evaluate_tick(context)
        assert not done.dagster_run_reactions, f"{sensor.name} writes into the log of a run"
        cursors[sensor.name] = done.cursor
        for event in done.asset_events:
            ticks.instance.report_runless_asset_event(event)
    for schedule in repository.schedule_defs:
        at = datetime.fromtimestamp(time.time(), UTC)
        schedule.evaluate_tick(
            dg.build_schedule_context(instance=ticks.instance, repository_def=repository, scheduled_execution_time=at)
        )


def test_a_day_of_two_locations_and_a_team_leaves_each_what_it_has(
    shop: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`dev` and `prod` have a session each, in one instance and beside the team, whose job fails within the day.

    The session of dev is killed: dev's watchdog fails its run, and prod's run is the same as before.
    """
    now, begun = time.time, time.time()
    clock = {"ahead": 0.0}
    with stored_instance(shop) as instance:
        dev, prod = (Ticks(of_prefix(shop, tmp_path / name, name), instance) for name in ("dev", "prod"))
        for day in DAYS:
            instance.report_runless_asset_event(dg.AssetMaterialization(LEDGER, partition=day))
        for fails in (False, True):
            finance(fails=fails).execute_in_process(instance=instance, raise_on_error=False)
        instance.create_run_for_job(finance(), status=dg.DagsterRunStatus.STARTED)
        before = stored(instance)
        lives = prod.run(dg.DagsterRunStatus.STARTED, **{WORKER_TAG: identity()})
        of_prod = dict(instance.get_run_by_id(lives).tags)  # type: ignore[union-attr]
        lost = dev.run(dg.DagsterRunStatus.STARTED, **{WORKER_TAG: DEAD_WORKER})

        monkeypatch.setattr("orchestration.sessions.definitions.time.time", lambda: now() + clock["ahead"])
        locations = [(ticks, merged(ticks), {}) for ticks in (dev, prod)]  # type: ignore[var-annotated]
        for hour in range(0, 25, 4):
            clock["ahead"] = hour * 3600.0
            for ticks, repository, cursors in locations:
                tick_all(ticks, repository, cursors)
            if hour == 8:
                finance(fails=True).execute_in_process(instance=instance, raise_on_error=False)
        assert time.time() - begun > 86_000

        theirs = stored(instance)
        assert {key: theirs["runs"][key] for key in before["runs"]} == before["runs"]  # type: ignore[index, attr-defined]
        assert {key: theirs["logs"][key] for key in before["logs"]} == before["logs"]  # type: ignore[index, attr-defined]
        assert theirs["days"] == before["days"]
        assert theirs["checks"][-len(before["checks"]) :] == before["checks"]  # type: ignore[index, arg-type]
        assert (prod.status(lives), dict(instance.get_run_by_id(lives).tags)) == ("STARTED", of_prod)  # type: ignore[union-attr]
        assert dev.status(lost) == "FAILURE"
        assert prod.keepalive() is not None, "its session runs"
        verdicts = instance.event_log_storage.get_latest_asset_check_execution_by_key(
            [dg.AssetCheckKey(dg.AssetKey([name, "orders"]), "health") for name in ("dev", "prod")]
        )
        assert {key.asset_key.path[0] for key in verdicts} == {"dev"}, "the stream of prod was never started: no news"


def merged(ticks: Ticks) -> dg.RepositoryDefinition:
    """The location beside the definitions of the team, in one."""
    return dg.Definitions.merge(ticks.defs, dg.Definitions(jobs=[finance()])).get_repository_def()


def test_runs_of_workers_on_another_host_are_left_to_those_who_can_see_them(
    shop: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a run launcher for containers starts them: the host and its processes are not these."""
    elsewhere = "another-host/4026531836:7:123456"
    silent = shop.dagster.stale_after.total_seconds() + 1000
    with stored_instance(shop) as instance:
        ticks = Ticks(shop, instance)
        reports = {WORKER_TAG: elsewhere, HEARTBEAT_TAG: f"{time.time() + silent:.0f}"}
        runs = {
            "starts": ticks.run(dg.DagsterRunStatus.STARTING),
            "has not reported": ticks.run(dg.DagsterRunStatus.STARTED, **{WORKER_TAG: elsewhere}),
            "reports": ticks.run(dg.DagsterRunStatus.STARTED, **reports),
            "suites": ticks.run(dg.DagsterRunStatus.STARTED, **{WORKER_TAG: elsewhere, KIND_TAG: "quality"}),
        }
        now = time.time
        monkeypatch.setattr("orchestration.sessions.definitions.time.time", lambda: now() + silent)
        assert "every run in progress has a worker" in str(ticks.tick("watchdog"))
        assert ticks.keepalive() is not None, "no second session beside one that runs elsewhere"
        monkeypatch.setattr("orchestration.sessions.definitions.time.time", lambda: now() + 2 * silent)
        assert "on another host" in str(ticks.tick("watchdog"))
        states = {name: ticks.status(run_id) for name, run_id in runs.items()}
        assert states == {**dict.fromkeys(runs, "STARTED"), "starts": "STARTING", "reports": "FAILURE"}
