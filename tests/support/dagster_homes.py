"""Dagster instances with SQLite files, as at home: copies of one whose tables were created once; and runs in them."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import dagster as dg
from dagster._core.remote_origin import RegisteredCodeLocationOrigin, RemoteJobOrigin, RemoteRepositoryOrigin

from orchestration.local_dagster.dagster_home import prepare
from streaming_jobs.settings import Settings

REPOSITORY = RemoteRepositoryOrigin(RegisteredCodeLocationOrigin("streams"), "__repository__")


@cache
def _template() -> TemporaryDirectory[str]:
    folder = TemporaryDirectory(prefix="dagster-template-")
    prepare(Settings(home=Path(folder.name)))
    return folder


def prepared(settings: Settings) -> Path:
    """The folder for DAGSTER_HOME, with its configuration and its databases."""
    if not settings.dagster_home.exists():
        shutil.copytree(Settings(home=Path(_template().name)).dagster_home, settings.dagster_home)
    return prepare(settings)


@contextmanager
def stored_instance(settings: Settings) -> Iterator[dg.DagsterInstance]:
    """An instance that other processes can use too."""
    with dg.DagsterInstance.from_config(str(prepared(settings))) as instance:
        yield instance


def planned(
    instance: dg.DagsterInstance,
    status: dg.DagsterRunStatus,
    key: dg.AssetCheckKey,
    tags: Mapping[str, str] | None = None,
) -> dg.DagsterRun:
    """A run that is to execute a check, and has not given its outcome."""

    @dg.asset_check(asset=key.asset_key, name=key.name)
    def check() -> dg.AssetCheckResult:
        return dg.AssetCheckResult(passed=True)

    job = dg.define_asset_job("quality", dg.AssetSelection.checks(check))
    run = instance.create_run_for_job(
        dg.Definitions(asset_checks=[check], jobs=[job]).resolve_job_def("quality"),
        status=status,
        tags=tags,
        remote_job_origin=RemoteJobOrigin(REPOSITORY, "quality"),  # a run in the queue has to have one
    )
    newest = instance.event_log_storage.get_latest_asset_check_execution_by_key([key])[key]
    assert newest.run_id == run.run_id
    return run
