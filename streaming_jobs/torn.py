"""What a power cut leaves half written, put right before a start: the newest file of a log, never one before it.

Everything is on disk before what relies on it is written (`sinks/durable.py`, `checkpoint_sync.py`), so only what was
being written at that moment can be torn: empty, cut off, or naming files that are not there. Nothing relies on it yet.
It is removed, and the batch is repeated. What more than that is damaged was damaged otherwise, and is refused.
"""

from __future__ import annotations

import json
import shutil
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import structlog

from streaming_jobs import generation as generations
from streaming_jobs.checkpoint import Checkpoint
from streaming_jobs.errors import PreflightRefused
from streaming_jobs.files import sync
from streaming_jobs.generation import StreamRecord
from streaming_jobs.ledger import LedgerEntry, Txn
from streaming_jobs.settings import Settings
from streaming_jobs.sinks.delta import open_sink
from streaming_jobs.sinks.table_log import log_files
from streaming_jobs.stream import Stream
from streaming_jobs.world import all_tables

log = structlog.get_logger()


def mend(settings: Settings, stream: Stream) -> list[Path]:
    """Remove what is torn in the stream's tables and its checkpoint; what that was. The caller holds the lease.

    Raises PreflightRefused for a table whose newest commit has lost files after Spark has noted its batch as done.
    """
    record = generations.load(settings, stream.name)
    if record is None:
        return []
    checkpoint = generations.checkpoint(settings, stream.name, record.generation)
    gone = list(_torn_entry(checkpoint.folder / "commits"))
    for declared, _ in all_tables(stream):
        gone += _mend_table(settings.tables / declared.name, record, checkpoint)
    primary = open_sink(settings, stream.primary, stream.name)
    at = primary.position if primary is not None else None
    done = at.batch if at is not None and at.generation == record.generation else -1
    gone += _mend_plan(checkpoint, done)
    gone += _torn_snapshots(checkpoint.folder / "state")
    for path in gone:
        log.warning("removed what a power cut had left half written", stream=stream.name, path=str(path))
    return gone


def _remove(*paths: Path) -> Iterator[Path]:
    for path in paths:
        if path.exists():
            path.unlink()
            sync(path.parent)
            yield path


def _torn_entry(folder: Path) -> Iterator[Path]:
    """The newest entry of `commits` or `offsets`, if it was cut off; both are text in several lines."""
    newest = _newest(folder)
    if newest is not None and not _whole_entry(folder / str(newest)):
        yield from _remove(folder / str(newest))


def _mend_plan(checkpoint: Checkpoint, done: int) -> Iterator[Path]:
    """The plan of a batch that no table has, if it was cut off or Spark's note on the batch before it was lost."""
    planned = _newest(checkpoint.folder / "offsets")
    committed = _newest(checkpoint.folder / "commits")
    if done < 0 and committed is None and _any_empty(checkpoint.folder):
        shutil.rmtree(checkpoint.folder)  # the first start, before anything was written
        sync(checkpoint.folder.parent)
        yield checkpoint.folder
        return
    if planned is None or planned <= done:
        return
    path = checkpoint.folder / "offsets" / str(planned)
    before = checkpoint.folder / "commits" / str(planned - 1)
    if not _whole_entry(path) or (planned and committed is not None and planned - 1 == done and not before.exists()):
        yield from _remove(path)


def _any_empty(checkpoint: Path) -> bool:
    paths = [checkpoint / "metadata", *(checkpoint / "sources").glob("*/0"), *(checkpoint / "offsets").glob("[0-9]*")]
    return checkpoint.is_dir() and any(not path.is_file() or not path.stat().st_size for path in paths)


def _mend_table(table: Path, record: StreamRecord, checkpoint: Checkpoint) -> Iterator[Path]:
    folder = table / "_delta_log"
    if not folder.is_dir():
        return
    for file in log_files(folder):
        if file.kind == "checkpoint" and not _is_parquet(file.path):
            yield from _remove(file.path)
    hint = folder / "_last_checkpoint"
    if hint.exists() and not _points_somewhere(hint):
        yield from _remove(hint)
    committed = _newest(checkpoint.folder / "commits")
    while commits := [file for file in log_files(folder) if file.kind == "commit"]:
        newest = max(commits, key=lambda file: file.version)
        actions = _actions(newest.path)
        missing = [] if actions is None else _missing(table, actions)
        if actions is not None and not missing:
            return
        if actions is not None and not _unfinished(actions, record, committed):
            raise PreflightRefused(
                f"file {missing[0]} of table {table.name}, which version {newest.version} added, is gone or cut off",
                "put the file back from a copy, or go back to a savepoint (`recourse savepoints list`)",
            )
        checkpoint_file = folder / f"{newest.version:020d}.checkpoint.parquet"
        yield from _remove(newest.path, checkpoint_file, *([hint] if checkpoint_file.exists() else []))


def _actions(commit: Path) -> list[tuple[str, Mapping[str, Any]]] | None:
    """The commit's actions; None when its text was cut off."""
    try:
        lines = [json.loads(line) for line in commit.read_bytes().split(b"\n") if line]
    except ValueError:
        return None
    found = [(kind, action) for line in lines for kind, action in line.items()]
    return found if any(kind == "commitInfo" for kind, _ in found) else None


def _missing(table: Path, actions: list[tuple[str, Mapping[str, Any]]]) -> list[str]:
    """The files that the commit adds and that are not there with all their bytes; those of other places are passed."""
    added = [(str(action["path"]), int(action["size"])) for kind, action in actions if kind == "add"]
    return [path for path, size in added if "://" not in path and _size(table, path) != size]


def _size(table: Path, path: str) -> int | None:
    for name in (path, unquote(path), unquote(unquote(path))):
        if (table / name).exists():
            return (table / name).stat().st_size
    return None


def _unfinished(actions: list[tuple[str, Mapping[str, Any]]], record: StreamRecord, committed: int | None) -> bool:
    """Whether nothing relies on the commit: it is the stream's own, and not of a batch that Spark has as done."""
    text = next(action.get("userMetadata") for kind, action in actions if kind == "commitInfo")
    entry = LedgerEntry.decode(text if isinstance(text, str) else None)
    if entry is None or entry.stream != record.stream:
        return False
    return entry.kind != "batch" or entry.txn > Txn(record.generation, -1 if committed is None else committed)


def _torn_snapshots(state: Path) -> Iterator[Path]:
    """Snapshots of state that Spark was writing beside the stream; it goes on from the one before."""
    for path in sorted(state.rglob("*.zip")):
        if not _whole_snapshot(path):
            yield from _remove(path, path.with_name(f"{path.name}.crc"))


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
    """Whether Spark's entry has all its lines; one in a format that is not known here is not judged."""
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


def _is_parquet(path: Path) -> bool:
    with path.open("rb") as file:
        size = file.seek(0, 2)
        file.seek(max(size - 4, 0))
        return size > 8 and file.read() == b"PAR1"


def _points_somewhere(hint: Path) -> bool:
    try:
        version = int(json.loads(hint.read_bytes())["version"])
    except (ValueError, KeyError, TypeError):
        return False
    return any(hint.parent.glob(f"{version:020d}.checkpoint*"))
