"""`recourse feed`: send the flights of 2013 to their topic; and the feeder thread of `recourse up`."""

from __future__ import annotations

import threading
import time
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Annotated

import typer

from orchestration.cli import INTERRUPTED
from orchestration.cli.invocation import invocation
from orchestration.cli.output import Output, OutputOption, number, print_json, say, stderr_console
from orchestration.cli.screen import Feeding

if TYPE_CHECKING:
    from streaming_jobs.examples.flights.feeder import FeedReport
    from streaming_jobs.settings import Settings

ShareOption = Annotated[
    float, typer.Option(min=0.0001, max=1.0, help="Share of the flights, the earliest first; 1 is all.")
]
RateOption = Annotated[
    float | None, typer.Option(min=1, help="Records per second; default: full speed.", show_default=False)
]


def feed(
    context: typer.Context,
    rate: RateOption = None,
    share: ShareOption = 1.0,
    again: Annotated[bool, typer.Option("--again", help="Send them even if the topic has them already.")] = False,
    output: OutputOption = Output.text,
) -> None:
    """Send the flights of 2013 to the topic `flights`, in the order of their departure."""
    from orchestration.cli.children import stop_signals_interrupt
    from orchestration.cli.kafka import broker_for_command

    settings = invocation(context).settings
    with stop_signals_interrupt(), broker_for_command(settings):
        report = feed_with_bar(settings, rate=rate, share=share, again=again)
    if output is Output.json:
        print_json({**asdict(report), "seconds": round(report.seconds, 3)})
    else:
        say(summary(report))
    if report.stopped:
        raise typer.Exit(INTERRUPTED)


def feed_with_bar(settings: Settings, *, rate: float | None, share: float, again: bool = False) -> FeedReport:
    """Feed with a progress bar on stderr."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    from streaming_jobs.examples.flights.feeder import feed as send

    columns = (TextColumn("feeding"), BarColumn(), MofNCompleteColumn(), TextColumn("records,"), TimeRemainingColumn())
    console = stderr_console()
    with Progress(*columns, console=console, disable=not console.is_terminal) as bar:
        task = bar.add_task("feeding", total=None)
        return send(
            settings,
            rate=rate,
            share=share,
            again=again,
            progress=lambda held, total: bar.update(task, completed=held, total=total),
        )


def summary(report: FeedReport) -> str:
    """The result of a feed in one line."""
    line = f"sent {number(report.records)} records in {report.seconds:.1f} s"
    if report.stopped:
        return (
            f"{line}; interrupted at {number(report.held)} of {number(report.total)}: the same command continues there"
        )
    return f"{line}, {number(round(report.rate))} a second" if report.rate else line


class FeederThread:
    """Feeds in the background at a rate; `state` is its progress, or its error."""

    def __init__(self, settings: Settings, *, rate: float | None, share: float) -> None:
        self._settings, self._rate, self._share = settings, rate, share
        self._ended = threading.Event()
        self._begun: tuple[float, int] | None = None
        self._thread = threading.Thread(target=self._run, name="feeder", daemon=True)
        self.state = Feeding("starting", 0, 0)

    def start(self) -> None:
        """Begin to feed."""
        self._thread.start()

    def stop(self, deadline: float = 10.0) -> None:
        """End between two chunks, within `deadline` seconds; the next start continues after the last record sent."""
        self._ended.set()
        if self._thread.is_alive():
            self._thread.join(deadline)

    def _run(self) -> None:
        from streaming_jobs.examples.flights import dataset

        try:
            self._feed_all()
        finally:
            dataset.release()

    def _feed_all(self) -> None:
        from streaming_jobs.errors import TransientError

        while not self._ended.is_set():
            self._begun = None
            try:
                self.state = self._feed()
                return
            except TransientError as error:
                self.state = replace(self.state, state="waiting", message=f"waits for the broker: {error.found}")
                self._ended.wait(5)
            except Exception as error:  # noqa: BLE001 - shown on the screen; no caller waits for the thread
                self.state = replace(self.state, state="failed", message=f"failed: {error}")
                return

    def _feed(self) -> Feeding:
        from streaming_jobs.examples.flights.feeder import feed as send
        from streaming_jobs.examples.flights.feeder import survey

        there = survey(self._settings, self._share)
        if not there.complete:
            send(self._settings, rate=self._rate, share=self._share, progress=self._progressed, stop=self._ended)
        return Feeding(
            "done", there.total, there.total, message=f"done: {number(there.total)} flights are in the topic"
        )

    def _progressed(self, held: int, total: int) -> None:
        now = time.monotonic()
        at, before = self._begun = self._begun or (now, held)
        self.state = Feeding("feeding", held, total, (held - before) / (now - at) if now - at > 0.5 else 0.0)
