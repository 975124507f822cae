"""Pictures as SVG text: elements with escaped attributes and text, and the ticks of an axis."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from html import escape


def element(name: str, *children: str, **attributes: str | float) -> str:
    """An element; children are markup already, attribute values are escaped. `text_anchor` becomes `text-anchor`,
    and `class_` becomes `class`."""
    words = "".join(f' {_name(key)}="{_value(value)}"' for key, value in attributes.items())
    return f"<{name}{words}>{''.join(children)}</{name}>" if children else f"<{name}{words}/>"


def text(x: float, y: float, words: str, **attributes: str | float) -> str:
    """A line of text with its baseline at `y`; the words are escaped."""
    return element("text", escape(words), x=x, y=y, **attributes)


def line(x1: float, y1: float, x2: float, y2: float, **attributes: str | float) -> str:
    return element("line", x1=x1, y1=y1, x2=x2, y2=y2, **attributes)


def title(words: str) -> str:
    """The words that are shown when a pointer is over the element around them; they are escaped."""
    return element("title", escape(words))


def rect(x: float, y: float, width: float, height: float, *, hover: str = "", **attributes: str | float) -> str:
    """A rectangle; `hover` is its title, if there is one."""
    return element("rect", *([title(hover)] if hover else []), x=x, y=y, width=width, height=height, **attributes)


def polygon(*points: tuple[float, float], hover: str = "", class_: str) -> str:
    """A filled shape with these corners; `hover` is its title, if there is one."""
    corners = " ".join(f"{_value(x)},{_value(y)}" for x, y in points)
    return element("polygon", *([title(hover)] if hover else []), points=corners, class_=class_)


def axis_notes(left: float, right: float, y: float, words: Sequence[str], columns: int) -> Iterator[str]:
    """Three notes below an axis, at its left end, in its middle and at its right end; with fewer columns, fewer."""
    each = [(left, "start", words[0]), ((left + right) / 2, "middle", words[1]), (right, "end", words[2])]
    for x, anchor, note in each[:1] if columns == 1 else each[::2] if columns == 2 else each:
        yield text(x, y, note, class_="note", text_anchor=anchor)


def picture(width: float, height: float, children: Iterable[str], *, label: str) -> str:
    """A picture inside an HTML page; `label` is its text alternative."""
    content = "\n".join(children)
    return element("svg", content, viewBox=f"0 0 {_value(width)} {_value(height)}", role="img", aria_label=label)


def ticks(largest: float, count: int = 4) -> list[int]:
    """Whole numbers from 0 to at least `largest`, in about `count` equal steps of 1, 2 or 5 times a power of ten."""
    step = max(largest, 1) / count
    power = 10.0 ** math.floor(math.log10(step))
    rough = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= step * 0.999)
    whole = max(round(rough), 1)
    return [whole * number for number in range(math.ceil(largest / whole) + 1)] if largest > 0 else [0, 1]


class VerticalScale:
    """A vertical axis from 0 to `end`, `high` pixels below `top`; `fine` for numbers that are often below one.

    Values above the axis (up to `largest`) are cut off, and the grid says so.
    """

    def __init__(self, top: float, high: float, end: float, largest: float = 0.0, *, fine: bool = False) -> None:
        parts = 100 if fine and end < 4 else 1
        self.marks = [mark / parts for mark in ticks(end * parts, 3)]
        self.top, self.high, self.most, self.largest = top, high, self.marks[-1], largest

    @property
    def bottom(self) -> float:
        """The y of zero."""
        return self.top + self.high

    def y(self, value: float) -> float:
        return self.bottom - self.high * value / self.most

    def grid(self, left: float, right: float) -> Iterator[str]:
        """Lines with their numbers at the left."""
        for mark in self.marks:
            yield line(left, self.y(mark), right, self.y(mark), class_="grid")
            yield text(left - 8, self.y(mark) + 4, f"{mark:,.10g}", class_="note", text_anchor="end")
        if self.largest > self.most:
            words = f"cut off: the largest is {self.largest:,.0f}"
            yield text(right, self.top - 14, words, class_="note", text_anchor="end")

    def column(
        self, x: float, wide: float, value: float, *, hover: str, class_: str, base: float = 0.0
    ) -> Iterator[str]:
        """A column from `base` up; a truncated column ends in a point above the plot."""
        y = self.y(min(base + value, self.most))
        yield rect(x, y, wide, self.y(base) - y, hover=hover, class_=class_)
        if base + value > self.most:
            yield polygon((x, y - 2), (x + wide, y - 2), (x + wide / 2, y - 8), hover=hover, class_=class_)


def _name(key: str) -> str:
    return key if key == "viewBox" else key.rstrip("_").replace("_", "-")


def _value(value: str | float) -> str:
    if isinstance(value, str):
        return escape(value)
    return f"{value:.1f}".removesuffix(".0")
