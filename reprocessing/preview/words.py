"""A preview as text, for a terminal and for a log: what was compared, and what would change."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from reprocessing.planning.instants import instant_words
from reprocessing.preview.compare import TableChange
from reprocessing.preview.result import Preview, Verdict, reasons
from streaming_jobs.text.spelling import counted

_SHOWN = 3
_CHARACTERS = 200
_COLUMNS = 8
_PARTITIONS = 24


def headline(preview: Preview) -> str:
    """The verdict in one line."""
    if preview.verdict is Verdict.cannot_start:
        return f"stream {preview.stream}: cannot start on today's state: {'; '.join(reasons(preview))}"
    if preview.verdict is Verdict.broken:
        what = "the replay failed" if preview.failure is not None else "the rebuilt rows break a suite"
        return f"stream {preview.stream}: broken: {what}: {'; '.join(reasons(preview))}"
    if preview.verdict is Verdict.equal:
        return f"stream {preview.stream}: equal: the code on disk makes the same rows"
    return f"stream {preview.stream}: different: {'; '.join(filter(None, map(_changed, preview.tables)))}"


def text(preview: Preview, report: str = "") -> str:
    """The whole text, with the place of its report."""
    lines = [headline(preview), *(f"  {line}" for line in _body(preview))]
    if report:
        lines.append(f"  report: {report}")
    return "\n".join(lines) + "\n"


def _body(preview: Preview) -> Iterator[str]:
    yield code_words(preview)
    yield f"{counted(preview.records, 'record')} replayed, {range_words(preview)}"
    ranges = preview.ranges()
    for topic, partition, begin, end in ranges[:_PARTITIONS]:
        yield (
            f"  {topic}/{partition}: offsets {begin:,} to {end - 1:,}"
            if end > begin
            else f"  {topic}/{partition}: none"
        )
    if len(ranges) > _PARTITIONS:
        yield f"  and {counted(len(ranges) - _PARTITIONS, 'more partition')}"
    for table in preview.tables:
        yield from _table(table)
    for name, before, after in preview.counted():
        if before != after and not name.startswith("written"):
            yield f"{name}: {before:,} in the published batches, {after:,} rebuilt"
    for name, failing in preview.suites:
        yield f"suite {name}: {'passes' if not failing else '; '.join(failing)}"
    yield from preview.notes
    if preview.seconds:
        yield "took " + ", ".join(f"{seconds:.1f} s {part}" for part, seconds in preview.seconds.items())


def code_words(preview: Preview) -> str:
    """Which code was compared with which."""
    against = ", then ".join(map(str, preview.published_code)) or "unknown code"
    same = "; it is the same code" if preview.same_code and preview.published_code else ""
    return f"code {preview.code} on disk against {against} that wrote the published rows{same}"


def range_words(preview: Preview) -> str:
    """From which batch to which."""
    begin = preview.begin.txn
    if begin is None:
        start = f"from the stream's start ({preview.why})"
    else:
        start = f"after {begin}, savepoint {preview.savepoint} of {instant_words(preview.begin.at)} ({preview.why})"
    return f"{start}, to {preview.end.txn} of {instant_words(preview.end.at)}"


def _changed(table: TableChange) -> str:
    d = table.difference
    rows = [f"{n:,} {kind}" for n, kind in ((d.corrected, "changed"), (d.new, "new"), (d.gone, "gone")) if n]
    parts = [f"rows: {', '.join(rows)}"] if rows else []
    if table.new_columns:
        parts.append(f"new column {', '.join(table.new_columns)}")
    return f"{d.table} {'; '.join(parts)}" if parts else ""


def _table(table: TableChange) -> Iterator[str]:
    d = table.difference
    words = _changed(table).removeprefix(d.table).strip() or "equal"
    yield f"{d.table}: {words}, of {counted(d.old_rows, 'published row')}"
    if table.new_columns:
        yield f"  only the code on disk has: {', '.join(table.new_columns)}"
    sums = [f"{name} {old} -> {new}" for name, (old, new) in d.totals.items() if old != new]
    if table.rows and sums:
        yield f"  sums over {d.read_words()}: {', '.join(sums[:_COLUMNS])}"
    for row in d.sample[:_SHOWN]:
        yield f"  {_row(row)}"


def _row(row: Mapping[str, Any]) -> str:
    """A row of a sample; of one that has both sides, only the columns that differ, after its keys."""
    parts = []
    for name, value in row.items():
        other = name.removesuffix(" published")
        if name.endswith(" published") and f"{other} rebuilt" in row:
            if value != row[f"{other} rebuilt"]:
                parts.append(f"{other} {value} -> {row[f'{other} rebuilt']}")
        elif not (name.endswith(" rebuilt") and f"{name.removesuffix(' rebuilt')} published" in row):
            parts.append(f"{name} {_plain(value)}")
    line = ", ".join(parts)
    return line if len(line) <= _CHARACTERS else line[:_CHARACTERS] + " ..."


def _plain(value: Any) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{name} {each}" for name, each in list(value.items())[:_COLUMNS])
    return str(value)
