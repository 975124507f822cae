"""Savepoints: a stream as it was after one batch. Rewinding, undoing and aborting all mean: go to a savepoint.

    <state>/<stream>/savepoints/g0001-b000000041/savepoint.json   written last: without it there is no savepoint
                                                 files.json.gz    the files of each table, as its log adds them
                                                 checkpoint/      Spark's checkpoint, cut after the batch
    <tables>/<table>/_savepoints/<stream>-g0001-b000000041/...    hard links of these files

Links keep a file's bytes whoever removes its name: compaction, clean-up, or a VACUUM by hand. Nothing is copied but
log entries, so a savepoint costs what was rewritten since. The name says generation and batch: taking it twice is
taking it once.
"""

from __future__ import annotations

import gzip
import json
import re
import shutil
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import structlog
from deltalake import DeltaTable
from deltalake.exceptions import DeltaError

from streaming_jobs.errors import PreflightRefused, RecourseError, UsageError
from streaming_jobs.files import hard_link, private_folder, sync, sync_files, write_json
from streaming_jobs.ledger import NO_CODE, CodeVersion, Txn
from streaming_jobs.positions import OffsetRange, TopicOffsets, decode
from streaming_jobs.settings import Settings
from streaming_jobs.sinks.delta.log import walk
from streaming_jobs.sinks.delta.table_files import TableFile, on_disk, table_files
from streaming_jobs.state import stream_record
from streaming_jobs.state.checkpoint_cut import cut
from streaming_jobs.state.savepoint_retention import expired, files_below, too_large
from streaming_jobs.state.stream_folder import StreamFolder
from streaming_jobs.state.stream_record import StreamRecord

Reason = Literal["time", "code", "purpose", "recovery"]
log = structlog.get_logger()
_FORMAT = 1
_NAME = re.compile(r"g\d{4,}-b\d{9,}")
_DAY = 86_400.0
_MB = 1 << 20
_ATTEMPTS = 3


@dataclass(frozen=True)
class SavedTable:
    """One table of a savepoint: its Delta id, the version whose files are kept, its columns, and how many files."""

    name: str
    table_id: str
    version: int
    schema: str
    partition_by: tuple[str, ...]
    files: int


@dataclass(frozen=True)
class Savepoint:
    """What savepoint.json says. `ends` by topic and partition; `taken_at` in seconds since 1970."""

    stream: str
    generation: int
    batch: int
    taken_at: float
    reason: Reason
    note: str
    ends: TopicOffsets
    topic_ids: Mapping[str, str]
    code: CodeVersion
    state_fingerprint: Mapping[str, str]
    tables: tuple[SavedTable, ...]

    @property
    def id(self) -> str:
        """Its name."""
        return name_of(Txn(self.generation, self.batch))

    @property
    def txn(self) -> Txn:
        """The batch it was taken after."""
        return Txn(self.generation, self.batch)

    @property
    def offsets(self) -> tuple[OffsetRange, ...]:
        """Where that batch ended, as a ledger entry names it."""
        return tuple(OffsetRange(topic, self.topic_ids[topic], {}, dict(ends)) for topic, ends in self.ends.items())


@dataclass(frozen=True)
class Cost:
    """What a savepoint occupies: files and bytes, and of the bytes those that nothing else holds any more."""

    files: int
    size: int
    alone: int


def name_of(txn: Txn) -> str:
    """The savepoint's name for a batch."""
    return f"g{txn.generation:04d}-b{txn.batch:09d}"


def folder(settings: Settings, stream: str) -> Path:
    """Where a stream's savepoints lie."""
    return StreamFolder.of(settings, stream).savepoints


def links(settings: Settings, stream: str, table: str, name: str) -> Path:
    """Where a savepoint's links to a table's files lie."""
    return settings.tables / table / "_savepoints" / f"{stream}-{name}"


def checkpoint_of(settings: Settings, savepoint: Savepoint) -> Path:
    """The savepoint's checkpoint."""
    return folder(settings, savepoint.stream) / savepoint.id / "checkpoint"


def take(settings: Settings, record: StreamRecord, batch: int, reason: Reason, note: str = "") -> Savepoint:
    """Keep everything as it was after a batch of the current generation; one that is there already is returned.

    Raises UsageError or PreflightRefused when the checkpoint or a table no longer shows that moment.
    """
    txn = Txn(record.generation, batch)
    if (found := find(settings, record.stream, name_of(txn))) is not None:
        return found
    for attempt in range(_ATTEMPTS):
        try:
            return _take(settings, record, txn, reason, note)
        except FileNotFoundError:  # a driver at work has just removed or rewritten a file; then it lists another one
            if attempt + 1 == _ATTEMPTS:
                raise
    raise AssertionError


