"""What tests of table checks share: a stream of orders on disk."""

from __future__ import annotations

from pathlib import Path

import pytest

from streaming_jobs.stream import DeltaTable
from tests.support.checked_tables import Orders


@pytest.fixture
def orders(tmp_path: Path) -> Orders:
    """With an append table."""
    return Orders.begin(tmp_path)


@pytest.fixture
def upsert(tmp_path: Path) -> Orders:
    """With an upsert table."""
    return Orders.begin(tmp_path, DeltaTable("orders", keys=["id"]))
