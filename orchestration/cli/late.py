"""`recourse late`: days of windowed tables that lack late records, and their rebuild while the stream continues."""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Annotated, Any

import typer

from orchestration.cli.options import AnyStreams, StreamName, invocation
from orchestration.cli.slices import as_json as slice_as_json
from orchestration.cli.slices import print_report
from orchestration.cli.text import Output, OutputOption, number, say, show, show_table

if TYPE_CHECKING:
    from reprocessing.slices.late import LateDay, LateReport

app = typer.Typer(no_args_is_help=True, help="Late records: the days that lack them, and their rebuild.")


@app.callback()
def late() -> None:
    """Late records that `late_rows="keep"` has kept: the days of a table that lack them are rebuilt with them."""


@app.command("list", short_help="Print the days that lack late records.")
def list_late(context: typer.Context, names: AnyStreams = None, output: OutputOption = Output.text) -> None:
    """Print the days whose windows lack late records. Reads files only; needs neither Spark nor a broker."""
    from reprocessing.slices.late import kept_late, late_days

    call = invocation(context)
    values, rows = [], []
    for stream in call.topology.select(dict.fromkeys(names or [])):
        for made in kept_late(stream):
            for day in late_days(call.settings, made):
                values.append({"stream": stream.name, "table": made.table.name, **_day(day)})
                first, last = (f"{at:%Y-%m-%d %H:%M:%S}Z" for at in (day.first, day.last))
                rows.append([made.table.name, f"{day.day}", number(day.records), day.state, first, last, day.why])
    columns = ["table", "day", "late records", "state", "first", "last", "why"]
    show_table(output, values, columns, rows, right=["late records"])


@app.command(short_help="Rebuild the closed days that lack late records.")
def rebuild(
    context: typer.Context,
    stream: StreamName,
    table: Annotated[str | None, typer.Option(metavar="TABLE", help="The table, if several keep late records.")] = None,
    max_days: Annotated[int, typer.Option(min=1, help="Days of each table at most; the oldest are the first.")] = 31,
    wait_commit: Annotated[
        str, typer.Option(metavar="DURATION", help="The longest wait for the running stream to commit a slice.")
    ] = "5 minutes",
    output: OutputOption = Output.text,
) -> None:
    """Rebuild the slices of the closed days that lack late records; days in a row are one slice, with one commit.

    The stream may run or not; it is not disturbed. Needs a broker and Spark if there is anything to rebuild. Exit
    codes: 0 done, days may be left or lost; 1 failed; 2 usage, also a stream that keeps no late records; 75 another
    slice of the stream is being rebuilt.
    """
    from orchestration.cli.children import stop_signals_interrupt
    from orchestration.cli.preparations import broker_for_command
    from orchestration.slices.runner import rebuild_late_days
    from reprocessing.slices.late import LateReport, kept_late, late_days
    from reprocessing.slices.rebuild import Waits
    from streaming_jobs.errors import UsageError
    from streaming_jobs.text.durations import parse_duration

    call = invocation(context)
    tables = kept_late(call.topology[stream], table)
    if not tables:
        raise UsageError(f"stream {stream} keeps no late records", "declare late_rows='keep' of its DeltaTable")
    waits = replace(Waits(), commit=parse_duration(wait_commit).total_seconds())
    lacking = {made.table.name: late_days(call.settings, made) for made in tables}
    if not any(day.state == "to rebuild" for days in lacking.values() for day in days):
        reports = [LateReport(name, (), tuple(days)) for name, days in lacking.items()]
    else:
        why = "late records are read from their topic, and need a broker for that"
        with stop_signals_interrupt(), broker_for_command(call.settings, why) as address:
            reports = rebuild_late_days(call.settings, address, tables, most=max_days, waits=waits, tell=say)
    show(output, [_as_json(report) for report in reports], lambda: _print(reports))


def _day(day: LateDay) -> dict[str, Any]:
    return {**asdict(day), "day": day.day.isoformat(), "first": day.first.isoformat(), "last": day.last.isoformat()}


def _as_json(report: LateReport) -> dict[str, Any]:
    return {
        "table": report.table,
        "slices": [slice_as_json(each) for each in report.slices],
        "left": [_day(day) for day in report.left],
    }


def _print(reports: list[LateReport]) -> None:
    from typing import get_args

    from reprocessing.slices.late import State

    for report in reports:
        for each in report.slices:
            print_report(each)
        left = ", ".join(f"{number(len(report.days(state)))} {state}" for state in get_args(State))
        say(f"table {report.table}: days that lack late records: {left}")
