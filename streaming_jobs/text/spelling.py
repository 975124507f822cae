"""Words for people: the name that was probably meant, a number with its noun, a time."""

from __future__ import annotations

import difflib
import zoneinfo
from collections.abc import Iterable
from datetime import UTC, datetime


def counted(count: int, noun: str, one: str = "", many: str = "") -> str:
    """A number with its noun, such as `1 record`, and its verb if it is given, such as `2 rows differ`."""
    verb = one if count == 1 else many
    plural = "" if count == 1 else "es" if noun.endswith("ch") else "s"
    return f"{count:,} {noun}{plural}{verb and ' ' + verb}"


def instant_words(at: float) -> str:
    """A time (seconds since 1970) in UTC."""
    return datetime.fromtimestamp(at, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")


def nearest(name: str, known: Iterable[str]) -> str | None:
    """The known name that `name` is probably a misspelling of; None when none is near."""
    names = {each.lower(): each for each in known}
    matches = difflib.get_close_matches(name.lower(), names, n=1, cutoff=0.6)
    return names[matches[0]] if matches else None


def nearest_zone(zone: str) -> str:
    """The next step of an error about a time zone that there is not."""
    near = nearest(zone, zoneinfo.available_timezones())
    return f"did you mean '{near}'?" if near is not None else "such as UTC or Europe/Berlin"


def instead(name: str, known: Iterable[str]) -> str:
    """The next step of an error about a wrong name: the nearest known name, or all of them."""
    names = list(known)
    if (near := nearest(name, names)) is not None:
        return f"did you mean '{near}'?"
    return f"there are: {', '.join(names)}" if names else "there are none"
