"""`recourse lineage`: the OpenLineage events of streams, to look at or to send by other means."""

from __future__ import annotations

import time
from typing import Annotated

import typer

from orchestration.cli.options import AnyStreams, invocation


def lineage(
    context: typer.Context,
    streams: AnyStreams = None,
    since: Annotated[str, typer.Option(help="A duration, such as '2 hours'.")] = "1 hour",
) -> None:
    """Print OpenLineage events of sessions and batches, a line of JSON each.

    The setting lineage.url names a receiver, to which Dagster sends the same events as they come.
    """
    from streaming_jobs.platform.extras import require
    from streaming_jobs.text import commands

    require("lineage", commands.lineage())
    from openlineage.client.serde import Serde

    from orchestration.lineage import Lineage, Position
    from streaming_jobs.text.durations import parse_duration

    call = invocation(context)
    begin = time.time() - parse_duration(since).total_seconds()
    for name in call.names(streams or []):
        for event, _ in Lineage(call.settings, call.topology[name]).since(Position(begin, begin)):
            print(Serde.to_json(event))
