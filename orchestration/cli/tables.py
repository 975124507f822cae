"""`recourse tables snapshot`: the versions of all tables that belong together."""

from __future__ import annotations

import time
from dataclasses import asdict
from typing import Annotated

import typer

from orchestration.cli.options import AnyStreams, invocation, moment_of
from orchestration.cli.text import Output, OutputOption, show_table

app = typer.Typer(no_args_is_help=True, help="The tables of all streams.", rich_markup_mode=None)


@app.callback()
def tables() -> None:
    """The tables of all streams."""


@app.command(short_help="Print versions of the tables that belong together.")
def snapshot(
    context: typer.Context,
    names: AnyStreams = None,
    at: Annotated[
        str | None, typer.Option(metavar="TIME", help="As of this time, UTC without a zone; or '2 hours' ago.")
    ] = None,
    output: OutputOption = Output.text,
) -> None:
    """Print for each table the version that belongs to those of the others, now or at a time.

    The tables of one stream are those of one batch. A recovery of several streams is in all of their tables or in none.
    Reads the tables' logs only. Name streams if no recovery spans them and others.
    """
    from streaming_jobs.catalog.snapshots import read_snapshot

    call = invocation(context)
    moment = None if at is None else moment_of("--at", at, time.time())
    found = read_snapshot(call.settings, call.topology, streams=call.names(names) if names else None, at=moment)
    value = [{**asdict(each), "location": str(each.location)} for each in found.values()]
    columns = ["table", "version", "stream", "generation", "batch", "location"]
    rows = [["-" if each[name] is None else str(each[name]) for name in columns] for each in value]
    show_table(output, value, columns, rows)
