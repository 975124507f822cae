"""Spark for a run of suites, started by the first suite that needs it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from streaming_jobs.settings import Settings

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


@contextmanager
def spark_on_demand(settings: Settings) -> Iterator[Callable[[], SparkSession]]:
    """Gives a function that returns the session, and starts it if it is called the first time; the block ends it."""
    sessions: list[SparkSession] = []

    def session() -> SparkSession:
        from streaming_jobs.platform.spark import start

        if not sessions:
            sessions.append(start(settings, name="quality"))
        return sessions[0]

    try:
        yield session
    finally:
        for each in sessions:
            each.stop()
