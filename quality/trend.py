"""A suite's history as a small SVG: the observed number and the failing rows of one expectation over time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise

from quality.history import PastOutcome
from streaming_jobs.page import PALETTE
from streaming_jobs.text.svg import element, line, rect, text, title

_WIDTH, _HEIGHT, _LEFT, _RIGHT, _TOP, _GAP = 760, 130, 90, 20, 40, 46
_INK, _FAINT = PALETTE["ink"][0], PALETTE["line"][0]
_COLOURS = {
    word: PALETTE[role][0] for word, role in (("ok", "good"), ("failed", "bad"), ("warning", "warn"), ("info", "now"))
}
"""By the word of an outcome; the words are in the titles of the points too."""


def draw(heading: str, past: Sequence[PastOutcome]) -> str:
    """The picture of some outcomes of one expectation, in any order; green passed, red failed, yellow warned."""
    points = sorted(past, key=lambda each: each.started_at)
    number: Callable[[PastOutcome], float | None] = lambda each: each.number  # noqa: E731 - a column
    failing: Callable[[PastOutcome], float | None] = lambda each: each.failing  # noqa: E731
    share = "failing rows, %" if any(each.failing is not None for each in points) else "observed"
    panels = [(share, number), ("failing rows", failing)]
    panels = [(name, value) for name, value in panels if any(value(each) is not None for each in points)]
    height = _TOP + max(len(panels), 1) * (_HEIGHT + _GAP)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" width="{_WIDTH}" height="{height}">',
        "<style>text { font: 12px sans-serif }</style>",
        rect(0, 0, _WIDTH, height, fill="white"),
        text(_LEFT, 22, heading, style="font-size: 15px", fill=_INK),
    ]
    for place, (name, value) in enumerate(panels):
        parts += _panel(_TOP + place * (_HEIGHT + _GAP), name, points, value)
    if not panels:
        parts.append(text(_LEFT, _TOP + 30, "no numbers in the history", fill=_INK))
    return "\n".join([*parts, "</svg>\n"])


def _panel(
    top: int, name: str, points: Sequence[PastOutcome], value: Callable[[PastOutcome], float | None]
) -> list[str]:
    known = [(each, number) for each in points if (number := value(each)) is not None]
    least, most = min([0.0, *(n for _, n in known)]), max(n for _, n in known)
    most = most if most > least else least + 1
    first, last = (each.started_at.timestamp() for each in (points[0], points[-1]))
    wide = _WIDTH - _LEFT - _RIGHT

    def x(each: PastOutcome) -> float:
        return _LEFT + wide * ((each.started_at.timestamp() - first) / (last - first) if last > first else 0.5)

    def y(number: float) -> float:
        return top + _HEIGHT - _HEIGHT * (number - least) / (most - least)

    bottom = top + _HEIGHT
    parts = [text(_LEFT, top - 6, name, fill=_INK)]
    for number in (least, (least + most) / 2, most):
        parts.append(line(_LEFT, y(number), _WIDTH - _RIGHT, y(number), stroke=_FAINT))
        parts.append(text(_LEFT - 8, y(number) + 4, f"{number:,.4g}", text_anchor="end", fill=_INK))
    for (one, before), (other, after) in pairwise(known):
        parts.append(line(x(one), y(before), x(other), y(after), stroke=_INK, stroke_width=1, opacity=0.5))
    for each, number in known:
        colour = _COLOURS[each.word]
        words = f"{each.started_at:%Y-%m-%d %H:%M:%S} UTC, version {each.version}, {each.word}: {each.observed}"
        parts.append(element("circle", title(words), cx=x(each), cy=y(number), r=4, fill=colour))
    for each, anchor in ((points[0], "start"), (points[-1], "end")) if len(points) > 1 else ((points[0], "middle"),):
        time = f"{each.started_at:%Y-%m-%d %H:%M}"
        parts.append(text(x(each), bottom + 18, time, text_anchor=anchor, fill=_INK))
    return parts
