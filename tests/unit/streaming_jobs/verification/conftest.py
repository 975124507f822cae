"""What several tests of the verifier start from."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.placed import make_placed


@pytest.fixture
def placed(tmp_path: Path) -> Path:
    """A stream whose rows name their records; four batches of 15."""
    return make_placed(tmp_path)
