"""The plots of a report: offsets and batches of a stream, differences of a table by time and by key."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from reprocessing.replay.difference import ByKey, Difference, minute
from reprocessing.replay.words import RowCounts
from reprocessing.report.facts import BatchColumn, BatchSeries, PartitionRanges, Span, StreamFacts
from streaming_jobs.text.spelling import counted, instant_words
from streaming_jobs.text.svg import VerticalScale, axis_notes, line, picture, polygon, rect, text, ticks

WIDTH = 960
_LEFT, _RIGHT = 190, 90
_INSIDE = WIDTH - _LEFT - _RIGHT
_BAR, _ROW, _HEAD = 10, 50, 46
_PANEL, _PANEL_LEFT = 120, 70

_KEPT = 0.3
"""Offsets from before the change that are drawn, at most, as a share of those after it; older ones are cut off."""


_HIGH, _TIME_LEFT, _TOP = 150, 70, 14
_KEY_LEFT, _KEY_ROW, _KEY_CHARACTERS = 270, 22, 36


def offsets(stream: StreamFacts) -> str:
    """Per partition three bars: held before, replayed or skipped, held now; aligned where the change begins."""
    rows = stream.partitions
    after = max(*(max(r.before[1], r.replayed[1], r.skipped[1], r.now[1]) - r.pivot for r in rows), 1)
    before = min(max(*(r.pivot - min(r.before[0], r.now[0]) for r in rows), 0), round(after * _KEPT))
    scale = _INSIDE / (before + after)
    zero = _LEFT + before * scale
    bottom = _HEAD + len(rows) * _ROW
    doing = "skip" if stream.skips else "replay"
    parts = [text(zero, 14, f"{doing} begins", class_="note", text_anchor="start" if before < after / 4 else "middle")]
    for tick in ticks(after, 6)[1:]:
        if tick <= after:
            x = zero + tick * scale
            parts.append(line(x, _HEAD - 10, x, bottom, class_="grid"))
            parts.append(text(x, 32, f"+{tick:,}", class_="note", text_anchor="middle"))
    for place, row in enumerate(rows):
        parts += _partition(row, _HEAD + place * _ROW, zero, scale, doing)
    parts.append(line(zero, 18, zero, bottom, class_="axis"))
    label = f"Offsets of stream {stream.stream}: {counted(len(rows), 'partition')}, {_moved_words(stream)}"
    return picture(WIDTH, bottom + 8, parts, label=label)


def _moved_words(stream: StreamFacts) -> str:
    moved = sum(row.moved for row in stream.partitions) + stream.left_out.records
    doing = "skipped" if stream.skips else "replayed"
    return f"{counted(moved, 'record')} {doing if stream.done else f'to be {doing}'}"


def _partition(row: PartitionRanges, top: float, zero: float, scale: float, doing: str) -> Iterator[str]:
    topic = row.topic if len(row.topic) <= 26 else row.topic[:23] + "..."
    yield text(0, top + 14, topic)
    yield text(0, top + 30, f"partition {row.partition}, from {row.pivot:,}", class_="note")
    middle = row.skipped if doing == "skip" else row.replayed
    spans = (("before", "held before", row.before), (doing, f"{doing} of", middle), ("now", "held now", row.now))
    for place, (kind, words, span) in enumerate(spans):
        yield from _bar(span, top + place * (_BAR + 2), zero - row.pivot * scale, scale, kind, words)
    last = max(row.before[1], row.replayed[1], row.skipped[1], row.now[1])
    yield text(zero + (last - row.pivot) * scale + 6, top + 21, f"{last:,}", class_="note")


def _bar(span: Span, y: float, shift: float, scale: float, kind: str, words: str) -> Iterator[str]:
    """A bar; if its beginning is cut off, with an arrow to the left."""
    begin, end = (shift + offset * scale for offset in span)
    if span[0] >= span[1]:
        return
    hover = f"{words}: offsets {span[0]:,} to {span[1] - 1:,}"
    cut = begin < _LEFT - 0.05
    begin = max(begin, _LEFT)
    if end > begin:
        yield rect(begin, y, max(end - begin, 1.5), _BAR, hover=hover, class_=kind)
    if cut:
        yield polygon((_LEFT - 9, y + _BAR / 2), (_LEFT - 1, y), (_LEFT - 1, y + _BAR), class_=kind)


def batches(stream: StreamFacts) -> str:
    """Rows per batch, of the replaced batches above those of the replay; each column is one batch or some joined."""
    panels = (
        ("replaced by the replay", stream.replaced, "before"),
        ("of the replay", stream.replayed, "replay"),
    )
    most = [max((each.largest for each in series.columns), default=0) for _, series, _ in panels]
    shared = shares_scale(stream)
    parts: list[str] = []
    top = 30.0
    for (words, series, kind), own in zip(panels, most, strict=True):
        parts += _panel(words, series, kind, top, max(most) if shared else own)
        top += _PANEL + 74
    label = (
        f"Rows per batch of stream {stream.stream}: {_totals(stream.replaced)} replaced, "
        f"{_totals(stream.replayed)} in the replay"
    )
    return picture(WIDTH, top - 30, parts, label=label)


def shares_scale(stream: StreamFacts) -> bool:
    """True if both panels of the batches can be read on one scale: the largest ones differ by less than eight times."""
    largest = [
        max((each.largest for each in series.columns), default=0) for series in (stream.replaced, stream.replayed)
    ]
    return max(largest) < 8 * min(largest)


def _totals(series: BatchSeries) -> str:
    return f"{counted(series.batches, 'batch')} with {counted(series.rows, 'row')}"


def _panel(words: str, series: BatchSeries, kind: str, top: float, largest: float) -> Iterator[str]:
    bottom = top + _PANEL
    head = f"{counted(series.batches, 'batch')} {words}: {counted(series.rows, 'row')} written"
    yield text(_PANEL_LEFT, top - 12, head if series.columns else f"no batches {words} are in the ledger")
    if not series.columns:
        yield line(_PANEL_LEFT, bottom, WIDTH - 10, bottom, class_="axis")
        return
    scale = VerticalScale(top, _PANEL, largest)
    yield from scale.grid(_PANEL_LEFT, WIDTH - 10)
    wide = (WIDTH - 10 - _PANEL_LEFT) / len(series.columns)
    bar = min(wide * 0.84, 60.0)
    for place, column in enumerate(series.columns):
        x = _PANEL_LEFT + wide * place + (wide - bar) / 2
        yield from scale.column(x, bar, column.mean, hover=_column_words(column), class_=kind)
        if column.batches > 1:
            yield line(x, scale.y(column.largest), x + bar, scale.y(column.largest), class_="most")
    yield line(_PANEL_LEFT, bottom, WIDTH - 10, bottom, class_="axis")
    columns = series.columns
    times = [columns[0].since, columns[len(columns) // 2].since, columns[-1].until]
    yield from axis_notes(_PANEL_LEFT, WIDTH - 10, bottom + 18, list(map(instant_words, times)), len(columns))


def _column_words(column: BatchColumn) -> str:
    if column.batches == 1:
        return (
            f"batch {column.first}, {instant_words(column.since)}: {counted(column.rows, 'row')} from {_read(column)}"
        )
    return (
        f"batches {column.first} to {column.last}, {instant_words(column.since)} to {instant_words(column.until)}: "
        f"{column.mean:,.1f} rows per batch, {column.largest:,} in the largest; {counted(column.rows, 'row')} from "
        f"{_read(column)}"
    )


def _read(column: BatchColumn) -> str:
    return counted(column.records, "record")


def by_time(difference: Difference) -> str:
    """Differing rows per period of the table's time; a period without differences is a gap."""
    seconds, periods = difference.timeline.seconds, difference.timeline.periods
    counts = [RowCounts.of(*each[1:], keyed=difference.keyed) for each in periods]
    scale = VerticalScale(_TOP, _HIGH, max(sum(each) for each in counts))
    first, last = periods[0][0], periods[-1][0]
    slots = (last - first) // seconds + 1
    wide = (WIDTH - 10 - _TIME_LEFT) / slots
    bottom = _TOP + _HIGH
    bar = min(max(wide * 0.86, 1.5), 60.0)
    parts = [*scale.grid(_TIME_LEFT, WIDTH - 10)]
    for (start, *_), each in zip(periods, counts, strict=True):
        x = _TIME_LEFT + wide * ((start - first) // seconds) + (wide - bar) / 2
        hover = f"{minute(start)} to {minute(start + seconds)}: {each.words()}"
        base = 0
        for kind, count in each._asdict().items():
            if count:
                parts += scale.column(x, bar, count, hover=hover, class_=kind, base=base)
            base += count
    parts.append(line(_TIME_LEFT, bottom, WIDTH - 10, bottom, class_="axis"))
    ends = [first, (first + last + seconds) // 2, last + seconds]
    parts += axis_notes(_TIME_LEFT, WIDTH - 10, bottom + 18, list(map(minute, ends)), slots)
    label = (
        f"Differing rows of table {difference.table} by {difference.time_column}, from {minute(first)} to "
        f"{minute(last + seconds)}: {difference.counts.words()}"
    )
    return picture(WIDTH, bottom + 26, parts, label=label)


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
        hover = f"{key}: {RowCounts(changed, came, gone).words()}; {values:,} differing values"
        x = float(_KEY_LEFT)
        for kind, count in parts._asdict().items():
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


def _parts(counts: Sequence[int], values: int, rows: bool) -> RowCounts:
    """A bar's rows; or its differing values, in the place of what its one row is."""
    gone, came, changed = counts
    each = 1 if rows else values
    return RowCounts(each * changed, each * came, each * gone)
