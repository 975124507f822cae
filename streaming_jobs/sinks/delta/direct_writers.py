"""The writes that deltalake commits: appends from the driver's memory or of Parquet files, small upserts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import pyarrow as pa
from deltalake import CommitProperties, DeltaTable, write_deltalake
from deltalake.transaction import AddAction

from streaming_jobs.errors import LedgerConflict
from streaming_jobs.ledger.entry import LedgerEntry
from streaming_jobs.sinks.base import Committer, PendingWrite
from streaming_jobs.sinks.delta import column_bounds
from streaming_jobs.sinks.delta.sink import DeltaSink
from streaming_jobs.sinks.delta.upsert_order import FLAGS, clauses, order_of
from streaming_jobs.sinks.row_rules import NOTHING_BROKEN, Judged


@dataclass
class ArrowAppend:
    """Rows in the driver's memory, appended by deltalake."""

    committer: ClassVar[Committer] = "direct"
    sink: DeltaSink
    table: pa.Table
    null_keys: pa.Table | None = None
    deletes: ClassVar[None] = None
    judged: Judged = NOTHING_BROKEN

    @property
    def rows(self) -> int:
        return int(self.table.num_rows)

    def commit(self, entry: LedgerEntry) -> int | None:
        def write(handle: DeltaTable, properties: CommitProperties) -> None:
            if self.rows:
                written = column_bounds.writer_properties(self.sink.schema)
                write_deltalake(
                    handle, self.table, mode="append", writer_properties=written, commit_properties=properties
                )

        return self.sink.commit(entry, write)

    def close(self) -> None:
        """Nothing is held."""


@dataclass
class ParquetAppend:
    """Parquet files below the table's folder that no version lists yet, committed by deltalake."""

    committer: ClassVar[Committer] = "direct"
    sink: DeltaSink
    actions: Sequence[AddAction]
    rows: int
    null_keys: pa.Table | None = None
    deletes: ClassVar[None] = None
    judged: Judged = NOTHING_BROKEN

    def commit(self, entry: LedgerEntry) -> int | None:
        return self.sink.commit(entry, lambda _, properties: self.sink.commit_actions(list(self.actions), properties))

    def close(self) -> None:
        """Nothing is held; the next attempt of the batch removes files that were not committed."""


@dataclass
class ArrowMerge:
    """Rows in the driver's memory, one per key, merged by deltalake."""

    committer: ClassVar[Committer] = "direct"
    sink: DeltaSink
    table: pa.Table
    null_keys: pa.Table | None
    by_position: bool = False
    deletes: PendingWrite | None = None
    judged: Judged = NOTHING_BROKEN

    @property
    def rows(self) -> int:
        return int(self.table.num_rows)

    def commit(self, entry: LedgerEntry) -> int | None:
        def write(handle: DeltaTable, properties: CommitProperties) -> None:
            if not self.rows:
                return
            order = order_of(self.sink.schema, self.sink.declared.order_by, by_position=self.by_position)
            does = clauses(order, self.table.column_names)
            values = {f"`{c}`": f"s.`{c}`" for c in self.table.column_names if c not in FLAGS}
            merge = handle.merge(
                self.table,
                predicate=" AND ".join(f"t.`{k}` = s.`{k}`" for k in self.sink.declared.keys),
                source_alias="s",
                target_alias="t",
                writer_properties=column_bounds.writer_properties(self.sink.schema),
                commit_properties=properties,
            )
            if does.delete is not None:
                merge = merge.when_matched_delete(does.delete)
            merge.when_matched_update(values, does.update).when_not_matched_insert(values, does.insert).execute()

        return self.sink.commit(entry, write)

    def close(self) -> None:
        """Nothing is held."""


@dataclass
class CommittedBefore:
    """Rows of a batch that an earlier attempt has committed: their number is known, and nothing is written."""

    committer: ClassVar[Committer] = "direct"
    sink: DeltaSink
    rows: int
    null_keys: ClassVar[None] = None
    deletes: ClassVar[None] = None
    judged: ClassVar[Judged] = NOTHING_BROKEN

    def commit(self, entry: LedgerEntry) -> None:
        """Have the earlier commit on disk; raises LedgerConflict if the table has lost the batch."""
        if not self.sink.holds(entry):
            raise LedgerConflict(
                f"table {self.sink.name} had {entry.txn} when the batch was computed, and is at {self.sink.position}",
                "look for a second driver with another state folder on the same tables",
            )
        self.sink.sync()

    def close(self) -> None:
        """Nothing is held."""
