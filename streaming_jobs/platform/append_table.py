"""A Delta table to which several processes append what they know, each commit once, and from which old rows go.

A commit carries a transaction (Delta's protocol, "Transaction Identifiers"), so it is there wholly or not at all, and
once, also when a process is killed or repeats it. Appends do not conflict: deltalake commits the later one as the next
version. Transactions are forgotten after a day (`delta.setTransactionRetentionDuration`), as many of them make every
commit slower.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Literal

from streaming_jobs.storage.locations import Location, delta_options, delta_table

if TYPE_CHECKING:
    import pyarrow as pa
    import pyarrow.dataset as ds
    from deltalake import DeltaTable

UPKEEP_EVERY = 25
"""Versions."""
_CONFIGURATION = {
    "delta.setTransactionRetentionDuration": "interval 1 days",
    "delta.logRetentionDuration": "interval 1 days",
    "delta.deletedFileRetentionDuration": "interval 1 hours",
    "delta.checkpointInterval": "50",
}
_RETRIES = 50
_READS = 3


@dataclass(frozen=True)
class AppendTable:
    """The table at a location, which need not exist yet; `clock`: the column with the time by which rows become old."""

    location: Location
    schema: pa.Schema
    clock: str
    keep: timedelta

    def transaction(self, app: str) -> int | None:
        """The newest transaction of an application; None without one, or without the table."""
        from deltalake.exceptions import TableNotFoundError

        try:
            return delta_table(self.location).transaction_version(app)
        except TableNotFoundError:
            return None

    def append(self, rows: pa.Table, app: str, number: int) -> bool:
        """Append rows as a transaction of an application; False if the table has that one or a later one already.

        Now and then old rows are removed, small files joined, and the log is cleaned up.
        """
        from deltalake import CommitProperties, Transaction, write_deltalake
        from deltalake.exceptions import CommitFailedError

        transaction = Transaction(app, number, int(time.time() * 1000))
        properties = CommitProperties(app_transactions=[transaction], max_commit_retries=_RETRIES)
        for attempt in range(_RETRIES):
            handle = self._opened_or_made()
            if (there := handle.transaction_version(app)) is not None and there >= number:
                return False
            try:
                write_deltalake(handle, rows, mode="append", commit_properties=properties)
                break
            except CommitFailedError:  # of the same application, or too many others: look again
                if attempt == _RETRIES - 1:
                    raise
        self._upkeep(handle)
        return True

    def read(self, wanted: ds.Expression | None = None, columns: Sequence[str] | None = None) -> pa.Table | None:
        """The matching rows; None if there is no table. Reads again if a clean-up has removed files meanwhile."""
        from deltalake.exceptions import TableNotFoundError

        from streaming_jobs.platform.table_rows import dataset

        for attempt in range(_READS):
            try:
                source = dataset(delta_table(self.location), self.location)
                return source.to_table(columns=None if columns is None else list(columns), filter=wanted)
            except TableNotFoundError:
                return None
            except FileNotFoundError:
                if attempt == _READS - 1:
                    raise
        return None

    def newest(self) -> datetime | None:
        """The greatest time of a row, by the log; None without rows, or without the table."""
        from deltalake.exceptions import TableNotFoundError

        try:
            times = self._times(delta_table(self.location), "max")
        except TableNotFoundError:
            return None
        return max(times, default=None)

    def _opened_or_made(self) -> DeltaTable:
        from deltalake import DeltaTable
        from deltalake.exceptions import CommitFailedError, DeltaError, TableNotFoundError

        try:
            return delta_table(self.location)
        except TableNotFoundError:
            with suppress(CommitFailedError, DeltaError):  # another process makes it
                return DeltaTable.create(
                    str(self.location),
                    schema=self.schema,
                    mode="error",
                    name=self.location.name,
                    configuration={**_CONFIGURATION, "delta.dataSkippingStatsColumns": f"`{self.clock}`"},
                    storage_options=delta_options(self.location),
                )
            return delta_table(self.location)

    def _upkeep(self, handle: DeltaTable) -> None:
        """Remove old rows, join small files, clean up the log; another process may do the same at the same time."""
        import structlog
        from deltalake.exceptions import CommitFailedError, DeltaError

        before = datetime.now(UTC) - self.keep
        oldest = min(self._times(handle, "min"), default=before)
        if handle.version() % UPKEEP_EVERY and oldest >= before - timedelta(days=1):
            return
        try:
            handle.update_incremental()
            # As text: DataFusion's own times have no zone.
            handle.delete(f"{self.clock} < '{before:%Y-%m-%d %H:%M:%S}Z'")
            handle.optimize.compact()
            handle.vacuum(retention_hours=1, dry_run=False, enforce_retention_duration=False)
            handle.create_checkpoint()
            handle.cleanup_metadata()
        except CommitFailedError:  # another process is at it
            return
        except (DeltaError, OSError) as error:  # the rows are there; the next append tries again
            structlog.get_logger().warning("table_upkeep_failed", table=self.location.name, error=str(error)[:300])

    def _times(self, handle: DeltaTable, bound: Literal["min", "max"]) -> list[datetime]:
        """The least or the greatest time of each file that has rows."""
        import pyarrow as pa

        files = pa.table(handle.get_add_actions(flatten=True))
        name = f"{bound}.{self.clock}"
        return files[name].drop_null().to_pylist() if name in files.column_names else []
