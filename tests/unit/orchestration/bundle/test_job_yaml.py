"""The job YAML: what is read, how it is resolved, and that everything else is refused with file and key."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest
from dagster._core.definitions.utils import DISALLOWED_NAMES

from orchestration.bundle import job_yaml
from orchestration.bundle.job import ENTRY_POINT, Continuous, CronSchedule
from orchestration.bundle.references import user
from streaming_jobs.errors import ConfigurationError
from streaming_jobs.settings import Settings
from tests.support import ROOT

BUNDLE = """
bundle:
  name: shop
include:
  - jobs/*.yml
variables:
  rate:
    description: records a batch
    default: 100
targets:
  dev:
    mode: development
    default: true
  prod:
    mode: production
    variables:
      rate: 900
"""
JOB = """
resources:
  jobs:
    orders:
      name: "[${bundle.target}] orders"
      description: All orders
      tags: {team: shop}
      parameters:
        - {name: rate, default: "${var.rate}"}
        - {name: late, default: true}
      continuous: {pause_status: UNPAUSED}
      max_concurrent_runs: 1
      timeout_seconds: 0
      tasks:
        - task_key: session
          python_wheel_task:
            package_name: recourse-streams
            entry_point: recourse-session
            parameters: [--streams, "a, b", --set, "stream.x={{job.parameters.rate}}", "--y={{ job.parameters.late }}"]
"""


CONTINUOUS = "continuous: {pause_status: UNPAUSED}"


def schedule(zone: str, hour: int = 1) -> str:
    return f"schedule: {{quartz_cron_expression: '0 0 {hour} * * ?', timezone_id: {zone}}}"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "databricks.yml").write_text(BUNDLE)
    (tmp_path / "jobs").mkdir()
    (tmp_path / "jobs" / "orders.yml").write_text(JOB)
    return tmp_path


def edited(folder: Path, old: str, new: str, file: str = "jobs/orders.yml") -> Path:
    path = folder / file
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))
    return folder / "databricks.yml"


def refused(path: Path, target: str = "") -> str:
    with pytest.raises(ConfigurationError) as caught:
        job_yaml.load(path, target)
    return str(caught.value)


def test_a_job_is_read_for_the_default_target(folder: Path) -> None:
    bundle = job_yaml.load(folder / "databricks.yml")
    (job,) = bundle.jobs
    assert (bundle.name, bundle.target) == ("shop", "dev")
    assert (job.key, job.name, job.description) == ("orders", f"[dev {user()}] [dev] orders", "All orders")
    assert job.tags == {"dev": user(), "team": "shop"}
    assert job.defaults == {"rate": "100", "late": "true"}
    assert job.trigger == Continuous(paused=False)
    assert job.streams == ("a", "b")


def test_the_target_s_own_variables_come_before_the_defaults(folder: Path) -> None:
    (job,) = job_yaml.load(folder / "databricks.yml", "prod").jobs
    assert job.defaults["rate"] == "900"
    assert job.name == "[prod] orders"


def test_parameters_of_a_run_come_before_the_defaults(folder: Path) -> None:
    (job,) = job_yaml.load(folder / "databricks.yml").jobs
    assert job.arguments() == ["--streams", "a, b", "--set", "stream.x=100", "--y=true"]
    assert job.arguments({"rate": "7"})[3] == "stream.x=7"


def test_a_scheduled_job_ends_when_it_has_caught_up(folder: Path) -> None:
    weekly = "schedule: {quartz_cron_expression: '0 30 4 ? * MON', timezone_id: Europe/Oslo, pause_status: PAUSED}"
    (job,) = job_yaml.load(edited(folder, CONTINUOUS, weekly)).jobs
    assert job.trigger == CronSchedule("0 30 4 ? * MON", "30 4 * * 1", "Europe/Oslo", paused=True)
    assert job.arguments()[-2:] == ["--trigger", "available-now"]


def test_a_job_without_continuous_and_schedule_is_started_by_hand(folder: Path) -> None:
    (job,) = job_yaml.load(edited(folder, CONTINUOUS, "")).jobs
    assert job.trigger is None
    assert "--trigger" not in job.arguments()


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ("max_concurrent_runs: 1", "max_runs: 1", "resources.jobs.orders.max_runs: is not known here"),
        ("pause_status: UNPAUSED", "paused: true", "continuous.paused: is not known here"),
        ("pause_status: UNPAUSED", "pause_status: OFF", "continuous.pause_status: 'false' is not allowed"),
        ("task_key: session", "task_key: session\n          max_retries: 3", "a continuous job has no task retries"),
        (
            "task_key: session",
            "task_key: session\n          sql_task: {}",
            "tasks[0]: has python_wheel_task and sql_task",
        ),
        ("max_concurrent_runs: 1", "max_concurrent_runs: 2", "max_concurrent_runs is not 1"),
        ("timeout_seconds: 0", "timeout_seconds: -1", "timeout_seconds: '-1' is not a whole number"),
        ("timeout_seconds: 0", "timeout_seconds: yes", "timeout_seconds: 'True' is not a whole number"),
        ("timeout_seconds: 0", "timeout_seconds: 0\n      timeout_seconds: 1", "'timeout_seconds' is written twice"),
        ("${var.rate}", "${var.rat}", "${var.rat} is not known"),
        ("${var.rate}", "${workspace.host}", "${workspace.host} is not known on this machine"),
        ("{{job.parameters.rate}}", "{{job.parameters.rat}}", "{{job.parameters.rat}} names no parameter"),
        ("{{job.parameters.rate}}", "{{job.run_id}}", "{{job.run_id}} names no parameter"),
        ("{name: late, default: true}", "{name: rate, default: 1}", "'rate' is not a new parameter name"),
        ("{name: late, default: true}", "{name: late}", "parameters[1].default: is missing"),
        ('--streams, "a, b"', "--streams, ' '", "the parameters name no streams"),
        ("entry_point: recourse-session", "entry_point: main", "entry_point 'main' starts no session"),
        ("team: shop", "team: a b", "tags: 'a b' cannot be a tag"),
        ("    orders:", "    Orders:", "'Orders' is not a job key"),
        ("resources:", "job_clusters: []\nresources:", "job_clusters: is not known here"),
        ("resources:", "resources: [1]\nx:", "x: is not known here"),
        (CONTINUOUS, "continuous: [1]", "continuous: is not a mapping of fields"),
        ("max_concurrent_runs: 1", schedule("UTC"), "has both continuous and schedule"),
        (
            CONTINUOUS,
            schedule("Mars/Olympus"),
            "schedule.timezone_id: no time zone 'Mars/Olympus'\n  next: such as UTC or Europe/Berlin",
        ),
        (CONTINUOUS, schedule("Europe/Berlinn"), "'Europe/Berlinn'\n  next: did you mean 'Europe/Berlin'?"),
        (
            CONTINUOUS,
            schedule("UTC", hour=25),
            "schedule.quartz_cron_expression: '0 0 25 * * ?': '25' is not a number from 0 to 23",
        ),
    ],
)
def test_what_is_not_understood_is_refused_with_file_and_key(folder: Path, old: str, new: str, expected: str) -> None:
    text = refused(edited(folder, old, new))
    assert expected in text
    assert str(folder / "jobs" / "orders.yml") in text


def test_two_sessions_in_one_job_are_refused(folder: Path) -> None:
    path = folder / "jobs" / "orders.yml"
    task = path.read_text().partition("      tasks:\n")[2]
    path.write_text(path.read_text() + task.replace("task_key: session", "task_key: other"))
    edited(folder, CONTINUOUS, "")
    assert "has 2 tasks that run sessions" in refused(folder / "databricks.yml")


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ("bundle:\n  name: shop", "bundle: {}", "bundle.name: is missing"),
        ("jobs/*.yml", "job/*.yml", "nothing matches 'job/*.yml'"),
        ("    default: true\n", "", "targets: 0 have default: true"),
        ("      rate: 900", "      tempo: 900", "'tempo' is not declared"),
        ("    default: 100\n", "", "variables.rate: has no default"),
        ("mode: production", "mode: live", "targets.prod.mode: 'live' is not allowed"),
        ("bundle:", "sinc: {}\nbundle:", "sinc: is not known here"),
        ("include:", "include: jobs\nx:", "x: is not known here"),
        ("bundle:", "bundle: [", "while parsing"),
    ],
)
def test_a_bundle_that_is_not_understood_is_refused(folder: Path, old: str, new: str, expected: str) -> None:
    assert expected in refused(edited(folder, old, new, "databricks.yml"))


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("2026-13-45", "'2026-13-45' cannot be read: month must be in 1..12"),
        ("!!int many", "'many' cannot be read"),
        ("!!bool perhaps", "'perhaps' cannot be read"),
        ("!!timestamp soon", "'soon' cannot be read"),
        ("{[a, b]: 1}", "found unhashable key"),
        ("[" * 2000 + "]" * 2000, "is nested too deeply"),
        ("2026-01-13", "is a date to YAML"),
    ],
)
def test_a_value_that_yaml_cannot_make_is_refused_with_file_and_line(folder: Path, value: str, expected: str) -> None:
    path = edited(folder, "default: 100", f"default: {value}", "databricks.yml")
    text = refused(path)
    assert expected in text
    line = next(n for n, written in enumerate(path.read_text().split("\n"), 1) if f"default: {value}" in written)
    assert text.startswith(f"REC-002 {path}:{line}: " if "nested" not in expected else f"REC-002 {path}: ")


def test_a_wrong_indentation_is_told_in_one_line_with_what_to_look_at(folder: Path) -> None:
    path = edited(folder, "default: 100", "default: 100\n   more: 1", "databricks.yml")
    text = refused(path)
    assert "while parsing a block mapping, expected <block end>, but found" in text
    assert str(path) not in text.removeprefix(f"REC-002 {path}:") and "<unicode string>" not in text
    assert "indent with spaces" in text


@pytest.mark.parametrize("pattern", ["", "/etc/j/*.yml", ".", "./", "a**.yml"])
def test_an_include_that_is_no_pattern_is_refused_with_its_file(folder: Path, pattern: str) -> None:
    path = edited(folder, "- jobs/*.yml", f"- '{pattern}'", "databricks.yml")
    assert refused(path).startswith(f"REC-002 {path}: include: '{pattern}' cannot be used")


def test_a_file_that_cannot_be_read_is_named(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigurationError, match=f"{folder}: cannot be read: Is a directory"):
        job_yaml.load(folder)
    (folder / "jobs" / "orders.yml").write_bytes(b"name: \xff")
    assert f"{folder / 'jobs' / 'orders.yml'}: " in refused(folder / "databricks.yml")


def test_a_job_is_not_named_as_dagster_names_its_own_things(folder: Path) -> None:
    """Dagster would refuse all definitions for one such job."""
    words = sorted(word for word in DISALLOWED_NAMES if re.fullmatch("[a-z][a-z0-9_]*", word))
    assert {"config", "input", "output", "type", "meta", "class"} <= set(words)
    original = (folder / "jobs" / "orders.yml").read_text()
    for word in words:
        (folder / "jobs" / "orders.yml").write_text(original)
        text = refused(edited(folder, "    orders:", f"    {word}:"))
        assert f"orders.yml:4: resources.jobs.{word}: '{word}' cannot be a job key" in text


def test_an_unknown_target_and_one_job_key_in_two_files_are_refused(folder: Path) -> None:
    assert "the targets are: dev, prod" in refused(folder / "databricks.yml", "test")
    (folder / "jobs" / "again.yml").write_text(JOB)
    assert "job orders is also in" in refused(folder / "databricks.yml")


def test_the_shipped_bundle_runs_the_shipped_streams_in_one_session() -> None:
    (job,) = job_yaml.load(ROOT / "databricks.yml").jobs
    assert job.key == "flights"
    assert job.streams == ("flights_clean", "airport_hours", "carrier_totals")
    assert job.trigger == Continuous(paused=False)
    assert job.arguments({"max_offsets_per_trigger": "5"})[-1] == "stream.max_offsets_per_trigger=5"


def test_the_bundle_is_found_by_setting_then_folder_then_package(
    folder: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    monkeypatch.chdir(elsewhere)
    assert job_yaml.find(Settings()) in (
        ROOT / "orchestration" / "bundle" / "databricks.yml",
        ROOT / "databricks.yml",
    )
    monkeypatch.chdir(folder)
    assert job_yaml.find(Settings()) == folder / "databricks.yml"
    other = elsewhere / "other.yml"
    other.write_text(BUNDLE)
    assert job_yaml.find(Settings(jobs=other)) == other
    with pytest.raises(ConfigurationError, match="there is no file"):
        job_yaml.find(Settings(jobs=elsewhere / "none.yml"))


def test_without_a_bundle_of_ones_own_one_job_runs_all_of_ones_streams() -> None:
    shipped = job_yaml.load(ROOT / "databricks.yml")
    assert job_yaml.is_shipped(shipped.file)
    (job,) = job_yaml.for_streams(shipped, ["orders", "totals"]).jobs
    assert (job.streams, job.trigger) == (("orders", "totals"), Continuous(paused=False))
    assert job.arguments() == ["--streams", "orders,totals"]
    assert job_yaml.for_streams(shipped, list(shipped.jobs[0].streams)) == shipped
    assert job_yaml.for_streams(shipped, [*shipped.jobs[0].streams, "orders"]) == shipped


def test_the_entry_point_that_the_job_yaml_names_is_in_the_wheel() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["scripts"][ENTRY_POINT] == "streaming_jobs.session:main"
    (job,) = job_yaml.load(ROOT / "databricks.yml").jobs
    assert job.tasks[0].package_name == project["name"]
