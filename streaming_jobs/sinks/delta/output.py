"""A stream's Delta table as a sink of its batches (`sinks/base.py`): which way rows take, and what its log shows."""

from __future__ import annotations

from typing import TYPE_CHECKING

from streaming_jobs.ledger import LedgerEntry, Txn
from streaming_jobs.settings import StreamSettings
from streaming_jobs.sinks.base import BatchOfRows, PendingWrite
from streaming_jobs.sinks.delta.log import newest
from streaming_jobs.sinks.delta.sink import DeltaSink
from streaming_jobs.sinks.delta.writers import prepare_write

if TYPE_CHECKING:
    from pyspark.sql import DataFrame


class DeltaOutput:
    """One table. `remembers` is the table that remembers the deletes of this one."""

    def __init__(self, sink: DeltaSink, own: StreamSettings, remembers: DeltaSink | None = None) -> None:
        self.sink = sink
        self.own = own
        self.remembers = remembers

    @property
    def name(self) -> str:
        """The table's name."""
        return self.sink.name

    @property
    def position(self) -> Txn | None:
        """The newest batch in the table, as of the last look."""
        return self.sink.position

    @property
    def version(self) -> int:
        """The table's version, as of the last look."""
        return int(self.sink.handle.version())

    def refresh(self) -> None:
        """Read what was committed since."""
        self.sink.refresh()

    def newest_entry(self) -> LedgerEntry | None:
        """The stream's newest entry that the table's log still shows."""
        commit, _ = newest(self.sink.path, self.sink.stream)
        return commit.entry if commit else None

    def sync(self) -> None:
        """Have every commit on disk."""
        self.sink.sync()

    def prepare(self, frame: DataFrame, rows: BatchOfRows) -> PendingWrite:
        """Compute the rows."""
        driver, spark_commits = self.way(rows)
        return prepare_write(
            self.sink,
            frame,
            driver=driver,
            spark_commits=spark_commits,
            batch=(rows.generation, rows.batch),
            topics=rows.topics,
            kept=self.remembers,
        )

    def way(self, rows: BatchOfRows) -> tuple[bool, bool]:
        """Two answers: rows pass through the driver; delta-spark makes the commit.

        A table too large to be merged by the driver takes the executors, one outside our profile delta-spark.
        """
        large = self.sink.declared.mode == "upsert" and self.sink.megabytes > self.own.direct_merge_max_mb
        return rows.driver and not large, self.own.committer == "spark" or not self.sink.direct
