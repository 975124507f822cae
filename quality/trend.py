"""A suite's history as a small SVG: the observed number and the failing rows of one expectation over time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from html import escape
from itertools import pairwise

from quality.history import PastOutcome

_WIDTH, _HEIGHT, _LEFT, _RIGHT, _TOP, _GAP = 760, 130, 90, 20, 40, 46
_GREEN, _RED, _INK, _FAINT = "#1a7f37", "#cf222e", "#24292f", "#d0d7de"


def draw(title: str, past: Sequence[PastOutcome]) -> str:
    """The picture of some outcomes of one expectation, in any order; green passed, red failed."""
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
        f'<rect width="{_WIDTH}" height="{height}" fill="white"/>',
        f'<text x="{_LEFT}" y="22" style="font-size: 15px" fill="{_INK}">{escape(title)}</text>',
    ]
    for place, (name, value) in enumerate(panels):
        parts += _panel(_TOP + place * (_HEIGHT + _GAP), name, points, value)
    if not panels:
        parts.append(f'<text x="{_LEFT}" y="{_TOP + 30}" fill="{_INK}">no numbers in the history</text>')
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
    parts = [f'<text x="{_LEFT}" y="{top - 6}" fill="{_INK}">{escape(name)}</text>']
    for number in (least, (least + most) / 2, most):
        parts.append(
            f'<line x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y(number):.1f}" y2="{y(number):.1f}" stroke="{_FAINT}"/>'
        )
        parts.append(
            f'<text x="{_LEFT - 8}" y="{y(number) + 4:.1f}" text-anchor="end" fill="{_INK}">{number:,.4g}</text>'
        )
    for (one, before), (other, after) in pairwise(known):
        parts.append(
            f'<line x1="{x(one):.1f}" y1="{y(before):.1f}" x2="{x(other):.1f}" y2="{y(after):.1f}" stroke="{_INK}" '
            'stroke-width="1" opacity="0.5"/>'
        )
    for each, number in known:
        colour = _GREEN if each.passed else _RED
        words = escape(f"{each.started_at:%Y-%m-%d %H:%M:%S} UTC, version {each.version}: {each.observed}")
        parts.append(
            f'<circle cx="{x(each):.1f}" cy="{y(number):.1f}" r="4" fill="{colour}"><title>{words}</title></circle>'
        )
    for each, anchor in ((points[0], "start"), (points[-1], "end")) if len(points) > 1 else ((points[0], "middle"),):
        time = f"{each.started_at:%Y-%m-%d %H:%M}"
        parts.append(f'<text x="{x(each):.1f}" y="{bottom + 18}" text-anchor="{anchor}" fill="{_INK}">{time}</text>')
    return parts
