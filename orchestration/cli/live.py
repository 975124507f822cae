"""Live input for a stream, and a reader of its table: how far the table is behind its input, drawn over time."""

from __future__ import annotations

import threading
import time
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise

from streaming_jobs.page import colours
from streaming_jobs.text.svg import VerticalScale, element, line, rect, text, ticks

LOOK_EVERY = 0.1
_SEND_EVERY = 0.25
_HEIGHT = 8
"""Lines of the plot in a terminal."""
_STYLE = colours("svg.freshness", "ink", "soft", "line", "back", "now", "recovery") + (
    "svg.freshness text { font: 13px system-ui, sans-serif; fill: var(--ink) }\n"
    "svg.freshness text.note { font-size: 12px; fill: var(--soft) } svg.freshness .back { fill: var(--back) }\n"
    "svg.freshness .grid { stroke: var(--line) } svg.freshness .behind { fill: var(--now) }\n"
    "svg.freshness .mark { stroke: var(--recovery); stroke-dasharray: 9 4 }\n"
)


@dataclass(frozen=True)
class Look:
    """What the reader saw at a time (seconds since 1970): the records in the table, and how far it is behind.

    `behind`: seconds since the oldest record that the table lacks was sent; 0 if it has all of them.
    """

    at: float
    records: int
    behind: float


@dataclass(frozen=True)
class Mark:
    """An event in the plot: its time (seconds since 1970), its sign of one character, and its words."""

    at: float
    sign: str
    words: str


def legend(marks: Sequence[Mark]) -> str:
    """Each sign once, with its words."""
    return "; ".join(f"{sign}: {words}" for sign, words in {mark.sign: mark.words for mark in marks}.items())


@dataclass(frozen=True)
class Freshness:
    """The looks of a reader, oldest first."""

    looks: Sequence[Look]

    def largest_gap(self, since: float = 0.0) -> float:
        """The longest time, in seconds, for which the reader saw no further records, of those that ended `since`."""
        changes = [after.at for before, after in pairwise(self.looks) if after.records != before.records]
        times = [*(look.at for look in self.looks[:1]), *changes]
        return max((end - begin for begin, end in pairwise(times) if end > since), default=0.0)

    def columns(self, count: int) -> list[float]:
        """The largest seconds behind in each of `count` equal parts of the time; a part without a look repeats one."""
        begin, span = self.looks[0].at, self._span
        parts: list[float | None] = [None] * count
        for look in self.looks:
            place = min(int((look.at - begin) / span * count), count - 1)
            parts[place] = max(parts[place] or 0.0, look.behind)
        filled = [0.0]
        for part in parts:
            filled.append(filled[-1] if part is None else part)
        return filled[1:]

    def lines(self, marks: Sequence[Mark], width: int) -> list[str]:
        """The plot in plain characters, in lines of at most `width`."""
        values = self.columns(width - 7)
        most = ticks(max(values), 4)[-1]
        plot = []
        for row in range(_HEIGHT, 0, -1):
            label = f"{most * row / _HEIGHT:5.1f} |" if row % 2 == 0 else "      |"
            low = "." if row == 1 else " "
            plot.append(label + "".join("#" if v * _HEIGHT / most >= row - 0.5 else low if v else " " for v in values))
        signs = [" "] * len(values)
        for mark in marks:
            place = min(int((mark.at - self.looks[0].at) / self._span * len(values)), len(values) - 1)
            while place < len(values) - 1 and signs[place] != " ":
                place += 1
            signs[place] = mark.sign
        end = f"{self._span:.0f} s"
        axis = [f"  0.0 +{'-' * len(values)}", f"       {''.join(signs)}".rstrip()]
        return [line.rstrip() for line in plot] + axis + [f"       0 s{end.rjust(len(values) - 3)}"]

    def svg(self, marks: Sequence[Mark], title: str) -> str:
        """The plot as a picture."""
        left, top, wide, high = 60, 64, 1000, 200
        values = self.columns(500)
        scale = VerticalScale(top, high, max(values), fine=True)

        def x(at: float) -> float:
            return left + wide * min(max((at - self.looks[0].at) / self._span, 0.0), 1.0)

        parts = [
            element("style", _STYLE),
            rect(0, 0, left + wide + 24, top + high + 60, class_="back"),
            text(14, 24, title),
            *scale.grid(left, left + wide),
        ]
        for place, value in enumerate(values):
            if value:
                parts.append(rect(left + 2 * place, scale.y(value), 2, scale.bottom - scale.y(value), class_="behind"))
        for number, mark in enumerate(marks):
            high_at = top - 8 - 12 * (number % 2)
            parts.append(line(x(mark.at), high_at, x(mark.at), scale.bottom, class_="mark"))
            parts.append(text(x(mark.at), high_at - 2, mark.sign, text_anchor="middle"))
        for second in ticks(self._span, 8):
            if second <= self._span:
                at = x(self.looks[0].at + second)
                parts.append(text(at, scale.bottom + 18, f"{second} s", class_="note", text_anchor="middle"))
        parts.append(text(left, scale.bottom + 44, legend(marks), class_="note"))
        size = {"viewBox": f"0 0 {left + wide + 24} {top + high + 60}", "role": "img", "aria_label": title}
        return element("svg", "\n".join(parts), xmlns="http://www.w3.org/2000/svg", class_="freshness", **size) + "\n"

    @property
    def _span(self) -> float:
        return max(self.looks[-1].at - self.looks[0].at, 1.0)


class LiveInput:
    """Records that arrive at a rate, and a reader who counts those in the table every 100 ms.

    `send` sends the records from a number to another one, of which there are `most`; `sent` were sent before. `count`
    returns the records in the table. `looked` is called after each look.
    """

    def __init__(
        self,
        send: Callable[[int, int], None],
        count: Callable[[], int],
        *,
        sent: int,
        most: int,
        rate: int,
        looked: Callable[[], object] = lambda: None,
    ) -> None:
        self._send, self._count, self._looked = send, count, looked
        self._most, self._step = most, max(int(rate * _SEND_EVERY), 1)
        self._pause = self._step / rate
        self._totals, self._times = [sent], [0.0]
        self._over = threading.Event()
        self.looks: list[Look] = []

    @property
    def sent(self) -> int:
        return self._totals[-1]

    @contextmanager
    def running(self) -> Iterator[None]:
        """Records arrive, and the reader looks, until the block ends; raises what has failed meanwhile."""
        with ThreadPoolExecutor(2) as pool:
            tasks = [pool.submit(self._feed), pool.submit(self._read)]
            try:
                yield
            finally:
                self._over.set()
            for task in tasks:
                task.result()

    def _feed(self) -> None:
        due = time.monotonic()
        while not self._over.wait(max(due - time.monotonic(), 0.0)) and self.sent < self._most:
            end = min(self.sent + self._step, self._most)
            self._times.append(time.time())
            self._send(self.sent, end)
            self._totals.append(end)
            due += self._pause

    def _read(self) -> None:
        while not self._over.wait(LOOK_EVERY):
            records, now = self._count(), time.time()
            waits = bisect_right(self._totals, records)
            behind = now - self._times[waits] if waits < len(self._totals) else 0.0
            self.looks.append(Look(now, records, behind))
            self._looked()
