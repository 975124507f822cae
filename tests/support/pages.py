"""The code that pages of the documentation show."""

from __future__ import annotations

import re

from tests.support import ROOT


def code_of(page: str, *, language: str = "python", blocks: int | None = None) -> str:
    """The first blocks of a page in a language, or all of them, as one text."""
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    return "\n\n".join(re.findall(rf"^```{language}\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)[:blocks])
