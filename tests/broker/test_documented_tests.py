"""The tests that docs/testing.md and docs/lookup.md show are green, on the streams that the pages show."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import ROOT
from tests.support.pages import code_of

LOOKUP = code_of("lookup.md", blocks=1)


@pytest.mark.parametrize(
    ("flows", "shown", "number"),
    [
        (code_of("streams.md", blocks=1), code_of("testing.md", blocks=3), 3),
        (LOOKUP, code_of("lookup.md").removeprefix(LOOKUP), 1),
    ],
    ids=["testing.md", "lookup.md"],
)
def test_the_tests_of_the_page_are_green(tmp_path: Path, flows: str, shown: str, number: int) -> None:
    (tmp_path / "my_flows.py").write_text(flows)
    (tmp_path / "test_shown.py").write_text(shown)
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_shown.py"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)])},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-6000:]
    assert f"{number} passed" in done.stdout
