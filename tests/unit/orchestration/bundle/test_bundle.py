"""Bundles as Databricks takes them: one that uses nearly every field, wrong ones, targets, variables and notes."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import pytest

from orchestration.bundle import job_yaml
from orchestration.bundle.fields import Fields, Shape
from orchestration.bundle.job import Continuous, CronSchedule, Job, Notification, Periodic, Rule
from orchestration.bundle.model import JobFields
from streaming_jobs.errors import ConfigurationError
from tests.support import ROOT

GOOD = """
bundle:
  name: shop
  databricks_cli_version: ">= 0.250"
include: [jobs/*.yml]
workspace:
  host: https://example.cloud.databricks.com
  root_path: /Workspace/shop/${bundle.target}
artifacts:
  wheel: {type: whl, build: python -m build --wheel, path: .}
permissions:
  - {level: CAN_VIEW, group_name: users}
run_as: {service_principal_name: shop}
sync: {exclude: [.venv]}
variables:
  rate: {description: records a batch, default: 100}
  team: {default: "shop-${bundle.target}"}
  cluster:
    type: complex
    default:
      spark_version: 16.4.x-scala2.12
      num_workers: 2
      spark_conf: {spark.speculation: "false", spark.master: "local[*]", spark.jars: "{{secrets/a/b}}"}
  policy: {lookup: {cluster_policy: Streams}}
  hook: {lookup: {notification_destination: Pager}}
targets:
  dev: {mode: development, default: true}
  prod:
    mode: production
    workspace: {host: https://prod.cloud.databricks.com}
    variables:
      rate: 900
      cluster: {spark_version: 17.3.x-scala2.13, num_workers: 8, policy_id: "${var.policy}"}
    presets: {tags: {cost: "17"}}
    resources:
      jobs:
        orders:
          continuous: {pause_status: UNPAUSED}
          tasks:
            - task_key: session
              python_wheel_task: {parameters: [--set, stream.lateness=2 hours]}
        nightly:
          trigger: {pause_status: PAUSED}
          parameters:
            - {name: days, default: 3}
            - {name: more, default: x}
resources:
  pipelines: {p: {name: other}}
"""
JOBS = """
resources:
  jobs:
    orders:
      name: orders
      tags: {team: "${var.team}"}
      parameters:
        - {name: rate, default: "${var.rate}"}
      continuous: {task_retry_mode: ON_FAILURE}
      health:
        rules:
          - {metric: STREAMING_BACKLOG_RECORDS, op: GREATER_THAN, value: 1000}
          - {metric: STREAMING_BACKLOG_BYTES, op: GREATER_THAN, value: 1000}
      email_notifications: {on_failure: [a@example.com]}
      webhook_notifications: {on_failure: [{id: "${var.hook}"}]}
      job_clusters:
        - job_cluster_key: small
          new_cluster: ${var.cluster}
      tasks:
        - task_key: session
          job_cluster_key: small
          libraries: [{whl: ./dist/*.whl}]
          python_wheel_task:
            package_name: recourse-streams
            entry_point: recourse-session
            parameters: [--streams, orders, --set, "stream.max_offsets_per_trigger={{job.parameters.rate}}"]
    nightly:
      trigger: {periodic: {interval: 12, unit: HOURS}}
      queue: {enabled: true}
      timeout_seconds: 7200
      parameters: [{name: days, default: 1}]
      environments:
        - environment_key: default
          spec: {environment_version: "4", dependencies: [./dist/*.whl]}
      tasks:
        - task_key: check
          depends_on: [{task_key: totals}, {task_key: refresh}]
          environment_key: default
          python_wheel_task: {package_name: recourse-streams, entry_point: recourse, parameters: [quality, run, totals]}
        - task_key: totals
          environment_key: default
          max_retries: 2
          min_retry_interval_millis: 1500
          retry_on_timeout: true
          timeout_seconds: 600
          python_wheel_task:
            package_name: recourse-streams
            entry_point: recourse-session
            named_parameters: {streams: totals}
        - task_key: refresh
          notebook_task: {notebook_path: ./refresh.py}
"""


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.delenv("BUNDLE_VAR_rate", raising=False)
    (tmp_path / "jobs").mkdir()
    (tmp_path / "jobs" / "all.yml").write_text(JOBS)
    (tmp_path / "databricks.yml").write_text(GOOD)
    return tmp_path / "databricks.yml"


def jobs(path: Path, target: str = "") -> dict[str, Job]:
    return {job.key: job for job in job_yaml.load(path, target).jobs}


def edited(path: Path, old: str, new: str) -> Path:
    """The bundle with a change in the file that has the text."""
    file = next(file for file in (path, path.parent / "jobs" / "all.yml") if old in file.read_text())
    file.write_text(file.read_text().replace(old, new, 1))
    return file


def line_of(file: Path, text: str) -> int:
    return next(number for number, line in enumerate(file.read_text().split("\n"), 1) if text in line)


def test_a_bundle_of_nearly_every_field_is_read(path: Path) -> None:
    reading = job_yaml.read(path)
    assert reading.problems == []
    orders, nightly = jobs(path).values()
    assert orders.trigger == Continuous(paused=True)
    assert orders.rules == (Rule("STREAMING_BACKLOG_RECORDS", 1000), Rule("STREAMING_BACKLOG_BYTES", 1000))
    assert orders.notifications == (Notification("on_failure", ("a@example.com",), webhook=True),)
    assert orders.arguments()[:2] == ["--set", 'spark.extra={"spark.speculation": "false"}']
    assert nightly.trigger == Periodic(12, "HOURS", paused=True)
    assert (nightly.queue, nightly.timeout_seconds, nightly.streams) == (True, 7200, ("totals",))
    totals, check = nightly.tasks
    assert (totals.key, totals.max_retries, totals.retry_interval) == ("totals", 2, 1.5)
    assert (totals.retry_on_timeout, totals.timeout_seconds) == (True, 600)
    assert (check.key, check.depends_on) == ("check", ("totals",))
    assert nightly.arguments(task=totals) == ["--streams=totals", "--trigger", "available-now"]
    assert nightly.arguments(task=check) == ["quality", "run", "totals"]


def test_development_pauses_triggers_and_marks_names_and_production_does_not(path: Path) -> None:
    dev, prod = jobs(path)["orders"], jobs(path, "prod")["orders"]
    assert dev.name.startswith("[dev ") and "dev" in dev.tags
    assert (prod.name, prod.tags) == ("orders", {"cost": "17", "team": "shop-prod"})
    assert (dev.tags["team"], prod.trigger) == ("shop-dev", Continuous(paused=False))


def test_a_target_merges_maps_and_joins_lists_by_key_as_databricks_does(path: Path) -> None:
    dev, prod = jobs(path), jobs(path, "prod")
    assert dev["orders"].defaults == {"rate": "100"} and prod["orders"].defaults == {"rate": "900"}
    assert dev["nightly"].defaults == {"days": "1"}
    assert prod["nightly"].defaults == {"days": "3", "more": "x"}
    (session,) = prod["orders"].tasks
    assert session.parameters[:2] == ("--streams", "orders")
    assert session.parameters[-2:] == ("--set", "stream.lateness=2 hours")
    assert session.spark_conf == {}  # the complex variable is replaced, not merged
    assert prod["nightly"].trigger == Periodic(12, "HOURS", paused=True)


def test_a_variable_is_set_by_environment_then_file_then_target_then_default(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = path.parent / ".databricks" / "bundle" / "prod" / "variable-overrides.json"
    file.parent.mkdir(parents=True)
    file.write_text('{"rate": 5, "others": 1}')
    assert jobs(path, "prod")["orders"].defaults == {"rate": "5"}
    monkeypatch.setenv("BUNDLE_VAR_rate", "6")
    assert jobs(path, "prod")["orders"].defaults == {"rate": "6"}
    assert jobs(path)["orders"].defaults == {"rate": "6"}
    monkeypatch.setenv("BUNDLE_VAR_cluster", "{}")
    (problem,) = job_yaml.read(path, "prod").problems
    assert "BUNDLE_VAR_cluster: a complex variable cannot be set in the environment" in problem.text


def test_a_reference_reaches_into_a_complex_variable_and_keeps_its_type(path: Path) -> None:
    edited(path, 'default: "${var.rate}"', 'default: "${var.cluster.num_workers}"')
    edited(path, "timeout_seconds: 7200", "timeout_seconds: ${var.rate}")
    found = jobs(path)
    assert found["orders"].defaults == {"rate": "2"}
    assert found["nightly"].timeout_seconds == 100


def test_what_means_nothing_here_is_noted_with_its_line(path: Path) -> None:
    notes = {note.path: note for note in job_yaml.read(path).notes}
    file = path.parent / "jobs" / "all.yml"
    assert {
        "workspace",
        "artifacts",
        "permissions",
        "run_as",
        "sync",
        "bundle.databricks_cli_version",
        "resources.pipelines",
        "resources.jobs.orders.continuous.task_retry_mode",
        "resources.jobs.orders.job_clusters[0].new_cluster",
        "resources.jobs.orders.tasks[0].libraries",
        "resources.jobs.nightly.environments",
        "resources.jobs.nightly.tasks[2].notebook_task",
        "resources.jobs.nightly.tasks.check",
        "resources.jobs.orders.tasks.session",
        "resources.jobs.orders.health",
        "resources.jobs.orders.webhook_notifications",
    } == notes.keys()
    assert notes["resources.jobs.orders.tasks[0].libraries"].position == (file, line_of(file, "libraries:"))
    assert "STREAMING_BACKLOG_BYTES is not judged here" in notes["resources.jobs.orders.health"].text
    assert "does not wait here for refresh" in notes["resources.jobs.nightly.tasks.check"].text
    about_spark = [n.text for n in job_yaml.read(path).notes if n.path == "resources.jobs.orders.tasks.session"]
    assert any("spark_conf spark.jars is not used here: it is a secret" in text for text in about_spark)
    assert any("the setting spark.master decides" in text for text in about_spark)


ABOVE = ("tasks:", "orders:", "- task_key: session", 'tags: {team: "${var.team}"}')
"""Lines that are reported for an error that has no line of its own."""


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        (
            "queue: {enabled: true}",
            "que: {enabled: true}",
            "nightly.que: is not known here\n  next: did you mean 'queue'?",
        ),
        ("queue: {enabled: true}", "queue: {enabled: 1}", "nightly.queue.enabled: '1' is not true or false"),
        (
            "num_workers: 2",
            "num_wokers: 2",
            "new_cluster.num_wokers: is not known here\n  next: did you mean 'num_workers'?",
        ),
        ("[{task_key: totals}, ", "[{task_key: total}, ", "nightly.tasks[0].depends_on: there is no task 'total'"),
        (
            "job_cluster_key: small\n          libraries",
            "job_cluster_key: big\n          libraries",
            "no job cluster 'big'",
        ),
        ("environment_key: default\n          max", "environment_key: d\n          max", "there is no environment 'd'"),
        ("          max_retries: 2", "          depends_on: [{task_key: check}]", "wait for each other"),
        ("          max_retries: 2", "          run_if: ALL_DONE", "run_if: ALL_DONE cannot be kept here"),
        ("[quality, run, totals]", "[quality, list]", "'quality list' is not a command that a task runs"),
        ("unit: HOURS", "unit: HOUR", "periodic.unit: 'HOUR' is not allowed\n  next: did you mean 'HOURS'?"),
        ("interval: 12", "interval: 0", "nightly.trigger.periodic.interval: '0' is no interval"),
        ("metric: STREAMING_BACKLOG_BYTES", "metric: LAG", "rules[1].metric: 'LAG' is not allowed"),
        ('"${var.rate}"', '"${var.rats}"', "${var.rats} is not known\n  next: did you mean 'var.rate'?"),
        ('"${var.rate}"', '"${var.cluster}"', "parameters[0].default: is not a single value"),
        ('"${var.rate}"', '"a${var.cluster}"', "${var.cluster} is not a single value"),
        ('"${var.rate}"', '"${var.cluster.nodes}"', "is not known: there is no 'nodes'"),
        ('"${var.rate}"', '"${resources.jobs.order.name}"', "there is no 'order'\n  next: did you mean 'orders'?"),
        ('"${var.rate}"', '"${var.policy}"', "${var.policy} is not known on this machine"),
        (
            "notebook_task: {notebook_path: ./refresh.py}",
            "notebook_task: {}",
            "notebook_task.notebook_path: is missing",
        ),
        ("libraries: [{whl", "libraries: [{wheel", "libraries[0].wheel: is not known here"),
        ("spark.speculation:", "spark.sql.extensions:", "Recourse sets spark.sql.extensions itself"),
        (
            "continuous: {task_retry",
            "triggers: [{continuous: {}}]\n      continuous: {task_retry",
            "has both continuous and",
        ),
        ("default: 100", "default: [1]", "variables.rate.default: is a mapping or list\n  next: write `type: complex`"),
        ("lookup: {cluster_policy", "lookup: {cluster_polcy", "lookup.cluster_polcy"),
        ("pipelines: {p", "pipelins: {p", "resources.pipelins: is not known here\n  next: did you mean 'pipelines'?"),
        ("presets: {tags", "presets: {tag", "presets.tag: is not known here"),
        ("- {level: CAN_VIEW, ", "- {", "permissions[0].level: is missing"),
        ("root_path:", "rootpath:", "workspace.rootpath: is not known here\n  next: did you mean 'root_path'?"),
        ('"shop-${bundle.target}"', '"${var.team}"', "${var.team} refers to itself"),
        (
            "orders:\n          continuous: {pause",
            "orders:\n          continuous: [a]\n          queue: {pause",
            "cannot replace",
        ),
    ],
)
def test_what_is_wrong_is_refused_with_file_and_line(path: Path, old: str, new: str, expected: str) -> None:
    edited(path, old, new)
    with pytest.raises(ConfigurationError) as caught:
        for target in job_yaml.target_names(path):
            job_yaml.load(path, target)
    assert expected in str(caught.value)
    file, line, _ = str(caught.value).removeprefix("REC-002 ").split(":", 2)
    reported = Path(file).read_text().split("\n")[int(line) - 1].strip()
    assert reported in new or new.split("\n", 1)[0].strip() in reported or reported in ABOVE


def test_every_error_of_a_bundle_is_told(path: Path) -> None:
    edited(path, "queue: {enabled: true}", "queue: {enabled: 1}")
    edited(path, "unit: HOURS", "unit: HOUR")
    edited(path, "orders:\n      name:", "orders:\n      nam:")
    edited(path, "    nightly:\n      trigger", "    nightly:\n      colour: red\n      trigger")
    paths = [problem.path for problem in job_yaml.read(path).problems]
    assert paths == [
        "resources.jobs.orders.nam",
        "resources.jobs.nightly.colour",
        "resources.jobs.nightly.trigger.periodic.unit",
        "resources.jobs.nightly.queue.enabled",
    ]


def test_an_error_in_a_target_s_override_names_the_line_of_the_override(path: Path) -> None:
    edited(path, "trigger: {pause_status: PAUSED}", "trigger: {pause_status: STOPPED}")
    (problem,) = job_yaml.read(path, "prod").problems
    assert problem.position == (path, line_of(path, "STOPPED"))
    assert job_yaml.read(path, "dev").problems == []


def test_development_cannot_start_all_triggers(path: Path) -> None:
    edited(path, "dev: {mode: development,", "dev: {mode: development, presets: {trigger_pause_status: UNPAUSED},")
    (problem,) = job_yaml.read(path).problems
    assert "mode: development cannot start the triggers of all jobs" in problem.text


@pytest.mark.parametrize("words", ["[verify]", "[verify, totals]", "[recover, plan, totals]", "[recover, resume, x]"])
def test_a_task_runs_a_command_that_is_fit_for_a_job(path: Path, words: str) -> None:
    edited(path, "[quality, run, totals]", words)
    check = jobs(path)["nightly"].tasks[1]
    assert f"[{', '.join(check.parameters)}]" == words


def test_an_item_of_triggers_is_a_trigger(path: Path) -> None:
    edited(
        path, "trigger: {periodic: {interval: 12, unit: HOURS}}", "triggers: [{periodic: {interval: 2, unit: DAYS}}]"
    )
    edited(path, "trigger: {pause_status: PAUSED}", "tags: {}")
    assert jobs(path)["nightly"].trigger == Periodic(2, "DAYS", paused=True)
    edited(
        path,
        "{periodic: {interval: 2, unit: DAYS}}",
        "{schedule: {quartz_cron_expression: '0 0 3 L * ?', timezone_id: UTC}}",
    )
    assert jobs(path)["nightly"].trigger == CronSchedule("0 0 3 L * ?", "0 3 * * *", "UTC", paused=True)
    edited(path, "'0 0 3 L * ?', timezone_id: UTC}", "'7 0 3 L * ?', timezone_id: UTC, pause_status: PAUSED}")
    (problem,) = job_yaml.read(path).problems
    assert "schedule: has pause_status inside" in str(problem.error())
    edited(path, ", pause_status: PAUSED}", "}")
    assert any("not at second 7" in note.text for note in job_yaml.read(path).notes)


def test_an_included_file_includes_no_other_one(path: Path) -> None:
    (path.parent / "jobs" / "more.yml").write_text("include: [other/*.yml]\n")
    (problem,) = job_yaml.read(path).problems
    assert problem.path == "include" and problem.position == (path.parent / "jobs" / "more.yml", 1)


def test_a_job_that_only_databricks_runs_is_noted_and_left_out(path: Path) -> None:
    (path.parent / "jobs" / "other.yml").write_text(
        "resources: {jobs: {Report: {tasks: [{task_key: a, notebook_task: {notebook_path: ./r.py}}]}}}"
    )
    assert "Report" not in jobs(path)
    assert any("Report: has no task that runs here" in note.text for note in job_yaml.read(path).notes)


def test_the_examples_of_the_page_are_a_bundle(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "jobs.md").read_text()
    resources, nightly, targets = re.findall(r"```yaml\n(.*?)```", page, re.DOTALL)
    file = tmp_path / "databricks.yml"
    file.write_text(
        f"bundle: {{name: x}}\nvariables: {{max_offsets_per_trigger: {{default: 5}}}}\n{targets}{resources}{nightly}"
    )
    prod = jobs(file, "prod")
    assert prod["flights"].arguments()[-1] == "spark.driver_memory_mb=8192"
    assert [task.key for task in prod["nightly"].tasks] == ["totals", "suites"]
    assert jobs(file)["flights"].notifications == ()


def _models(kind: Any, metadata: Any = ()) -> Iterator[Any]:
    if isinstance(kind, type) and issubclass(kind, Fields):
        yield kind
    for mark in (*metadata, *getattr(kind, "__metadata__", ())):
        yield from _models(mark.model) if isinstance(mark, Shape) else ()
    for argument in get_args(kind):
        yield from _models(argument)


OUTSIDE_THE_API = {"permissions", "lifecycle", "alert_on_last_attempt", "pause_status", "sql_condition"}
"""Fields that bundles add to a job, and fields of a base class."""
NOT_CHECKED = {"AiFunctionTask", "ComputeSpec", "JobDeployment", "SubscriptionAttachment", "Task"}
"""Types below which everything is taken; `Task` is that of `for_each_task`, which a function checks."""


def test_every_field_of_the_jobs_api_is_known_and_no_other() -> None:
    api: dict[str, Any] = json.loads((Path(__file__).parent / "jobs_api.json").read_text())
    seen: set[str] = set()

    def compare(model: Any, name: str, where: str) -> None:
        seen.add(name)
        ours = {field.alias or key: field for key, field in model.model_fields.items()}
        assert ours.keys() - api[name].keys() <= OUTSIDE_THE_API, where
        assert api[name].keys() - ours.keys() == set(), where
        for field, kind in api[name].items():
            if kind is None:
                continue
            below = next(_models(ours[field].annotation, ours[field].metadata), None)
            assert below is not None or kind in NOT_CHECKED, f"{where}.{field}"
            if below is not None and kind not in seen:
                compare(below, kind, f"{where}.{field}")

    compare(JobFields, "JobSettings", "job")
    assert {"Task", "ClusterSpec", "AwsAttributes", "SqlTaskAlert", "WebhookNotifications"} <= seen
