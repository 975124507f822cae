"""The pages that are made from the code are those that the code makes, and nothing in them is left blank."""

from __future__ import annotations

import ast
import importlib.util
import re
import tomllib
from configparser import ConfigParser
from pathlib import Path
from types import ModuleType

import pytest
import yaml
from pydantic import BaseModel

from streaming_jobs.errors import PermanentError, UsageError
from streaming_jobs.preflight.doctor import PYTHONS
from streaming_jobs.settings import Settings, StreamSettings
from streaming_jobs.text.durations import parse_duration
from tests.conftest import KINDS, LONGEST_FIRST, TESTS

pytestmark = pytest.mark.slow

DOCS = Path(__file__).parent.parent.parent / "docs"
PROJECT = tomllib.loads((DOCS.parent / "pyproject.toml").read_text(encoding="utf-8"))
PACKAGES = {"streaming_jobs", "reprocessing", "quality", "orchestration"}
SECONDS_TO_STOP = StreamSettings().stop_deadline.total_seconds() + 15 + 60
"""For the streams, the driver, and Spark."""


def script(name: str) -> ModuleType:
    """A script beside the pages, as a module."""
    spec = importlib.util.spec_from_file_location(name, DOCS / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_link_to_a_file_of_the_project_leads_to_one() -> None:
    root = DOCS.parent
    dead = [
        f"{page.name}: {target}"
        for page in (*sorted(root.glob("*.md")), *sorted(DOCS.rglob("*.md")), root / "benchmarks" / "README.md")
        for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text(encoding="utf-8"))
        if not (page.parent / target).exists()
    ]
    assert not dead


def test_every_module_that_docs_and_docstrings_name_is_there() -> None:
    root = DOCS.parent
    packages = ("streaming_jobs", "reprocessing", "quality", "orchestration", "benchmarks", "docs", "tests")
    there = {str(path.relative_to(root)) for package in packages for path in (root / package).rglob("*.py")}
    own = {
        "docs/streams.md": {"my_flows.py"},
        "docs/testing.md": {"my_flows.py"},
        "docs/cookbook.md": {"recipes.py"},
        "docs/tour.md": {"sensors/streams.py", "sensors/suites.py", "tests/test_streams.py"},
        "docs/project.md": {"corner_shop/streams.py", "corner_shop/suites.py"},
    }
    gone = []
    pages = (root / "README.md", root / "CONTRIBUTING.md", root / "SECURITY.md", *DOCS.rglob("*.md"))
    for path in (*pages, *(root / file for file in there if file[:5] != "tests")):
        name = str(path.relative_to(root))
        for module in re.findall(r"`((?:[a-z_0-9]+/)*[a-z_0-9]+\.py)`", path.read_text(encoding="utf-8")):
            known = any(f"/{file}".endswith(f"/{module}") for file in there)
            gone += [] if known or module in own.get(name, ()) else [f"{name}: {module}"]
    assert not gone


def test_every_name_that_a_page_imports_from_the_project_can_be_imported() -> None:
    """Two-line snippets are not run elsewhere, and a user copies them first of all."""
    wrong = []
    for page in (DOCS.parent / "README.md", *DOCS.rglob("*.md")):
        for code in re.findall(r"^```python\n(.*?)^```$", page.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE):
            for line in ast.walk(ast.parse(code)):
                if isinstance(line, ast.ImportFrom) and str(line.module).partition(".")[0] in PACKAGES:
                    module = importlib.import_module(str(line.module))
                    names = (name.name for name in line.names)
                    wrong += [f"{page.name}: {line.module}.{name}" for name in names if not hasattr(module, name)]
    assert not wrong


def test_the_picture_and_the_page_of_rooms_are_what_the_imports_say() -> None:
    """Also that rooms do not import each other in a circle, and that each step of the walks is in the code."""
    rooms = script("architecture")
    text = (DOCS / "architecture.md").read_text(encoding="utf-8")
    assert rooms.page(text) == text, "run: python docs/architecture.py"
    assert rooms.picture() == rooms.PICTURE.read_text(encoding="utf-8"), "run: python docs/architecture.py"
    assert all(rooms.sentence(room) and rooms.first_file(room) for room in rooms.arrows())


