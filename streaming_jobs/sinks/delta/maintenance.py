"""The maintenance that keeps a table fast and its disk use bounded: compaction, removal of unlisted files, a short log.

All of it runs in the stream's driver between two batches, so nothing else writes the table meanwhile; a driver whose
lease another driver has taken over deletes nothing (`DeltaSink.check_epoch`). The commits of upkeep change no rows and
say so in their ledger entry. The batch is committed by then, so no failure here ends the stream: if another writer's
commit comes first, the disk is full or the log is damaged, the task is put off with a warning and tried again later.
The part of the log that preflight reads stays: the stream's newest entry and all later commits.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING

import structlog
from deltalake.exceptions import DeltaError

from streaming_jobs.declare.columns import DELETED_AT_COLUMN
from streaming_jobs.errors import RecourseError
from streaming_jobs.ledger.entry import LedgerEntry
from streaming_jobs.settings import TableSettings
from streaming_jobs.sinks.delta import column_bounds, orphan_files, retained
from streaming_jobs.sinks.delta.log import newest, noted
from streaming_jobs.sinks.delta.log_cleanup import LogFile, UnreadLog, bounded, expired, log_files
from streaming_jobs.sinks.stored import Unread, no_readers
from streaming_jobs.storage.files import sync_files
from streaming_jobs.storage.locations import StorePath, remove_files

if TYPE_CHECKING:
    from streaming_jobs.sinks.delta.sink import DeltaSink

log = structlog.get_logger()

_LOOK_EVERY = 50
_SWEEP_EVERY = 60.0
_SWEEP_STORE_EVERY = 900.0
"""Seconds between listings of a table on a store, which asks for a thousand objects at a time."""
_SWEEP_SHARE = 0.01
_LOOK_BYTES = 4
"""Commits may remove this part (one in four) of `deleted_files_max_mb`; then unlisted files are looked for at once."""
_LEVELS = (64, 8, 1)
_CROWD = 8


def crowded(files: Iterable[tuple[object, int]], *, enough: int, target: int) -> int | None:
    """The size in bytes up to which files are worth compacting now, or None; `files` are (partition, bytes).

    A table that grows in small files would rewrite nearly all of its rows at each compaction if all files below
    `target` counted alike. So there are three sizes, `target` / 64, / 8 and / 1, and a file of half a size has reached
    it. Files that have not reached the first are compacted to it when there are `enough` in partitions with several
    of them, and those between two sizes when one partition has 8: a row is rewritten a few times in its life.
    """
    sizes: dict[object, list[int]] = {}
    for partition, size in files:
        sizes.setdefault(partition, []).append(size)
    chosen, reached = None, 0
    for level in (target // share for share in _LEVELS):
        counts = [sum(1 for size in partition if reached <= size < level // 2) for partition in sizes.values()]
        if (max(counts, default=0) >= _CROWD) if reached else (sum(n for n in counts if n > 1) >= enough):
            chosen = level
        reached = level // 2
    return chosen


@dataclass
class TableMaintenance:
    """The maintenance of one table; `after_commit` is called after each of the stream's commits.

    `forgets` is the time for which a table of remembered deletes keeps them; None for any other table. `unread` gives
    the versions that each stream that reads the table still needs: they and their files stay, within
    `unread_retention` and `unread_max_mb`.
    """

    sink: DeltaSink
    settings: TableSettings
    generation: int
    forgets: timedelta | None = None
    unread: Unread = no_readers
    put_off: Mapping[str, str] = field(default_factory=dict)
    """Tasks that failed when they were last tried: name -> a sentence with the reason."""
    _kept: UnreadLog = field(init=False)
    _commits: int = 0
    _removed_bytes: int = 0
    _sweep_at: float = field(default_factory=lambda: time.monotonic() + _SWEEP_EVERY)
    _forget_at: float = 0.0

    def __post_init__(self) -> None:
        self._kept = UnreadLog(self.sink.path)

    @property
    def name(self) -> str:
        return self.sink.name

    def after_commit(self) -> None:
        """Every 50 commits: compact if there are enough small files, shorten the log, remove unlisted files.

        Unlisted files are looked for at most once per minute and for at most 1% of the time. They are looked for at
        once when commits have removed a quarter of `deleted_files_max_mb`: an upsert can rewrite a whole table.
        """
        self._commits += 1
        many = max((self.settings.deleted_files_max_mb << 20) // _LOOK_BYTES, 1)
        if self.sink.removed_bytes - self._removed_bytes >= many:
            self._removed_bytes = self.sink.removed_bytes
            self.remove_unlisted()
        if self._commits % _LOOK_EVERY:
            return
        if self.forgets is not None and time.monotonic() >= self._forget_at:
            self.forget(self.forgets)
            self._forget_at = time.monotonic() + max(_SWEEP_EVERY, self.forgets.total_seconds() * _SWEEP_SHARE)
        if self.settings.compact_after_files and self.sink.direct:
            self._or_put_off("compaction", self._compact_crowded)
        if time.monotonic() >= self._sweep_at:
            began = time.monotonic()
            self.remove_unlisted()
            ended = time.monotonic()
            every = _SWEEP_STORE_EVERY if isinstance(self.sink.path, StorePath) else _SWEEP_EVERY
            self._sweep_at = ended + max(every, (ended - began) / _SWEEP_SHARE)
        self.shorten_log()

    def compaction_size(self) -> int | None:
        """The size in bytes below which files should be compacted now; None if there are few."""
        actions = self.sink.handle.get_add_actions(flatten=True)
        sizes = actions["size_bytes"].to_pylist()
        partitions: Iterable[object] = [()] * len(sizes)
        if columns := [actions[f"partition.{name}"].to_pylist() for name in self.sink.declared.partition_by]:
            partitions = zip(*columns, strict=True)
        return crowded(
            zip(partitions, sizes, strict=True),
            enough=self.settings.compact_after_files,
            target=self.settings.target_file_mb << 20,
        )

    def compact(self, size: int | None = None) -> int:
        """Rewrite files below `size` bytes (default: the target size of files) into larger ones with the same rows.

        Returns the number of files that were replaced.
        """
        return self._or_put_off("compaction", lambda: self._compact(size or self.settings.target_file_mb << 20))

    def _compact_crowded(self) -> int:
        size = self.compaction_size()
        return self._compact(size) if size else 0

    def _compact(self, size: int) -> int:
        began = time.monotonic()
        self.sink.check_epoch()
        metrics = self.sink.handle.optimize.compact(
            target_size=size,
            writer_properties=column_bounds.writer_properties(self.sink.schema, "ZSTD"),
            commit_properties=noted(self._entry("compaction"), retries=0),
        )
        self.sink.update()
        self.sink.sync()
        log.info(
            "compacted",
            table=self.sink.name,
            files_before=metrics["numFilesRemoved"],
            files_after=metrics["numFilesAdded"],
            seconds=round(time.monotonic() - began, 2),
        )
        return int(metrics["numFilesRemoved"])

    def shorten_log(self) -> int:
        """Delete files past their retention from the table's log; returns their number.

        Oldest first, so that a kill at any moment leaves the log without a gap; on a store there may be one among the
        files to be deleted, which a checkpoint replaces.
        """
        return self._or_put_off("shortening the log", self._shorten_log)

    def _shorten_log(self) -> int:
        place, _ = newest(self.sink.path, self.sink.stream)
        files = list(log_files(self.sink.path / "_delta_log"))
        first = self._first_unread(files)
        gone = expired(
            files,
            now=time.time(),
            retention=self.settings.log_retention,
            versions=self.settings.log_versions,
            needed=0 if place is None else place.version,
        )
        if gone:
            self.sink.check_epoch()
            self._sync_checkpoints()
        self._kept.keep(gone, first)
        remove_files([file.path for file in gone], self.sink.check_epoch)
        left = set(files).difference(gone)
        self._kept.trim(first, min((file.version for file in left if file.kind == "commit"), default=0))
        return len(gone)

    def remove_unlisted(self) -> int:
        """Delete files that no version lists and that are past their retention; returns their number.

        Only for tables that deltalake may write: it may not know every file of others, such as deletion vectors.
        Nothing is committed, so the log of an idle table does not grow.
        """
        return self._or_put_off("removing unlisted files", self._remove_unlisted) if self.sink.direct else 0

    def _remove_unlisted(self) -> int:
        now = time.time()
        retention = self.settings.deleted_file_retention
        self.sink.update()
        live = self.sink.handle.get_add_actions()["path"].to_pylist()
        kept = self._kept_for_readers()
        files = [file for file in orphan_files.find(self.sink.path, live) if file.name not in kept]
        stored = isinstance(self.sink.path, StorePath)
        gone = orphan_files.due(
            files,
            now=now,
            retention=max(retention, orphan_files.AT_LEAST_ON_STORES) if stored else retention,
            max_bytes=self.settings.deleted_files_max_mb << 20,
            at_least=orphan_files.AT_LEAST_ON_STORES if stored else orphan_files.AT_LEAST,
        )
        if isinstance(self.sink.path, StorePath) and gone:
            saved = retained.names(self.sink.path)  # after the choice: `retained.py` says why
            gone = [file for file in gone if file.name not in saved]
        remove_files([file.path for file in gone], self.sink.check_epoch)
        orphan_files.remove_empty_folders(self.sink.path, before=now - retention.total_seconds())
        if gone:
            log.info("removed unlisted files", table=self.sink.name, files=len(gone), of=len(files))
        return len(gone)

    def _first_unread(self, files: Iterable[LogFile]) -> int | None:
        """The first version that stays for streams that read the table, within the bounds of the settings."""
        needs = self.unread()
        if not needs:
            return None
        return bounded(
            self._kept.before(files),
            needs,
            now=time.time(),
            retention=self.settings.unread_retention,
            max_bytes=self.settings.unread_max_mb << 20,
            removed=lambda commit: self._kept.removal(commit).size,
        )

    def _kept_for_readers(self) -> frozenset[str]:
        """The files that have left the table and that a stream has not read yet."""
        files = list(log_files(self.sink.path / "_delta_log"))
        if (first := self._first_unread(files)) is None:
            return frozenset()
        later = (commit for commit in self._kept.before(files) if commit.version > first)
        return frozenset().union(*(self._kept.removal(commit).names for commit in later))

    def _sync_checkpoints(self) -> None:
        """Have the log's checkpoints on disk before the commits that they replace are deleted."""
        log = self.sink.path / "_delta_log"
        if isinstance(log, Path):
            sync_files((Path(str(file.path)) for file in log_files(log) if file.kind == "checkpoint"), log)

    def forget(self, retention: timedelta) -> int:
        """Remove remembered deletes older than `retention`; returns their number."""
        gone = self._or_put_off("removing old deletes", lambda: forget(self.sink, retention, self.generation))
        if gone:
            log.info("removed old deletes", table=self.sink.name, rows=gone)
        return gone

    def _or_put_off(self, what: str, task: Callable[[], int]) -> int:
        """Run the task `what` and return its result; if it fails, log and record that, and return 0.

        The one place that decides which errors do not end the stream: all that a table, its log or its disk can raise.
        """
        others = {each: sentence for each, sentence in self.put_off.items() if each != what}
        try:
            done = task()
        except (RecourseError, DeltaError, ValueError, OSError) as error:
            sentence = f"{what} of table {self.sink.name} was put off: {str(error)[:300]}"
            log.warning("maintenance put off", table=self.sink.name, task=what, reason=str(error)[:300])
            self.put_off = {**others, what: sentence}
            return 0
        self.put_off = others
        return done

    def _entry(self, note: str) -> LedgerEntry:
        return LedgerEntry("upkeep", self.sink.stream, self.sink.name, self.generation, -1, note=note)


def forget(sink: DeltaSink, retention: timedelta, generation: int) -> int:
    """Remove remembered deletes older than `retention`; returns their number."""
    before = (datetime.now(UTC) - retention).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
    entry = LedgerEntry("upkeep", sink.stream, sink.name, generation, -1, note="removed remembered deletes")
    sink.check_epoch()
    figures = sink.handle.delete(
        f"`{DELETED_AT_COLUMN}` < arrow_cast('{before}', 'Timestamp(Microsecond, Some(\"UTC\"))')",
        commit_properties=noted(entry, retries=0),
    )
    sink.update()
    sink.sync()
    return int(figures["num_deleted_rows"] or 0)
