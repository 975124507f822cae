"""Fixtures of the tests of Delta tables: a home, and the table `evens` in it."""

from __future__ import annotations

from typing import Any

import pytest
from pyspark.sql.types import StructType

from streaming_jobs.settings import Settings
from streaming_jobs.sinks.delta.sink import DeltaSink
from streaming_jobs.sinks.delta.store import ensure_sink
from streaming_jobs.stream import DeltaTable as Declared
from tests.support.delta_table import TABLE, Make
from tests.support.worlds import OUTPUT, STREAM


@pytest.fixture
def make(home: Settings) -> Make:
    def make(output: StructType = OUTPUT, *, generation: int = 1, stream: str = STREAM, **declared: Any) -> DeltaSink:
        return ensure_sink(home, Declared(TABLE, **declared), stream, output, generation=generation)

    return make