def savepoints(settings: Settings, stream: str) -> list[Savepoint]:
    """All savepoints of a stream, oldest first."""
    found = (_load(path) for path in folder(settings, stream).glob("g*-b*/savepoint.json"))
    return sorted((s for s in found if s is not None), key=lambda savepoint: savepoint.txn)


def find(settings: Settings, stream: str, name: str) -> Savepoint | None:
    """The savepoint of that name."""
    return _load(folder(settings, stream) / name / "savepoint.json") if _NAME.fullmatch(name) else None


def files_of(settings: Settings, savepoint: Savepoint) -> dict[str, list[TableFile]]:
    """The files of each table."""
    path = folder(settings, savepoint.stream) / savepoint.id / "files.json.gz"
    with gzip.open(path, "rt", encoding="utf-8") as packed:
        return {table: [TableFile(**file) for file in files] for table, files in json.load(packed).items()}


def drop(settings: Settings, stream: str, name: str) -> None:
    """Remove a savepoint; its record goes first, so that a kill leaves rubbish and no half savepoint."""
    place = folder(settings, stream) / name
    (place / "savepoint.json").unlink(missing_ok=True)
    for table in _linked_tables(settings, stream, name):
        shutil.rmtree(table, ignore_errors=True)
    shutil.rmtree(place, ignore_errors=True)


def drop_outdated(settings: Settings, record: StreamRecord, batch: int) -> None:
    """Drop the savepoint of a batch if a table has changed since without the stream: an accepted commit came later."""
    txn = Txn(record.generation, batch)
    kept = find(settings, record.stream, name_of(txn))
    if kept is None:
        return
    for table in kept.tables:
        path = settings.tables / table.name
        now = version_after(path, record.stream, txn)
        since = [c for c in walk(path) if table.version < c.version <= now]
        if any(c.changes_data and (c.entry is None or c.entry.stream != record.stream) for c in since):
            drop(settings, record.stream, kept.id)
            return


def keep_for_recovery(settings: Settings, savepoint: Savepoint) -> None:
    """Let a savepoint that age would take live as long as those of recoveries."""
    if savepoint.reason in ("time", "code"):
        kept = {**asdict(savepoint), "reason": "recovery"}
        write_json(folder(settings, savepoint.stream) / savepoint.id / "savepoint.json", {"format": _FORMAT, **kept})


def prune(settings: Settings, stream: str) -> list[str]:
    """Drop what is past its age or too large together, and what a kill left half made; the names that went."""
    kept = savepoints(settings, stream)
    gone = [s.id for s in expired(kept, settings.savepoint, time.time())]
    if settings.savepoint.max_mb:
        left = [s for s in kept if s.id not in gone]
        gone += [s.id for s in beyond(settings, left, settings.savepoint.max_mb * _MB)]
    begun = (p for p in folder(settings, stream).glob("g*-b*") if p.name not in {s.id for s in kept})
    gone += [path.name for path in begun if time.time() - path.stat().st_mtime > _DAY / 24]
    for name in gone:
        drop(settings, stream, name)
    return gone


def beyond(settings: Settings, kept: Sequence[Savepoint], max_bytes: int) -> list[Savepoint]:
    """The oldest of these that have to go so that what only savepoints hold is at most `max_bytes`."""
    return too_large(kept, {savepoint.id: _places(settings, savepoint) for savepoint in kept}, max_bytes)


def cost(settings: Settings, savepoint: Savepoint) -> Cost:
    """What it occupies on disk."""
    found = list(files_below(_places(settings, savepoint)))
    return Cost(len(found), sum(f.st_size for f in found), sum(f.st_size for f in found if f.st_nlink == 1))


def _places(settings: Settings, savepoint: Savepoint) -> list[Path]:
    """Where its files lie."""
    tables = [links(settings, savepoint.stream, table.name, savepoint.id) for table in savepoint.tables]
    return [folder(settings, savepoint.stream) / savepoint.id, *tables]


class PeriodicSavepoints:
    """Takes a stream's savepoints while it runs: called between two batches, it looks at the clock."""

    def __init__(self, settings: Settings, record: StreamRecord) -> None:
        self._settings, self._record = settings, record
        newest = max((s.taken_at for s in savepoints(settings, record.stream)), default=None)
        self._last = newest if newest is not None else time.time()

    def after(self, batch: int) -> None:
        """Take one after this batch if it is time; a savepoint that fails is told and stops no stream."""
        every = self._settings.savepoint.every.total_seconds()
        if batch < 0 or not every or time.time() - self._last < every:
            return
        self._last = time.time()
        try_take(self._settings, self._record, batch, "time")


