"""The output of commands: tables for people, JSON for programs, and messages on stderr."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any

import typer

from streaming_jobs.storage.log_stream import log_stream

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress, ProgressColumn
    from rich.table import Table

FAILED, USAGE, BUG, INTERRUPTED = 1, 2, 3, 130
"""Exit codes of all commands."""


class Output(StrEnum):
    """The shape of a command's data on stdout."""

    text = "text"
    json = "json"


OutputOption = Annotated[
    Output, typer.Option("--output", "-o", help="text for people, json for programs.", show_default=True)
]


def say(text: str = "") -> None:
    """Print one line for people on stderr; it is dropped if stderr is a file on a full disk."""
    print(text, file=log_stream(sys.stderr), flush=True)


def print_json(value: Any) -> None:
    """Print one JSON document on stdout; paths and times become text."""
    print(json.dumps(value, indent=2, default=str, ensure_ascii=False))


def print_table(columns: Sequence[str], rows: Sequence[Sequence[str]], *, right: Sequence[str] = ()) -> None:
    """Print a table on stdout; without a terminal no column is ever cut."""
    stdout_console().print(make_table(columns, rows, right=right))


def make_table(columns: Sequence[str], rows: Sequence[Sequence[str]], *, right: Sequence[str] = ()) -> Table:
    """A rich table with plain cells; `right` names the columns of numbers."""
    from rich.text import Text

    table = empty_table()
    for column in columns:
        table.add_column(column, justify="right" if column in right else "left", overflow="fold")
    for row in rows:
        table.add_row(*(Text(cell, style=style_of(cell)) for cell in row))
    return table


def empty_table() -> Table:
    from rich import box
    from rich.table import Table

    return Table(box=box.SIMPLE_HEAD, pad_edge=False, header_style="bold", show_edge=False)


def style_of(cell: str) -> str:
    return _STYLES.get(cell.split(" ", 1)[0], "")


def stdout_console() -> Console:
    return _console(stderr=False)


def stderr_console() -> Console:
    return _console(stderr=True)


def show(output: Output, value: Any, text: Callable[[], None]) -> None:
    """Print `value` as JSON, or call `text`, as --output says."""
    if output is Output.json:
        print_json(value)
    else:
        text()


def show_table(
    output: Output, value: Any, columns: Sequence[str], rows: Sequence[Sequence[str]], *, right: Sequence[str] = ()
) -> None:
    """Print `value` as JSON, or the rows as a table, as --output says."""
    show(output, value, lambda: print_table(columns, rows, right=right))


def show_lines(output: Output, value: Any, lines: Sequence[str]) -> None:
    """Print `value` as JSON, or the lines, as --output says."""
    show(output, value, lambda: print(*lines, sep="\n"))


def progress_bar(*columns: ProgressColumn) -> Progress:
    """A bar on stderr; without a terminal it draws nothing."""
    from rich.progress import Progress

    console = stderr_console()
    return Progress(*columns, console=console, disable=not console.is_terminal)


def log_to_stderr() -> None:
    """Print warnings and errors of the libraries on stderr, one line each; commands report their own results."""
    import logging

    import structlog

    for plan_errors in ("DataFrameQueryContextLogger", "SQLQueryContextLogger"):
        logging.getLogger(plan_errors).disabled = True  # PySpark's: the trace of each, as JSON
    structlog.configure(
        processors=[
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.format_exc_info,
            structlog.processors.LogfmtRenderer(key_order=["timestamp", "level", "event"]),
        ],
        wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING),
        # A new logger for each line: a live screen replaces sys.stderr by a stream that prints above the screen.
        logger_factory=lambda *_: structlog.PrintLogger(log_stream(sys.stderr)),
    )


def number(value: float | int | None) -> str:
    """A count or a rate, with thousands set apart; `-` for nothing."""
    if value is None:
        return "-"
    return f"{value:,.0f}" if abs(value) >= 100 or value == int(value) else f"{value:,.1f}"


def offsets_text(topic: str, start: Mapping[Any, int], end: Mapping[Any, int]) -> str:
    """The offsets of a batch by partition with records, such as `orders 0:120-180 2:7-9`."""
    ranges = [
        f"{partition}:{start.get(partition, 0)}-{last}"
        for partition, last in sorted(end.items(), key=lambda pair: int(pair[0]))
        if last != start.get(partition, 0)
    ]
    return f"{topic} {' '.join(ranges) or '(none)'}"


def ago(seconds: float) -> str:
    """A span in the largest unit that keeps it readable."""
    for unit, size in (("d", 86_400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{max(seconds, 0):.0f} s"


_STYLES = {
    "ok": "green",
    "well": "green",
    "running": "green",
    "idle": "green",
    "warn": "yellow",
    "starting": "yellow",
    "stopping": "yellow",
    "recovering": "yellow",
    "silent": "yellow",
    "stopped": "dim",
    "never": "dim",
    "fail": "red",
    "failing": "red",
    "failed": "red",
    "red:": "bold red",
    "yellow:": "yellow",
    "dead": "red",
    "wrong": "bold red",
}


def _console(*, stderr: bool) -> Console:
    from rich.console import Console

    stream = sys.stderr if stderr else sys.stdout
    terminal = stream.isatty()
    # Without a terminal rich assumes 80 columns and would cut lines that a program or a file should get whole.
    return Console(file=stream, highlight=False, markup=False, emoji=False, width=None if terminal else 10_000)
