"""A user's folder with the name of one of our packages is reported, before anything is imported from it."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from streaming_jobs.errors import UsageError
from streaming_jobs.platform import entry
from tests.support import ROOT

RECOURSE = "import sys; from streaming_jobs.platform.entry import main; sys.argv[0] = 'recourse'; sys.exit(main())"


def run(folder: Path, path: str, *command: str) -> subprocess.CompletedProcess[str]:
    environment: Mapping[str, str] = {**os.environ, "PYTHONPATH": os.pathsep.join([path, str(ROOT)])}
    return subprocess.run(
        [sys.executable, *command],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


@pytest.mark.parametrize(
    ("name", "where"),
    [
        pytest.param("orchestration", ".", id="on PYTHONPATH"),
        pytest.param("quality", "/nowhere", id="in the working directory"),
        pytest.param("quality", ".", marks=pytest.mark.long),
        pytest.param("orchestration", "/nowhere", marks=pytest.mark.long),
    ],
)
def test_a_package_of_the_users_is_named_and_what_to_do(tmp_path: Path, name: str, where: str) -> None:
    (tmp_path / name).mkdir()
    (tmp_path / name / "__init__.py").touch()
    session = run(tmp_path, where, "-m", "streaming_jobs.session", "--streams", "nothing")
    for process in (run(tmp_path, where, "-c", RECOURSE, "streams", "list"), session):
        assert process.returncode == 2
        assert f"{tmp_path / name} is found as the package '{name}'" in process.stderr
        assert f"rename your {name}" in process.stderr and "Traceback" not in process.stderr


def test_a_folder_without_code_and_another_name_hide_nothing(tmp_path: Path) -> None:
    (tmp_path / "quality").mkdir()
    (tmp_path / "quality" / "rules.sql").touch()
    (tmp_path / "flows.py").touch()
    assert run(tmp_path, ".", "-c", RECOURSE, "--help").returncode == 0


def test_a_module_of_that_name_counts_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    entry.check()
    (tmp_path / "reprocessing.py").touch()
    with pytest.raises(UsageError, match=r"reprocessing.py is found as the package 'reprocessing'"):
        entry.check()
