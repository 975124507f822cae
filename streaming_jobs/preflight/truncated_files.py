"""Removal of half-written files after a power cut, before a start: the newest file of a log, never one before it.

Every file is synced before a file that relies on it is written (`sinks/delta/log.py`, `checkpoint.py`). So only
the files that were being written at that moment can be truncated: empty, cut off, or naming files that do not exist.
Nothing relies on them yet: they are removed, and the batch is repeated. Any other damage has another cause, and the
start is refused.

Only the ledger file is not synced: its last lines may be missing, and are added again from the primary table's log
before a later batch makes a hole of them.
"""

from __future__ import annotations

import json
import shutil
import zipfile
from collections.abc import Iterator
from pathlib import Path

import structlog

from streaming_jobs.ledger.entry import LedgerEntry, Txn
from streaming_jobs.preflight.snapshot import ledger_file
from streaming_jobs.settings import Settings
from streaming_jobs.sinks.stored import ReliedOn, newest
from streaming_jobs.sinks.tables import all_tables, open_table, store_of
from streaming_jobs.state import stream_record
from streaming_jobs.state.stream_folder import StreamFolder
from streaming_jobs.state.stream_record import StreamRecord
from streaming_jobs.storage.files import remove_files, sync
from streaming_jobs.stream import Stream

log = structlog.get_logger()
_START = Txn(0, -1)


def repair(settings: Settings, stream: Stream, reached: Txn | None = None) -> list[Path]:
    """Remove truncated files of the stream's tables and its checkpoint; returns them. The caller holds the lease.

    Lines that the ledger file has lost are added again.

    `reached` is for a recovery: the position to which it has brought the tables for certain. Without it, truncated
    files that a recovery was writing stay.
    Raises PreflightRefused for a table whose newest commit is damaged although something relies on it.
    """
    record = stream_record.load(settings, stream.name)
    if record is None:
        return []
    folder = StreamFolder.of(settings, stream.name).checkpoint(record.generation).folder
    if not isinstance(folder, Path):  # a store has whole objects
        _add_lost_lines(settings, stream)
        return []
    gone = list(_truncated_entry(folder / "commits"))
    for declared, _ in all_tables(stream):
        gone += store_of(declared).truncated_copies(settings, declared)
    gone += remove_files(*_truncated_commits(settings, stream, record, _newest(folder / "commits"), reached))
    primary = open_table(settings, stream.primary, stream.name)
    at = primary.position if primary is not None else None
    done = at.batch if at is not None and at.generation == record.generation else -1
    gone += _repair_plan(folder, done)
    gone += _truncated_snapshots(folder / "state")
    for path in gone:
        log.warning("removed what a power cut had left half written", stream=stream.name, path=str(path))
    _add_lost_lines(settings, stream)
    return gone


def _add_lost_lines(settings: Settings, stream: Stream) -> None:
    """Add the ledger lines of batches after the ledger's newest one that only the primary table's log has."""
    ledger, name = ledger_file(settings, stream.name), stream.primary.name
    newest_line = ledger.newest(stream.name)
    known, versions = (_START, {}) if newest_line is None else (newest_line[0].txn, dict(newest_line[1]))
    lost: list[tuple[int, LedgerEntry]] = []
    for commit in store_of(stream.primary).commits(settings, stream.primary):
        entry = commit.entry
        if entry is None or entry.stream != stream.name or entry.kind not in ("batch", "publish"):
            continue
        if entry.txn <= known:
            break
        if entry.kind == "batch":
            lost.append((commit.version, entry))
    for version, entry in reversed(lost):
        log.warning("added a lost line of the ledger", stream=stream.name, batch=str(entry.txn))
        ledger.append(entry, {**versions, name: version})
    ledger.flush()


