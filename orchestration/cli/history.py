"""`recourse streams history`: the timeline of one stream as text, data or a picture."""

from __future__ import annotations

import time
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from orchestration.cli.options import StreamName, invocation, moment_of
from orchestration.cli.text import Output, OutputOption, ago, number, offsets_text, say, show, stdout_console
from streaming_jobs.errors import UsageError

if TYPE_CHECKING:
    from reprocessing.timeline.timeline import BatchGroup, BatchPoint, Item, Timeline

_STYLES = {
    "deploy": "bold cyan",
    "code": "cyan",
    "session": "yellow",
    "recovery": "bold magenta",
    "savepoint": "dim",
    "slice": "magenta",
}
_DAY = 86_400.0
_LAST_CHANGE = "deploy"


def history(
    context: typer.Context,
    name: StreamName,
    since: Annotated[
        str, typer.Option(help="A duration ('2 days'), a time in UTC ('2026-11-24 09:30'), or 'deploy': the last one.")
    ] = "1 day",
    last: Annotated[int | None, typer.Option(min=1, help="So many of the newest batches, instead of --since.")] = None,
    every_batch: Annotated[bool, typer.Option("--batches", help="A line for each batch.")] = False,
    plot: Annotated[Path | None, typer.Option(help="Also write a picture: FILE.svg or FILE.html.")] = None,
    output: OutputOption = Output.text,
) -> None:
    """Print the history of a stream: batches, deploys, sessions, recoveries and savepoints, oldest first.

    Reads files only. Batches are joined to a line per period; --batches prints each. Times are UTC.
    """
    from reprocessing.timeline.marks import as_json
    from reprocessing.timeline.plot import write
    from reprocessing.timeline.timeline import batch_json, item_json, timeline_of

    call = invocation(context)
    stream = call.topology[name].name
    if plot is not None and plot.suffix not in (".svg", ".html"):
        raise UsageError(f"--plot {plot}: not a kind of picture that is written", "name a file .svg or .html")
    now = time.time()
    begin = _begin(call.settings, stream, since, now)
    timeline = timeline_of(call.settings, stream, since=begin, until=now, last=last)
    lines = [item_json(item) for item in timeline.items()]
    if every_batch:
        each = [batch_json(batch) for batch in timeline.batches] + [as_json(mark) for mark in timeline.marks]
        lines = sorted(each, key=lambda line: line["at"])
    value: dict[str, Any] = {
        "stream": stream,
        "since": timeline.since,
        "until": timeline.until,
        "batches": len(timeline.batches),
        "lines": lines,
    }
    show(output, value, lambda: _print(timeline, every_batch))
    if plot is not None:
        write(plot, timeline)
        say(f"wrote {plot}")


def _begin(settings: Any, stream: str, text: str, now: float) -> float:
    from reprocessing.timeline.marks import events_of

    if text == _LAST_CHANGE:
        changes = [mark for mark in events_of(settings, stream) if mark.kind in ("deploy", "code")]
        if not changes:
            raise UsageError(f"no deploy or change of code of stream {stream} is on file", "name a duration or a time")
        return changes[-1].at
    return moment_of("--since", text, now, or_else=f" or '{_LAST_CHANGE}'")


def _print(timeline: Timeline, every_batch: bool) -> None:
    from reprocessing.timeline.timeline import group
    from streaming_jobs.text.spelling import instant_words

    items: list[Item] = timeline.items()
    if every_batch:
        singles = [group([batch]) for batch in timeline.batches]
        items = sorted([*singles, *timeline.marks], key=_time_of)
    say(f"stream {timeline.stream} since {instant_words(timeline.since)}, times in UTC")
    if not items:
        newest = timeline.newest_batch
        seen = f"its newest batch is of {instant_words(newest)}" if newest else "no batch is on file"
        say(f"nothing happened since then; {seen}")
        return
    offsets = [_offsets(batch) for batch in timeline.batches] if every_batch else []
    _print_lines(items, offsets)


def _time_of(item: Item) -> float:
    from reprocessing.timeline.marks import Mark

    return item.at if isinstance(item, Mark) else item.until


def _print_lines(items: list[Item], offsets: list[str]) -> None:
    from rich.text import Text

    from reprocessing.timeline.marks import Mark

    head = ["", "batches", "records", "rows", "rows/min", "s/batch", "slowest", "version", ""]
    rows = [[*_cells(item)] for item in items if not isinstance(item, Mark)]
    for row, words in zip(rows, offsets, strict=False):
        row[-1] = "; ".join(filter(None, (words, row[-1])))
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
    console, day, cells = stdout_console(), "", iter(rows)
    if rows:
        console.print(Text(_line(head, widths), style="bold"), soft_wrap=True)
    for item in items:
        at = datetime.fromtimestamp(_time_of(item) if isinstance(item, Mark) else item.since, UTC)
        if (today := f"{at:%A, %Y-%m-%d}") != day:
            day = today
            console.print(Text(day, style="bold"), soft_wrap=True)
        if isinstance(item, Mark):
            text = " ".join(item.text.split())
            console.print(Text(f"{at:%H:%M:%S}  == {text}", style=_STYLES[item.kind]), soft_wrap=True)
        else:
            console.print(Text(_line(next(cells), widths)), soft_wrap=True)


def _line(cells: list[str], widths: list[int]) -> str:
    middle = [cell.rjust(width) for cell, width in zip(cells[1:-1], widths[1:-1], strict=True)]
    return "  ".join([cells[0].ljust(widths[0]), *middle, cells[-1]]).rstrip()


def _cells(group: BatchGroup) -> list[str]:
    begin, end = (datetime.fromtimestamp(at, UTC) for at in (group.since, group.until))
    times = f"{begin:%H:%M:%S}" if group.batches == 1 else f"{begin:%H:%M:%S} - {end:%H:%M:%S}"
    numbers = f"{group.first}" if group.batches == 1 else f"{group.first}-{group.last} ({group.batches:,})"
    version = "-" if group.versions is None else str(group.versions[1])
    return [
        times,
        numbers,
        number(group.records),
        number(group.rows),
        "" if group.rows_per_minute is None else number(round(group.rows_per_minute)),
        _seconds(group.seconds),
        "" if group.batches == 1 else _seconds(group.slowest),
        version,
        ", ".join(_notes(group)),
    ]


def _notes(group: BatchGroup) -> list[str]:
    from streaming_jobs.text.spelling import counted

    notes = [f"g{group.generation:04d}", group.code[:8]]
    if group.replay:
        notes.append("replay")
    for count, words in (
        (group.dead_letters, "dead letter"),
        (group.quarantined, "quarantined row"),
        (group.savepoints, "savepoint"),
        (group.session_events, "session event"),
    ):
        if count:
            notes.append(counted(count, words))
    return notes


def _seconds(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:.2f}" if value < 100 else ago(value)


def _offsets(batch: BatchPoint) -> str:
    return "; ".join(offsets_text(topic, each["start"], each["end"]) for topic, each in batch.offsets.items())
