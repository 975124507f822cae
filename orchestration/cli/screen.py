"""The live screen of `recourse up`: its content, and drawing it."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from orchestration.cli.observed import COLUMNS, RIGHT, Observed
from orchestration.cli.output import make_table, number, say, stderr_console

if TYPE_CHECKING:
    from rich.console import Group


@dataclass(frozen=True)
class Feeding:
    """The progress of the feeder; `rate` in records per second."""

    state: str
    sent: int
    total: int
    rate: float = 0.0
    message: str = ""

    def __str__(self) -> str:
        if self.state == "feeding":
            share = 100 * self.sent / self.total if self.total else 0
            return f"feeding {number(self.sent)} of {number(self.total)} ({share:.0f} %), {number(self.rate)} records/s"
        return self.message or self.state


def lines(streams: Sequence[Observed], feeding: Feeding | None) -> list[str]:
    """The screen as plain lines, for a log: one per stream, and one for the feeder."""
    text = []
    for observed in streams:
        status = observed.status
        if status is None or not observed.live or not status.generation:
            text.append(f"{observed.stream}: {observed.state}")
            continue
        letters = status.totals.dead_letters if status.totals else status.dead_letters  # as in `streams status`
        text.append(
            f"{observed.stream}: {observed.state}, g{status.generation:04d} batch {number(status.batch)},"
            f" {number(status.processed_rows_per_s)} rows/s, lag {number(status.lag_records)},"
            f" watermark {status.watermark or '-'}, {number(letters)} dead letters"
        )
    if feeding is not None:
        text.append(f"feeder: {feeding}")
    return text


def panel(head: Sequence[str], streams: Sequence[Observed], feeding: Feeding | None) -> Group:
    """The screen for a terminal: addresses to open, the streams, the feeder, and notes."""
    from rich.console import Group
    from rich.text import Text

    notes = [Text(note, style="yellow") for observed in streams for note in observed.notes()]
    feeder = [Text(f"feeder  {feeding}")] if feeding is not None else []
    table = make_table(COLUMNS, [observed.row() for observed in streams], right=RIGHT)
    return Group(
        *(Text(line) for line in head),
        Text(),
        table,
        Text(),
        *feeder,
        *notes,
        Text("Ctrl-C ends all of it", style="dim"),
    )


class Screen:
    """Draws on stderr: in place on a terminal, otherwise as lines every `every` seconds."""

    def __init__(self, head: Sequence[str] = (), *, every: float = 10.0) -> None:
        from rich.live import Live

        self._head, self._every, self._next = list(head), every, 0.0
        console = stderr_console()
        self._live = Live(console=console, auto_refresh=False, transient=False) if console.is_terminal else None

    def __enter__(self) -> Screen:
        if self._live:
            self._live.start()
        else:
            for line in self._head:
                say(line)
        return self

    def __exit__(self, *_: object) -> None:
        if self._live:
            self._live.stop()

    def show(self, streams: Sequence[Observed], feeding: Feeding | None = None, *, last: bool = False) -> None:
        """Draw the present state; `last` draws it without waiting for the interval."""
        if self._live:
            self._live.update(panel(self._head, streams, feeding), refresh=True)
        elif last or time.monotonic() >= self._next:
            self._next = time.monotonic() + self._every
            for line in lines(streams, feeding):
                say(line)
