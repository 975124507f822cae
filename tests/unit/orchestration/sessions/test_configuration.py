"""A configuration beside a project's file: its paths are those of the file's folder."""

from __future__ import annotations

import os
import subprocess
import sys
from datetime import timedelta
from pathlib import Path

import pytest
from pydantic import SecretStr

from orchestration.sessions.configuration import Configuration, beside, text_of
from streaming_jobs.errors import ConfigurationError
from tests.support import ROOT


@pytest.fixture(autouse=True)
def own_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path])


@pytest.mark.parametrize(("name", "table"), [("recourse.toml", ""), ("pyproject.toml", "[tool.recourse]\n")])
def test_relative_paths_are_those_of_the_files_folder(tmp_path: Path, name: str, table: str) -> None:
    (tmp_path / name).write_text(f'{table}flows = ["shop"]\ntables_dir = "tables"\nstate_dir = "s3://lake/state"\n')
    loaded = beside(tmp_path / name, {}).load().settings
    assert (loaded.home, loaded.tables_dir) == (tmp_path / ".recourse", tmp_path / "tables")
    assert str(loaded.state_dir) == "s3://lake/state" and loaded.flows == ["shop"]


def test_every_setting_that_is_a_path_is_of_the_files_folder_in_the_location_and_in_its_children(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "recourse.toml"
    file.write_text('flows = ["shop"]\njars_dir = "jars"\njava_home = "jdk"\n')
    origin = beside(file, {"tables_dir": Path("out")})
    loaded = origin.load().settings
    assert (loaded.jars_dir, loaded.java_home, loaded.tables_dir) == tuple(tmp_path / n for n in ("jars", "jdk", "out"))
    for name, text in origin.environment().items():
        monkeypatch.setenv(name, text)
    assert Configuration().load().settings == loaded


def test_modules_beside_the_file_hide_none_of_the_standard_library_in_the_location_and_in_its_children(
    tmp_path: Path,
) -> None:
    file = tmp_path / "recourse.toml"
    file.write_text('flows = ["shop"]\n')
    (tmp_path / "queue.py").write_text("raise AssertionError('the module of the project')\n")
    (tmp_path / "shop.py").write_text("HERE = __file__\n")
    origin = beside(file, {})
    standard = next(n for n, entry in enumerate(sys.path) if Path(entry, "queue.py").is_file())
    assert sys.path.index(str(tmp_path)) > standard
    code = (
        "import queue\n"
        "from contextlib import suppress\n"
        "from streaming_jobs.catalog.topology import Topology\n"
        "from streaming_jobs.errors import UsageError\n"
        "with suppress(UsageError):\n"  # the module has no stream
        "    Topology.load(['shop'])\n"
        "import shop; print(shop.HERE)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd="/",
        env={**os.environ, "PYTHONPATH": str(ROOT), **origin.environment()},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout == f"{tmp_path / 'shop.py'}\n", done.stderr


@pytest.mark.parametrize(
    ("key", "value", "text"),
    [
        ("tables_dir", Path("/lake/tables"), "/lake/tables"),
        ("quality.every", timedelta(hours=1, milliseconds=500), "1 hour 500 ms"),
        ("dagster.keepalive", False, "false"),
        ("metrics.port", 9464, "9464"),
        ("flows", ["shop"], '["shop"]'),
        ("streams", {"orders": {"late_after": timedelta(minutes=5)}}, '{"orders": {"late_after": "5 minutes"}}'),
        ("kafka.bootstrap_servers", "k:1", "k:1"),
    ],
)
def test_a_value_is_the_same_for_a_child(key: str, value: object, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert text_of(key, value) == text
    given = Configuration(values={"flows": ["shop"], key: value})
    loaded = given.load().settings
    for name, variable in given.environment().items():
        monkeypatch.setenv(name, variable)
    assert Configuration().load().settings == loaded


@pytest.mark.parametrize("value", [None, SecretStr("s3cret"), b"bytes", {"a": SecretStr("s3cret")}])
def test_a_value_that_a_child_would_read_as_another_one_is_refused(value: object) -> None:
    with pytest.raises(ConfigurationError, match=r"kafka\.sasl_password cannot be given to another process") as raised:
        Configuration(values={"kafka.sasl_password": value}).environment()
    assert "s3cret" not in str(raised.value)
