"""`recourse quality`: suites of expectations on tables, their runs, their history."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path
from textwrap import shorten
from typing import TYPE_CHECKING, Annotated, Any

import typer

from orchestration.cli.options import Invocation, invocation
from orchestration.cli.text import Output, OutputOption, ago, number, print_json, print_table, say, show, show_table
from streaming_jobs.errors import RecourseError, UsageError
from streaming_jobs.text import commands

if TYPE_CHECKING:
    from quality.history import PastOutcome
    from quality.suite_set import SuiteSet
    from quality.validation import Validation

app = typer.Typer(no_args_is_help=True, help="Suites of expectations on tables.", rich_markup_mode=None)


class SliceKind(StrEnum):
    new = "new"
    all = "all"


class Engine(StrEnum):
    auto = "auto"
    pandas = "pandas"
    spark = "spark"


Names = Annotated[list[str] | None, typer.Argument(metavar="[SUITE]...", help="Suites; none: all.")]
Name = Annotated[str, typer.Argument(metavar="SUITE", help="A suite.", show_default=False)]
_ROWS_SHOWN, _OBSERVED = 5, 110


@app.callback()
def quality() -> None:
    """Suites of expectations on tables: run them, and read the results of earlier runs."""


@app.command(short_help="Run suites; exit code 1 if something critical failed.")
def run(
    context: typer.Context,
    names: Names = None,
    slice_kind: Annotated[
        SliceKind | None, typer.Option("--slice", help="Rows since the last run, or all; default: as the suite says.")
    ] = None,
    partition: Annotated[
        list[str] | None, typer.Option(metavar="COLUMN=VALUE", help="Only this partition; may be given again.")
    ] = None,
    begin: Annotated[str | None, typer.Option("--from", metavar="TIME", help="Rows at or after it.")] = None,
    end: Annotated[str | None, typer.Option("--to", metavar="TIME", help="Rows before it.")] = None,
    column: Annotated[str | None, typer.Option(help="The column of --from and --to.")] = None,
    engine: Annotated[Engine, typer.Option(help="auto: by the number of rows.")] = Engine.auto,
    docs: Annotated[bool, typer.Option(help="Write an HTML page.")] = True,
    output: OutputOption = Output.text,
) -> None:
    """Run suites and print each outcome, failing rows with their keys, and the first batch that wrote one.

    The exit code is 1 if a critical expectation failed or a suite could not be run.
    """
    from streaming_jobs.platform.extras import require

    require("quality", f"`{commands.run_suites()}`")

    from quality.runs.runner import RunRequest, run_suite
    from quality.sample import TimeRange, parse_partition
    from streaming_jobs.platform.runtime import spark_on_demand

    call = invocation(context)
    suites = _suites(call).select(names or [])
    if not suites:
        raise UsageError("no suite is declared", "declare one beside its stream: docs/quality.md")
    done: list[Validation] = []
    errors: dict[str, RecourseError] = {}
    with spark_on_demand(call.settings, "quality") as spark:
        request = RunRequest(
            slice=None if slice_kind is None else slice_kind.value,
            partition=tuple(parse_partition(partition or []).items()),
            times=TimeRange.parse(column, begin, end),
            engine=engine.value,
            docs=docs,
            spark=spark,
        )
        for suite in suites:
            try:
                validation = run_suite(call.settings, call.topology, suite, request)
            except RecourseError as error:
                if len(suites) == 1:
                    raise
                errors[suite.name] = error
                say(f"suite {suite.name}: {error}")
                continue
            done.append(validation)
            if output is Output.text:
                _print_validation(validation)
    if output is Output.json:
        print_json([_as_json(each) for each in done] + [{"suite": n, "error": str(e)} for n, e in errors.items()])
    if errors or any(each.broken for each in done):
        raise typer.Exit(1)


@app.command("list", short_help="Print the suites and their last results.")
def list_suites(context: typer.Context, output: OutputOption = Output.text) -> None:
    """Print every suite with its table, its last result and the time of that run."""
    import time

    from quality.history import history

    _without_pandas()
    call = invocation(context)
    suites = _suites(call)
    value: list[dict[str, Any]] = []
    for suite in suites.suites.values():
        last = history(call.settings, suite.name, last=1)
        value.append(
            {
                "suite": suite.name,
                "table": suite.table,
                "stream": suites.writers[suite.table],
                "slice": suite.slice,
                "result": _verdict(last),
                "failed": [each.expectation for each in last if not each.passed],
                "version": last[0].version if last else None,
                "at": last[0].started_at if last else None,
            }
        )
    rows = [
        [
            str(each["result"]),
            str(each["suite"]),
            str(each["table"]),
            f"{ago(time.time() - each['at'].timestamp())} ago" if each["at"] else "",
            number(each["version"]) if each["at"] else "",
            ", ".join(each["failed"]),
        ]
        for each in value
    ]
    columns = ["result", "suite", "table", "last run", "version", "not passed"]
    show_table(output, value, columns, rows, right=["version"])


@app.command("show", short_help="Print a suite's last outcomes and failing rows.")
def show_suite(context: typer.Context, name: Name, output: OutputOption = Output.text) -> None:
    """Print the outcomes of a suite's last run, with failing rows."""
    from quality.history import history

    _without_pandas()
    call = invocation(context)
    suite = _suites(call)[name]
    last = history(call.settings, suite.name, last=1)
    value = {
        "suite": suite.name,
        "table": suite.table,
        "description": suite.description,
        "outcomes": [dataclasses.asdict(each) for each in last],
    }

    def text() -> None:
        if not last:
            say(f"suite {suite.name} has not been run yet: `{commands.run_suites(suite.name)}`")
            return
        first = last[0]
        print(f"{suite.name} on table {suite.table}, version {first.version}: {first.slice}")
        print(f"{first.started_at:%Y-%m-%d %H:%M:%S} UTC, {number(first.rows)} rows, by {first.engine}\n")
        _print_outcomes(last)
        _print_samples(last)

    show(output, value, text)


