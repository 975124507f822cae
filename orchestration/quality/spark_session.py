"""The Spark session of a quality run: started by the first suite that needs one, ended with the run.

A sample that pandas evaluates needs none, and then no JVM is started. The streams' own sessions are never used.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Self

from dagster_pyspark import LazyPySparkResource
from pydantic import PrivateAttr

from streaming_jobs.platform.runtime import LocalSpark, Runtime
from streaming_jobs.platform.spark import profile
from streaming_jobs.settings import Settings

HEAP_MB = 768
"""Heap of the JVM: a sample is read once, and aggregated."""
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
    """Dagster's lazy Spark resource, with a session of our runtime."""

    _runtime: Runtime = PrivateAttr()

    @classmethod
    def of(cls, settings: Settings) -> Self:
        """The resource for one run."""
        modest = small(settings)
        made = cls(spark_config=profile(modest))
        made._runtime = LocalSpark(modest)
        return made

    def _init_session(self) -> None:
        if self._spark_session is None:
            self._spark_session = self._runtime.start(NAME)

    def end(self) -> None:
        """End the session and its JVM, if a suite has started one."""
        if self._spark_session is not None:
            self._spark_session = None
            self._runtime.stop()


def session_of_run(settings: Settings) -> Iterator[Any]:
    """Yield the resource; its session ends with the run, however that ends."""
    resource = QualitySpark.of(settings)
    try:
        yield resource
    finally:
        resource.end()
