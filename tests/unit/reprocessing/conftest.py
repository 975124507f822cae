"""The stream that tests of recoveries begin with, unless their module has another one."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.life import Life


@pytest.fixture
def life(tmp_path: Path) -> Life:
    """Batches 0 to 2 are right, 3 to 5 are wrong."""
    return Life.of_batches(tmp_path, 6, wrong=range(3, 6), code="aaaxxx")
