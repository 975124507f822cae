"""The code that pages of the documentation show."""

from __future__ import annotations

import re

from tests.support import ROOT


def code_of(page: str, *, blocks: int | None = None) -> str:
    """The first Python blocks of a page, or all of them, as one module."""
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    return "\n\n".join(re.findall(r"^```python\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)[:blocks])
