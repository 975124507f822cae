"""`recourse verify`: compare the tables of declared streams with their topics, offset by offset and row by row."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from orchestration.cli.options import AnyStreams, invocation
from orchestration.cli.text import (
    FAILED,
    Output,
    OutputOption,
    number,
    print_json,
    print_table,
    say,
    stderr_console,
)

if TYPE_CHECKING:
    from streaming_jobs.settings import Settings
    from streaming_jobs.stream import Stream
    from streaming_jobs.verification.offset_ranges import Span
    from streaming_jobs.verification.topic import CommittedReader
    from streaming_jobs.verification.verification import Told
    from streaming_jobs.verification.verifier import OverallVerdict, StreamVerdict

_SHOWN = 20
_FIGURES, _SPANS = ("version", "batches", "rows", "verified", "unproved"), ("lost", "doubled")
"""Of a stream's verdict: counts, and ranges of offsets."""
_LINES_EVERY = 10.0


def verify(
    context: typer.Context,
    names: AnyStreams = None,
    finished: Annotated[
        bool, typer.Option("--finished", help="The streams must have read everything: an unread offset counts as lost.")
    ] = False,
    strict: Annotated[
        bool, typer.Option("--strict", help="Fail also if something could not be proved, because its evidence is gone.")
    ] = False,
    quick: Annotated[
        bool, typer.Option("--quick", help="Do not decode the records; dead letters are then not compared.")
    ] = False,
    recompute: Annotated[
        bool,
        typer.Option("--recompute", help="Run each stream's function again over all that it has read; needs Spark."),
    ] = False,
    timeout: Annotated[
        str, typer.Option(metavar="DURATION", help="The longest time that reading the topics may take.")
    ] = "1 hour",
    output: OutputOption = Output.text,
) -> None:
    """Compare tables and topics of declared streams, which may run meanwhile, and report each comparison.

    Reads the tables, the topics up to where they end now, and the ledger; needs a broker, and Spark only with
    --recompute. Exit codes:
    0 all that was compared is right, 1 something is wrong or none of the streams has ever run, 2 usage.
    """
    from orchestration.cli.children import stop_signals_interrupt
    from orchestration.cli.preparations import broker_for_command
    from streaming_jobs.catalog.topology import truths_in
    from streaming_jobs.text.durations import parse_duration
    from streaming_jobs.verification.verification import Options, verify_streams

    call = invocation(context)
    streams = call.topology.select(dict.fromkeys(names or []))
    tables = [sink.name for stream in call.topology.streams.values() for sink in stream.sinks.values()]
    declared = truths_in(call.settings.flows, tables)
    options = Options(finished, not quick, time.monotonic() + parse_duration(timeout).total_seconds())
    verdicts: list[OverallVerdict] = []
    try:
        with (
            stop_signals_interrupt(),
            broker_for_command(
                call.settings, "verify compares tables with their topics, and needs a broker for that"
            ) as at,
            told() as tell,
        ):
            verdict, readers = verify_streams(call.settings, streams, declared, at, options, tell)
            verdicts.append(verdict)
            if recompute:
                _recompute(call.settings, streams, at, verdict, readers, verdicts.append)
    finally:  # the verdict so far is printed also if a later step fails
        if verdicts:
            _say(verdicts[-1], output, call.settings.home)
    verdict = verdicts[-1]
    if not (verdict.ok and verdict.begun) or (strict and not verdict.whole):
        raise typer.Exit(FAILED)


def _say(verdict: OverallVerdict, output: Output, home: Path) -> None:
    if output is Output.json:
        print_json(verdict_as_json(verdict))
    else:
        print_verdict(verdict)
        if verdict.begun or not verdict.ok:
            say(in_words(verdict))
    if not verdict.begun:
        say(f"home {home}: none of these streams has ever run here")


def _recompute(
    settings: Settings,
    streams: list[Stream],
    bootstrap: str,
    verdict: OverallVerdict,
    readers: Mapping[str, CommittedReader],
    tell: Callable[[OverallVerdict], None],
) -> None:
    """Call `tell` after each stream with the verdict so far, the outcome of its batch query included."""
    from orchestration.cli.preparations import fetch_jars
    from streaming_jobs.platform import spark as platform
    from streaming_jobs.verification.recompute import recompute

    fetch_jars(settings, broker=False)
    say("starting Spark, which runs the functions of the streams again")
    spark = platform.start(settings, name="verify")
    try:
        verdicts = list(verdict.streams)
        for number, (stream, one) in enumerate(zip(streams, verdict.streams, strict=True)):
            say(f"{stream.name}: computing its rows again")
            more = recompute(settings, stream, spark, bootstrap, one, readers)
            others = [c for c in one.comparisons if c.what != "values"]
            verdicts[number] = replace(one, comparisons=(*others, *more))
            tell(replace(verdict, streams=tuple(verdicts)))
    finally:
        spark.stop()


