"""A timeline in a file: the picture alone (.svg), or a page with the picture and its marks in words (.html).

The picture has rows per minute and durations of batches over time, in columns of equal parts of the time, with marks in
lanes above them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from reprocessing.timeline.marks import KINDS, Mark, MarkKind
from reprocessing.timeline.timeline import BatchPoint, Timeline, group
from streaming_jobs.errors import UsageError
from streaming_jobs.page import colours, macros, render_page
from streaming_jobs.storage.files import write_atomic
from streaming_jobs.text.spelling import counted, instant_words
from streaming_jobs.text.svg import VerticalScale, element, line, polygon, rect, text, title

COLUMNS = 220
"""Columns at most."""
_WIDTHS = (5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14_400, 28_800, 86_400, 7 * 86_400)


WIDTH = 1100
_LEFT, _RIGHT, _TOP = 92, 24, 64
_INSIDE = WIDTH - _LEFT - _RIGHT
_LANE, _PANEL, _GAP = 22, 150, 52
_LETTER = 6.7
_LANES: dict[MarkKind, str] = {
    "deploy": "deploys",
    "code": "code",
    "session": "sessions",
    "recovery": "recoveries",
    "savepoint": "savepoints",
    "slice": "slices",
}
_LINES: tuple[MarkKind, ...] = ("deploy", "code", "session", "recovery")
"""Kinds whose marks are lines through the plots."""
_STEPS = (60, 120, 300, 600, 900, 1800, 3600, 7200, 10_800, 21_600, 43_200, 86_400, 2 * 86_400, 7 * 86_400, 28 * 86_400)
STYLE = (
    colours("svg.timeline", "ink", "soft", "line", "back", "now", "replay", "good", "warn", "bad", "recovery")
    + """
