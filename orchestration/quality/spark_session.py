"""The Spark session of a quality run: started by the first suite that needs one, ended with the run.

A slice that pandas evaluates needs none, and then no JVM is started. The streams' own sessions are never used.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Self

from dagster import InitResourceContext
from dagster_pyspark import LazyPySparkResource
from pydantic import PrivateAttr

from streaming_jobs.platform.runtime import LocalSpark, Runtime
from streaming_jobs.platform.spark import profile
from streaming_jobs.settings import Settings

HEAP_MB = 768
"""Heap of the JVM: a slice is read once, and aggregated."""
CORES = "local[2]"
"""Where the streams run on this machine, a check does not take all its cores."""
NAME = "quality"
"""Of the JVM's log, `<home>/logs/quality.spark.log`."""


def small(settings: Settings) -> Settings:
    """The settings with a small heap, and few cores if Spark runs on this machine."""
    spark = settings.spark
    master = CORES if spark.master.startswith("local") else spark.master
    heap = min(spark.driver_memory_mb, HEAP_MB)
    return settings.model_copy(
        update={"spark": spark.model_copy(update={"driver_memory_mb": heap, "master": master, "shuffle_partitions": 2})}
    )


class QualitySpark(LazyPySparkResource):
    """Dagster's lazy Spark resource with our session, which it also ends."""

    _runtime: Runtime | None = PrivateAttr(default=None)

    @classmethod
    def of(cls, settings: Settings, runtime: Runtime | None = None) -> Self:
        """The resource for one run; `runtime` is another one in tests."""
        modest = small(settings)
        made = cls(spark_config=profile(modest))
        made._runtime = runtime or LocalSpark(modest)
        return made

    def _init_session(self) -> None:
        if self._spark_session is None:
            assert self._runtime is not None
            self._spark_session = self._runtime.start(NAME)

    def teardown_after_execution(self, context: InitResourceContext | None) -> None:  # noqa: ARG002 - Dagster's method
        """End the session and its JVM, if a suite has started one."""
        runtime, self._runtime, started = self._runtime, None, self._spark_session is not None
        self._spark_session = None
        if runtime is not None and started:
            runtime.stop()


def session_of_run(settings: Settings) -> Iterator[Any]:
    """Yield the resource, and end what was started when the run ends, however it ends."""
    resource = QualitySpark.of(settings)
    try:
        yield resource
    finally:
        resource.teardown_after_execution(None)
