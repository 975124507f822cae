"""The stream that tests of recoveries begin with, unless their module has another one."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.life import Life


@pytest.fixture
def life(tmp_path: Path) -> Life:
    """Batches 0 to 2 are right, 3 to 5 are wrong."""
    life = Life.begin(tmp_path)
    for number in range(6):
        life.batch(number, wrong=number > 2, code="bug" if number > 2 else "a")
    return life
