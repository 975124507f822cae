"""The plots of one table's differences: by time, and by key. Colours are classes of the page's style."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from reprocessing.rebuild.audit import Difference, paired
from reprocessing.rebuild.audit_groups import ByKey, minute
from reprocessing.report.plots import WIDTH
from streaming_jobs.text.svg import line, picture, rect, text, ticks

KINDS = ("corrected", "new", "gone")
"""Classes of the style, in the order of `paired`."""

_HIGH, _LEFT, _TOP = 150, 70, 14
_KEY_LEFT, _KEY_ROW, _KEY_CHARACTERS = 270, 22, 36


def by_time(difference: Difference) -> str:
    """Differing rows per period of the table's time; a period without differences is a gap."""
    seconds, periods = difference.timeline.seconds, difference.timeline.periods
    counts = [paired(*each[1:], keyed=difference.keyed) for each in periods]
    marks = ticks(max(sum(each) for each in counts), 3)
    first, last = periods[0][0], periods[-1][0]
    slots = (last - first) // seconds + 1
    wide = (WIDTH - 10 - _LEFT) / slots
    bottom = _TOP + _HIGH
    bar = min(max(wide * 0.86, 1.5), 60.0)
    parts = []
    for mark in marks:
        y = bottom - _HIGH * mark / marks[-1]
        parts.append(line(_LEFT, y, WIDTH - 10, y, class_="grid"))
        parts.append(text(_LEFT - 8, y + 4, f"{mark:,}", class_="note", text_anchor="end"))
    for (start, *_), each in zip(periods, counts, strict=True):
        x = _LEFT + wide * ((start - first) // seconds) + (wide - bar) / 2
        hover = f"{minute(start)} to {minute(start + seconds)}: {words(each)}"
        y = float(bottom)
        for kind, count in zip(KINDS, each, strict=True):
            high = _HIGH * count / marks[-1]
            y -= high
            if count:
                parts.append(rect(x, y, bar, high, hover=hover, class_=kind))
    parts.append(line(_LEFT, bottom, WIDTH - 10, bottom, class_="axis"))
    parts += _ends(first, last + seconds, slots, bottom + 18)
    label = (
        f"Differing rows of table {difference.table} by {difference.time_column}, from {minute(first)} to "
        f"{minute(last + seconds)}: {words((difference.corrected, difference.new, difference.gone))}"
    )
    return picture(WIDTH, bottom + 26, parts, label=label)


def _ends(first: int, end: int, slots: int, y: float) -> Iterator[str]:
    yield text(_LEFT, y, minute(first), class_="note")
    if slots > 2:
        yield text((_LEFT + WIDTH - 10) / 2, y, minute((first + end) // 2), class_="note", text_anchor="middle")
    if slots > 1:
        yield text(WIDTH - 10, y, minute(end), class_="note", text_anchor="end")


def counts_rows(keys: ByKey) -> bool:
    """True if a key has several rows, so that rows are counted; otherwise the values that differ are."""
    return any(gone + came + changed > 1 for _, gone, came, changed, _ in keys.largest)


def by_key(difference: Difference) -> str:
    """The keys with most differing rows; if each has one row, those with most differing values."""
    keys, rows = difference.by_key, counts_rows(difference.by_key)
    bars = [(key, _parts(counts, values, rows)) for key, *counts, values in keys.largest]
    largest = max(sum(parts) for _, parts in bars)
    scale = (WIDTH - 70 - _KEY_LEFT) / largest
    drawn = []
    for place, ((key, parts), (_, *counts, values)) in enumerate(zip(bars, keys.largest, strict=True)):
        top = 4 + place * _KEY_ROW
        short = key if len(key) <= _KEY_CHARACTERS else key[: _KEY_CHARACTERS - 3] + "..."
        drawn.append(text(_KEY_LEFT - 8, top + 13, short, text_anchor="end"))
        gone, came, changed = counts
        hover = f"{key}: {words((changed, came, gone))}; {values:,} differing values"
        x = float(_KEY_LEFT)
        for kind, count in zip(KINDS, parts, strict=True):
            if count:
                drawn.append(rect(x, top, max(count * scale, 1.5), _KEY_ROW - 6, hover=hover, class_=kind))
                x += count * scale
        drawn.append(text(x + 6, top + 13, f"{sum(parts):,}", class_="note"))
    drawn.append(line(_KEY_LEFT, 0, _KEY_LEFT, 4 + len(bars) * _KEY_ROW, class_="axis"))
    what = "rows" if rows else "values"
    label = (
        f"Differing {what} of table {difference.table} by {', '.join(keys.columns)}: {len(bars)} of {keys.groups:,} "
        f"keys; most of them, {largest:,}, at {bars[0][0]}"
    )
    return picture(WIDTH, 8 + len(bars) * _KEY_ROW, drawn, label=label)


def _parts(counts: Sequence[int], values: int, rows: bool) -> tuple[int, int, int]:
    """A bar's (corrected, new, gone) rows; or its differing values, in the place of what its one row is."""
    gone, came, changed = counts
    if rows:
        return changed, came, gone
    return values * changed, values * came, values * gone


def words(counts: Sequence[int]) -> str:
    """Counts of (corrected, new, gone) rows as text."""
    each = (f"{count:,} {kind}" for count, kind in zip(counts, KINDS, strict=True) if count)
    return ", ".join(each) or "no difference"