@app.command("history", short_help="Print earlier outcomes.")
def show_history(
    context: typer.Context,
    name: Annotated[str | None, typer.Argument(metavar="[SUITE]", help="A suite; none: all.")] = None,
    last: Annotated[int, typer.Option(min=1, help="The number of runs.")] = 20,
    output: OutputOption = Output.text,
) -> None:
    """Print the runs of a suite or of all, newest first, with what did not pass."""
    from quality.history import history

    _without_pandas()
    call = invocation(context)
    suite = None if name is None else _suites(call)[name].name
    past = history(call.settings, suite, last=last)
    rows = []
    for validation in dict.fromkeys(each.validation for each in past):
        mine = [each for each in past if each.validation == validation]
        one = mine[0]
        red = [
            f"{each.expectation} {number(each.failing) if each.failing is not None else ''}".strip()
            for each in mine
            if not each.passed
        ]
        rows.append(
            [
                _verdict(mine),
                f"{one.started_at:%Y-%m-%d %H:%M:%S}",
                one.suite,
                number(one.version),
                number(one.rows),
                f"{one.seconds:.1f} s",
                ", ".join(red),
            ]
        )
    columns = ["result", "UTC", "suite", "version", "rows", "time", "not passed"]
    value = [dataclasses.asdict(each) for each in past]
    show_table(output, value, columns, rows, right=["version", "rows", "time"])


@app.command(short_help="Draw the trend of an expectation as SVG.")
def plot(
    context: typer.Context,
    name: Name,
    out: Annotated[Path, typer.Option(metavar="FILE.svg", help="The file to write.", show_default=False)],
    expectation: Annotated[
        str | None, typer.Option(help="One expectation; without it, the one that failed most often.")
    ] = None,
) -> None:
    """Draw the observed number and the failing rows of an expectation over time."""
    from quality.history import history
    from quality.trend import draw
    from streaming_jobs.text.spelling import instead

    if out.suffix != ".svg":
        raise UsageError(f"--out {out}: the picture is SVG", "name a file .svg")
    _without_pandas()
    call = invocation(context)
    suite = _suites(call)[name]
    past = history(call.settings, suite.name)
    if not past:
        raise UsageError(f"suite {suite.name} has no history", f"run it: {commands.run_suites(suite.name)}")
    names = list(dict.fromkeys(each.expectation for each in past))
    if expectation is None:
        expectation = max(names, key=lambda n: sum(e.expectation == n and not e.passed for e in past))
    elif expectation not in names:
        raise UsageError(f"suite {suite.name} has no outcome of '{expectation}'", instead(expectation, names))
    points = [each for each in past if each.expectation == expectation]
    out.write_text(draw(f"{suite.name}: {expectation}", points), encoding="utf-8")
    say(f"wrote {out}: {len(points)} runs of {expectation}")


def _without_pandas() -> None:
    """Have PyArrow do without pandas, which takes half a second to import."""
    from streaming_jobs.platform.processes.pandas_on_demand import pandas_on_demand

    pandas_on_demand()


def _suites(call: Invocation) -> SuiteSet:
    from quality.suite_set import SuiteSet

    return SuiteSet.of_settings(call.settings, call.topology)


def _verdict(outcomes: Sequence[PastOutcome]) -> str:
    from quality.validation import worst_word

    return worst_word(each.word for each in outcomes) if outcomes else "never"


def _print_validation(validation: Validation) -> None:
    v = validation
    print(f"{v.suite} on table {v.table}, version {v.version}: {v.slice}")
    print(f"{number(v.rows)} rows in {v.files_read}, by {v.engine}, {v.seconds:.1f} s\n")
    if not v.outcomes:
        print("no rows to look at\n")
        return
    _print_outcomes(v.outcomes)
    _print_samples(v.outcomes)
    if v.first_failing is not None:
        first = v.first_failing
        print(f"\nthe first failing row came with g{first.generation:04d} batch {first.batch} ({first.expectation})")
        print(f"  code {first.code}")
        if first.command:
            print(f"  next: {first.command}")
    if v.first_failing_note:
        print(f"  note: {v.first_failing_note}")
    if v.docs:
        print(f"\n{v.docs}")
    print()


def _print_outcomes(outcomes: Sequence[Any]) -> None:
    rows = [[each.word, each.expectation, shorten(each.error or each.observed, _OBSERVED)] for each in outcomes]
    print_table(["result", "expectation", "observed"], rows)


def _print_samples(outcomes: Sequence[Any]) -> None:
    for each in outcomes:
        if each.passed or not each.sample:
            continue
        columns = list(each.sample[0])
        shown = each.sample[:_ROWS_SHOWN]
        more = "" if (each.failing or 0) <= len(shown) else f", {len(shown)} of {number(each.failing)}"
        print(f"\n{each.expectation}: failing rows{more}")
        print_table(columns, [[_cell(row.get(column)) for column in columns] for row in shown])


def _cell(value: object) -> str:
    return "null" if value is None else str(value)


def _as_json(validation: Validation) -> dict[str, Any]:
    return {**dataclasses.asdict(validation), "passed": validation.passed, "broken": validation.broken}
