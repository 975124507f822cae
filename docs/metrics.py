"""Writes the table of figures in docs/metrics.md from the list in the code: `python docs/metrics.py`."""

from __future__ import annotations

import re
from pathlib import Path

from orchestration.metrics.figures import table

PAGE = Path(__file__).with_suffix(".md")


def page() -> str:
    """The page, with today's table between its marks."""
    written = PAGE.read_text(encoding="utf-8")
    return re.sub(r"(?<=<!-- figures -->\n).*(?=<!-- end -->)", lambda _: table(), written, flags=re.DOTALL)


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
    print(PAGE)
