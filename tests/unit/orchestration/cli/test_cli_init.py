"""`recourse init`: a project that can be used as it is written, and no file of the user is touched."""

from __future__ import annotations

import importlib
import json
import re
import subprocess
import sys
import tomllib
from configparser import ConfigParser
from pathlib import Path

import pytest
import yaml

from orchestration.cli import init
from streaming_jobs.errors import UsageError
from tests.support import ROOT
from tests.support.pages import code_of
from tests.unit.orchestration.cli.conftest import Run

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("empty_folder")]

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def written(folder: Path) -> dict[str, str]:
    return {str(path.relative_to(folder)): path.read_text() for path in folder.rglob("*") if path.is_file()}


def test_a_project_has_its_name_in_every_file_and_its_streams_suites_and_jobs_can_be_used(
    tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = run.ended(0, "init", "corner-shop").err
    folder = tmp_path / "corner-shop"
    files = written(folder)
    assert {"pyproject.toml", "corner_shop/streams.py", "deploy/corner-shop.service", ".gitignore"} <= files.keys()
    assert f"{len(files)} files of project corner-shop" in said and "cd corner-shop" in said
    assert not [name for name, text in files.items() if "my-project" in text or "my_project" in text]
    assert (folder.stat().st_mode & 0o777, [path for path in tmp_path.iterdir() if path != folder]) == (0o755, [])
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "path", [*sys.path])
    assert [row["stream"] for row in run.json("streams", "list")] == ["priced_orders"]
    assert [row["suite"] for row in run.json("quality", "list")] == ["priced_orders_rows"]
    run.ended(0, "jobs", "validate")
    [sample] = [text for name, text in files.items() if name.startswith("samples/")]
    assert len({json.loads(line)["order_id"] for line in sample.splitlines()}) == 24
    sys.modules.pop("corner_shop")


def test_the_tours_own_data_fit_the_project_that_the_tour_makes(
    tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    run.ended(0, "init", "sensors")
    folder = tmp_path / "sensors"
    streams = code_of("tour.md", blocks=1)
    (folder / "sensors" / "streams.py").write_text(streams)
    (folder / "sensors" / "suites.py").write_text(code_of("tour.md").removeprefix(streams))
    jobs = folder / "recourse-jobs.yml"
    jobs.write_text(jobs.read_text().replace("priced_orders", "temperatures"))
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "path", [*sys.path])
    assert [row["stream"] for row in run.json("streams", "list")] == ["temperatures"]
    assert [row["suite"] for row in run.json("quality", "list")] == ["temperatures_rows"]
    run.ended(0, "jobs", "validate")
    [topic] = importlib.import_module("sensors.streams").temperatures.topics
    page = (ROOT / "docs" / "tour.md").read_text(encoding="utf-8")
    block = topic.value.reader().read(
        [line.encode() for line in re.findall(r'^ +(\{"sensor".*\})$', page, re.MULTILINE)]
    )
    assert not block.refused and block.columns.to_pydict()["celsius"] == [21.5, 9.0, 22.0, 451.0]
    for name in [name for name in sys.modules if name.partition(".")[0] == "sensors"]:
        del sys.modules[name]


def test_a_name_that_resembles_the_one_in_the_templates_is_taken_as_it_is() -> None:
    files = init.project_files("my_project-2")
    assert {"my_project_2/streams.py", "deploy/my_project-2.service"} <= {str(path) for path in files}
    assert 'flows = ["my_project_2"]' in files[Path("pyproject.toml")]


def test_the_code_of_a_project_is_formatted_and_has_no_findings(tmp_path: Path, run: Run) -> None:
    run.ended(0, "init", "shop")
    for arguments in (["format", "--check"], ["check"]):
        ruff = [sys.executable, "-m", "ruff", *arguments, "--line-length=120", "--no-cache", "shop"]
        done = subprocess.run(ruff, capture_output=True, text=True, check=False, cwd=tmp_path)
        assert done.returncode == 0, done.stdout


def test_requirements_pythons_unit_and_ci_are_those_of_recourse(run: Run, tmp_path: Path) -> None:
    run.ended(0, "init", "shop")
    project = tomllib.loads((tmp_path / "shop/pyproject.toml").read_text())["project"]
    major, minor, _ = PROJECT["version"].split(".")
    recourse = f"recourse-streams[dagster,quality]>={major}.{minor},<{major}.{int(minor) + 1}"
    assert (project["dependencies"], project["requires-python"]) == ([recourse], PROJECT["requires-python"])
    units = []
    for path in (tmp_path / "shop/deploy/shop.service", ROOT / "docs/recourse.service"):
        unit = ConfigParser(interpolation=None)
        unit.read(path)
        units.append({key: value for key, value in unit["Service"].items() if value.isdigit() or "/" not in value})
    assert units[0] == units[1] and "killmode" in units[0]
    steps = yaml.safe_load((tmp_path / "shop/.github/workflows/ci.yml").read_text())["jobs"]["test"]["steps"]
    assert steps[-1] == {"run": "python -m pytest"}


def test_a_folder_with_files_is_not_touched_and_an_empty_one_is_used(tmp_path: Path, run: Run) -> None:
    (tmp_path / "shop").mkdir()
    run.ended(0, "init", "shop")
    before = written(tmp_path)
    assert "exists, and is not an empty folder" in run.said("init", "shop")
    (tmp_path / "file").write_text("")
    assert "is not an empty folder" in run.said("init", "file")
    assert written(tmp_path) == before | {"file": ""}


def test_here_writes_what_is_missing_and_nothing_if_a_file_differs(tmp_path: Path, run: Run) -> None:
    (tmp_path / "README.md").write_text("mine")
    assert "README.md would be overwritten" in run.said("init", "shop", "--here")
    assert written(tmp_path) == {"README.md": "mine"}
    (tmp_path / "README.md").unlink()
    run.ended(0, "init", "shop", "--here")
    whole = written(tmp_path)
    (tmp_path / "shop/streams.py").unlink()  # as after a command that was killed
    run.ended(0, "init", "shop", "--here")
    assert written(tmp_path) == whole
    (tmp_path / "Dockerfile").unlink()
    (tmp_path / "Dockerfile").symlink_to("nowhere")
    assert "Dockerfile would be overwritten" in run.said("init", "shop", "--here")


def test_a_failure_leaves_no_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(folder: Path, _: object) -> None:
        (folder / "half").write_text("")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(init, "_write", full)
    with pytest.raises(OSError, match="No space"):
        init._write_new(tmp_path / "shop", {})
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "name",
    [
        "Shop",
        "../shop",
        "a b",
        "1shop",
        "shop-",
        "a__b",
        "",
        "s" * 51,
        "class",
        "match",
        "tests",
        "random",
        "quality",
        "pyspark",
    ],
)
def test_a_name_that_no_package_can_have_or_that_hides_another_is_refused(name: str) -> None:
    with pytest.raises(UsageError, match=r"is not the name|cannot be the name|would hide"):
        init.checked(name)
