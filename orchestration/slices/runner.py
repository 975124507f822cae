"""Rebuilds of slices with a Spark session of their own, which starts only after all refusals."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from reprocessing.slices.late import LateReport, rebuild_late
from reprocessing.slices.rebuild import SliceReport, Tools, Waits, rebuild
from streaming_jobs.platform.runtime import spark_on_demand
from streaming_jobs.runtime.sliceable import Sliceable, sliceable
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


def rebuild_late_days(
    settings: Settings,
    bootstrap: str,
    tables: Sequence[Sliceable],
    *,
    most: int,
    waits: Waits,
    tell: Callable[[str], None] = lambda _: None,
) -> list[LateReport]:
    """Rebuild the closed days of tables of one stream that lack late records, of each table at most so many."""
    topics = Topics.of(settings.kafka, bootstrap)
    with spark_on_demand(settings, f"late-{tables[0].stream.name}") as spark:
        tools = Tools(settings, topics, bootstrap, spark, tell, waits)
        return [rebuild_late(tools, made, most=most) for made in tables]
