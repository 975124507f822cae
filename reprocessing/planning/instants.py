"""Times in words."""

from __future__ import annotations

from datetime import UTC, datetime


def instant_words(at: float) -> str:
    """A time in the form that plans show, UTC."""
    return datetime.fromtimestamp(at, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
