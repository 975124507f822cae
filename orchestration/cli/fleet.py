"""`recourse fleet`: how every stream of a home is: state, freshness against its objective, and its last runs.

Everything is read from files of the state folder: no Spark, no broker, no table.

**Error budget.** A table that declares `fresh_within` is to be fresh for a share of the time (`quality.fresh_share`) of
the last seven days; the rest is the budget. It is used by each second in which the newest rows were older than the
objective, also if the topics brought none.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from orchestration.cli.options import AnyStreams, invocation
from orchestration.cli.progress import ObservedStream, observe_all
from orchestration.cli.text import Output, OutputOption, ago, say, show_table
from streaming_jobs.errors import UsageError
from streaming_jobs.state.stream_history import SessionEvent, session_events

if TYPE_CHECKING:
    from streaming_jobs.settings import Settings

COLUMNS = ("stream", "state", "verdict", "behind", "newest rows", "objective", "budget left", "last runs, newest first")
WINDOW = 7 * 86_400.0
RUNS = 5


def fleet(
    context: typer.Context,
    streams: AnyStreams = None,
    page: Annotated[Path | None, typer.Option(help="Also write a page: FILE.html.")] = None,
    output: OutputOption = Output.text,
) -> None:
    """Print every stream: state, freshness against its objective, error budget of 7 days, last five runs.

    Red streams come first; exit code 1 if there are any. Reads files only.
    """
    call = invocation(context)
    found = streams_of(call.settings, observe_all(call.settings, call.names(streams or [])))
    rows = [row(stream) for stream in found]
    show_table(output, [stream.as_json() for stream in found], COLUMNS, rows)
    if page is not None:
        _write(page, rows)
    if any(stream.observed.health.red for stream in found):
        raise typer.Exit(1)


@dataclass(frozen=True)
class Freshness:
    """A table beside its objective, in seconds: the age of its newest rows, and the budget of the last seven days.

    `used` and `window` count from the first known batch on, if that was later. The batches are those that brought rows
    to the stream's primary table: of another table the ledger file has no rows.
    """

    table: str
    within: float
    age: float
    used: float
    window: float
    share: float

    @property
    def budget(self) -> float:
        return self.window * (1 - self.share)

    @property
    def left(self) -> float:
        """The share of the budget that is left; negative if more was used."""
        return 1 - self.used / self.budget if self.budget else 1.0


@dataclass(frozen=True)
class SessionRun:
    """One session of a stream, from `began` to `ended` (seconds since 1970; None: it runs, or nobody knows).

    `restarts` are new queries within the session, after failures; `reason` is the last failure's.
    """

    began: float
    ended: float | None
    outcome: Literal["running", "stopped", "failed", "killed"]
    restarts: int = 0
    reason: str = ""


@dataclass(frozen=True)
class FleetStream:
    """One stream at one moment."""

    observed: ObservedStream
    freshness: tuple[Freshness, ...]
    runs: tuple[SessionRun, ...]

    def as_json(self) -> dict[str, Any]:
        seen = self.observed
        return {
            "stream": seen.stream,
            "state": seen.state,
            "verdict": seen.verdict,
            "red": seen.health.red,
            "behind_s": seen.status.lag_s if seen.status else None,
            "freshness": [{**asdict(each), "budget": each.budget, "left": each.left} for each in self.freshness],
            "runs": [asdict(run) for run in self.runs],
        }


def streams_of(settings: Settings, observed: Iterable[ObservedStream]) -> list[FleetStream]:
    """The streams, those that are red first."""
    made = [_stream(settings, each) for each in observed]
    return sorted(made, key=lambda one: (not one.observed.health.red, one.observed.stream))


def _stream(settings: Settings, seen: ObservedStream) -> FleetStream:
    runs = session_runs(session_events(settings, seen.stream), live=seen.live)[-RUNS:]
    tables = seen.status.tables if seen.status else {}
    aims = {name: table for name, table in tables.items() if table.fresh_within_s is not None}
    if not aims:
        return FleetStream(seen, (), tuple(runs))
    from reprocessing.timeline.timeline import read_batches

    begin = seen.at - WINDOW
    read = read_batches(settings, seen.stream, begin - WINDOW)  # also the newest rows before the window
    times = [batch.at for batch in read.batches if batch.rows and not batch.replay]
    share = settings.quality.fresh_share
    found = []
    for name, table in sorted(aims.items()):
        within = table.fresh_within_s or 0.0
        known = times or [table.rows_at or table.since]
        window = min(seen.at - known[0], WINDOW)
        used = stale_seconds(known, within, begin, seen.at)
        found.append(Freshness(name, within, table.seconds(seen.at), used, window, share))
    return FleetStream(seen, tuple(found), tuple(runs))


def stale_seconds(times: Sequence[float], within: float, begin: float, now: float) -> float:
    """The seconds from `begin`, or the first of these commits of rows, until now in which the newest was too old."""
    ends = [*times[1:], now]
    return sum(max(end - max(at + within, begin), 0.0) for at, end in zip(times, ends, strict=True))


def session_runs(events: Iterable[SessionEvent], *, live: bool) -> list[SessionRun]:
    """The runs that events tell of, oldest first; `live`: the last one still runs."""
    runs: list[SessionRun] = []
    for event in events:
        if event.what == "started":
            runs.append(SessionRun(event.at, None, "killed"))
        elif runs and event.what == "restarted":
            runs[-1] = replace(runs[-1], restarts=runs[-1].restarts + 1, reason=event.reason)
        elif runs and event.what in ("stopped", "failed"):
            outcome: Literal["stopped", "failed"] = "failed" if event.what == "failed" else "stopped"
            runs[-1] = replace(runs[-1], ended=event.at, outcome=outcome, reason=event.reason or runs[-1].reason)
    if runs and live and runs[-1].ended is None:
        runs[-1] = replace(runs[-1], outcome="running")
    return runs


def row(stream: FleetStream) -> list[str]:
    """The cells of `COLUMNS`; a stream with several objectives shows the one with the least budget left."""
    seen = stream.observed
    behind = seen.status.lag_s if seen.status else None
    least = min(stream.freshness, key=lambda each: each.left, default=None)
    fresh = ["-", "-", "-"] if least is None else [ago(least.age), ago(least.within), _budget(least)]
    runs = ", ".join(_run(run, seen.at) for run in reversed(stream.runs)) or "-"
    return [seen.stream, seen.state, seen.verdict, "-" if behind is None else ago(behind), *fresh, runs]


def _budget(freshness: Freshness) -> str:
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
