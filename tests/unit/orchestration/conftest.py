"""What tests of what stands on Dagster share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from streaming_jobs.settings import Settings

if TYPE_CHECKING:  # the command line's tests need no Dagster
    import dagster as dg


@pytest.fixture
def instance(tmp_path: Path) -> Iterator[dg.DagsterInstance]:
    """One with SQLite files, in the home `tmp_path`."""
    from tests.support.dagster_homes import stored_instance

    with stored_instance(Settings(home=tmp_path)) as instance:
        yield instance