def _truncated_commits(
    settings: Settings, stream: Stream, record: StreamRecord, committed: int | None, reached: Txn | None
) -> list[Path]:
    """The files of truncated commits in the stream's tables, in the order in which they are to be removed.

    `committed` is Spark's last committed batch, `reached` the position to which a calling recovery has brought all
    tables. Every table is checked before the first file is removed. Raises PreflightRefused for a commit that is not
    whole and that something relies on.
    """
    everywhere = reached or _START
    known_at = {stream.primary.name: Txn(record.generation, -1 if committed is None else committed)}
    gone: list[Path] = []
    for declared, role in all_tables(stream):
        name, store = declared.name, store_of(declared)
        relied = ReliedOn(
            at=max(known_at.get(name, _START), everywhere),
            accepted=record.accepts(name),
            bound=record.table(name) is not None,
            generation=record.generation,
            recovering=reached is not None,
        )
        end = store.truncated_end(settings, declared, stream.name, relied)
        if end is None:
            continue
        gone += end.files
        if role == "primary":
            commit, _ = newest(store.commits(settings, declared, up_to=end.whole), stream.name)
            known_at |= _listed(record, name, commit.entry if commit is not None else None)
    return gone


def _listed(record: StreamRecord, primary: str, entry: LedgerEntry | None) -> dict[str, Txn]:
    """The positions of the other tables by the primary's newest entry; a fence is written to them first."""
    if entry is None:
        return {}
    if entry.kind == "fence":
        return {bound.name: entry.txn for bound in record.tables if bound.name != primary}
    return {name: Txn.of(number) for name, number in entry.txns.items()}


def _truncated_entry(folder: Path) -> Iterator[Path]:
    """Remove the newest entry of `commits` or `offsets` if it was truncated; both are text in several lines."""
    newest = _newest(folder)
    if newest is not None and not _whole_entry(folder / str(newest)):
        yield from remove_files(folder / str(newest))


def _repair_plan(folder: Path, done: int) -> Iterator[Path]:
    """Remove the plan of a batch that no table has, if it, or the `commits` entry before it, is truncated."""
    planned = _newest(folder / "offsets")
    committed = _newest(folder / "commits")
    if done < 0 and committed is None and _any_empty(folder):
        shutil.rmtree(folder)  # the first start, before anything was written
        sync(folder.parent)
        yield folder
        return
    if planned is None or planned <= done:
        return
    path = folder / "offsets" / str(planned)
    # Spark writes one `commits` entry at a time, so only that of the batch before may be lost.
    lost = planned - 1 == done and planned - 2 == (-1 if committed is None else committed)
    if not _whole_entry(path) or (planned and lost):
        yield from remove_files(path)


def _any_empty(checkpoint: Path) -> bool:
    paths = [checkpoint / "metadata", *(checkpoint / "sources").glob("*/0"), *(checkpoint / "offsets").glob("[0-9]*")]
    return checkpoint.is_dir() and any(not path.is_file() or not path.stat().st_size for path in paths)


def _truncated_snapshots(state: Path) -> Iterator[Path]:
    """Remove truncated snapshots of state, which Spark writes in the background; it continues from the one before."""
    for path in sorted(state.rglob("*.zip")):
        if not _whole_snapshot(path):
            yield from remove_files(path, path.with_name(f"{path.name}.crc"))


def _whole_snapshot(path: Path) -> bool:
    try:
        with zipfile.ZipFile(path) as packed:
            _, _, text = packed.read("metadata").decode().partition("\n")
    except (zipfile.BadZipFile, KeyError):
        return False
    tables = [path.parent / "SSTs" / file["dfsSstFileName"] for file in json.loads(text)["sstFiles"]]
    return all(table.is_file() and table.stat().st_size for table in tables)


def _newest(folder: Path) -> int | None:
    return max((int(path.name) for path in folder.glob("[0-9]*") if path.name.isdigit()), default=None)


def _whole_entry(path: Path) -> bool:
    """True if Spark's entry has all its lines, or is in a format that is not known here."""
    version, _, rest = path.read_text(encoding="utf-8", errors="replace").rstrip("\n").partition("\n")
    if rest and version not in ("v1", "v2"):
        return True
    return bool(rest) and all(_is_json(line) for line in rest.split("\n") if line != "-")


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except ValueError:
        return False
    return True
