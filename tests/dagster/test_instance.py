"""`recourse doctor --dagster`: the settings of an instance, compared with what the jobs of a home need."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import dagster as dg
import pytest
import yaml
from typer.testing import CliRunner

from orchestration.bundle import job_yaml
from orchestration.bundle.job import Job
from orchestration.cli.app import app
from orchestration.cli.doctor import verdict
from orchestration.local_dagster import instance as instances
from streaming_jobs.settings import Settings
from tests.support.dagster_homes import prepared, stored_instance

QUALITY = {"key": "recourse/kind", "value": "quality", "limit": 1}
GOOD: dict[str, Any] = {
    "run_monitoring": {"enabled": True, "cancel_timeout_seconds": 600},
    "concurrency": {
        "pools": {"granularity": "run", "default_limit": 1},
        "runs": {"max_concurrent_runs": 20, "tag_concurrency_limits": [QUALITY]},
    },
    "sensors": {"use_threads": True, "num_workers": 4},
    "retention": {"sensor": {"purge_after_days": {"skipped": 1}}},
}
"""A team's dagster.yaml with what is needed, and nothing that only `recourse up` has."""


def jobs(settings: Settings) -> tuple[Job, ...]:
    return job_yaml.load(job_yaml.find(settings)).jobs


def found(settings: Settings, folder: Path, changes: Mapping[str, Any] | None = None) -> dict[str, tuple[str, str]]:
    """The verdict and the fix of each check, on an instance with these sections in place of the good ones."""
    (folder / "dagster.yaml").write_text(yaml.safe_dump({"telemetry": {"enabled": False}, **GOOD, **(changes or {})}))
    with dg.DagsterInstance.from_config(str(folder)) as instance:
        checks = list(instances.checks(instance, settings, jobs(settings)))
    worst = sorted(checks, key=lambda check: ("ok", "warn", "fail").index(verdict(check)))
    return {check.name.removeprefix("Dagster "): (verdict(check), check.fix) for check in worst}


def test_the_instance_of_recourse_up_is_as_needed_but_for_a_storage_of_several_hosts(shop: Settings) -> None:
    own = shop.model_copy(update={"dagster": shop.dagster.model_copy(update={"own_instance": True})})
    with stored_instance(own) as instance:
        checks = list(instances.checks(instance, own, jobs(own)))
    assert {check.name for check in checks if not check.ok} == {"Dagster storage"}


def test_a_team_s_instance_with_what_is_needed_only_keeps_events(shop: Settings, tmp_path: Path) -> None:
    assert {name for name, (word, _) in found(shop, tmp_path).items() if word != "ok"} == {"storage", "retention"}


@pytest.mark.parametrize(
    ("changes", "check", "word", "fix"),
    [
        (
            {"concurrency": {**GOOD["concurrency"], "runs": {"max_concurrent_runs": 1}}},
            "queue",
            "fail",
            "max_concurrent_runs: at least 5",
        ),
        (
            {"concurrency": {**GOOD["concurrency"], "runs": {"max_concurrent_runs": 4}}},
            "queue",
            "warn",
            "max_concurrent_runs: at least 5",
        ),
        (
            {
                "concurrency": {"pools": {"granularity": "run"}},
                "run_coordinator": {
                    "module": "dagster._core.run_coordinator",
                    "class": "DefaultRunCoordinator",
                },
            },
            "queue",
            "warn",
            "remove run_coordinator",
        ),
        ({"concurrency": {"pools": {"granularity": "run"}}}, "pools", "warn", "concurrency set session_shop 1"),
        (
            {"concurrency": {"pools": {"granularity": "run", "default_limit": 0}}},
            "pools",
            "fail",
            "concurrency set session_shop 1",
        ),
        ({"concurrency": {"pools": {"default_limit": 1}}}, "pools", "warn", "granularity: run"),
        ({"concurrency": {"pools": {"granularity": "run", "default_limit": 1}}}, "suites", "warn", "recourse/kind"),
        ({"run_monitoring": {"enabled": False}}, "monitoring", "warn", "run_monitoring.enabled: true"),
        (
            {"run_monitoring": {"enabled": True, "cancel_timeout_seconds": 30}},
            "monitoring",
            "warn",
            "cancel_timeout_seconds",
        ),
        ({"run_monitoring": {"enabled": True, "max_runtime_seconds": 7200}}, "max_runtime", "warn", "timeout_seconds"),
        ({"sensors": {"use_threads": False}}, "sensors", "warn", "use_threads: true"),
        ({"retention": {"sensor": {"purge_after_days": -1}}}, "ticks", "warn", "skipped: 1"),
        (
            {"run_launcher": {"module": "tests.dagster.fakes.launcher", "class": "ElsewhereLauncher"}},
            "launcher",
            "warn",
            "flock",
        ),
        (
            {
                "run_launcher": {"module": "tests.dagster.fakes.launcher", "class": "ElsewhereLauncher"},
                "run_monitoring": {"enabled": False},
            },
            "launcher",
            "fail",
            "run_monitoring.enabled: true",
        ),
    ],
)
def test_what_differs_is_named_with_the_remedy(
    shop: Settings, tmp_path: Path, changes: Mapping[str, Any], check: str, word: str, fix: str
) -> None:
    is_now, remedy = found(shop, tmp_path, changes)[check]
    assert is_now == word
    assert fix in remedy


