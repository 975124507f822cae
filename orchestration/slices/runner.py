"""One rebuild of a slice with a Spark session of its own, which starts only after all refusals."""

from __future__ import annotations

from collections.abc import Callable

from reprocessing.plan.sliceable import sliceable
from reprocessing.slices.rebuild import SliceReport, Tools, Waits, rebuild
from streaming_jobs.platform.runtime import spark_on_demand
from streaming_jobs.settings import Settings
from streaming_jobs.sources.topics import Topics
from streaming_jobs.stream import Stream


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
    topics = Topics.of(settings.kafka, bootstrap)
    with spark_on_demand(settings, f"slice-{stream.name}") as spark:
        tools = Tools(settings, topics, bootstrap, spark, tell, waits or Waits(), despite_accepted)
        return rebuild(tools, sliceable(stream, table), begin, end, dry_run=dry_run)
