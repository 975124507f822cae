"""`recourse preview`: what the code on disk would do to a stream's newest rows. Nothing is changed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from orchestration.cli.options import StreamName, invocation
from orchestration.cli.text import Output, OutputOption, say, show
from streaming_jobs.errors import UsageError

if TYPE_CHECKING:
    from reprocessing.preview.folders import Folders
    from reprocessing.preview.result import Preview


def preview(
    context: typer.Context,
    stream: StreamName,
    last: Annotated[
        str | None, typer.Option(metavar="'2 hours'", help="From the newest savepoint that is at least that old.")
    ] = None,
    from_savepoint: Annotated[str | None, typer.Option(metavar="NAME", help="From this savepoint.")] = None,
    suites: Annotated[
        bool, typer.Option("--suites/--no-suites", help="The stream's suites have to pass on the rebuilt rows.")
    ] = True,
    json_file: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Write the JSON to this file too.", show_default=False)
    ] = None,
    output: OutputOption = Output.text,
) -> None:
    """Replay the newest records with the code on disk, and compare the rows with the published ones.

    The stream runs on, and nothing is published. Exit codes: 0 equal, 10 different, 1 broken, 2 usage.
    """
    from orchestration.cli.children import stop_signals_interrupt
    from orchestration.recoveries.suite_gate import suite_runner, suites_of
    from reprocessing.preview.folders import Folders
    from reprocessing.preview.result import text
    from reprocessing.preview.run import PreviewRequest
    from reprocessing.preview.run import preview as run
    from reprocessing.preview.start import Wanted
    from streaming_jobs.platform.broker import bootstrap_servers
    from streaming_jobs.platform.processes.child import lower_priority
    from streaming_jobs.sources.topics import Topics
    from streaming_jobs.storage.files import write_atomic
    from streaming_jobs.text.durations import parse_duration

    if last is not None and from_savepoint is not None:
        raise UsageError("--last and --from-savepoint were both given", "give one of them, or none")
    call = invocation(context)
    selected = call.topology[stream]
    wanted = Wanted(parse_duration(last) if last is not None else None, from_savepoint)
    names = tuple(suite.name for suite in suites_of(call.settings, call.topology, selected)) if suites else ()
    topics = Topics.of(call.settings.kafka, bootstrap_servers(call.settings))
    lower_priority()
    with stop_signals_interrupt(), suite_runner(call.settings, call.topology) as run_suite:
        result = run(call.settings, selected, topics, PreviewRequest(wanted, names, run_suite), tell=say)
    report = _written(Folders(call.settings, stream), result)
    value = {**result.value(), "report": str(report)}
    if json_file is not None:
        write_atomic(json_file.absolute(), json.dumps(value, indent=1, default=str))
    show(output, value, lambda: print(text(result, str(report)), end=""))
    if result.verdict.exit_code:
        raise typer.Exit(result.verdict.exit_code)


def _written(folders: Folders, result: Preview) -> Path:
    """Write the report as a page and as JSON; returns the page's path."""
    from reprocessing.preview.result import page
    from streaming_jobs.storage.files import write_atomic

    folder = folders.new_report()
    write_atomic(folder / "preview.json", json.dumps(result.value(), indent=1, default=str))
    write_atomic(folder / "report.html", page(result))
    return folder / "report.html"