def test_the_command_reads_the_instance_of_dagster_home_and_leaves_its_dagster_yaml(
    shop: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("streaming_jobs.preflight.doctor.checks", lambda _: [])
    monkeypatch.delenv("DAGSTER_HOME", raising=False)

    def doctor() -> tuple[int, str]:
        done = CliRunner().invoke(app, ["doctor", "--dagster"])
        return done.exit_code, " ".join(done.stdout.split())

    assert doctor()[0] == 1
    assert "DAGSTER_HOME is not set" in doctor()[1]
    prepared(shop)
    assert doctor()[0] == 0, "without DAGSTER_HOME: that of recourse up"
    team = tmp_path / "team"
    team.mkdir()
    monkeypatch.setenv("DAGSTER_HOME", str(team))
    text = yaml.safe_dump({"concurrency": {"runs": {"max_concurrent_runs": 1}}})
    (team / "dagster.yaml").write_text(text)
    assert doctor()[0] == 1
    assert f"the instance of {team} has never been started" in doctor()[1]
    assert [path.name for path in team.iterdir()] == ["dagster.yaml"], "the command makes no databases"
    dg.DagsterInstance.from_config(str(team)).dispose()
    before = sorted(team.rglob("*"))
    code, words = doctor()
    assert code == 1 and sorted(team.rglob("*")) == before
    assert "1 runs at a time, of which 1 are continuous sessions" in words
    assert (team / "dagster.yaml").read_text() == text
    (team / "dagster.yaml").write_text("storage: {postgres: {postgres_url: 'postgresql+psycopg2://me:s3cret@nowhere'}}")
    code, words = doctor()
    assert code == 1
    assert "cannot be opened" in words and "s3cret" not in words


@pytest.mark.parametrize(
    "storage",
    [
        "storage: {sqlite: {base_dir: %s}}",
        "storage: {sqlite: {base_dir: {env: DATABASES}}}",
        "run_storage: {module: dagster._core.storage.runs, class: SqliteRunStorage, config: {base_dir: %s}}",
    ],
)
def test_an_instance_whose_databases_are_elsewhere_is_opened_only_if_they_are_there(
    storage: str, shop: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    team, databases = tmp_path / "team", tmp_path / "databases"
    team.mkdir()
    monkeypatch.setenv("DAGSTER_HOME", str(team))
    monkeypatch.setenv("DATABASES", str(databases))
    (team / "dagster.yaml").write_text(storage.replace("%s", str(databases)))
    (check,) = instances.checks_of_home(shop, jobs(shop))
    assert not check.ok and f"there is no {databases}" in check.found and not databases.exists()
    dg.DagsterInstance.from_config(str(team)).dispose()
    assert len(instances.checks_of_home(shop, jobs(shop))) > 1
