"""What retention deletes, and what it leaves: in an instance of our own, and in one that others use too."""

from __future__ import annotations

import time
from datetime import UTC, datetime, timedelta
from pathlib import Path

import dagster as dg
import pytest

from orchestration.sessions.ownership import KIND_TAG, SESSION_TAG, job_tags
from orchestration.sessions.reporting import not_being_made
from orchestration.sessions.retention import RUNS_AT_ONCE, Owned, delete_events, delete_runs
from streaming_jobs.settings import Settings

pytestmark = pytest.mark.slow

ORDERS = dg.AssetKey(["orders"])
HEALTH = dg.AssetCheckKey(ORDERS, "health")
OWNED = Owned([ORDERS], [HEALTH])
LEDGER = dg.AssetKey(["finance", "ledger"])
BALANCE = dg.AssetCheckKey(LEDGER, "health")


def home(path: Path, *, own: bool) -> Settings:
    return Settings.load({"home": path, "dagster.own_instance": own})


def soon() -> datetime:
    return datetime.now(UTC) + timedelta(seconds=5)


def a_minute() -> float:
    return time.monotonic() + 60


def report(instance: dg.DagsterInstance, check: dg.AssetCheckKey, number: int, partition: str | None = None) -> None:
    asset = check.asset_key
    instance.report_runless_asset_event(dg.AssetObservation(asset, metadata={"alert": f"trouble {number}"}))
    instance.report_runless_asset_event(
        dg.AssetMaterialization(asset, metadata={"number": number}, partition=partition)
    )
    verdict = dg.AssetCheckEvaluation(asset_key=asset, check_name=check.name, passed=True)
    instance.report_runless_asset_event(verdict)


def stored(instance: dg.DagsterInstance, check: dg.AssetCheckKey) -> tuple[int, int, int]:
    """Observations, materialisations and verdicts."""
    table = check.asset_key
    checks = instance.event_log_storage.get_asset_check_execution_history(check, limit=100)
    observed, made = instance.fetch_observations(table, limit=100), instance.fetch_materializations(table, limit=100)
    return len(observed.records), len(made.records), len(checks)


def test_in_an_instance_of_our_own_old_events_are_deleted_and_the_newest_of_each_kind_stay(
    instance: dg.DagsterInstance, tmp_path: Path
) -> None:
    settings = home(tmp_path, own=True)
    for number in range(4):
        report(instance, HEALTH, number)
        not_being_made(instance, [ORDERS])
    long_ago = datetime.now(UTC) - timedelta(hours=1)
    assert delete_events(instance, settings, OWNED, long_ago, a_minute()) == 0
    assert stored(instance, HEALTH) == (4, 4, 4)
    assert delete_events(instance, settings, OWNED, soon(), a_minute()) == 12
    assert stored(instance, HEALTH) == (1, 1, 1)
    newest = instance.get_latest_materialization_event(ORDERS)
    assert newest is not None and newest.asset_materialization is not None
    assert newest.asset_materialization.metadata["number"].value == 3
    for connection in (instance.event_log_storage.index_connection, instance.event_log_storage.run_connection):  # type: ignore[attr-defined]
        with connection() if "index" in connection.__name__ else connection("") as open_connection:
            assert open_connection.exec_driver_sql("select count(*) from event_logs").scalar() == 4


def test_the_newest_event_of_each_partition_stays(instance: dg.DagsterInstance, tmp_path: Path) -> None:
    """Otherwise a rebuilt day would be shown as missing."""
    for number in range(4):
        report(instance, HEALTH, number, f"2026-11-0{number // 2 + 1}")
    delete_events(instance, home(tmp_path, own=True), OWNED, soon(), a_minute())
    made = instance.fetch_materializations(ORDERS, limit=100).records
    assert sorted(str(record.partition_key) for record in made) == ["2026-11-01", "2026-11-02"]
    assert {record.asset_materialization.metadata["number"].value for record in made} == {1, 3}  # type: ignore[union-attr]


@pytest.mark.parametrize("own", [False, True])
def test_what_another_team_has_reported_stays(instance: dg.DagsterInstance, tmp_path: Path, own: bool) -> None:
    theirs = dg.AssetCheckKey(ORDERS, "their_check_of_our_table")
    for number in range(3):
        report(instance, BALANCE, number, f"2026-11-0{number + 1}")
        report(instance, HEALTH, number)
        instance.report_runless_asset_event(
            dg.AssetCheckEvaluation(asset_key=ORDERS, check_name=theirs.name, passed=False)
        )
    delete_events(instance, home(tmp_path, own=own), OWNED, soon(), a_minute())
    assert stored(instance, BALANCE) == (3, 3, 3)
    assert len(instance.event_log_storage.get_asset_check_execution_history(theirs, limit=100)) == 3
    assert stored(instance, HEALTH) == ((1, 1, 1) if own else (3, 3, 3)), "SQL deletes in an instance of our own only"


def runs(instance: dg.DagsterInstance, count: int, tags: dict[str, str]) -> list[str]:
    """Finished runs of a job named `orders`."""

    @dg.job(name="orders")
    def orders() -> None:
        pass

    return [
        instance.create_run_for_job(orders, status=dg.DagsterRunStatus.SUCCESS, tags=tags).run_id for _ in range(count)
    ]


def test_old_runs_of_every_kind_are_deleted_until_none_is_left_and_those_of_others_stay(
    instance: dg.DagsterInstance, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("orchestration.sessions.retention.RUNS_AT_ONCE", 2)
    settings, other = home(tmp_path, own=False), home(tmp_path / "other", own=False)
    kinds = ("continuous", "quality", "recovery", "preview", "slices", "health")
    old = [run_id for kind in kinds for run_id in runs(instance, 1, job_tags(settings, kind))]
    (newest,) = runs(instance, 1, job_tags(settings, "continuous"))
    theirs = runs(instance, 2, {})
    other_home = [
        run_id for kind in kinds for run_id in runs(instance, 1, {**job_tags(other, kind), SESSION_TAG: "orders"})
    ]
    assert delete_runs(instance, settings, datetime.now(UTC) - timedelta(hours=1), [], a_minute()) == 0
    assert delete_runs(instance, settings, soon(), [newest], a_minute()) == len(old)
    assert {run.run_id for run in instance.get_runs()} == {newest, *theirs, *other_home}


def test_runs_from_before_the_tag_are_deleted_in_an_instance_of_our_own_only(
    instance: dg.DagsterInstance, tmp_path: Path
) -> None:
    before = runs(instance, 2, {KIND_TAG: "continuous"})
    assert delete_runs(instance, home(tmp_path, own=False), soon(), [], a_minute()) == 0
    assert delete_runs(instance, home(tmp_path, own=True), soon(), before[:1], a_minute()) == 1


def test_the_time_of_a_tick_bounds_what_is_deleted(instance: dg.DagsterInstance, tmp_path: Path) -> None:
    settings = home(tmp_path, own=True)
    runs(instance, 3, job_tags(settings, "preview"))
    report(instance, HEALTH, 1)
    report(instance, HEALTH, 2)
    over = time.monotonic() - 1
    assert delete_runs(instance, settings, soon(), [], over) == 0
    assert delete_events(instance, settings, OWNED, soon(), over) == 0
    assert RUNS_AT_ONCE > 1
