"""The stream that tests of recoveries begin with, unless their module has another one."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.life import Life


@pytest.fixture
def life(tmp_path: Path) -> Life:
    """Batches 0 to 2 are right, 3 to 5 are wrong."""
    return Life.of_batches(tmp_path, 6, wrong=range(3, 6), code="aaaxxx")


@pytest.fixture(autouse=True)
def _one_version_of_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    """The version that the code of `Life` names."""
    monkeypatch.setattr("streaming_jobs.runtime.code_version.package_version", lambda: "1")
