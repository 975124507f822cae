"""Numbers and times in words."""

from __future__ import annotations

from datetime import UTC, datetime


def percent(part: int, whole: int) -> str:
    """A share that is not rounded to nothing, nor to everything."""
    if not whole or not part:
        return "0%"
    share = 100 * part / whole
    if share < 0.01:
        return "under 0.01%"
    text = f"{share:.2f}".rstrip("0").rstrip(".")
    return "over 99.99%" if text == "100" and part < whole else f"{text}%"


def instant(seconds: float) -> str:
    """A time since 1970 as text, UTC."""
    return f"{datetime.fromtimestamp(seconds, UTC):%Y-%m-%d %H:%M:%S}"