@contextmanager
def told() -> Iterator[Told]:
    """A function that shows progress on stderr: as a bar on a terminal, otherwise as lines."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

    console = stderr_console()
    if not console.is_terminal:
        yield _ProgressLines()
        return
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console) as bar:
        tasks: dict[str, TaskID] = {}

        def tell(doing: str, done: int, total: int) -> None:
            if doing not in tasks:
                tasks[doing] = bar.add_task(doing, total=total)
            bar.update(tasks[doing], completed=done, total=total)

        yield tell


class _ProgressLines:
    """Prints a line when an activity begins, when it ends, and every ten seconds between."""

    def __init__(self) -> None:
        self._doing, self._next = "", 0.0

    def __call__(self, doing: str, done: int, total: int) -> None:
        now = time.monotonic()
        if doing != self._doing or done >= total or now >= self._next:
            self._doing, self._next = doing, now + _LINES_EVERY
            say(f"{doing}: {number(done)} of {number(total)}")


def verdict_as_json(verdict: OverallVerdict) -> dict[str, Any]:
    return {
        "right": verdict.ok,
        "proved": verdict.whole,
        "records": verdict.records,
        "offsets_verified": verdict.verified,
        "lost": verdict.lost,
        "doubled": verdict.doubled,
        "unread": verdict.unread,
        "streams": [
            {
                "stream": stream.stream,
                "verdict": word(stream),
                "proved": stream.whole,
                **{name: getattr(stream, name) for name in (*_FIGURES, "log_from", "why", "skipped", "unread")},
                **{name: [str(each) for each in getattr(stream, name)] for name in (*_SPANS, "faults")},
                "comparisons": [one._asdict() for one in stream.comparisons],
            }
            for stream in verdict.streams
        ],
    }


def print_verdict(verdict: OverallVerdict) -> None:
    """Print the offsets by stream, then the comparisons of each table."""
    columns = [*_FIGURES, *_SPANS, "unread"]
    print_table(["stream", *columns, "verdict"], [_row(stream) for stream in verdict.streams], right=columns)
    compared = [one for stream in verdict.streams for one in stream.comparisons]
    if compared:
        print()
        print_table(["table", "compared", "verdict", "detail"], [list(one) for one in compared])
    for stream in verdict.streams:
        for what in _SPANS:
            _say_spans(f"{stream.stream}: {what}", getattr(stream, what))
        for fault in stream.faults[:_SHOWN]:
            say(str(fault))
        if stream.unproved:
            say(f"{stream.stream}: {number(stream.unproved)} offsets cannot be judged: {stream.why}")
        if stream.skipped:
            say(f"{stream.stream}: a recovery skipped {number(stream.skipped)} offsets: neither lost nor read")


def in_words(verdict: OverallVerdict) -> str:
    if not verdict.ok:
        return "WRONG: see above"
    unread = f"; {number(verdict.unread)} are not read yet" if verdict.unread else ""
    if verdict.whole:
        return f"every offset is in its table exactly once{unread}"
    return f"all that could be compared is right, and not all could be: see above{unread}"


def word(verdict: StreamVerdict) -> str:
    if verdict.version < 0 and verdict.ok:
        return "not started"
    if verdict.position is None and verdict.ok and all(c.verdict != "unproved" for c in verdict.comparisons):
        return "no batch yet"
    return "ok" if verdict.whole else "wrong" if not verdict.ok else "unproved"


def _row(verdict: StreamVerdict) -> list[str]:
    figures = [getattr(verdict, name) for name in _FIGURES]
    figures += [sum(span.offsets for span in getattr(verdict, name)) for name in _SPANS]
    return [verdict.stream, *map(number, [*figures, verdict.unread]), word(verdict)]


def _say_spans(what: str, spans: tuple[Span, ...]) -> None:
    for span in spans[:_SHOWN]:
        say(f"{what}: {span} ({number(span.offsets)} offsets)")
    if len(spans) > _SHOWN:
        say(f"{what}: {len(spans) - _SHOWN} more ranges")
