"""The picture of a timeline: rows per minute and duration of batches over time, with marks in lanes above them.

Plain SVG: no script, nothing loaded, all text escaped; colours for a light and a dark background.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime

from reprocessing.planning.instants import instant_words
from reprocessing.timeline.bins import Bin, bins_of, width_of
from reprocessing.timeline.marks import KINDS, Kind, Mark
from reprocessing.timeline.timeline import Timeline
from streaming_jobs.text.spelling import counted
from streaming_jobs.text.svg import element, line, rect, text, ticks, title

WIDTH = 1100
_LEFT, _RIGHT, _TOP = 92, 24, 64
_INSIDE = WIDTH - _LEFT - _RIGHT
_LANE, _PANEL, _GAP = 22, 150, 52
_LETTER = 6.7
_LANES: dict[Kind, str] = {
    "deploy": "deploys",
    "code": "code",
    "session": "sessions",
    "recovery": "recoveries",
    "savepoint": "savepoints",
}
_LINES: tuple[Kind, ...] = ("deploy", "code", "session", "recovery")
"""Kinds whose marks are lines through the plots."""
_STEPS = (60, 120, 300, 600, 900, 1800, 3600, 7200, 10_800, 21_600, 43_200, 86_400, 2 * 86_400, 7 * 86_400, 28 * 86_400)

STYLE = """
svg.timeline { --ink: #1f2328; --soft: #59636e; --line: #d1d9e0; --back: #ffffff; --rows: #0969da; --replay: #b35900;
  --time: #6e7781; --deploy: #1a7f37; --code: #1a7f37; --session: #9a6700; --failed: #cf222e; --recovery: #8250df;
  --savepoint: #59636e }
@media (prefers-color-scheme: dark) { svg.timeline { --ink: #e6edf3; --soft: #9ea7b1; --line: #3d444d;
  --back: #0d1117; --rows: #58a6ff; --replay: #f0a04b; --time: #9ea7b1; --deploy: #3fb950; --code: #3fb950;
  --session: #d29922; --failed: #f85149; --recovery: #bc8cff; --savepoint: #9ea7b1 } }
svg.timeline text { font: 13px system-ui, sans-serif; fill: var(--ink) }
svg.timeline text.head { font-size: 16px; font-weight: 600 }
svg.timeline text.note { font-size: 12px; fill: var(--soft) }
svg.timeline text.over { paint-order: stroke; stroke: var(--back); stroke-width: 5px; stroke-linejoin: round }
svg.timeline rect { stroke: none }
svg.timeline .back { fill: var(--back) }
svg.timeline .grid { stroke: var(--line); stroke-width: 1 }
svg.timeline .axis { stroke: var(--soft); stroke-width: 1 }
svg.timeline .rows { fill: var(--rows) } svg.timeline .replay { fill: var(--replay) }
svg.timeline .time { fill: var(--time) } svg.timeline .most { stroke: var(--ink); stroke-width: 1.5 }
svg.timeline .stood { fill: var(--recovery); opacity: .13 }
svg.timeline .deploy, svg.timeline .code, svg.timeline .session, svg.timeline .failed, svg.timeline .recovery,
svg.timeline .savepoint { stroke-width: 1.5; fill: none }
svg.timeline .deploy { stroke: var(--deploy) } svg.timeline .code { stroke: var(--code); stroke-dasharray: 6 3 }
svg.timeline .session { stroke: var(--session); stroke-dasharray: 2 4 }
svg.timeline .failed { stroke: var(--failed); stroke-dasharray: 2 4 }
svg.timeline .recovery { stroke: var(--recovery); stroke-dasharray: 9 4 }
svg.timeline .savepoint { stroke: var(--savepoint) }
svg.timeline g.sign * { stroke-dasharray: none }
svg.timeline g.sign .deploy { fill: var(--deploy) } svg.timeline g.sign .code { fill: var(--back) }
svg.timeline g.sign .session { fill: var(--session) } svg.timeline g.sign .failed { fill: var(--failed) }
svg.timeline g.sign .recovery { fill: var(--recovery) }
"""


def draw(timeline: Timeline) -> str:
    """The picture as an SVG file."""
    return _Picture(timeline).svg()


class _Picture:
    """The places of everything in one picture."""

    def __init__(self, timeline: Timeline) -> None:
        self.timeline = timeline
        self.span = max(timeline.until - timeline.since, 1.0)
        self.bins = bins_of(timeline.batches, timeline.since, timeline.until)
        self.lanes = [kind for kind in KINDS if any(mark.kind == kind for mark in timeline.marks)]
        self.panels = _TOP + len(self.lanes) * _LANE + 36
        self.bottom = self.panels + 2 * _PANEL + _GAP
        self.height = self.bottom + 34
        self.titles: list[str] = []
        """The titles of the plots, which are drawn over the lines of marks."""

    def x(self, at: float) -> float:
        return _LEFT + _INSIDE * min(max((at - self.timeline.since) / self.span, 0.0), 1.0)

    def svg(self) -> str:
        timeline = self.timeline
        rows = sum(each.rows for each in timeline.batches)
        label = f"Timeline of stream {timeline.stream}: {_batches(len(timeline.batches))}, {counted(rows, 'row')}"
        parts = [
            element("style", STYLE),
            rect(0, 0, WIDTH, self.height, class_="back"),
            text(14, 26, f"Stream {timeline.stream}", class_="head"),
            text(14, 46, self._words(rows), class_="note"),
            *self._times(),
            *self._stood(),
            *self._panel(self.panels, "rows per minute", self._rows),
            *self._panel(self.panels + _PANEL + _GAP, "seconds per batch: mean, and the slowest", self._seconds),
            *self._lines(),
            *self.titles,
            *self._lanes(),
        ]
        return (
            element(
                "svg",
                "\n".join(parts),
                xmlns="http://www.w3.org/2000/svg",
                viewBox=f"0 0 {WIDTH} {self.height:.0f}",
                width=WIDTH,
                height=self.height,
                role="img",
                aria_label=label,
                class_="timeline",
            )
            + "\n"
        )

    def _words(self, rows: int) -> str:
        timeline = self.timeline
        width = width_of(timeline.since, timeline.until)
        return (
            f"{instant_words(timeline.since)} to {instant_words(timeline.until)}: {_batches(len(timeline.batches))}, "
            f"{counted(rows, 'row')}; a column is {_span(width)}"
        )

    def _panel(self, top: float, words: str, draw_in: Callable[[float], Iterator[str]]) -> Iterator[str]:
        self.titles.append(text(_LEFT, top - 14, words, class_="over"))
        if self.bins:
            yield from draw_in(top)
        else:
            yield text(_LEFT + 12, top + _PANEL / 2, "no batches", class_="note")
        yield line(_LEFT, top + _PANEL, WIDTH - _RIGHT, top + _PANEL, class_="axis")

    def _rows(self, top: float) -> Iterator[str]:
        width = width_of(self.timeline.since, self.timeline.until)
        usual = max(each.rows for each in self.bins) * 60 / width
        largest = max(each.rows + each.replayed for each in self.bins) * 60 / width
        scale = _Scale(top, *_cut(usual, largest))
        yield from scale.grid()
        if any(each.replayed for each in self.bins):
            self.titles.append(rect(_LEFT + 118, top - 24, 14, 10, class_="replay"))
            words = "of a replay, beside the tables"
            self.titles.append(text(_LEFT + 138, top - 14, words, class_="note over"))
        for each in self.bins:
            own, replayed = each.rows * 60 / width, each.replayed * 60 / width
            x, wide = self._column(each, width)
            hover = f"{instant_words(each.since)}: {_batches(each.batches)}, {counted(each.rows, 'row')}"
            if each.replayed:
                words = f"{hover}, and {counted(each.replayed, 'row')} of a replay"
                yield from scale.column(x, wide, own + replayed, hover=words, class_="replay")
            if own:
                yield from scale.column(x, wide, own, hover=hover, class_="rows")

    def _seconds(self, top: float) -> Iterator[str]:
        width = width_of(self.timeline.since, self.timeline.until)
        usual, largest = max(each.mean for each in self.bins), max(each.slowest for each in self.bins)
        scale = _Scale(top, *_cut(usual, largest), fine=True)
        yield from scale.grid()
        for each in self.bins:
            x, wide = self._column(each, width)
            hover = f"{instant_words(each.since)}: {each.mean:.2f} s per batch, the slowest {each.slowest:.2f} s"
            yield from scale.column(x, wide, each.mean, hover=hover, class_="time")
            if each.batches > 1:
                y = scale.y(min(each.slowest, scale.most))
                yield line(x, y, x + wide, y, class_="most")

    def _column(self, each: Bin, width: int) -> tuple[float, float]:
        begin, end = self.x(each.since), self.x(each.since + width)
        return begin, max((end - begin) * 0.86, 1.0)

    def _times(self) -> Iterator[str]:
        """Ticks of the time axis, through both plots; labels with the day where it changes."""
        step = next((each for each in _STEPS if self.span / each <= 9), _STEPS[-1])
        at, day = (self.timeline.since // step + 1) * step, ""
        while at < self.timeline.until:
            x, moment = self.x(at), datetime.fromtimestamp(at, UTC)
            yield line(x, self.panels, x, self.bottom, class_="grid")
            if _LEFT + 14 < x < WIDTH - 30:
                words = f"{moment:%H:%M}" if step < 86_400 else f"{moment:%a %d %b}"
                yield text(x, self.bottom + 16, words, class_="note", text_anchor="middle")
                if step < 86_400 and day != (day := f"{moment:%a %Y-%m-%d}"):
                    yield text(x, self.bottom + 30, day, class_="note", text_anchor="middle")
            at += step

    def _stood(self) -> Iterator[str]:
        """The times for which recoveries have stopped the stream."""
        begun: dict[str, float] = {}
        for mark in self.timeline.marks:
            if mark.plan is None:
                continue
            if mark.what == "begun":
                begun[mark.plan] = mark.at
            elif mark.what in ("finished", "aborted"):
                since = begun.pop(mark.plan, self.timeline.since)
                yield self._shade(since, mark.at, mark.plan)
        for plan, since in begun.items():
            yield self._shade(since, self.timeline.until, plan)

    def _shade(self, since: float, until: float, plan: str) -> str:
        x = self.x(since)
        wide = max(self.x(until) - x, 2.0)
        hover = f"stopped by recovery {plan}"
        return rect(x, self.panels, wide, self.bottom - self.panels, hover=hover, class_="stood")

    def _lines(self) -> Iterator[str]:
        for kind in _LINES:
            for mark in self._apart(kind, 2.0):
                if kind != "recovery" or mark.what in ("begun", "published", "undone", "skipped", "aborted"):
                    x = self.x(mark.at)
                    yield line(x, self.panels - 30, x, self.bottom, class_=_class(mark))

    def _lanes(self) -> Iterator[str]:
        for place, kind in enumerate(self.lanes):
            y = _TOP + place * _LANE + _LANE / 2
            yield text(_LEFT - 10, y + 4, _LANES[kind], text_anchor="end")
            yield line(_LEFT, y + _LANE / 2 + 0.5, WIDTH - _RIGHT, y + _LANE / 2 + 0.5, class_="grid")
            marks = self._apart(kind, 4.0 if kind == "savepoint" else 2.0)
            ends = [*(self.x(mark.at) for mark in marks[1:]), WIDTH - 4.0]
            for mark, end in zip(marks, ends, strict=True):
                x = self.x(mark.at)
                words = f"{instant_words(mark.at)}: {mark.text}"
                yield element("g", title(words), *_sign(mark, x, y), class_="sign")
                label = _label(mark)
                if label and x + 9 + len(label) * _LETTER < end - 8:
                    yield text(x + 9, y + 4, label, class_="note")

    def _apart(self, kind: Kind, pixels: float) -> list[Mark]:
        """The marks of a kind, without those that would lie upon the one before."""
        shown: list[Mark] = []
        for mark in self.timeline.marks:
            if mark.kind == kind and (not shown or self.x(mark.at) - self.x(shown[-1].at) >= pixels):
                shown.append(mark)
            elif mark.kind == kind and shown and mark.what in ("failed", "published", "undone", "aborted"):
                shown[-1] = mark  # of two in one place, the one that matters more
        return shown


def _cut(usual: float, largest: float) -> tuple[float, float]:
    """The end of a scale, and the largest value: a few that are far larger than the usual ones are cut off."""
    return (usual * 2 if 0 < usual * 5 < largest else largest), largest


class _Scale:
    """The vertical scale of a plot from 0 to `end`; `fine` for numbers that are often below one."""

    def __init__(self, top: float, end: float, largest: float, *, fine: bool = False) -> None:
        parts = 100 if fine and end < 4 else 1
        self.marks = [mark / parts for mark in ticks(end * parts, 3)]
        self.top, self.most, self.largest = top, self.marks[-1], largest

    def y(self, value: float) -> float:
        return self.top + _PANEL - _PANEL * value / self.most

    def column(self, x: float, wide: float, value: float, *, hover: str, class_: str) -> Iterator[str]:
        """A column; one that is cut off ends in a point above the plot."""
        y = self.y(min(value, self.most))
        yield rect(x, y, wide, self.top + _PANEL - y, hover=hover, class_=class_)
        if value > self.most:
            around = f"{x:.1f},{y - 2:.1f} {x + wide:.1f},{y - 2:.1f} {x + wide / 2:.1f},{y - 8:.1f}"
            yield element("polygon", title(hover), points=around, class_=class_)

    def grid(self) -> Iterator[str]:
        for mark in self.marks:
            yield line(_LEFT, self.y(mark), WIDTH - _RIGHT, self.y(mark), class_="grid")
            yield text(_LEFT - 8, self.y(mark) + 4, f"{mark:,.10g}", class_="note", text_anchor="end")
        if self.largest > self.most:
            words = f"cut off: the largest is {self.largest:,.0f}"
            yield text(WIDTH - _RIGHT, self.top - 14, words, class_="note", text_anchor="end")


def _class(mark: Mark) -> str:
    return "failed" if mark.kind == "session" and mark.what in ("failed", "restarted") else mark.kind


def _sign(mark: Mark, x: float, y: float) -> Sequence[str]:
    name = _class(mark)
    if mark.kind in ("deploy", "code"):
        return [
            element(
                "polygon", points=f"{x:.1f},{y - 6:.1f} {x + 6:.1f},{y + 5:.1f} {x - 6:.1f},{y + 5:.1f}", class_=name
            )
        ]
    if mark.kind == "recovery":
        around = f"{x:.1f},{y - 6:.1f} {x + 6:.1f},{y:.1f} {x:.1f},{y + 6:.1f} {x - 6:.1f},{y:.1f}"
        return [element("polygon", points=around, class_=name)]
    if mark.kind == "session":
        if mark.what == "stopped":
            return [rect(x - 4, y - 4, 8, 8, class_=name)]
        return [element("circle", cx=x, cy=y, r=4.5, class_=name)]
    return [line(x, y - 6, x, y + 6, class_=name)]


def _label(mark: Mark) -> str:
    """A few words beside the sign of a mark."""
    if mark.kind in ("deploy", "code"):
        return mark.what.split(" ")[0][:8]
    if mark.kind == "recovery":
        return f"{mark.plan} {mark.what}"
    return mark.what if mark.kind == "session" or mark.what != "time" else ""


def _batches(count: int) -> str:
    return "1 batch" if count == 1 else f"{count:,} batches"


def _span(seconds: int) -> str:
    for size, name in ((86_400, "day"), (3600, "hour"), (60, "minute")):
        if seconds >= size and seconds % size == 0:
            return counted(seconds // size, name)
    return counted(seconds, "second")
