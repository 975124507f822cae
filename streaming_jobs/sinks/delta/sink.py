"""A stream's open Delta table: commits to it exactly once, its sink of batches, and the table at rest.

Every commit of a batch goes through `DeltaSink._commit`, which is the one place where exactly once is decided:
refresh the table, compare its transaction version with the batch's, commit with no retries, and after a refusal
start again. A version of a newer generation raises Fenced; the batch's version means that it is committed already.
The epoch of the driver's lease, if it has one, is a second transaction: a later epoch in the table raises Fenced too.

Batches use the methods of `sinks/base.py`, all other code the methods of `sinks/stored.py`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, cast
from uuid import uuid4

import pyarrow as pa
from deltalake import CommitProperties, DeltaTable
from deltalake import Field as DeltaField
from deltalake.exceptions import CommitFailedError, TableNotFoundError
from deltalake.transaction import AddAction, RemoveAction
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.types import StructField, StructType

from streaming_jobs.declare.rules import NO_RULES, RowRules
from streaming_jobs.declare.table import DeclaredTable
from streaming_jobs.errors import CommitImpossible, CommitRefused, Fenced, PreflightRefused, RecourseError, UsageError
from streaming_jobs.ledger.entry import LedgerEntry, Txn, app_id, epoch_id, redrive_id
from streaming_jobs.ledger.positions import OffsetRange
from streaming_jobs.platform.delta_log import read_commit
from streaming_jobs.platform.failures import classify
from streaming_jobs.settings import Settings, StreamSettings, TableSettings
from streaming_jobs.sinks.base import BatchOfRows, PendingWrite, WriteLease, refuse_later_epoch
from streaming_jobs.sinks.delta import column_bounds, dead_letters
from streaming_jobs.sinks.delta.content import DeltaContent, content_of, delta_content, has_content, identities
from streaming_jobs.sinks.delta.fitting import fitted
from streaming_jobs.sinks.delta.later_rows import add_later_rows
from streaming_jobs.sinks.delta.log import (
    STREAM_PROPERTY,
    WRITER,
    append_commit,
    moving,
    newest,
    noted,
    redriving,
    sync_commits,
    walk,
)
from streaming_jobs.sinks.delta.maintenance import TableMaintenance
from streaming_jobs.sinks.delta.pending_writes import ArrowAppend
from streaming_jobs.sinks.delta.replace_rows import replace_rows
from streaming_jobs.sinks.delta.table_files import on_disk, table_files
from streaming_jobs.sinks.delta.writers import not_by_spark, prepare_write
from streaming_jobs.sinks.redriven import RedrivenTable
from streaming_jobs.sinks.sliced import SlicedTable
from streaming_jobs.sinks.stored import (
    Commit,
    Content,
    LaterRows,
    Replaced,
    StoredTable,
    Unread,
    fence_entry,
    no_readers,
    refuse_foreign,
)
from streaming_jobs.sources.base import Source
from streaming_jobs.storage.locations import Location, StorePath, delta_table, files_below

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

_ATTEMPTS = 20
_CHECKPOINT_EVERY = 100
"""Commits between two checkpoints of a table without the property; deltalake's default."""
_LAST_PLAIN_WRITER = 4
"""The greatest version of writers without a list of features that knows neither identity columns nor column mapping."""
_MARKS_OF_CHECKS = (
    '"nullable":false', '"containsNull":false', '"valueContainsNull":false', "delta.invariants", "delta.identity.",
)  # fmt: skip
"""What a schema says of columns whose values a writer has to check, or to make."""
_OPEN_END = 5
"""Commits that a driver may have made and not synced before it was killed: one batch, upkeep, a change of schema."""
_DIRECT_WRITER_FEATURES = {
    "appendOnly",
    "invariants",
    "changeDataFeed",
    "timestampNtz",
    "v2Checkpoint",
    "domainMetadata",
}


