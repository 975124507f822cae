"""When suites are run: the cron of a duration, what is due, and that nothing which waits or runs is doubled."""

from __future__ import annotations

import time
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import dagster as dg
import pytest
from dagster import evaluate_automation_conditions
from dagster._core.remote_origin import RegisteredCodeLocationOrigin, RemoteJobOrigin, RemoteRepositoryOrigin

from orchestration.quality import when
from orchestration.quality.when import cron_of, due_checks, when_written

REPOSITORY = RemoteRepositoryOrigin(RegisteredCodeLocationOrigin("streams"), "__repository__")
EVERY = timedelta(minutes=5)
KEY = dg.AssetCheckKey(dg.AssetKey(["orders"]), "orders_rows")


@pytest.mark.parametrize(
    ("every", "cron"),
    [
        (timedelta(0), "* * * * *"),
        (timedelta(seconds=10), "* * * * *"),
        (timedelta(seconds=119), "* * * * *"),
        (timedelta(minutes=5), "*/5 * * * *"),
        (timedelta(minutes=7), "*/6 * * * *"),
        (timedelta(minutes=45), "*/30 * * * *"),
        (timedelta(hours=1), "0 * * * *"),
        (timedelta(hours=5), "0 */4 * * *"),
        (timedelta(days=1), "0 0 * * *"),
        (timedelta(days=30), "0 0 * * *"),
    ],
)
def test_a_duration_as_cron_is_never_longer_than_a_day_and_never_shorter_than_a_minute(
    every: timedelta, cron: str
) -> None:
    assert cron_of(every) == cron


@pytest.fixture
def instance() -> Iterator[dg.DagsterInstance]:
    with dg.DagsterInstance.ephemeral() as instance:
        yield instance


def plan(instance: dg.DagsterInstance, status: dg.DagsterRunStatus) -> None:
    """A run that is to execute the check."""

    @dg.asset_check(asset="orders", name="orders_rows")
    def rows() -> dg.AssetCheckResult:
        return dg.AssetCheckResult(passed=True)

    defs = dg.Definitions(asset_checks=[rows], jobs=[dg.define_asset_job("q", dg.AssetSelection.checks(rows))])
    run = instance.create_run_for_job(
        defs.resolve_job_def("q"), status=status, remote_job_origin=RemoteJobOrigin(REPOSITORY, "q")
    )
    assert instance.event_log_storage.get_latest_asset_check_execution_by_key([KEY])[KEY].run_id == run.run_id


@pytest.fixture
def tables(tmp_path: Path) -> Path:
    """A folder with the table, as a stream makes it."""
    (tmp_path / "orders" / "_delta_log").mkdir(parents=True)
    return tmp_path


