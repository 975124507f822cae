"""The tests that docs/testing.md shows are green, on the stream that docs/streams.md shows."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import ROOT
from tests.support.pages import code_of


@pytest.mark.timeout(300)
def test_the_tests_of_the_page_are_green(tmp_path: Path) -> None:
    (tmp_path / "my_flows.py").write_text(code_of("streams.md", blocks=1))
    (tmp_path / "test_account_totals.py").write_text(code_of("testing.md", blocks=3))
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_account_totals.py"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)])},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-6000:]
    assert "3 passed" in done.stdout
