"""All commands and the global options."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from orchestration.cli import (
    adopt,
    bundle,
    chaos,
    config,
    deadletters,
    demo,
    deploy,
    describe,
    doctor,
    events,
    fleet,
    history,
    init,
    inspect,
    jobs,
    late,
    lineage,
    mcp_server,
    metrics,
    preview,
    quality,
    recover,
    sample,
    savepoints,
    schema,
    send,
    slices,
    state,
    streams,
    tables,
    topics,
    trace,
    up,
    verify,
)
from orchestration.cli.options import Invocation, parse_set
from orchestration.cli.text import log_to_stderr, say

app = typer.Typer(
    name="recourse",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
)


def _version(show: bool) -> None:
    if show:
        from importlib.metadata import PackageNotFoundError, version

        try:
            print(version("recourse-streams"))
        except PackageNotFoundError:
            say("recourse-streams is not installed here; this is its source folder")
            raise typer.Exit(1) from None
        raise typer.Exit


@app.callback()
def recourse(
    context: typer.Context,
    config_file: Annotated[
        Path | None,
        typer.Option("--config", metavar="FILE", help="The configuration file, in place of the one found upwards."),
    ] = None,
    values: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="One setting; may be given again.")
    ] = None,
    _: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Kafka to Delta streams whose effects can be recovered.

    Data on stdout, messages on stderr. Exit codes: 0 ok, 1 failed, 2 usage error, 3 a bug in Recourse.
    """
    log_to_stderr()
    context.obj = Invocation(config_file, parse_set(values or []))


app.command("up", short_help="Start everything and print the addresses to open; Ctrl-C ends all of it.")(up.up)
app.command("doctor", short_help="Check this machine: one line per check, with the fix.")(doctor.doctor)
app.command("init", short_help="Write a new project: a stream, a suite, jobs, a test, CI, an image, a unit.")(init.init)
app.command("send", short_help="Send the lines of a file to a topic.")(send.send)
app.command("events", short_help="Print what happened to the streams, and keep it in a Delta table.")(events.events)
app.command("fleet", short_help="Print every stream: state, freshness, error budget, last runs.")(fleet.fleet)
app.command("lineage", short_help="Print OpenLineage events of sessions and batches.")(lineage.lineage)
app.command("feed", short_help="Send the flights of 2013 to their topic.")(up.feed)
app.command("topics", short_help="Print the topics that streams read, with their figures.")(topics.topics)
app.command("schema", short_help="Print the newest schema of a subject of the registry.")(schema.schema)
app.command("chaos", short_help="Kill the streams with -9 and prove that every offset is written once.")(chaos.chaos)
app.command("trace", short_help="Print what became of a record, or from which records rows came.")(trace.trace)
app.command("verify", short_help="Compare tables and topics, offset by offset and row by row.")(verify.verify)
app.command("metrics", short_help="Serve the streams' figures to Prometheus and OpenTelemetry.")(metrics.metrics)
app.command("preview", short_help="Show what the code on disk would change in a stream's newest rows.")(preview.preview)
app.command("adopt", short_help="Let a stream go on where another job has stopped, in its table.")(adopt.adopt)
app.command("inspect", short_help="Rebuild what any Kafka-to-Delta job of Spark has done.")(inspect.inspect)
streams.app.command("describe", short_help="Print the topology: sources, stream, sinks.")(describe.describe)
streams.app.command("history", short_help="Print the history of a stream, oldest first.")(history.history)
streams.app.command("sample", short_help="Print rows of a table, the newest first.")(sample.sample)
app.command("deploy", short_help="Bring the code on disk to the streams that run.")(deploy.deploy)
app.command("mcp", short_help="Serve status, plans and previews to an assistant (Model Context Protocol).")(
    mcp_server.mcp
)
app.add_typer(demo.app, name="demo")
streams.app.command("start", short_help="Start streams and wait until they run.")(streams.start)
streams.app.command("restart", short_help="Stop streams at a batch border and start them again.")(streams.restart)
app.add_typer(streams.app, name="streams")
app.add_typer(recover.app, name="recover")
app.add_typer(slices.app, name="slices")
app.add_typer(late.app, name="late")
app.add_typer(deadletters.app, name="deadletters")
app.add_typer(deadletters.quarantine_app, name="quarantine")
app.add_typer(savepoints.app, name="savepoints")
app.add_typer(savepoints.generations_app, name="generations")
app.add_typer(state.app, name="state")
app.add_typer(tables.app, name="tables")
app.add_typer(quality.app, name="quality")
app.add_typer(jobs.app, name="jobs")
app.add_typer(bundle.app, name="bundle")
app.add_typer(config.app, name="config")