def test_the_page_of_errors_is_what_the_classes_say() -> None:
    """Each with a code of its own, a meaning, and what to do."""
    errors = script("errors")
    assert errors.page() == (DOCS / "errors.md").read_text(encoding="utf-8"), "run: python docs/errors.py"
    assert all(kind.meaning and kind.what_to_do for kind in errors.kinds())


def test_the_page_of_settings_is_what_the_model_says() -> None:
    made = script("settings").page()
    assert made == (DOCS / "settings.md").read_text(encoding="utf-8"), "run: python docs/settings.py"


def test_the_table_of_figures_is_what_the_list_says() -> None:
    page = script("metrics")
    assert page.PAGE.read_text(encoding="utf-8") == page.page(), "run: python docs/metrics.py"


def test_every_setting_says_what_it_means() -> None:
    for section in (Settings, *(f.annotation for f in Settings.model_fields.values())):
        if isinstance(section, type) and issubclass(section, BaseModel):
            for name, field in section.model_fields.items():
                nested = isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel)
                assert nested or field.description or name in ("streams", "clusters"), f"{section.__name__}.{name}"


def test_the_unit_of_systemd_stops_a_session_at_a_batch_border_and_starts_it_again_only_where_that_may_help() -> None:
    """Without `KillMode=mixed` systemd signals Spark's JVM too, and the batch under way fails with it."""
    unit = ConfigParser(interpolation=None)
    unit.read(DOCS / "recourse.service")
    service = unit["Service"]
    assert service["KillMode"] == "mixed" and service["KillSignal"] == "SIGTERM"
    assert Path(service["WorkingDirectory"]).is_absolute() and service["Restart"] == "on-failure"
    assert set(service["RestartPreventExitStatus"].split()) == {
        str(code) for code in (UsageError.exit_code, PermanentError.exit_code)
    }
    assert int(service["TimeoutStopSec"]) >= SECONDS_TO_STOP


def test_the_container_has_what_the_wheel_is_made_of_shows_its_ui_on_loopback_alone_and_is_given_time_to_stop() -> None:
    service = yaml.safe_load((DOCS / "docker" / "compose.yaml").read_text(encoding="utf-8"))["services"]["recourse"]
    assert all(port.startswith("127.0.0.1:") for port in service["ports"]) and service["init"] is True
    assert parse_duration(service["stop_grace_period"]).total_seconds() >= SECONDS_TO_STOP
    assert (DOCS / "docker" / service["build"]["context"]).resolve() == DOCS.parent
    assert (DOCS.parent / service["build"]["dockerfile"]).is_file()
    image = (DOCS / "docker" / "Dockerfile").read_text(encoding="utf-8")
    copied = {name for line in re.findall(r"^COPY (?!--)(.+) \S+$", image, re.M) for name in line.split()}
    wheel = PROJECT["tool"]["hatch"]["build"]["targets"]["wheel"]
    needed = {*wheel["packages"], *wheel["force-include"], *PROJECT["project"]["license-files"], "requirements.lock"}
    assert needed | {"pyproject.toml", PROJECT["project"]["readme"]} == copied
    assert all((DOCS.parent / name).exists() for name in copied)


def test_the_hosted_ci_calls_the_script_that_anybody_can_run_on_every_python_that_the_project_names() -> None:
    [job] = yaml.safe_load((DOCS.parent / ".github/workflows/ci.yml").read_text(encoding="utf-8"))["jobs"].values()
    named = re.findall(r"Python :: (3\.\d+)", " ".join(PROJECT["project"]["classifiers"]))
    assert job["strategy"]["matrix"]["python"] == named == [f"{major}.{minor}" for major, minor in PYTHONS]
    assert PROJECT["project"]["requires-python"] == f">={named[0]},<3.{PYTHONS[-1][1] + 1}"
    assert ".ci/run" in [step.get("run") for step in job["steps"]]


def test_ci_runs_each_kind_without_its_long_tests_and_begins_with_files_that_there_are() -> None:
    makefile = (DOCS.parent / "Makefile").read_text(encoding="utf-8")
    runs = re.findall(r"\$\(BIN\)/pytest tests/(\w+) (.*)", makefile)
    assert sorted(kind for kind, _ in runs) == sorted([*KINDS, "unit"]) and all(
        'not long"' in how for _, how in runs
    ), runs
    assert [name for name in LONGEST_FIRST if not (TESTS / name).is_file()] == []
