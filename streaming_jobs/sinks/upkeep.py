"""What keeps a table quick and its disk bounded: compaction, removal of unlisted files, a short log.

All of it runs in the stream's driver between two batches, so nothing else writes the table meanwhile. Its commits
change no rows and say so in their ledger entry. A commit of somebody else that comes first ends the attempt; the
next one comes by itself. What preflight reads stays in the log: the stream's newest entry and all commits after it.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from datetime import timedelta

import structlog
from deltalake import CommitProperties
from deltalake.exceptions import DeltaError

from streaming_jobs.ledger import LedgerEntry, newest
from streaming_jobs.settings import TableSettings
from streaming_jobs.sinks.delta import DeltaSink
from streaming_jobs.sinks.table_log import expired, log_files

log = structlog.get_logger()

_LOOK_EVERY = 50
_VACUUM_EVERY = 3600.0


@dataclass
class Upkeep:
    """The upkeep of one table; `after_commit` is called after each of the stream's commits."""

    sink: DeltaSink
    settings: TableSettings
    generation: int
    _commits: int = 0
    _vacuumed: float = field(default_factory=time.monotonic)

    def after_commit(self) -> None:
        """Every 50 commits: compact if there are enough small files, shorten the log; hourly, remove unlisted files."""
        self._commits += 1
        if self._commits % _LOOK_EVERY:
            return
        if self.settings.compact_after_files and self.sink.direct and self.small_files() >= self._threshold:
            self.compact()
        if time.monotonic() - self._vacuumed >= _VACUUM_EVERY:
            self.remove_unlisted()
        self.shorten_log()

    @property
    def _threshold(self) -> int:
        return self.settings.compact_after_files

    def small_files(self) -> int:
        """Files in the table below the target size."""
        sizes = self.sink.handle.get_add_actions(flatten=True)["size_bytes"]
        limit = self.settings.target_file_mb << 20
        return sum(1 for size in sizes.to_pylist() if size < limit // 2)

    def compact(self) -> None:
        """Rewrite small files into larger ones, the same rows."""
        began = time.monotonic()
        try:
            self.sink.refresh()
            metrics = self.sink.handle.optimize.compact(
                target_size=self.settings.target_file_mb << 20,
                commit_properties=CommitProperties(
                    custom_metadata={"userMetadata": self._entry("compaction").encode()}, max_commit_retries=0
                ),
            )
            self.sink.refresh()
        except (DeltaError, OSError) as error:  # the rows are safe; a disk that is full now may not be next time
            log.warning("compaction put off", table=self.sink.name, reason=str(error))
            return
        log.info(
            "compacted",
            table=self.sink.name,
            files_before=metrics["numFilesRemoved"],
            files_after=metrics["numFilesAdded"],
            seconds=round(time.monotonic() - began, 2),
        )

    def shorten_log(self) -> int:
        """Delete what is past its retention from the table's log; how many files that were.

        Oldest first, so that the log has no gap wherever a kill ends it.
        """
        try:
            place, _ = newest(self.sink.path, self.sink.stream)
            gone = expired(
                log_files(self.sink.path / "_delta_log"),
                now=time.time(),
                retention=self.settings.log_retention,
                versions=self.settings.log_versions,
                needed=0 if place is None else place.version,
            )
            for path in gone:
                path.unlink(missing_ok=True)
        except OSError as error:
            log.warning("shortening the log put off", table=self.sink.name, reason=str(error))
            return 0
        return len(gone)

    def remove_unlisted(self, retention: timedelta | None = None) -> None:
        """Delete files that no version within the retention lists.

        Only for tables that deltalake may write: of others it may not know every file, deletion vectors for one.
        """
        self._vacuumed = time.monotonic()
        if not self.sink.direct:
            return
        kept = retention if retention is not None else self.settings.deleted_file_retention
        hours = -(-int(kept.total_seconds()) // 3600)
        try:
            removed = self.sink.handle.vacuum(
                retention_hours=hours,
                dry_run=False,
                enforce_retention_duration=False,
                full=True,
                commit_properties=CommitProperties(
                    custom_metadata={"userMetadata": self._entry("vacuum").encode()}, max_commit_retries=0
                ),
            )
            self.sink.refresh()
        except (DeltaError, OSError) as error:
            log.warning("vacuum put off", table=self.sink.name, reason=str(error))
            return
        log.info("removed unlisted files", table=self.sink.name, files=len(removed))

    def _entry(self, note: str) -> LedgerEntry:
        return LedgerEntry("upkeep", self.sink.stream, self.sink.name, self.generation, -1, note=note)
