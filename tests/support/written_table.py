"""A table as a stream writes it, made commit by commit: batches, a publish, upkeep, commits of others."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pyarrow as pa
from deltalake import CommitProperties, DeltaTable, write_deltalake
from deltalake.transaction import AddAction, RemoveAction

from streaming_jobs.ledger.entry import LedgerEntry, app_id
from streaming_jobs.ledger.positions import OffsetRange
from streaming_jobs.sinks.delta.log import moving, noted
from streaming_jobs.sinks.delta.table_files import table_files

SCHEMA = pa.schema([("k", pa.string()), ("n", pa.int64())])


@dataclass
class WrittenTable:
    """The table `numbers` of stream `count`; rows are {"k": ..., "n": ...}."""

    path: Path
    stream: str = "count"
    schema: pa.Schema = SCHEMA
    partition_by: tuple[str, ...] = ()
    generation: int = 1
    _batch: int = field(default=-1, init=False)

    @property
    def version(self) -> int:
        """The newest version."""
        return DeltaTable(self.path).version()

    def make(self) -> WrittenTable:
        """The table without rows: version 0."""
        DeltaTable.create(self.path, self.schema, partition_by=list(self.partition_by))
        return self

    def rows(self, *numbers: int, k: str = "a") -> pa.Table:
        """Rows with these numbers."""
        return pa.Table.from_pylist([{"k": k, "n": n} for n in numbers], self.schema)

    def entry(self, kind: Any = "batch", **values: Any) -> LedgerEntry:
        """The ledger entry of the present batch: it reads one offset."""
        at = max(self._batch, 0)
        ranges = (OffsetRange("words", "id", {0: at}, {0: at + 1}),)
        entry = LedgerEntry(kind, self.stream, self.path.name, self.generation, self._batch, ranges)
        return replace(entry, **values)

    def append(self, rows: pa.Table, properties: CommitProperties | None, **options: Any) -> int:
        """One commit of rows."""
        write_deltalake(self.path, rows, mode=options.pop("mode", "append"), commit_properties=properties, **options)
        return self.version

    def batch(self, *numbers: int, k: str = "a") -> int:
        """A batch with rows of these numbers; its version."""
        self._batch += 1
        entry = self.entry()
        if not numbers:
            DeltaTable(self.path).create_write_transaction(
                [], "append", SCHEMA, [], commit_properties=self._moving(entry)
            )
            return self.version
        return self.append(self.rows(*numbers, k=k), self._moving(entry))

    def compact(self) -> int:
        """Compaction, as upkeep does it."""
        DeltaTable(self.path).optimize.compact(commit_properties=noted(self.entry("upkeep", batch=-1)))
        return self.version

    def publish(self, *numbers: int, new: tuple[int, ...] = (), known: bool = True, to: int | None = None) -> int:
        """A publish that replaces all rows by these numbers; `new` are of records that no batch had read.

        It says that it read up to the offset `to`; None: as far as the last batch.
        """
        self.generation += 1
        before = table_files(self.path, self.version)
        adds = [self._file(group) for group in (numbers, new) if group]
        removes = [file.remove(0) for file in before.values()]
        fresh = (adds[-1].path,) if new else ()
        entry = self.entry("publish", plan="r1", new=fresh if known else None)
        if to is not None:
            entry = replace(entry, offsets=(OffsetRange("words", "id", {0: 0}, {0: to}),))
        handle = DeltaTable(self.path)
        handle.create_write_transaction(
            [*removes, *adds], "append", self.schema, [], commit_properties=self._moving(entry)
        )
        return self.version

    def slice(self, *numbers: int) -> int:
        """A rebuilt slice: the newest file is replaced by one with these numbers."""
        newest = max(table_files(self.path, self.version).values(), key=lambda file: file.modified)
        entry = self.entry("slice", batch=-1, plan="s1")
        handle = DeltaTable(self.path)
        actions = [newest.remove(0), self._file(numbers, "slice")]
        handle.create_write_transaction(actions, "append", self.schema, [], commit_properties=noted(entry))
        return self.version

    def foreign(self, *numbers: int, **options: Any) -> int:
        """A commit of another program."""
        return self.append(self.rows(*numbers), None, **options)

    def delete(self, condition: str) -> int:
        """Rows that another program deletes."""
        DeltaTable(self.path).delete(condition)
        return self.version

    def _commit(self, actions: list[AddAction | RemoveAction], entry: LedgerEntry) -> None:
        handle = DeltaTable(self.path)
        handle.create_write_transaction(actions, "append", self.schema, [], commit_properties=self._moving(entry))

    def _moving(self, entry: LedgerEntry) -> CommitProperties:
        return moving(entry, app_id(self.stream, self.path.name))

    def _file(self, numbers: tuple[int, ...], kind: str = "published") -> AddAction:
        import pyarrow.parquet as pq

        name = f"{kind}-{self.generation}-{numbers[0]}.parquet"
        pq.write_table(self.rows(*numbers), self.path / name)
        size = (self.path / name).stat().st_size
        return AddAction(name, size, {}, 0, True, f'{{"numRecords":{len(numbers)}}}')
