"""The pytest fixture `stream_test`, found by pytest wherever this package is installed (docs/testing.md).

Each run of pytest in such an environment imports this module, whatever it tests: it imports nothing heavy.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from streaming_jobs.stream import Stream
    from streaming_jobs.testing.stream_test import StreamTest


@pytest.fixture(scope="session")
def recourse_spark(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SparkSession]:
    """The Spark session of all tests of a run, as a stream has it; a project may have a fixture of this name instead.

    The first start on a machine fetches the jars. Modules that pytest finds are found by Spark's Python processes too.
    """
    import os
    import sys

    from streaming_jobs.platform.spark import start
    from streaming_jobs.settings import Settings

    os.environ["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
    session = start(
        Settings.load(
            {
                "home": tmp_path_factory.mktemp("recourse"),
                "spark.master": "local[1]",
                "spark.driver_memory_mb": 1024,
                # A JVM that lives for seconds is quicker without its optimising compiler.
                "spark.extra": {"spark.driver.extraJavaOptions": "-XX:TieredStopAtLevel=1"},
            }
        ),
        name="tests",
    )
    yield session
    session.stop()


@pytest.fixture
def stream_test(recourse_spark: SparkSession, tmp_path: Path) -> Callable[..., StreamTest]:
    """Makes a `StreamTest` of a stream, in a folder of its own: `stream_test(account_totals, partitions=2)`."""
    from streaming_jobs.testing.stream_test import StreamTest

    made: list[StreamTest] = []

    def make(stream: Stream, **options: Any) -> StreamTest:
        made.append(StreamTest(stream, recourse_spark, tmp_path / f"stream-{len(made)}", **options))
        return made[-1]

    return make
