"""One rebuild of a slice with a Spark session of its own, which starts only after all refusals."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from reprocessing.plan.sliceable import sliceable
from reprocessing.slices.rebuild import SliceReport, Tools, Waits, rebuild
from streaming_jobs.platform.runtime import LocalSpark
from streaming_jobs.settings import Settings
from streaming_jobs.sources.topics import Topics
from streaming_jobs.stream import Stream

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def rebuild_slice(
    settings: Settings,
    bootstrap: str,
    stream: Stream,
    table: str | None,
    begin: str,
    end: str | None,
    *,
    dry_run: bool = False,
    despite_accepted: bool = False,
    waits: Waits | None = None,
    tell: Callable[[str], None] = lambda _: None,
) -> SliceReport:
    """Rebuild a slice of a stream's table; raises the error of its refusal or failure."""
    sliced = sliceable(stream, table)
    runtime = LocalSpark(settings)
    started: list[SparkSession] = []

    def spark() -> SparkSession:
        if not started:
            tell("starting Spark, which runs the stream's function on the slice's records")
            started.append(runtime.start(f"slice-{stream.name}"))
        return started[0]

    tools = Tools(
        settings, Topics.of(settings.kafka, bootstrap), bootstrap, spark, tell, waits or Waits(), despite_accepted
    )
    try:
        report = rebuild(tools, sliced, begin, end, dry_run=dry_run)
    except BaseException:  # an orderly end would wait for the running query
        runtime.kill()
        raise
    runtime.stop()
    return report
