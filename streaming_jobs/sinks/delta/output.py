"""A stream's Delta table as a sink of its batches (`sinks/base.py`): the way of the rows, and the newest entry."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from streaming_jobs.ledger.entry import LedgerEntry, Txn
from streaming_jobs.settings import StreamSettings
from streaming_jobs.sinks.base import BatchOfRows, PendingWrite
from streaming_jobs.sinks.delta.fitting import fitted
from streaming_jobs.sinks.delta.log import newest
from streaming_jobs.sinks.delta.quarantine import NO_TABLE_RULES, TableRules
from streaming_jobs.sinks.delta.sink import DeltaSink
from streaming_jobs.sinks.delta.writers import prepare_write

if TYPE_CHECKING:
    from pyspark.sql import DataFrame


class DeltaOutput:
    """One table, run with `settings`; `tombstone_table` remembers its deletes."""

    def __init__(
        self,
        sink: DeltaSink,
        settings: StreamSettings,
        tombstone_table: DeltaSink | None = None,
        rules: TableRules = NO_TABLE_RULES,
    ) -> None:
        self.sink = sink
        self.own = settings
        self.tombstone_table = tombstone_table
        self.rules = rules

    @property
    def name(self) -> str:
        return self.sink.name

    @property
    def position(self) -> Txn | None:
        """The newest batch in the table, as of the last `refresh` or commit."""
        return self.sink.position

    @property
    def version(self) -> int:
        """The table's version, as of the last `refresh` or commit."""
        return int(self.sink.handle.version())

    def refresh(self) -> None:
        self.sink.refresh()

    def newest_entry(self) -> LedgerEntry | None:
        """The stream's newest entry that the table's log still shows."""
        commit, _ = newest(self.sink.path, self.sink.stream)
        return commit.entry if commit else None

    def sync(self) -> None:
        """Have every commit on disk."""
        self.sink.sync()

    def fit(self, output: DataFrame, topics: Sequence[str]) -> DataFrame:
        """The table's columns, and those that ordering, deleting, refusing and judging need."""
        return fitted(self.sink, output, topics, self.rules.rules)

    def prepare(self, frame: DataFrame, rows: BatchOfRows) -> PendingWrite:
        driver, spark_commits = self.way(rows)
        return prepare_write(
            self.sink,
            frame,
            driver=driver,
            spark_commits=spark_commits,
            batch=(rows.generation, rows.batch),
            topics=rows.topics,
            tombstone_table=self.tombstone_table,
            rules=self.rules,
        )

    def way(self, rows: BatchOfRows) -> tuple[bool, bool]:
        """Two flags: rows pass through the driver; delta-spark makes the commit.

        Upserts into a table too large for the driver go through the executors. A table with features outside our
        profile is committed to by delta-spark. A quarantine goes the way of its table, so its features count too.
        """
        large = self.sink.declared.mode == "upsert" and self.sink.megabytes > self.own.direct_merge_max_mb
        aside = self.rules.quarantine
        direct = self.sink.direct and (aside is None or aside.direct)
        return rows.driver and not large, self.own.committer == "spark" or not direct