def try_take(settings: Settings, record: StreamRecord, batch: int, reason: Reason, note: str = "") -> Savepoint | None:
    """Take one, and drop what is past its age; the stream goes on without it, so a failure is told in the log."""
    taken = None
    try:
        taken = take(settings, record, batch, reason, note)
        prune(settings, record.stream)
        stream_record.prune(settings, record, settings.savepoint.keep_generations)
    except (OSError, RecourseError, DeltaError, ValueError, KeyError) as error:
        what = "no savepoint was taken" if taken is None else "old savepoints and generations stay for now"
        log.warning(what, stream=record.stream, batch=batch, reason=str(error)[:300])
    if taken is not None:
        log.info("savepoint", stream=record.stream, savepoint=taken.id, reason=reason)
    return taken


def version_after(table: Path, stream: str, txn: Txn) -> int:
    """The table's version once the batch was in it, with whatever upkeep came before the stream's next commit.

    Raises PreflightRefused when the log does not reach back to it.
    """
    version: int | None = None
    oldest = -1
    for commit in walk(table):
        version = commit.version if version is None else version
        oldest = commit.version
        entry = commit.entry
        if entry is None or entry.stream != stream or entry.kind not in ("batch", "fence", "publish"):
            continue
        if entry.kind == "publish" and entry.txn > txn:
            raise PreflightRefused(
                f"{txn} was replayed by plan {entry.plan}: no version of table {table.name} shows it alone",
                f"choose {entry.txn} or a later batch, or a savepoint",
            )
        if entry.txn <= txn:
            return version
        version = commit.version - 1
    if version is None or oldest > 0:
        raise PreflightRefused(
            f"the log of table {table.name} no longer shows {txn}", "choose a later batch, or a savepoint"
        )
    return version


def _take(settings: Settings, record: StreamRecord, txn: Txn, reason: Reason, note: str) -> Savepoint:
    name = name_of(txn)
    place = private_folder(folder(settings, record.stream)) / name
    private_folder(place)
    checkpoint = StreamFolder.of(settings, record.stream).checkpoint(txn.generation)
    cut(checkpoint, txn.batch, place / "checkpoint")
    files: dict[str, list[TableFile]] = {}
    tables = []
    for bound in record.tables:
        path = settings.tables / bound.name
        version = version_after(path, record.stream, txn)
        files[bound.name] = list(table_files(path, version).values())
        _link(path, files[bound.name], links(settings, record.stream, bound.name, name))
        handle = DeltaTable(path, version=version)
        tables.append(
            SavedTable(
                name=bound.name,
                table_id=str(handle.metadata().id),
                version=version,
                schema=handle.schema().to_json(),
                partition_by=tuple(handle.metadata().partition_columns),
                files=len(files[bound.name]),
            )
        )
    code = next((c for c in reversed(record.code) if c.since <= txn), None)
    savepoint = Savepoint(
        stream=record.stream,
        generation=txn.generation,
        batch=txn.batch,
        taken_at=time.time(),
        reason=reason,
        note=note,
        ends={topic: dict(ends) for topic, ends in checkpoint.end(txn.batch).items()},
        topic_ids={topic.name: topic.topic_id for topic in record.topics},
        code=code.version if code else NO_CODE,
        state_fingerprint=dict(record.state_fingerprint),
        tables=tuple(tables),
    )
    with gzip.open(place / "files.json.gz", "wt", encoding="utf-8") as packed:
        json.dump({table: [asdict(file) for file in listed] for table, listed in files.items()}, packed)
    sync(place / "files.json.gz")
    write_json(place / "savepoint.json", {"format": _FORMAT, **asdict(savepoint)})
    return savepoint


def _link(table: Path, files: Iterable[TableFile], target: Path) -> None:
    """Link a table's files, and have the links on disk."""
    made = []
    for file in files:
        source = on_disk(table, file.path)
        made.append(target / source.relative_to(table))
        hard_link(source, made[-1])
    sync_files(made, table)


def _linked_tables(settings: Settings, stream: str, name: str) -> Iterator[Path]:
    if settings.tables.is_dir():
        yield from settings.tables.glob(f"*/_savepoints/{stream}-{name}")


def _load(path: Path) -> Savepoint | None:
    try:
        value: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except ValueError as error:
        raise PreflightRefused(
            f"{path} cannot be read: {error}", "remove its folder; that savepoint is lost"
        ) from error
    if value.pop("format") != _FORMAT:
        raise UsageError(f"{path} was written by a newer version", "use the newer recourse-streams")
    ends = decode(value.pop("ends"))
    tables = tuple(SavedTable(**{**t, "partition_by": tuple(t["partition_by"])}) for t in value.pop("tables"))
    return Savepoint(**{**value, "ends": ends, "tables": tables, "code": CodeVersion(*value["code"])})