def test_a_suite_that_has_never_been_run_is_due_as_soon_as_its_table_is_there(
    instance: dg.DagsterInstance, tables: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    assert due_checks(instance, [KEY], EVERY, tmp_path_factory.mktemp("empty"), time.time()) == []
    assert due_checks(instance, [KEY], EVERY, tables, time.time()) == [KEY]


def test_a_suite_whose_table_has_gone_since_its_last_execution_is_due(
    instance: dg.DagsterInstance, tmp_path: Path
) -> None:
    instance.report_runless_asset_event(
        dg.AssetCheckEvaluation(asset_key=KEY.asset_key, check_name=KEY.name, passed=True)
    )
    assert due_checks(instance, [KEY], EVERY, tmp_path, time.time() + 900) == [KEY]


@pytest.mark.parametrize(("ago", "due"), [(60, False), (269, False), (271, True), (900, True)])
def test_a_suite_is_due_about_every_after_its_last_execution(
    instance: dg.DagsterInstance, tables: Path, ago: float, due: bool
) -> None:
    instance.report_runless_asset_event(
        dg.AssetCheckEvaluation(asset_key=KEY.asset_key, check_name=KEY.name, passed=True)
    )
    assert bool(due_checks(instance, [KEY], EVERY, tables, time.time() + ago)) is due


@pytest.mark.parametrize(("ago", "due"), [(299, False), (449, False), (451, True)])
def test_a_table_that_is_being_written_is_left_to_its_condition_unless_that_is_late(
    instance: dg.DagsterInstance, tables: Path, monkeypatch: pytest.MonkeyPatch, ago: float, due: bool
) -> None:
    instance.report_runless_asset_event(
        dg.AssetCheckEvaluation(asset_key=KEY.asset_key, check_name=KEY.name, passed=True)
    )
    monkeypatch.setattr(when, "_written_since", lambda _, keys, moment: {key.asset_key for key in keys})
    assert bool(due_checks(instance, [KEY], EVERY, tables, time.time() + ago)) is due


def test_a_table_counts_as_written_while_it_is_materialised(instance: dg.DagsterInstance) -> None:
    now = time.time()
    assert when._written_since(instance, [KEY], now - 60) == set()
    instance.report_runless_asset_event(dg.AssetMaterialization(KEY.asset_key))
    assert when._written_since(instance, [KEY], now - 60) == {KEY.asset_key}
    assert when._written_since(instance, [KEY], now + 60) == set()


@pytest.mark.parametrize(
    ("status", "due"),
    [
        (dg.DagsterRunStatus.QUEUED, False),
        (dg.DagsterRunStatus.STARTED, False),
        (dg.DagsterRunStatus.FAILURE, True),
        (dg.DagsterRunStatus.CANCELED, True),
    ],
)
def test_a_suite_that_waits_or_runs_is_not_doubled_however_long_it_takes(
    instance: dg.DagsterInstance, tables: Path, status: dg.DagsterRunStatus, due: bool
) -> None:
    plan(instance, status)
    assert bool(due_checks(instance, [KEY], EVERY, tables, time.time() + 86_400)) is due


class Ticks:
    """The condition of a check, evaluated at times of our own."""

    def __init__(self, instance: dg.DagsterInstance) -> None:
        spec = dg.AssetCheckSpec("orders_rows", asset="orders", automation_condition=when_written(EVERY))

        @dg.multi_asset_check(specs=[spec])
        def rows() -> Iterator[dg.AssetCheckResult]:
            yield dg.AssetCheckResult(passed=True, check_name="orders_rows", asset_key="orders")

        self.defs = dg.Definitions(assets=[dg.AssetSpec("orders")], asset_checks=[rows])
        self.instance, self.cursor = instance, None
        # Far in the future, so that "since the tick" includes what is written now.
        self.now = datetime.now(UTC).replace(minute=1, second=0, microsecond=0)

    def tick(self, minutes: float = 0, *, written: bool = False) -> bool:
        """Let time pass; True if the check is requested."""
        if written:
            self.instance.report_runless_asset_event(dg.AssetMaterialization("orders"))
        self.now += timedelta(minutes=minutes)
        result = evaluate_automation_conditions(
            self.defs, self.instance, dg.AssetSelection.all_asset_checks(), self.now, self.cursor
        )
        self.cursor = result.cursor  # type: ignore[assignment]
        return result.total_requested == 1


def test_a_check_is_requested_once_per_tick_of_the_clock_and_only_if_its_table_was_written(
    instance: dg.DagsterInstance,
) -> None:
    ticks = Ticks(instance)
    assert not ticks.tick()
    assert not ticks.tick(1, written=True), "the clock has not ticked"
    assert ticks.tick(4)
    assert not ticks.tick(1, written=True), "once per tick, though it is written each minute"
    assert not ticks.tick(1, written=True)
    assert ticks.tick(4)
    assert not ticks.tick(1)
    assert not ticks.tick(4), "nothing was written since"
    assert ticks.tick(1, written=True)


def test_a_check_that_waits_in_the_queue_is_not_requested_again(instance: dg.DagsterInstance) -> None:
    ticks = Ticks(instance)
    ticks.tick()
    plan(instance, dg.DagsterRunStatus.QUEUED)
    assert not ticks.tick(5, written=True)
    assert not ticks.tick(5, written=True)
    assert not ticks.tick(1, written=True)
