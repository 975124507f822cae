"""One redrive with a Spark session of its own, which starts only after all refusals."""

from __future__ import annotations

from collections.abc import Callable

from reprocessing.redrive.redrive import MOST, RedriveReport, redrive
from reprocessing.redrive.selection import Choice
from reprocessing.slices.rebuild import Tools, Waits
from streaming_jobs.platform.runtime import spark_on_demand
from streaming_jobs.settings import Settings
from streaming_jobs.sinks.redriven import Kind
from streaming_jobs.sources.topics import Topics
from streaming_jobs.stream import Stream


def redrive_records(
    settings: Settings,
    bootstrap: str,
    stream: Stream,
    kind: Kind,
    choice: Choice,
    *,
    table: str | None = None,
    limit: int = MOST,
    dry_run: bool = False,
    waits: Waits | None = None,
    tell: Callable[[str], None] = lambda _: None,
) -> RedriveReport:
    """Redrive what a stream has set aside; raises the error of its refusal or failure."""
    topics = Topics.of(settings.kafka, bootstrap)
    with spark_on_demand(settings, f"redrive-{stream.name}") as spark:
        tools = Tools(settings, topics, bootstrap, spark, tell, waits or Waits())
        return redrive(tools, stream, kind, choice, table=table, limit=limit, dry_run=dry_run)
