"""Self-contained HTML pages in one look: no script, nothing loaded, every text escaped, for a light and a dark screen.

Pages are made of sections: what the macros of `page_parts.html.j2`, or of a template that imports them, return.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

from streaming_jobs.text.spelling import counted

PALETTE = {
    "ink": ("#1f2328", "#e6edf3"),
    "soft": ("#59636e", "#9ea7b1"),
    "line": ("#d1d9e0", "#3d444d"),
    "back": ("#ffffff", "#0d1117"),
    "box": ("#f6f8fa", "#151b23"),
    "good": ("#1a7f37", "#3fb950"),
    "bad": ("#cf222e", "#f85149"),
    "warn": ("#9a6700", "#d29922"),
    "before": ("#8c959f", "#8b949e"),
    "replay": ("#b35900", "#f0a04b"),
    "now": ("#0969da", "#58a6ff"),
    "skip": ("#8a3fa0", "#d2a8ff"),
    "recovery": ("#8250df", "#bc8cff"),
    "corrected": ("#c26a00", "#f0a04b"),
    "new": ("#0a5fc2", "#4c9aff"),
    "gone": ("#6d2077", "#e2b8ff"),
}
"""Colours by role, on a light and on a dark background.

Corrected, new and gone rows differ in lightness as well as in hue (blue, orange and purple stay apart for people who
see no red or no green), and legends name them in words.
"""

_MOST_BYTES = 1_400_000
"""A section that would begin after them is left out."""


def colours(selector: str = ":root", *names: str) -> str:
    """CSS that declares colours of the palette, all of them if none is named, as variables."""

    def declared(side: int) -> str:
        return "; ".join(f"--{name}: {PALETTE[name][side]}" for name in names or PALETTE)

    return (
        f"{selector} {{ color-scheme: light dark; {declared(0)} }}\n"
        f"@media (prefers-color-scheme: dark) {{ {selector} {{ {declared(1)} }} }}\n"
    )


@cache
def _template(path: Path) -> Any:
    """A template, which may import those beside this module."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    loader = FileSystemLoader([path.parent, Path(__file__).parent])
    environment = Environment(
        loader=loader, autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    return environment.get_template(path.name)


def macros(template: Path | None = None) -> Any:
    """The macros of a template, by default of `page_parts.html.j2`; each returns a section as escaped HTML."""
    return _template(template or Path(__file__).with_name("page_parts.html.j2")).module


def render_page(title: str, sections: Iterable[str], last: Iterable[str] = (), *, style: str = "") -> str:
    """The page; sections beyond its size are left out, and it says so. The `last` ones always stay."""
    shown = [*_within(sections), *last]
    template = _template(Path(__file__).with_name("page.html.j2"))
    page: str = template.render(title=title, sections=shown, colours=colours(), more=style)
    return page


def _within(sections: Iterable[str]) -> Iterator[str]:
    size = left_out = 0
    for section in sections:
        size += len(section.encode())
        if size <= _MOST_BYTES:
            yield section
        else:
            left_out += 1
    if left_out:
        yield macros().note(f"The page would be too large: {counted(left_out, 'part')} left out.")
