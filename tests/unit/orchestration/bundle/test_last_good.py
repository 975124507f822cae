"""The job definitions that could be used last: kept whole, and the doctor says what is wrong with those of now."""

from __future__ import annotations

import json
import os
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

import dagster as dg
import pytest

from orchestration.bundle import job_yaml, last_good
from orchestration.bundle.fields import location_of
from orchestration.bundle.job import (
    Bundle,
    Continuous,
    CronSchedule,
    Job,
    Notification,
    Parameter,
    Periodic,
    Rule,
    Task,
    Trigger,
)
from orchestration.cli.doctor import check_jobs
from orchestration.local_dagster.processes import DagsterProcesses
from orchestration.location import definitions
from orchestration.sessions.definitions import sessions
from orchestration.sessions.health import HEALTH, HealthChecks
from streaming_jobs.catalog.topology import Topology
from streaming_jobs.errors import ConfigurationError
from streaming_jobs.settings import Settings
from streaming_jobs.state.status import Status, write_status
from tests.support import ROOT

FAKES = ROOT / "tests" / "dagster" / "fakes" / "databricks.yml"


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    (tmp_path / "databricks.yml").write_text(FAKES.read_text())
    flags = {"home": tmp_path, "flows": ["tests.dagster.fakes.flows"], "jobs": tmp_path / "databricks.yml"}
    return Settings.load({**flags, "dagster.port": 0})


def write(settings: Settings, text: str) -> Path:
    """Write the job YAML; its path."""
    assert settings.jobs is not None
    settings.jobs.write_text(text)
    return settings.jobs


def edit(settings: Settings, *change: str) -> Path:
    """The job YAML of the fakes, with this change."""
    text = FAKES.read_text()
    assert change[0] in text
    return write(settings, text.replace(*change))


def used(settings: Settings) -> Bundle:
    return last_good.use(settings, Topology.load(settings.flows), lambda bundle: bundle)


