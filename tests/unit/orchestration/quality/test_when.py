"""When suites are run: the cron of a duration, what is due, and that nothing which waits or runs is doubled."""

from __future__ import annotations

import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import dagster as dg
import pytest
from dagster._core.remote_origin import RegisteredCodeLocationOrigin, RemoteJobOrigin, RemoteRepositoryOrigin

from orchestration.quality.suites import JOB, OP, cron_of_interval, due_checks, run_config

REPOSITORY = RemoteRepositoryOrigin(RegisteredCodeLocationOrigin("streams"), "__repository__")
EVERY = timedelta(minutes=5)
KEY = dg.AssetCheckKey(dg.AssetKey(["orders"]), "orders_rows")
TAGS = {"recourse/location": "ours"}


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
    assert cron_of_interval(every) == cron


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
    assert due_checks(instance, [KEY], EVERY, tmp_path_factory.mktemp("empty"), TAGS, time.time()) == []
    assert due_checks(instance, [KEY], EVERY, tables, TAGS, time.time()) == [KEY]


def test_a_suite_whose_table_has_gone_since_its_last_execution_is_due(
    instance: dg.DagsterInstance, tmp_path: Path
) -> None:
    instance.report_runless_asset_event(
        dg.AssetCheckEvaluation(asset_key=KEY.asset_key, check_name=KEY.name, passed=True)
    )
    assert due_checks(instance, [KEY], EVERY, tmp_path, TAGS, time.time() + 900) == [KEY]


@pytest.mark.parametrize(("ago", "due"), [(60, False), (269, False), (271, True), (900, True)])
def test_a_suite_is_due_about_every_after_its_last_execution(
    instance: dg.DagsterInstance, tables: Path, ago: float, due: bool
) -> None:
    instance.report_runless_asset_event(
        dg.AssetCheckEvaluation(asset_key=KEY.asset_key, check_name=KEY.name, passed=True)
    )
    assert bool(due_checks(instance, [KEY], EVERY, tables, TAGS, time.time() + ago)) is due


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
    assert bool(due_checks(instance, [KEY], EVERY, tables, TAGS, time.time() + 86_400)) is due


@pytest.mark.parametrize(
    ("status", "suites", "due"),
    [
        (dg.DagsterRunStatus.QUEUED, [], False),
        (dg.DagsterRunStatus.STARTED, ["orders_rows"], False),
        (dg.DagsterRunStatus.STARTED, ["stock_rows"], True),
        (dg.DagsterRunStatus.SUCCESS, ["orders_rows"], True),
    ],
)
def test_a_suite_that_a_run_of_the_job_evaluates_is_not_doubled(
    instance: dg.DagsterInstance, tables: Path, status: dg.DagsterRunStatus, suites: list[str], due: bool
) -> None:
    origin = RemoteJobOrigin(REPOSITORY, JOB)
    config = run_config(suites)
    instance.create_run_for_job(job_of_suites(), run_config=config, tags=TAGS, status=status, remote_job_origin=origin)
    assert bool(due_checks(instance, [KEY], EVERY, tables, TAGS, time.time())) is due
    assert due_checks(instance, [KEY], EVERY, tables, {"recourse/location": "another"}, time.time()) == [KEY]


def job_of_suites() -> dg.JobDefinition:
    """A job like that of the suites."""

    @dg.op(name=OP, config_schema={"suites": [str]})
    def run_suites() -> None: ...

    @dg.job(name=JOB)
    def quality() -> None:
        run_suites()

    return quality
