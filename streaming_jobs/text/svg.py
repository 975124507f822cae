"""Pictures as SVG text: elements with escaped attributes and text, and the ticks of an axis."""

from __future__ import annotations

import math
from collections.abc import Iterable
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
    """A straight line."""
    return element("line", x1=x1, y1=y1, x2=x2, y2=y2, **attributes)


def title(words: str) -> str:
    """The words that are shown when a pointer is over the element around them; they are escaped."""
    return element("title", escape(words))


def rect(x: float, y: float, width: float, height: float, *, hover: str = "", **attributes: str | float) -> str:
    """A rectangle; `hover` is its title, if there is one."""
    return element("rect", *([title(hover)] if hover else []), x=x, y=y, width=width, height=height, **attributes)


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


def _name(key: str) -> str:
    return key if key == "viewBox" else key.rstrip("_").replace("_", "-")


def _value(value: str | float) -> str:
    if isinstance(value, str):
        return escape(value)
    return f"{value:.1f}".removesuffix(".0")