@pytest.mark.parametrize(
    "trigger",
    [
        None,
        Continuous(True),
        CronSchedule("0 0 4 ? * SUN", "0 4 * * 0", "Europe/Vienna", False),
        Periodic(5, "DAYS", False),
    ],
)
def test_what_is_kept_is_what_was_read(
    settings: Settings, trigger: Trigger | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    task = Task("session", "recourse-streams", "recourse-session", ("--streams", "orders", "--set", "a={{b}}"))
    job = Job("j", "J", "d", {"t": "x"}, (Parameter("b", "1"),), trigger, 60, (task,), Path("/x/jobs/j.yml"))
    job = replace(job, rules=(Rule("RUN_DURATION_SECONDS", 5),), notifications=(Notification("on_start", ("a",)),))
    bundle = Bundle("shop", "dev", (job,), Path("/x/databricks.yml"))
    monkeypatch.setattr(last_good, "read", lambda *_: bundle)
    assert used(settings) == bundle
    monkeypatch.undo()
    write(settings, "bundle: [")
    assert used(settings) == bundle


def test_a_copy_that_cannot_be_written_stops_nothing(settings: Settings) -> None:
    settings.dagster_home.write_text("a file where the folder should be")
    assert used(settings).name == "shop"


def test_the_doctor_says_file_and_line_of_a_broken_job_yaml_also_while_the_last_good_one_is_used(
    settings: Settings,
) -> None:
    used(settings)
    assert check_jobs(settings).ok
    file = edit(settings, "entry_point: recourse-session", "entry_point: main")
    line = next(n for n, text in enumerate(file.read_text().split("\n"), 1) if "entry_point:" in text)
    check = check_jobs(settings)
    assert check.ok is False
    where = "resources.jobs.shop.tasks[0].python_wheel_task.entry_point"
    assert check.found.startswith(f"{file}:{line}: {where}: entry_point")
    edit(settings, "orders,customers", "oders")
    assert "no stream is named 'oders'" in check_jobs(settings).found
    file.unlink()
    assert "there is no file" in check_jobs(settings).found


def test_a_field_that_is_not_there_is_placed_at_the_one_above() -> None:
    lines = FAKES.read_text().split("\n")
    shop = next(n for n, text in enumerate(lines, 1) if text.startswith("    shop:"))
    assert location_of(FAKES, "resources.jobs.shop.schedule") == f"{FAKES}:{shop}"
    assert location_of(FAKES, "nothing") == str(FAKES)


DATE = ("default: 100", "default: 2026-13-45")
"""A slip of the pen that YAML takes for a date."""
NAME = ("    shop:", "    config:")
"""A job key that Dagster keeps for itself."""


def test_a_job_yaml_of_any_kind_of_fault_costs_no_verdict_and_no_definitions(settings: Settings) -> None:
    topology = Topology.load(settings.flows)
    definitions(settings)
    edit(settings, *DATE)
    now = time.time()
    dead = Status("orders", "running", os.getpid(), started_at=now, heartbeat=now)  # nobody holds its lease
    write_status(settings, dead)
    fault = partial(last_good.fault, settings, topology, partial(sessions, topology=topology, settings=settings))
    checks = HealthChecks(list(topology.streams.values()), [], settings, fault)
    verdicts = checks.verdicts(dg.DagsterInstance.ephemeral(), now)
    assert verdicts[dg.AssetCheckKey(dg.AssetKey("orders"), HEALTH)].mark == "red: dead"
    assert "'2026-13-45' cannot be read" in verdicts[dg.AssetCheckKey(dg.AssetKey("customers"), HEALTH)].text
    assert "'2026-13-45' cannot be read" in check_jobs(settings).found
    assert definitions(settings).resolve_job_def("shop").run_config


def test_the_definitions_are_built_again_only_when_the_jobs_have_changed(settings: Settings) -> None:
    made: list[Bundle] = []
    now = last_good.PresentFault(settings, Topology.load(settings.flows), made.append)
    assert [now(), now()] == [None, None] and len(made) == 1
    edit(settings, *DATE)
    assert now() is not None and now() is not None
    write(settings, f"{FAKES.read_text()}# a remark\n")
    assert now() is None and len(made) == 1
    edit(settings, "default: 100", "default: 55")
    assert [now(), now()] == [None, None] and len(made) == 2


def test_what_nobody_has_foreseen_is_a_fault_that_says_what_it_was(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    used(settings)

    def broken(*_: object) -> Bundle:
        raise RuntimeError("nobody thought of this")

    monkeypatch.setattr(job_yaml, "load", broken)
    fault = last_good.fault(settings, Topology.load(settings.flows), lambda bundle: bundle)
    assert fault is not None and "RuntimeError: nobody thought of this" in fault.found
    assert used(settings).name == "shop"


def test_what_dagster_refuses_does_not_replace_the_last_good_one(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(job_yaml, "TAKEN", frozenset())  # as for a rule of Dagster's that is not known here
    definitions(settings)
    saved = last_good.path(settings).read_text()
    edit(settings, *NAME)
    assert definitions(settings).resolve_job_def("shop").run_config
    assert last_good.path(settings).read_text() == saved
    assert '"config" is not a valid name in Dagster' in check_jobs(settings).found
    with pytest.raises(ConfigurationError, match='"config" is not a valid name'):
        DagsterProcesses(settings).start()


def test_a_kept_copy_that_dagster_refuses_leaves_what_is_wrong_now(settings: Settings) -> None:
    definitions(settings)
    file = last_good.path(settings)
    file.write_text(file.read_text().replace('"key": "shop"', '"key": "config"'))
    edit(settings, *DATE)
    with pytest.raises(ConfigurationError, match="2026-13-45"):
        definitions(settings)


def test_a_job_yaml_of_ones_own_that_is_gone_is_not_replaced_by_the_shipped_one(
    settings: Settings, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The current folder is that of a project with its own databricks.yml, in which the home has been used."""
    monkeypatch.chdir(tmp_path_factory.mktemp("project"))
    own, project = Path.cwd() / "databricks.yml", settings.model_copy(update={"jobs": None})
    own.write_text(FAKES.read_text())
    definitions(project)
    file = last_good.path(project)
    saved = file.read_text()
    own.rename(own.with_name("moved.yml"))
    config = {"ops": {"shop_session": {"config": {"rate": 100}}}}
    assert definitions(project).resolve_job_def("shop").run_config == config
    assert file.read_text() == saved
    check = check_jobs(project)
    assert check.ok is False and str(own) in check.found and str(file) in check.fix
    with pytest.raises(ConfigurationError, match="which comes with Recourse"):
        DagsterProcesses(project).start()
    file.unlink()  # as the fault says
    assert definitions(project).resolve_job_def("streams")
    assert check_jobs(project).ok
    definitions(settings)
    value = json.loads(file.read_text())
    file.write_text(json.dumps({key: item for key, item in value.items() if key != "shipped"}))
    assert check_jobs(project).ok is False  # a copy of an older version, which did not say whose it is


def test_the_shipped_job_yaml_of_another_place_is_still_the_shipped_one(
    settings: Settings, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Recourse was installed anew, for another Python; and what the setting names is always what is meant."""
    monkeypatch.chdir(tmp_path_factory.mktemp("empty"))
    shipped = settings.model_copy(update={"jobs": None})
    definitions(shipped)
    file = last_good.path(shipped)
    file.write_text(json.dumps({**json.loads(file.read_text()), "file": "/before/orchestration/bundle/databricks.yml"}))
    assert check_jobs(shipped).ok
    definitions(settings)
    assert check_jobs(shipped).ok is False
    assert check_jobs(settings.model_copy(update={"jobs": job_yaml.find(shipped)})).ok
