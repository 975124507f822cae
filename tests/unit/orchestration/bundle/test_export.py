"""The bundle for a workspace: what is added to it, what stays, and that this machine still reads it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from orchestration.bundle import job_yaml
from orchestration.bundle.export import HEADER, HOME, Export, Project, export
from streaming_jobs.errors import ConfigurationError, UsageError
from tests.support import ROOT

BUNDLE = """
bundle: {name: shop}
include: [jobs/*.yml]
targets:
  dev: {default: true}
  prod:
    resources: {jobs: {nightly: {tasks: [{task_key: check, existing_cluster_id: abc}]}}}
"""
JOBS = """
resources:
  jobs:
    orders:
      parameters: [{name: rate, default: 100}, {name: late, default: true}]
      continuous: {}
      tasks:
        - task_key: session
          python_wheel_task: &wheel
            package_name: recourse-streams
            entry_point: recourse-session
            parameters: [--streams, orders]
    nightly:
      schedule: {quartz_cron_expression: '0 0 3 * * ?', timezone_id: UTC}
      job_clusters: [{job_cluster_key: small, new_cluster: {spark_version: x, num_workers: 1}}]
      tasks:
        - {task_key: session, job_cluster_key: small, python_wheel_task: *wheel}
        - task_key: check
          depends_on: [{task_key: session}]
          python_wheel_task: {package_name: recourse-streams, entry_point: recourse, parameters: [quality, run]}
        - {task_key: report, notebook_task: {notebook_path: ./r.py}}
"""


@pytest.fixture
def bundle(tmp_path: Path) -> Path:
    project = tmp_path / "project"
    (project / "jobs").mkdir(parents=True)
    (project / "pyproject.toml").write_text('[project]\nname = "acme"\n')
    (project / "jobs" / "all.yml").write_text(JOBS)
    (project / "databricks.yml").write_text(BUNDLE)
    return project / "databricks.yml"


def exported(bundle: Path, *wheels: Path, home: str = "/Volumes/a/b/c", flows: tuple[str, ...] = ("acme",)) -> Export:
    folder = bundle.parents[1] / "out"
    made = export(bundle, folder, Project.of(bundle, "1.2", wheels), home, flows)
    made.write(folder)
    return made


def written(bundle: Path, name: str = "databricks.yml") -> Any:
    return yaml.safe_load((bundle.parents[1] / "out" / name).read_text())


def test_the_wheel_is_built_there_and_every_wheel_task_has_an_environment_with_it(bundle: Path) -> None:
    said = "job nightly, task check: give it the wheels beside its compute in the target"
    assert exported(bundle).said == [said]
    root, jobs = written(bundle), written(bundle, "jobs/all.yml")["resources"]["jobs"]
    build = "python -m pip wheel --no-deps --wheel-dir dist ../project"
    assert root["artifacts"] == {"recourse": {"type": "whl", "path": ".", "build": build}}
    assert root["variables"][HOME]["default"] == "/Volumes/a/b/c"
    assert (root["include"], root["targets"].keys()) == (["jobs/all.yml"], {"dev", "prod"})
    wheels = ["../dist/*.whl", "recourse-streams==1.2"]
    orders, nightly = jobs["orders"], jobs["nightly"]
    spec = {"environment_version": "4", "dependencies": wheels}
    assert orders["environments"] == [{"environment_key": "recourse", "spec": spec}]
    assert orders["tasks"][0]["environment_key"] == "recourse"
    assert [parameter["default"] for parameter in orders["parameters"]] == ["100", "true"]
    settings = ["--set", "home=${var.recourse_home}", "--set", 'flows=["acme"]']
    assert orders["tasks"][0]["python_wheel_task"]["parameters"] == [*settings, "--streams", "orders"]
    assert "queue" not in orders and nightly["queue"] == {"enabled": False}
    assert orders["max_concurrent_runs"] == nightly["max_concurrent_runs"] == 1


def test_compute_that_the_bundle_has_stays_and_gets_the_wheels_as_libraries(bundle: Path) -> None:
    exported(bundle)
    session, check, report = written(bundle, "jobs/all.yml")["resources"]["jobs"]["nightly"]["tasks"]
    assert session["libraries"] == [{"whl": "../dist/*.whl"}, {"pypi": {"package": "recourse-streams==1.2"}}]
    assert "environment_key" not in session
    assert "environment_key" not in check  # a target gives it a cluster
    assert report == {"task_key": "report", "notebook_task": {"notebook_path": "./r.py"}}


def test_given_wheels_are_shipped_instead_of_built(bundle: Path) -> None:
    wheels = [bundle.parent / name for name in ("acme-1-py3-none-any.whl", "recourse_streams-1.2-py3-none-any.whl")]
    for wheel in wheels:
        wheel.write_bytes(b"wheel")
    exported(bundle, *wheels)
    assert "artifacts" not in written(bundle)
    (environment,) = written(bundle, "jobs/all.yml")["resources"]["jobs"]["orders"]["environments"]
    assert environment["spec"]["dependencies"] == [f"../dist/{wheel.name}" for wheel in wheels]
    assert (bundle.parents[1] / "out" / "dist" / wheels[0].name).read_bytes() == b"wheel"


def test_an_export_is_read_on_this_machine_for_each_target(bundle: Path) -> None:
    exported(bundle)
    out = bundle.parents[1] / "out" / "databricks.yml"
    for target in ("dev", "prod"):
        reading = job_yaml.read(out, target)
        assert reading.problems == [] and reading.bundle is not None
        assert [job.key for job in reading.bundle.jobs] == ["orders", "nightly"]


def required(root: Any, jobs: Any) -> list[str]:
    """What the bundle reference and the Jobs API require of a deployable bundle, as far as one can see on paper."""
    missing = [] if root.get("bundle", {}).get("name") else ["bundle.name"]
    for key, job in jobs.items():
        environments = {one["environment_key"] for one in job.get("environments", [])}
        clusters = {one["job_cluster_key"] for one in job.get("job_clusters", [])}
        for task in job["tasks"]:
            where = f"{key}.{task.get('task_key')}"
            if "python_wheel_task" in task:
                compute = {"environment_key": environments, "job_cluster_key": clusters}
                named = [name for name, there in compute.items() if task.get(name) in there]
                missing += [] if len(named) == 1 else [f"{where}: compute"]
                missing += [] if "environment_key" in named or task.get("libraries") else [f"{where}: libraries"]
                missing += [n for n in ("package_name", "entry_point") if n not in task["python_wheel_task"]]
        missing += [p["name"] for p in job.get("parameters", []) if not isinstance(p["default"], str)]
    return missing


def test_the_export_of_the_shipped_bundle_has_what_a_deployment_requires(tmp_path: Path) -> None:
    made = export(ROOT / "databricks.yml", tmp_path, Project.of(ROOT / "databricks.yml", "1.2", ()), "", ["f"])
    root, jobs = made.files["databricks.yml"], made.files["jobs/flights.yml"]["resources"]["jobs"]
    assert required(root, jobs) == []
    (environment,) = jobs["flights"]["environments"]
    assert environment["spec"]["dependencies"] == ["../dist/*.whl"]  # the project is Recourse itself
    assert made.said == [f"set the variable {HOME}: databricks bundle deploy --var {HOME}=/Volumes/..."]
    before = yaml.safe_load((ROOT / "jobs" / "flights.yml").read_text())["resources"]["jobs"]
    assert "flights.session: compute" in required(root, before)


def test_a_bundle_that_was_not_exported_is_not_overwritten_and_an_export_is(bundle: Path) -> None:
    made = exported(bundle)
    file = bundle.parents[1] / "out" / "databricks.yml"
    assert file.read_text().startswith(HEADER)
    made.write(file.parent)
    with pytest.raises(UsageError, match="was not written by an export"):
        made.write(bundle.parent)
    assert bundle.read_text() == BUNDLE


def test_a_bundle_that_cannot_be_read_is_not_exported(bundle: Path) -> None:
    bundle.write_text("bundle: [")
    with pytest.raises(ConfigurationError):
        exported(bundle)


def test_without_a_project_a_person_is_told_to_give_wheels(tmp_path: Path) -> None:
    file = tmp_path / "databricks.yml"
    file.write_text("bundle: {name: x}")
    made = export(file, tmp_path / "out", Project(None, "", "1.2"), "/v", ())
    assert made.said == ["no pyproject.toml above the bundle: give the wheel of your streams by --wheel"]
    assert "include" not in made.files["databricks.yml"]


def test_each_file_has_a_name_of_its_own_and_one_that_is_gone_is_not_included(bundle: Path) -> None:
    other = bundle.parent / "jobs" / "all.yaml"
    other.write_text("resources: {jobs: {third: {tasks: []}}}")
    bundle.write_text(BUNDLE.replace("jobs/*.yml", "jobs/*"))
    exported(bundle)
    assert written(bundle)["include"] == ["jobs/all.yml", "jobs/all-2.yml"]
    jobs = [written(bundle, name)["resources"]["jobs"].keys() for name in ("jobs/all.yml", "jobs/all-2.yml")]
    assert sorted(map(sorted, jobs)) == [["nightly", "orders"], ["third"]]
    other.unlink()
    exported(bundle)
    assert written(bundle)["include"] == ["jobs/all.yml"]