class DeltaSink:
    """One open table of one stream. Not for two threads at once."""

    def __init__(self, path: Location, declared: DeclaredTable, stream: str, handle: DeltaTable) -> None:
        self.path = path
        self.declared = declared
        self.stream = stream
        self.app_id = app_id(stream, declared.name)
        self._loaded = handle
        self._appended = -1  # the version of our newest append, which `_loaded` may lack
        self.removed_bytes = 0
        self.settings = StreamSettings()
        self.rules = NO_RULES
        self.quarantine: DeltaSink | None = None
        self.deletes_table: DeltaSink | None = None
        self.lease: WriteLease | None = None
        self._known = handle.version()
        self._synced = handle.version() - _OPEN_END
        self._sized: tuple[int, float] | None = None
        self._at: tuple[int, Txn | None] | None = None
        self._epoch_at: tuple[int, int] | None = None
        self._writer = uuid4().hex
        self._looked = False
        self._read_schema()

    @property
    def name(self) -> str:
        return self.declared.name

    @property
    def handle(self) -> DeltaTable:
        """The table as deltalake has it, with the appends that were committed without it.

        Appends change no metadata, so these are read of `_loaded`, without loading the appends.
        """
        if self._loaded.version() < self._appended:
            self._loaded.update_incremental()
        return self._loaded

    @property
    def table_id(self) -> str:
        """Delta's id of the table; a recreated table has another."""
        return str(self._loaded.metadata().id)

    @property
    def owner(self) -> str | None:
        return self._loaded.metadata().configuration.get(STREAM_PROPERTY)

    @property
    def version(self) -> int:
        return max(int(self._loaded.version()), self._appended)

    @property
    def partition_by(self) -> tuple[str, ...]:
        return tuple(self._loaded.metadata().partition_columns)

    @property
    def position(self) -> Txn | None:
        """The newest batch in the table, as of the last refresh. Reading it from deltalake takes a millisecond."""
        version = self.version
        if self._at is None or self._at[0] != version:
            self._at = (version, _position(self.handle, self.app_id))
        return self._at[1]

    @property
    def epoch(self) -> int:
        """As of the last refresh; read from deltalake only after commits of others, or commits of upkeep."""
        version = self.version
        if self._epoch_at is None or self._epoch_at[0] != version:
            self._epoch_at = (version, int(self.handle.transaction_version(epoch_id(self.stream)) or 0))
        return self._epoch_at[1]

    @property
    def megabytes(self) -> float:
        """Size of the table's live files, MB; computed again every hundred versions."""
        version = self.version
        if self._sized is None or version >= self._sized[0] + 100:
            sizes = self.handle.get_add_actions(flatten=True)["size_bytes"].to_pylist()
            self._sized = (version, sum(sizes) / 2**20)
        return self._sized[1]

    @property
    def bounded(self) -> tuple[str, ...]:
        """The columns that have bounds in the table's log."""
        return column_bounds.decode(self._loaded.metadata().configuration.get(column_bounds.PROPERTY, ""))

    @property
    def direct(self) -> bool:
        """True if deltalake may write this table; False sends every write through delta-spark."""
        protocol, configuration = self._loaded.protocol(), self._loaded.metadata().configuration
        features = set(protocol.writer_features or ())
        constrained = any(key.startswith("delta.constraints.") for key in configuration)
        generated = any("delta.generationExpression" in (f.metadata or {}) for f in self.schema.fields)
        plain = protocol.min_writer_version < 7 or features <= _DIRECT_WRITER_FEATURES
        mapped = configuration.get("delta.columnMapping.mode", "none") != "none"
        return plain and not constrained and not generated and not mapped

    def refresh(self) -> None:
        """Read newer commits, before a batch. On a store only once: a commit is refused if another one came first."""
        if not (isinstance(self.path, StorePath) and self._looked):
            self.update()
            self._looked = True

    def update(self) -> None:
        """Read newer commits.

        Listing the log takes deltalake a few microseconds per file, so two file names are checked first. The handle's
        version must still be in the log: otherwise the log is another one, or was cleaned up after later commits.
        """
        log, version = self.path / "_delta_log", self.version
        if (log / f"{version + 1:020d}.json").is_file() or not (log / f"{version:020d}.json").is_file():
            self._loaded.update_incremental()
            self._appended = -1

    def commit(
        self,
        entry: LedgerEntry,
        write: Callable[[DeltaTable, CommitProperties], object],
        done: Callable[[LedgerEntry], bool] | None = None,
    ) -> int | None:
        """Commit once for the entry's batch or redrive; returns the new version, or None if the table has it already.

        `done` decides that instead of `holds`, which it has to call too. `write` must make exactly one commit
        with the properties it is given, through the handle it is given; it is called again, on the refreshed handle,
        when another commit came first. If it makes none (a merge that changes nothing), a commit without data follows.
        Raises Fenced when the table is in a newer generation, ForeignWrite when another writer changed its rows since
        the last commit, CommitRefused when other commits keep coming first, CommitImpossible when the table allows no
        such commit.
        """
        return self._commit(entry, lambda properties: write(self._loaded, properties), done)

    def append_files(self, entry: LedgerEntry, actions: Callable[[], Sequence[AddAction]]) -> int | None:
        """`commit` of files that the table's folder has then; `actions` may be called again."""
        # Whether a redrive is there, the handle says, and it may say more than was checked before.
        load = not self.appends or entry.kind == "redrive"
        return self._commit(entry, lambda properties: self.commit_actions(actions(), properties), load=load)

    def _commit(
        self,
        entry: LedgerEntry,
        write: Callable[[CommitProperties], object],
        done: Callable[[LedgerEntry], bool] | None = None,
        *,
        load: bool = True,
    ) -> int | None:
        # On a store a look at the log costs requests, and the commit is refused if another one came first.
        done = done or (self._holds if isinstance(self.path, StorePath) else self.holds)
        for _ in range(_ATTEMPTS):
            if load:
                _ = self.handle  # loaded before the checks: it may read commits of others too
            if done(entry):
                self.sync()
                return None
            version = self.version
            try:
                write(self.properties(entry))
                if not self._written(version, entry):
                    if self.version != version:  # a commit of another, which was not checked
                        continue
                    self.commit_actions([], self.properties(entry))
            except CommitFailedError as error:
                self.update()
                if self.version == version:  # no other commit came first, so this was not a race
                    raise self._failed(error) from error
                if not self._is_ours(version + 1):
                    continue
            if self.version == version + 1 and entry.kind != "redrive":
                self._at = (version + 1, entry.txn)
            return self.committed()
        raise CommitRefused(f"table {self.name} was committed to by others {_ATTEMPTS} times during one commit")

    def _written(self, before: int, entry: LedgerEntry) -> bool:
        """True if the write has made its commit; on a store the version says so, since no other commit came first."""
        if isinstance(self.path, StorePath):
            return self.version > before
        self.update()
        at = self.position
        return self._has(entry) and (at is None or at.generation <= entry.generation)

    def _is_ours(self, version: int) -> bool:
        """True for a commit to a store that was made although the store, or its client's repetition, has refused it."""
        if not isinstance(self.path, StorePath):
            return False
        try:
            info = read_commit(self.path, version).info or {}
        except (FileNotFoundError, ValueError):
            return False
        return info.get(WRITER) == self._writer

    def _failed(self, error: CommitFailedError) -> RecourseError:
        if "append-only" in str(error):
            return CommitImpossible(
                f"table {self.name} is append-only (delta.appendOnly), and this commit takes rows out: {error}",
                f"let it take rows out: ALTER TABLE delta.`{self.path}` UNSET TBLPROPERTIES ('delta.appendOnly')",
            )
        return classify(error)

    def holds(self, entry: LedgerEntry) -> bool:
        """True if the table, as it is now, has the entry's batch or redrive.

        Raises Fenced, LeaseLost and ForeignWrite.
        """
        self.update()
        return self._holds(entry)

    def _holds(self, entry: LedgerEntry) -> bool:
        """`holds` for the version that the handle has loaded."""
        at = self.position
        if at is not None and at.generation > entry.generation:
            raise self.fenced(at, entry)
        self._refuse_later_epoch()
        self._refuse_foreign()
        return self._has(entry)

    def _has(self, entry: LedgerEntry) -> bool:
        if entry.kind == "redrive":
            return self.handle.transaction_version(redrive_id(entry.stream, entry.plan)) is not None
        return self.position is not None and self.position >= entry.txn

    def committed(self) -> int:
        """Have our commit on disk, and remember it as ours; returns the table's version."""
        version = self.version
        self.sync()
        if version == self._known + 1:  # with others in between, `_refuse_foreign` reads them next time
            self._known = version
            if self.lease is not None:
                self._epoch_at = (version, self.lease.epoch)
        return version

    def check_epoch(self) -> None:
        """Read newer commits, and raise Fenced or LeaseLost if this driver may no longer write the table.

        Deletes of files are not conditional. So list what to delete, then call this, then delete just that: the next
        driver adds its files after its fence, so the list has none of them. The same holds for commits by the handle,
        so it is loaded first.
        """
        _ = self.handle
        self.update()
        self._refuse_later_epoch()

    def under(self, lease: WriteLease, generation: int) -> None:
        self.update()
        if self.epoch > lease.epoch:
            lease.exceed(self.epoch)
        self.lease = lease
        while lease.expires and (self.table_id, self.epoch) not in lease.fenced:
            if self.epoch == lease.epoch:  # another session's: both have taken the lease (docs/fencing.md)
                lease.exceed(self.epoch)
            entry, version = fence_entry(self.stream, self.name, generation, lease), self.version
            try:
                self.commit_actions([], noted(entry, retries=0, epoch=lease.epoch))
                lease.fenced.add((self.table_id, lease.epoch))
            except CommitFailedError as error:
                self.update()
                if self.version == version:
                    raise self._failed(error) from error
            self.check_epoch()
        self.sync()

    def _refuse_later_epoch(self) -> None:
        refuse_later_epoch(self.name, self.epoch if self.lease is not None else 0, self.lease)

    def sync(self) -> None:
        """Have everything up to the handle's version on disk; adds the bytes of removed files to `removed_bytes`.

        This includes commits that an earlier driver did not sync before it was killed.
        """
        version = self.version
        self.removed_bytes += sync_commits(self.path, range(max(self._synced + 1, 0), version + 1))
        self._synced = version

    def _refuse_foreign(self) -> None:
        """Raise ForeignWrite if a commit since the last check changed rows and is not ours."""
        version = self.version
        if version == self._known:
            return
        refuse_foreign(walk(self.path), self._known, self.name, self.stream)
        self._known = version

    def fenced(self, at: Txn, entry: LedgerEntry) -> Fenced:
        """The error for a driver whose table has moved to a newer generation."""
        return Fenced(
            f"table {self.name} is in generation {at.generation}, this driver belongs to {entry.generation}",
            "let this driver end; the newer generation continues without it",
        )

    def commit_actions(self, actions: Sequence[AddAction | RemoveAction], properties: CommitProperties) -> None:
        """One commit of exactly these actions."""
        if self.appends and all(isinstance(action, AddAction) for action in actions):
            self._append(cast("Sequence[AddAction]", actions), properties)
            return
        self.handle.create_write_transaction(
            [*actions],
            mode="append",
            schema=self.handle.schema(),
            partition_by=list(self.declared.partition_by) or None,
            commit_properties=properties,
        )
        self.handle.update_incremental() if isinstance(self.path, StorePath) else self.update()

    @property
    def appends(self) -> bool:
        """True if files are appended without deltalake, which after each commit reads what the table has.

        That takes 7 ms and a tenth of a millisecond per file of the table (docs/speed.md). Left to deltalake are tables
        with partitions, whose paths are encoded, tables on stores, columns whose values it has to check, and features
        outside of our profile.
        """
        metadata, protocol = self._loaded.metadata(), self._loaded.protocol()
        bounded = column_bounds.PROPERTY in metadata.configuration  # otherwise deltalake bounds what it chooses
        known = protocol.min_writer_version <= _LAST_PLAIN_WRITER or protocol.writer_features is not None
        mine = isinstance(self.path, Path) and not metadata.partition_columns and bounded and not self._has_checks
        return mine and known and self.direct

    def _append(self, actions: Sequence[AddAction], properties: CommitProperties) -> None:
        assert isinstance(self.path, Path)
        before = self.version
        append_commit(self.path, before + 1, actions, properties)
        txns = {txn.app_id: txn.version for txn in properties.app_transactions or ()}
        if self.app_id in txns:
            self._at = (before + 1, Txn.of(txns[self.app_id]))
        elif self._at is not None and self._at[0] == before:
            self._at = (before + 1, self._at[1])
        if (epoch := txns.get(epoch_id(self.stream))) is not None:
            self._epoch_at = (before + 1, epoch)
        elif self._epoch_at is not None and self._epoch_at[0] == before:
            self._epoch_at = (before + 1, self._epoch_at[1])
        self._appended = before + 1
        every = int(self._loaded.metadata().configuration.get("delta.checkpointInterval", _CHECKPOINT_EVERY))
        if (self._appended + 1) % every == 0:  # as deltalake, whose commits count too
            self.handle.create_checkpoint()

    def properties(self, entry: LedgerEntry) -> CommitProperties:
        """Commit properties that carry the entry and its transaction, and allow no retry."""
        epoch = 0 if self.lease is None else self.lease.epoch
        writer = self._writer if isinstance(self.path, StorePath) else ""
        if entry.kind == "redrive":
            return redriving(entry, epoch, writer)
        return moving(entry, self.app_id, epoch, writer)

    def add_columns(self, fields: Sequence[StructField], generation: int) -> None:
        """Add columns, null in all rows that are there."""
        entry = self._changed(generation, f"added {', '.join(field.name for field in fields)}")
        self.handle.alter.add_columns(
            [DeltaField.from_json(field.json()) for field in fields], commit_properties=noted(entry)
        )
        self.update()
        self._read_schema()

    def widen(self, schema: str, generation: int) -> None:
        """Add the columns that only the schema (Delta's JSON) has; columns are never removed."""
        here = {field.name for field in self.handle.schema().fields}
        if added := [field for field in StructType.fromJson(json.loads(schema)).fields if field.name not in here]:
            self.add_columns(added, generation)

    def set_properties(self, properties: Mapping[str, str], generation: int) -> None:
        entry = self._changed(generation, f"set {', '.join(properties)}")
        self.handle.alter.set_table_properties(dict(properties), commit_properties=noted(entry))
        self.update()

    def _changed(self, generation: int, note: str) -> LedgerEntry:
        return LedgerEntry("schema", self.stream, self.name, generation, -1, note=note)

    def _read_schema(self) -> None:
        self.schema = StructType.fromJson(json.loads(self._loaded.schema().to_json()))
        self.arrow_schema = to_arrow_schema(self.schema, timezone="UTC")
        text = self.schema.json()
        self._has_checks = any(mark in text for mark in _MARKS_OF_CHECKS)

    # A sink of batches.

    def for_batches(
        self,
        settings: StreamSettings,
        *,
        rules: RowRules = NO_RULES,
        quarantine: StoredTable | None = None,
        deletes_table: StoredTable | None = None,
    ) -> DeltaSink:
        self.settings = settings
        self.rules = rules
        self.quarantine = None if quarantine is None else delta_sink(quarantine)
        self.deletes_table = None if deletes_table is None else delta_sink(deletes_table)
        return self

    def newest_entry(self) -> LedgerEntry | None:
        """The stream's newest entry that the table's log still shows."""
        commit, _ = newest(self.path, self.stream)
        return commit.entry if commit else None

    def fit(self, output: DataFrame, topics: Sequence[str]) -> DataFrame:
        """The table's columns, and those that ordering, deleting, refusing and judging need."""
        return fitted(self.declared, self.schema, output, topics, self.rules)

    def prepare(self, frame: DataFrame, rows: BatchOfRows) -> PendingWrite:
        driver, spark_commits = self.write_path(rows)
        return prepare_write(
            self,
            frame,
            driver=driver,
            spark_commits=spark_commits,
            batch=(rows.generation, rows.batch),
            topics=rows.topics,
            deletes_table=self.deletes_table,
            rules=self.rules,
            quarantine=self.quarantine,
        )

    def prepare_letters(
        self,
        spark: SparkSession,
        refused: Sequence[tuple[Source, OffsetRange, int]],
        rejected: Sequence[pa.Table],
        rows: BatchOfRows,
    ) -> PendingWrite:
        """Read the refused records of a batch again and prepare them with their reasons."""
        return dead_letters.prepared(self, spark, refused, rejected, rows)

    def append(self, rows: pa.Table, entry: LedgerEntry) -> int | None:
        return ArrowAppend(self, rows).commit(entry)

    def write_path(self, rows: BatchOfRows) -> tuple[bool, bool]:
        """Two flags: rows pass through the driver; delta-spark makes the commit.

        Upserts into a table too large for the driver go through the executors. A table with features outside our
        profile is committed to by delta-spark. A quarantine goes the way of its table, so its features count too.
        """
        large = self.declared.mode == "upsert" and self.megabytes > self.settings.direct_merge_max_mb
        direct = self.direct and (self.quarantine is None or self.quarantine.direct)
        if isinstance(self.path, StorePath):
            if self.settings.committer == "spark" or not direct:
                raise not_by_spark(self.name)
            return rows.driver and not large, False
        return rows.driver and not large, self.settings.committer == "spark" or not direct

    def upkeep(
        self, settings: TableSettings, *, generation: int, forgets: timedelta | None = None, unread: Unread = no_readers
    ) -> TableMaintenance:
        """Compaction, a short log, removal of unlisted files."""
        return TableMaintenance(self, settings, generation, forgets=forgets, unread=unread)

    # The table at rest.

    def commits(self) -> Iterator[Commit]:
        return walk(self.path)

    def mark(self, entry: LedgerEntry) -> int | None:
        """One commit with the entry's transaction and no action."""
        return self.commit(entry, lambda *_: None)

    def content(self, version: int | None = None) -> DeltaContent:
        return content_of(self.path, version)

    def has_content(self, content: Content, version: int | None = None) -> bool:
        return has_content(self.path, delta_content(content), version)

    def no_rows(self) -> DeltaContent:
        return DeltaContent({}, self.path, self.handle.schema().to_json(), self.partition_by)

    def replace_rows(self, content: Content, entry: LedgerEntry, place: str, new: Content | None = None) -> Replaced:
        return replace_rows(self, delta_content(content), entry, place, None if new is None else delta_content(new))

    def add_later_rows(self, now: Content, then: Content) -> LaterRows:
        """Add files of later rows, in commits of their own."""
        return add_later_rows(self, delta_content(now), delta_content(then))

    def sliced(self) -> SlicedTable:
        """The table as one whose slices can be replaced."""
        from streaming_jobs.sinks.delta.slice_staging import DeltaSlices  # it needs PySpark

        return DeltaSlices(self)

    def redriven(self) -> RedrivenTable:
        """The table as one that takes the rows of redrives."""
        from streaming_jobs.sinks.delta.redriven import DeltaRedriven

        return DeltaRedriven(self)

    def complete(self, version: int) -> bool:
        """True if the files of a version are all there."""
        try:
            files = table_files(self.path, version)
            if isinstance(self.path, StorePath):
                return set(identities(self.path, files)) <= {
                    f"{self.path}/{name}" for name, _ in files_below(self.path)
                }
            for path in files:
                on_disk(self.path, path)
        except PreflightRefused:
            return False
        return True

    def readable(self, version: int | None = None) -> DeltaTable:
        return delta_table(self.path, version)

    def size(self) -> tuple[int, int]:
        """The number of its files, and their total bytes."""
        sizes = self.handle.get_add_actions()["size_bytes"].to_pylist()
        return len(sizes), sum(sizes)

    def check_one_commit(self) -> None:
        """Raise UsageError for a table with features outside of the profile."""
        if not self.direct:
            raise UsageError(
                f"table {self.name} has constraints or features that a publish in one commit cannot keep",
                "a recovery of such a table is not offered; see docs/recover.md",
            )

    def check_removable(self) -> None:
        """Raise UsageError for a table that is append-only."""
        if self.handle.metadata().configuration.get("delta.appendOnly") == "true":
            raise UsageError(
                f"table {self.name} is append-only (delta.appendOnly): a publish takes the wrong rows out, and the "
                "table refuses that",
                f"let it take rows out: ALTER TABLE delta.`{self.path}` UNSET TBLPROPERTIES ('delta.appendOnly')",
            )


def delta_sink(table: StoredTable) -> DeltaSink:
    """An open table as a Delta table; tables receive only companions of their own store."""
    assert isinstance(table, DeltaSink)
    return table


def open_sink(settings: Settings, declared: DeclaredTable, stream: str) -> DeltaSink | None:
    """The table if it exists, even if another program created it."""
    path = settings.tables / declared.name
    try:
        return DeltaSink(path, declared, stream, delta_table(path))
    except TableNotFoundError:
        return None


def _position(handle: DeltaTable, app: str) -> Txn | None:
    version = handle.transaction_version(app)
    return None if version is None else Txn.of(version)
