"""`recourse streams sample`: rows of a table as text, the newest first."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from datetime import datetime
from typing import TYPE_CHECKING, Annotated, Any

import typer

from orchestration.cli.options import invocation
from orchestration.cli.text import Output, OutputOption, empty_table, say, show, stdout_console

if TYPE_CHECKING:
    from reprocessing.sample import Sample

_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069]")
"""Characters that could control a terminal, in records that anybody may have sent."""
_LONGEST = 2_000
_NARROWEST = 9


def sample(
    context: typer.Context,
    table: Annotated[str, typer.Argument(metavar="TABLE", help="A table of a stream.", show_default=False)],
    rows: Annotated[int, typer.Option(min=1, max=10_000, help="Rows at most.")] = 10,
    where: Annotated[
        str | None, typer.Option(help="A SQL condition on the columns, such as \"origin = 'JFK'\".")
    ] = None,
    by: Annotated[str | None, typer.Option("--order-by", help="The column whose largest values come first.")] = None,
    output: OutputOption = Output.text,
) -> None:
    """Print rows of a table, the newest first: also of dead letters and quarantines. Reads only; needs no Spark.

    Newest is by the columns that order an upsert, else by the event time, else by the first column that is a time.
    """
    from reprocessing.sample import sample as take

    call = invocation(context)
    taken = take(call.settings, call.topology, table, rows=rows, where=where, by=by)
    value = [{name: for_json(each) for name, each in row.items()} for row in taken.rows]
    show(output, value, lambda: _print(taken))


def _print(taken: Sample) -> None:
    order = f"newest first by {', '.join(taken.order)}" if taken.order else "in no order: no column is a time"
    say(f"{len(taken.rows)} {'row' if len(taken.rows) == 1 else 'rows'} of {taken.table}, {order}")
    if not taken.rows:
        return
    cells = [[for_people(row[name]) for name in taken.columns] for row in taken.rows]
    console = stdout_console()
    if console.is_terminal and len(taken.columns) * _NARROWEST > console.width:
        for number, row in enumerate(cells):
            print(f"{'' if number == 0 else chr(10)}row {number + 1}")
            wide = max(map(len, taken.columns))
            for name, cell in zip(taken.columns, row, strict=True):
                print(f"  {plain(name).ljust(wide)}  {cell[: max(console.width - wide - 4, 20)]}")
        return
    console.print(_table(taken, cells))


def _table(taken: Sample, cells: list[list[str]]) -> Any:
    from rich.text import Text

    table = empty_table()
    for place, name in enumerate(taken.columns):
        number = all(isinstance(row[name], (int, float)) or row[name] is None for row in taken.rows)
        wide = max(len(plain(name)), *(len(row[place]) for row in cells))
        table.add_column(
            Text(plain(name)),
            justify="right" if number else "left",
            overflow="ellipsis",
            no_wrap=True,
            min_width=min(wide, _NARROWEST - 2),
        )
    for row in cells:
        table.add_row(*map(Text, row))
    return table


def for_people(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, datetime):
        return value.isoformat(" ")
    if isinstance(value, bytes):
        value = _text_of(value)
    return plain(str(value))[:_LONGEST]


def plain(text: str) -> str:
    return _CONTROL.sub(lambda found: f"\\x{ord(found[0]):02x}", text)


def _text_of(value: bytes) -> str:
    try:
        return value.decode()
    except UnicodeDecodeError:
        return f"0x{value.hex()}"


def for_json(value: Any) -> Any:
    """A value that JSON can hold: bytes as text, numbers that JSON does not know as text."""
    if isinstance(value, bytes):
        return _text_of(value)
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, datetime):
        return value.isoformat()
    if isinstance(value, Mapping):
        return {str(key): for_json(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [for_json(each) for each in value]
    return value
