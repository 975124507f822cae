"""`recourse fleet`: every stream of a home on one screen or page."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from orchestration.cli.options import AnyStreams, invocation
from orchestration.cli.text import Output, OutputOption, ago, say, show_table
from streaming_jobs.errors import UsageError

if TYPE_CHECKING:
    from orchestration.fleet.fleet import FleetStream, Freshness, SessionRun

COLUMNS = ("stream", "state", "verdict", "behind", "newest rows", "objective", "budget left", "last runs, newest first")


def fleet(
    context: typer.Context,
    streams: AnyStreams = None,
    page: Annotated[Path | None, typer.Option(help="Also write a page: FILE.html.")] = None,
    output: OutputOption = Output.text,
) -> None:
    """Print every stream: state, freshness against its objective, error budget of 7 days, last five runs.

    Red streams come first; exit code 1 if there are any. Reads files only.
    """
    from orchestration.cli.progress import observe_all
    from orchestration.fleet.fleet import fleet as look

    call = invocation(context)
    found = look(call.settings, observe_all(call.settings, call.names(streams or [])))
    rows = [row(stream) for stream in found]
    show_table(output, [stream.as_json() for stream in found], COLUMNS, rows)
    if page is not None:
        _write(page, rows)
    if any(stream.observed.health.red for stream in found):
        raise typer.Exit(1)


def row(stream: FleetStream) -> list[str]:
    """The cells of `COLUMNS`; a stream with several objectives shows the one with the least budget left."""
    seen = stream.observed
    behind = seen.status.lag_s if seen.status else None
    least = min(stream.freshness, key=_left, default=None)
    fresh = ["-", "-", "-"] if least is None else [ago(least.age), ago(least.within), _budget(least)]
    runs = ", ".join(_run(run, seen.at) for run in reversed(stream.runs)) or "-"
    return [seen.stream, seen.state, seen.verdict, "-" if behind is None else ago(behind), *fresh, runs]


def _left(freshness: Freshness) -> float:
    return 1.0 if freshness.left is None else freshness.left


def _budget(freshness: Freshness) -> str:
    if freshness.left is None or freshness.used is None or freshness.budget is None:
        return "-"
    return f"{freshness.left:.0%} ({ago(freshness.used)} of {ago(freshness.budget)} used)"


def _run(run: SessionRun, now: float) -> str:
    words = str(run.outcome)
    if run.outcome == "running" or run.ended is not None:
        words += f" {ago((run.ended or now) - run.began)}"
    return f"{words} ({run.restarts} restarts)" if run.restarts else words


def _write(path: Path, rows: list[list[str]]) -> None:
    from streaming_jobs.page import macros, render_page
    from streaming_jobs.storage.files import write_atomic
    from streaming_jobs.text.spelling import instant_words

    parts = macros()
    sections = [parts.note(f"{len(rows)} streams at {instant_words(time.time())}"), parts.table(COLUMNS, rows)]
    try:
        write_atomic(path, render_page("Streams", sections, style="body { max-width: 90rem }"))
    except OSError as error:
        raise UsageError(f"{path} cannot be written: {error.strerror}", "name a file in a folder of yours") from error
    say(f"wrote {path}")
