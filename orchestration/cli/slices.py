"""`recourse slices`: rebuild a range of an output table, such as a day, while its stream continues."""

from __future__ import annotations

from dataclasses import asdict, fields, replace
from typing import TYPE_CHECKING, Annotated, Any

import typer

from orchestration.cli.options import AnyStreams, StreamName, invocation
from orchestration.cli.text import Output, OutputOption, number, print_table, say, show, show_table

if TYPE_CHECKING:
    from reprocessing.slices.rebuild import SliceReport

app = typer.Typer(no_args_is_help=True, help="Rebuild a day of a table, or another range.", rich_markup_mode=None)

_SAMPLE = 5
_OF_THE_COMMIT = ("change", "entry", "expires", "quarantine")


@app.callback()
def slices() -> None:
    """Slices: a range of an output table is rebuilt from the topic and replaced in one commit; the stream continues."""


@app.command(short_help="Rebuild the rows of some days.")
def rebuild(
    context: typer.Context,
    stream: StreamName,
    begin: Annotated[
        str, typer.Option("--from", metavar="DAY", help="The first day, or a time: 2013-03-01, 2013-03-01T05:00.")
    ],
    end: Annotated[
        str | None, typer.Option("--to", metavar="DAY", help="The first day after the slice; by default one day.")
    ] = None,
    table: Annotated[str | None, typer.Option(metavar="TABLE", help="The table, if several are possible.")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only show the difference; nothing is changed.")] = False,
    despite_accepted: Annotated[
        bool, typer.Option("--despite-accepted", help="Also where a foreign change was accepted.")
    ] = False,
    wait_closed: Annotated[
        str, typer.Option(metavar="DURATION", help="The longest wait for the stream to close the slice.")
    ] = "0 s",
    wait_commit: Annotated[
        str, typer.Option(metavar="DURATION", help="The longest wait for the running stream to commit the slice.")
    ] = "5 minutes",
    output: OutputOption = Output.text,
) -> None:
    """Rebuild the rows of some days from the topic, with today's code, and replace them in one commit.

    The stream may run or not; it is not disturbed. Needs a broker and Spark. Exit codes: 0 rebuilt, or nothing differs;
    1 failed or still open; 2 usage, also a table that cannot be sliced; 78 the records are gone.
    """
    from orchestration.cli.children import stop_signals_interrupt
    from orchestration.cli.preparations import broker_for_command
    from orchestration.slices.runner import rebuild_slice
    from reprocessing.slices.rebuild import Waits
    from streaming_jobs.runtime.sliceable import sliceable
    from streaming_jobs.text.durations import parse_duration

    call = invocation(context)
    declared = call.topology[stream]
    sliceable(declared, table)  # before a broker is started
    waits = replace(
        Waits(),
        closed=parse_duration(wait_closed).total_seconds(),
        commit=parse_duration(wait_commit).total_seconds(),
    )
    with (
        stop_signals_interrupt(),
        broker_for_command(call.settings, "a slice is rebuilt from its topic, and needs a broker for that") as address,
    ):
        report = rebuild_slice(
            call.settings,
            address,
            declared,
            table,
            begin,
            end,
            dry_run=dry_run,
            despite_accepted=despite_accepted,
            waits=waits,
            tell=say,
        )
    show(output, as_json(report), lambda: print_report(report))


@app.command("list", short_help="Print the slices that were rebuilt.")
def list_slices(
    context: typer.Context,
    names: AnyStreams = None,
    output: OutputOption = Output.text,
) -> None:
    """Print the rebuilt slices, oldest first, and the slices that wait for their commit."""
    from streaming_jobs.state.slice_requests import SliceRequests
    from streaming_jobs.text.spelling import instant_words

    call = invocation(context)
    requested = []
    for stream in call.topology.select(dict.fromkeys(names or [])):
        requests = SliceRequests.of(call.settings, stream.name)
        requested += [*requests.history(), *requests.waiting()]
    requested = [part for each in requested for part in each.parts]
    values = [{key: value for key, value in asdict(each).items() if key not in _OF_THE_COMMIT} for each in requested]
    rows = [
        [
            each.stream,
            each.table,
            str(each.summary.get("slice", "")),
            each.state,
            instant_words(each.at) if each.at else "",
            number(each.version),
            *(number(each.summary.get(key)) for key in ("before", "after", "gone", "came")),
            each.reason,
        ]
        for each in requested
    ]
    columns = ["stream", "table", "slice", "state", "at", "version", "before", "after", "gone", "came", "reason"]
    show_table(output, values, columns, rows, right=columns[5:10])


def as_json(report: SliceReport) -> dict[str, Any]:
    named = [each.name for each in fields(report) if each.name not in ("difference", "offsets", "quarantine")]
    return {
        **{name: getattr(report, name) for name in named},
        **report.figures,
        "sample": [dict(each) for each in report.difference.sample[:_SAMPLE]],
    }


def print_report(report: SliceReport) -> None:
    from reprocessing.replay.words import row_words

    figures = [[name.replace("_", " "), number(count)] for name, count in report.figures.items()]
    print_table(["table", report.table], figures)
    for each in report.difference.sample[:_SAMPLE]:
        print(f"  {row_words(each)}")
    version = f", version {report.version}" if report.version is not None else ""
    late = f"; the stream had dropped {number(report.late)} late records among them" if report.late else ""
    out = f"; row rules take out {number(report.taken_out)} rows" if report.taken_out else ""
    out += f"; the table cannot hold {number(report.refused)} rows" if report.refused else ""
    say(
        f"slice {report.words} of table {report.table}: {report.outcome}{version}, "
        f"from {number(report.records)} offsets in {report.seconds:.1f} s{late}{out}{report.aside_text}"
    )
