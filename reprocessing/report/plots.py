"""The plots of one stream: the offsets of its partitions, and its batches. Colours are classes of the page's style."""

from __future__ import annotations

from collections.abc import Iterator

from reprocessing.planning.instants import instant_words
from reprocessing.report.batches import BatchColumn, BatchSeries
from reprocessing.report.facts import PartitionRanges, Span, StreamFacts
from streaming_jobs.text.spelling import counted
from streaming_jobs.text.svg import element, line, picture, rect, text, ticks

WIDTH = 960
_LEFT, _RIGHT = 190, 90
_INSIDE = WIDTH - _LEFT - _RIGHT
_BAR, _ROW, _HEAD = 10, 50, 46
_PANEL, _PANEL_LEFT = 120, 70

_KEPT = 0.3
"""Offsets from before the change that are drawn, at most, as a share of those after it; older ones are cut off."""


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
        points = f"{_LEFT - 9},{y + _BAR / 2} {_LEFT - 1},{y} {_LEFT - 1},{y + _BAR}"
        yield element("polygon", points=points, class_=kind)


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
    return f"{batch_words(series.batches)} with {counted(series.rows, 'row')}"


def batch_words(count: int) -> str:
    """A number of batches."""
    return "1 batch" if count == 1 else f"{count:,} batches"


def _panel(words: str, series: BatchSeries, kind: str, top: float, largest: float) -> Iterator[str]:
    bottom = top + _PANEL
    head = f"{batch_words(series.batches)} {words}: {counted(series.rows, 'row')} written"
    yield text(_PANEL_LEFT, top - 12, head if series.columns else f"no batches {words} are in the ledger")
    if not series.columns:
        yield line(_PANEL_LEFT, bottom, WIDTH - 10, bottom, class_="axis")
        return
    marks = ticks(largest, 3)
    for mark in marks:
        y = bottom - _PANEL * mark / marks[-1]
        yield line(_PANEL_LEFT, y, WIDTH - 10, y, class_="grid")
        yield text(_PANEL_LEFT - 8, y + 4, f"{mark:,}", class_="note", text_anchor="end")
    wide = (WIDTH - 10 - _PANEL_LEFT) / len(series.columns)
    bar = min(wide * 0.84, 60.0)
    for place, column in enumerate(series.columns):
        x = _PANEL_LEFT + wide * place + (wide - bar) / 2
        high = _PANEL * column.mean / marks[-1]
        yield rect(x, bottom - high, bar, high, hover=_column_words(column), class_=kind)
        if column.batches > 1:
            y = bottom - _PANEL * column.largest / marks[-1]
            yield line(x, y, x + bar, y, class_="most")
    yield line(_PANEL_LEFT, bottom, WIDTH - 10, bottom, class_="axis")
    yield from _times(series, bottom + 18)


def _times(series: BatchSeries, y: float) -> Iterator[str]:
    """The times of the first and the last batch, and of the one in the middle if there is room between them."""
    columns = series.columns
    yield text(_PANEL_LEFT, y, instant_words(columns[0].since), class_="note")
    if len(columns) > 2:
        middle = columns[len(columns) // 2]
        yield text((_PANEL_LEFT + WIDTH) / 2, y, instant_words(middle.since), class_="note", text_anchor="middle")
    if len(columns) > 1:
        yield text(WIDTH - 10, y, instant_words(columns[-1].until), class_="note", text_anchor="end")


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