svg.timeline text { font: 13px system-ui, sans-serif; fill: var(--ink) }
svg.timeline text.head { font-size: 16px; font-weight: 600 }
svg.timeline text.note { font-size: 12px; fill: var(--soft) }
svg.timeline text.over { paint-order: stroke; stroke: var(--back); stroke-width: 5px; stroke-linejoin: round }
svg.timeline rect { stroke: none }
svg.timeline .back { fill: var(--back) }
svg.timeline .grid { stroke: var(--line); stroke-width: 1 }
svg.timeline .axis { stroke: var(--soft); stroke-width: 1 }
svg.timeline .rows { fill: var(--now) } svg.timeline .replay { fill: var(--replay) }
svg.timeline .time { fill: var(--soft) } svg.timeline .most { stroke: var(--ink); stroke-width: 1.5 }
svg.timeline .stood { fill: var(--recovery); opacity: .13 }
svg.timeline .deploy, svg.timeline .code, svg.timeline .session, svg.timeline .failed, svg.timeline .recovery,
svg.timeline .savepoint, svg.timeline .slice { stroke-width: 1.5; fill: none }
svg.timeline .deploy { stroke: var(--good) } svg.timeline .code { stroke: var(--good); stroke-dasharray: 6 3 }
svg.timeline .session { stroke: var(--warn); stroke-dasharray: 2 4 }
svg.timeline .failed { stroke: var(--bad); stroke-dasharray: 2 4 }
svg.timeline .recovery { stroke: var(--recovery); stroke-dasharray: 9 4 }
svg.timeline .savepoint { stroke: var(--soft) } svg.timeline .slice { stroke: var(--recovery) }
svg.timeline g.sign * { stroke-dasharray: none }
svg.timeline g.sign .deploy { fill: var(--good) } svg.timeline g.sign .code { fill: var(--back) }
svg.timeline g.sign .session { fill: var(--warn) } svg.timeline g.sign .failed { fill: var(--bad) }
svg.timeline g.sign .recovery { fill: var(--recovery) }
"""
)
MOST = 500
"""Marks at most that a page lists, the newest ones."""


@dataclass(frozen=True)
class Bin:
    """The batches that ended in one part of the time, from `since` on; those of a replay count apart in `replayed`."""

    since: float
    batches: int
    rows: int
    replayed: int
    mean: float
    slowest: float


def width_of(since: float, until: float) -> int:
    span = until - since
    return next((each for each in _WIDTHS if span / each <= COLUMNS), max(int(span / COLUMNS) + 1, 1))


def bins_of(batches: Sequence[BatchPoint], since: float, until: float) -> list[Bin]:
    width = width_of(since, until)
    last = int((until - since) // width)
    bins: dict[int, list[BatchPoint]] = {}
    for each in batches:  # a clock that was set back gives times after the end
        bins.setdefault(min(int((each.at - since) // width), last), []).append(each)
    return [_bin(since + place * width, bins[place]) for place in sorted(bins)]


def _bin(since: float, batches: Sequence[BatchPoint]) -> Bin:
    joined, replayed = group(batches), sum(each.rows for each in batches if each.replay)
    return Bin(since, len(batches), joined.rows - replayed, replayed, joined.seconds or 0.0, joined.slowest or 0.0)


def draw(timeline: Timeline) -> str:
    return _Picture(timeline).svg()


class _Picture:
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
        label = (
            f"Timeline of stream {timeline.stream}: {counted(len(timeline.batches), 'batch')}, {counted(rows, 'row')}"
        )
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
            f"{instant_words(timeline.since)} to {instant_words(timeline.until)}: "
            f"{counted(len(timeline.batches), 'batch')}, {counted(rows, 'row')}; a column is {_span(width)}"
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
        scale = VerticalScale(top, _PANEL, *_cut(usual, largest))
        yield from scale.grid(_LEFT, WIDTH - _RIGHT)
        if any(each.replayed for each in self.bins):
            self.titles.append(rect(_LEFT + 118, top - 24, 14, 10, class_="replay"))
            words = "of a replay, beside the tables"
            self.titles.append(text(_LEFT + 138, top - 14, words, class_="note over"))
        for each in self.bins:
            own, replayed = each.rows * 60 / width, each.replayed * 60 / width
            x, wide = self._column(each, width)
            hover = f"{instant_words(each.since)}: {counted(each.batches, 'batch')}, {counted(each.rows, 'row')}"
            if each.replayed:
                words = f"{hover}, and {counted(each.replayed, 'row')} of a replay"
                yield from scale.column(x, wide, own + replayed, hover=words, class_="replay")
            if own:
                yield from scale.column(x, wide, own, hover=hover, class_="rows")

    def _seconds(self, top: float) -> Iterator[str]:
        width = width_of(self.timeline.since, self.timeline.until)
        usual, largest = max(each.mean for each in self.bins), max(each.slowest for each in self.bins)
        scale = VerticalScale(top, _PANEL, *_cut(usual, largest), fine=True)
        yield from scale.grid(_LEFT, WIDTH - _RIGHT)
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
                yield element("g", title(words), _sign(mark, x, y), class_="sign")
                label = _label(mark)
                if label and x + 9 + len(label) * _LETTER < end - 8:
                    yield text(x + 9, y + 4, label, class_="note")

    def _apart(self, kind: MarkKind, pixels: float) -> list[Mark]:
        """The marks of a kind, without marks that would cover the previous one."""
        shown: list[Mark] = []
        for mark in self.timeline.marks:
            if mark.kind == kind and (not shown or self.x(mark.at) - self.x(shown[-1].at) >= pixels):
                shown.append(mark)
            elif mark.kind == kind and shown and mark.what in ("failed", "published", "undone", "aborted"):
                shown[-1] = mark  # of two at one position, the more important one
        return shown


def _cut(usual: float, largest: float) -> tuple[float, float]:
    """The end of a scale, and the largest value: a few that are far larger than the usual ones are cut off."""
    return (usual * 2 if 0 < usual * 5 < largest else largest), largest


def _class(mark: Mark) -> str:
    return "failed" if mark.kind == "session" and mark.what in ("failed", "restarted") else mark.kind


def _sign(mark: Mark, x: float, y: float) -> str:
    name = _class(mark)
    if mark.kind in ("deploy", "code"):
        return polygon((x, y - 6), (x + 6, y + 5), (x - 6, y + 5), class_=name)
    if mark.kind == "recovery":
        return polygon((x, y - 6), (x + 6, y), (x, y + 6), (x - 6, y), class_=name)
    if mark.kind == "session":
        if mark.what == "stopped":
            return rect(x - 4, y - 4, 8, 8, class_=name)
        return element("circle", cx=x, cy=y, r=4.5, class_=name)
    return line(x, y - 6, x, y + 6, class_=name)


def _label(mark: Mark) -> str:
    if mark.kind in ("deploy", "code"):
        return mark.what.split(" ")[0][:8]
    if mark.kind == "recovery":
        return f"{mark.plan} {mark.what}"
    return mark.what if mark.kind == "session" or mark.what != "time" else ""


def _span(seconds: int) -> str:
    for size, name in ((86_400, "day"), (3600, "hour"), (60, "minute")):
        if seconds >= size and seconds % size == 0:
            return counted(seconds // size, name)
    return counted(seconds, "second")


def write(path: Path, timeline: Timeline) -> None:
    """Replace the file, readable by its owner alone; raises UsageError if its folder is missing."""
    content = draw(timeline) if path.suffix == ".svg" else page(timeline)
    try:
        write_atomic(path, content)
    except OSError as error:
        raise UsageError(f"{path} cannot be written: {error.strerror}", "name a file in a folder of yours") from error


def page(timeline: Timeline) -> str:
    shown = [mark for mark in timeline.marks if mark.kind != "savepoint" or mark.what != "time"]
    parts, notes = macros(), []
    if len(shown) > MOST:
        notes.append(f"{len(shown) - MOST:,} older marks are left out.")
    if left := len(timeline.marks) - len(shown):
        notes.append(f"{counted(left, 'savepoint')} taken by the clock not listed.")
    rows = [[instant_words(mark.at), mark.kind, mark.text] for mark in shown[-MOST:]]
    sections = [
        parts.plot(draw(timeline)),
        parts.heading("Marks"),
        *map(parts.note, notes),
        parts.table(["time", "kind", "what"], rows),
    ]
    title = f"Timeline of stream {timeline.stream}"
    return render_page(title, (), sections, style="body { max-width: 74rem }")
