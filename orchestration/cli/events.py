"""`recourse events`: what happened to all streams of a home, from the table that anybody can query."""

from __future__ import annotations

from dataclasses import asdict
from datetime import UTC, datetime
from typing import Annotated

import typer

from orchestration.cli.options import AnyStreams, invocation
from orchestration.cli.text import Output, OutputOption, say, show_table
from streaming_jobs.errors import UsageError


def events(
    context: typer.Context,
    streams: AnyStreams = None,
    since: Annotated[str, typer.Option(help="A duration, such as '2 days'.")] = "1 day",
    kind: Annotated[list[str] | None, typer.Option(help="Only events of this kind; may be given again.")] = None,
    output: OutputOption = Output.text,
) -> None:
    """Print what happened to streams: sessions, failures, deploys, recoveries, slices, checks, alerts.

    First brings the Delta table recourse_events up to date, in which the same events can be queried.
    """
    from orchestration.event_table import KINDS, TABLE, rows, synchronise
    from streaming_jobs.text.durations import parse_duration
    from streaming_jobs.text.spelling import instead

    call = invocation(context)
    names = set(call.names(streams or []))
    for each in kind or ():
        if each not in KINDS:
            raise UsageError(f"--kind {each} is not a kind of event", instead(each, KINDS))
    begin = datetime.now(UTC) - parse_duration(since)
    new = synchronise(call.settings, call.topology.streams)
    say(f"{new} new events in table {call.settings.tables / TABLE}")
    found = [event for event in rows(call.settings, since=begin) if event.kind in (kind or KINDS)]
    wanted = [event for event in found if event.stream in names or not streams]
    cells = [[f"{event.at:%Y-%m-%d %H:%M:%S}", event.stream, event.kind, event.text] for event in wanted]
    value = [{**asdict(event), "at": event.at.isoformat()} for event in wanted]
    show_table(output, value, ("at (UTC)", "stream", "kind", "what"), cells)
