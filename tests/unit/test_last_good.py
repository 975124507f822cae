"""The job definitions that could be used last: kept whole, and the doctor says what is wrong with those of now."""

from __future__ import annotations

from pathlib import Path

import pytest

from orchestration import last_good
from orchestration.cli.doctor import check_jobs
from orchestration.fields import place
from orchestration.job_yaml import Bundle, Continuous, Job, Parameter, Schedule, Task
from streaming_jobs.settings import Settings
from streaming_jobs.topology import Topology
from tests.dagster.conftest import ROOT

FAKES = ROOT / "tests" / "dagster" / "fakes" / "databricks.yml"


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    (tmp_path / "databricks.yml").write_text(FAKES.read_text())
    return Settings(home=tmp_path, flows=["tests.dagster.fakes.flows"], jobs=tmp_path / "databricks.yml")


def used(settings: Settings) -> Bundle:
    return last_good.use(settings, Topology.load(settings.flows), lambda bundle: bundle)


@pytest.mark.parametrize(
    "trigger", [None, Continuous(True), Schedule("0 0 4 ? * SUN", "0 4 * * 0", "Europe/Vienna", False)]
)
def test_what_is_kept_is_what_was_read(
    settings: Settings, trigger: Continuous | Schedule | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    task = Task("session", "recourse-streams", "recourse-session", ("--streams", "orders", "--set", "a={{b}}"))
    job = Job("j", "J", "d", {"t": "x"}, (Parameter("b", "1"),), trigger, 60, task, Path("/x/jobs/j.yml"))
    bundle = Bundle("shop", "dev", (job,), Path("/x/databricks.yml"))
    monkeypatch.setattr(last_good, "read", lambda *_: bundle)
    assert used(settings) == bundle
    monkeypatch.undo()
    assert settings.jobs is not None
    settings.jobs.write_text("bundle: [")
    assert used(settings) == bundle


def test_a_copy_that_cannot_be_written_stops_nothing(settings: Settings) -> None:
    settings.dagster_home.write_text("a file where the folder should be")
    assert used(settings).name == "shop"


def test_the_doctor_says_file_and_line_of_a_broken_job_yaml_also_while_the_last_good_one_is_used(
    settings: Settings,
) -> None:
    used(settings)
    assert check_jobs(settings).ok
    assert settings.jobs is not None
    settings.jobs.write_text(FAKES.read_text().replace("entry_point: recourse-session", "entry_point: main"))
    line = next(n for n, text in enumerate(settings.jobs.read_text().split("\n"), 1) if "python_wheel_task:" in text)
    found = check_jobs(settings)
    assert found.ok is False
    assert found.found.startswith(
        f"{settings.jobs}:{line}: resources.jobs.shop.tasks[0].python_wheel_task: entry_point"
    )
    settings.jobs.write_text(FAKES.read_text().replace("orders,customers", "oders"))
    assert "no stream is named 'oders'" in check_jobs(settings).found
    settings.jobs.unlink()
    assert "there is no file" in check_jobs(settings).found


def test_a_field_that_is_not_there_is_placed_at_the_one_above() -> None:
    lines = FAKES.read_text().split("\n")
    shop = next(n for n, text in enumerate(lines, 1) if text.startswith("    shop:"))
    assert place(FAKES, "resources.jobs.shop.schedule") == f"{FAKES}:{shop}"
    assert place(FAKES, "nothing") == str(FAKES)
