"""The batch that wrote the first failing row: the row's file, the commit that added it, that commit's ledger entry.

A compaction puts the rows of several batches into one file. Then the files that it rewrote are read for the row's key,
as long as they are on disk. A commit that the log no longer has is looked up in the ledger file beside the state, by
the time at which the file was written: a batch's line has its end and its duration.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quality.slice_rows import place
from quality.slices import DataFile, Slice
from quality.table_changes import Change, read_change
from quality.validation import FirstFailing
from streaming_jobs.ledger.entry import LedgerEntry
from streaming_jobs.settings import Settings
from streaming_jobs.state.ledger_file import LedgerFile
from streaming_jobs.state.stream_folder import StreamFolder
from streaming_jobs.text import commands

_CLOCK = 0.002


@dataclass(frozen=True)
class FailingRow:
    """The first failing row of an expectation: its position in the slice, and its key."""

    expectation: str
    position: int
    key: Mapping[str, Any]


@dataclass(frozen=True)
class Origin:
    """The entry of the batch that wrote a row, or in words why it is not known."""

    entry: LedgerEntry | None
    note: str = ""


def find_first(
    settings: Settings, stream: str, chosen: Slice, rows: Iterable[FailingRow], *, upsert: bool = False
) -> tuple[FirstFailing | None, str]:
    """The earliest batch among those that wrote these rows, and a note: how sure it is, or why there is none."""
    log = _Log(chosen.table, chosen.version)
    found: list[tuple[LedgerEntry, FailingRow, str]] = []
    notes: list[str] = []
    for row in rows:
        file = chosen.files[place(row.position)[0]]
        origin = _origin(settings, stream, log, file, row)
        if origin.entry is not None:
            found.append((origin.entry, row, origin.note))
        else:
            notes.append(origin.note)
    if not found:
        return None, next(iter(notes), "")
    entry, row, note = min(found, key=lambda each: each[0].txn)
    unsure = [note] if note else []
    if upsert:
        unsure.append("an upsert rewrites files: the row may be older than the batch that wrote its file")
    if notes:
        unsure.append(f"of other failing rows it is not known: {notes[0]}")
    command = commands.plan(stream, before_first_broken=row.expectation)
    first = FirstFailing(row.expectation, entry.generation, entry.batch, str(entry.code), command)
    return first, "; ".join(unsure)


def newest_code(settings: Settings, stream: str, table: Path, version: int) -> str:
    """The code of the newest batch in a version, as far as log and ledger show it; empty if they do not."""
    for number in range(version, -1, -1):
        if (change := read_change(table, number)) is None:
            break
        if change.entry is not None and change.entry.kind == "batch":
            return str(change.entry.code)
    newest = _ledger(settings, stream).newest(stream)
    return str(newest[0].code) if newest is not None else ""


class _Log:
    """The commits of a table's log, read from a version backwards as far as they are asked for."""

    def __init__(self, table: Path, version: int) -> None:
        self.table = table
        self._next = version
        self._commits: list[Change] = []

    def adding(self, path: str) -> Change | None:
        """The newest commit that added a file, or rewrote others into it; None if the log no longer has it."""
        for known in self._commits:
            if path in known.added or path in known.rewritten:
                return known
        while self._next >= 0 and (change := read_change(self.table, self._next)) is not None:
            self._next -= 1
            self._commits.append(change)
            if path in change.added or path in change.rewritten:
                return change
        return None


def _origin(settings: Settings, stream: str, log: _Log, file: DataFile, row: FailingRow) -> Origin:
    path = str(file.path.relative_to(log.table))
    change = log.adding(path)
    if change is None:
        return _by_time(settings, stream, file)
    if path in change.added:
        return _of_commit(change, stream)
    originals = _originals(log, change)
    if originals is None:
        return Origin(None, f"its file was compacted in version {change.version}, of files the log no longer shows")
    batches = {entry.txn: entry for _, added in originals if (entry := _of_commit(added, stream).entry) is not None}
    if len(batches) == 1 and len({added.version for _, added in originals}) == 1:
        return Origin(next(iter(batches.values())))
    for name, added in originals:
        if row.key and _has(log.table / name, row.key):
            return _of_commit(added, stream)
    first, last = (f"{end}" for end in (min(batches, default="?"), max(batches, default="?")))
    return Origin(None, f"its file was compacted: the row came with one of the batches from {first} to {last}")


def _originals(log: _Log, change: Change) -> list[tuple[str, Change]] | None:
    """The files behind a compaction that batches wrote, oldest first; None if the log no longer shows all."""
    files: list[tuple[str, Change]] = []
    for path in change.gone:
        added = log.adding(path)
        if added is None:
            return None
        if path in added.added:
            files.append((path, added))
        elif (before := _originals(log, added)) is not None:
            files += before
        else:
            return None
    return sorted(files, key=lambda each: each[1].version)


def _of_commit(change: Change, stream: str) -> Origin:
    entry = change.entry
    if entry is None or entry.stream != stream:
        return Origin(None, f"version {change.version} wrote it, and that is no commit of stream {stream}")
    if entry.kind == "batch":
        return Origin(entry)
    return Origin(entry, f"version {change.version} is a {entry.kind} up to that batch, not the batch itself")


def _by_time(settings: Settings, stream: str, file: DataFile) -> Origin:
    """The batch during which the file was written, by the ledger file; a compaction is between batches."""
    at = file.modified / 1000
    unknown = Origin(None, "the table's log no longer has the version that added its file")
    for line in (raw.read() for day in _ledger(settings, stream).days(stream) for raw in reversed(day)):
        if line.at + _CLOCK < at:
            return unknown
        begun = None if line.seconds is None else line.at - line.seconds - _CLOCK
        if begun is not None and begun <= at and file.rows <= sum(line.entry.rows.values()):
            return Origin(line.entry, "by the time at which its file was written; the table's log no longer has it")
    return unknown


def _has(file: Path, key: Mapping[str, Any]) -> bool:
    """True if a file, which a vacuum may have removed, has a row with this key."""
    import pyarrow as pa
    import pyarrow.compute as pc
    import pyarrow.parquet as pq

    try:
        reader = pq.ParquetFile(file)
        names = [column for column in key if column in reader.schema_arrow.names]
        rows = reader.read(columns=names)
    except (FileNotFoundError, pa.ArrowException):
        return False
    mask: Any = None
    for column in names:
        values, wanted = rows[column], key[column]
        same = pc.is_null(values) if wanted is None else pc.equal(values, pa.scalar(wanted, values.type))
        mask = same if mask is None else pc.and_(mask, same)
    return bool(names) and bool(pc.any(mask).as_py())


def _ledger(settings: Settings, stream: str) -> LedgerFile:
    return LedgerFile(StreamFolder.of(settings, stream).ledger)


def first_rows(
    outcomes: Sequence[tuple[str, Sequence[int]]], rows: Mapping[int, Mapping[str, Any]], key: Sequence[str]
) -> list[FailingRow]:
    """One failing row for each file and expectation, with its key."""
    first: dict[tuple[str, int], FailingRow] = {}
    for name, positions in outcomes:
        for at in positions:
            values = rows.get(at, {})
            row = FailingRow(name, at, {column: values[column] for column in key if column in values})
            first.setdefault((name, place(at)[0]), row)
    return list(first.values())
