"""The batch that wrote the first failing row, by the row's file (`streaming_jobs/state/provenance.py`).

Of a file that a compaction made, the files that it rewrote are read for the row's key, as long as they are on disk.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quality.sample import SampleFile, SuiteSample
from quality.sample_rows import file_and_row
from quality.validation import FirstFailing
from streaming_jobs.ledger.entry import LedgerEntry
from streaming_jobs.settings import Settings
from streaming_jobs.state.ledger_file import LedgerFile
from streaming_jobs.state.provenance import Change, TableLog, batch_during, read_change
from streaming_jobs.state.stream_folder import StreamFolder
from streaming_jobs.text import commands


@dataclass(frozen=True)
class FailingRow:
    """The first failing row of an expectation: its position in the sample, and its key."""

    expectation: str
    position: int
    key: Mapping[str, Any]


RowOrigin = tuple[LedgerEntry | None, str]
"""The entry of the batch that wrote a row, and how sure that is; or None, and why it is not known."""


def find_first(
    settings: Settings, stream: str, chosen: SuiteSample, rows: Iterable[FailingRow], *, upsert: bool = False
) -> tuple[FirstFailing | None, str]:
    """The earliest batch among those that wrote these rows, and a note: how sure it is, or why there is none."""
    log = TableLog(chosen.table, chosen.version)
    found: list[tuple[LedgerEntry, FailingRow, str]] = []
    notes: list[str] = []
    for row in rows:
        file = chosen.files[file_and_row(row.position)[0]]
        entry, note = _origin(settings, stream, log, file, row)
        if entry is None:
            notes.append(note)
        else:
            found.append((entry, row, note))
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


def _origin(settings: Settings, stream: str, log: TableLog, file: SampleFile, row: FailingRow) -> RowOrigin:
    path = str(file.path.relative_to(log.table))
    change = log.adding(path)
    if change is None:
        entry = batch_during(_ledger(settings, stream), stream, file.modified, file.rows)
        how = "by the time at which its file was written; the table's log no longer has it"
        return entry, how if entry is not None else "the table's log no longer has the version that added its file"
    originals = log.originals(path)
    if originals is None:
        return None, f"its file was compacted in version {change.version}, of files the log no longer shows"
    if path in change.added:
        return _of_commit(change, stream)
    batches = {entry.txn: entry for _, added in originals if (entry := _of_commit(added, stream)[0]) is not None}
    if len(batches) == 1 and len({added.version for _, added in originals}) == 1:
        return next(iter(batches.values())), ""
    for name, added in originals:
        if row.key and _has(log.table / name, row.key):
            return _of_commit(added, stream)
    first, last = (f"{end}" for end in (min(batches, default="?"), max(batches, default="?")))
    return None, f"its file was compacted: the row came with one of the batches from {first} to {last}"


def _of_commit(change: Change, stream: str) -> RowOrigin:
    entry = change.entry
    if entry is None or entry.stream != stream:
        return None, f"version {change.version} wrote it, and that is no commit of stream {stream}"
    if entry.kind == "batch":
        return entry, ""
    return entry, f"version {change.version} is a {entry.kind} up to that batch, not the batch itself"


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
            first.setdefault((name, file_and_row(at)[0]), row)
    return list(first.values())
