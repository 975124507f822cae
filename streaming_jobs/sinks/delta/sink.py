"""A stream's Delta table: making it, its place in the ledger, and committing to it exactly once.

Every commit goes through `DeltaSink.commit`, which is the one place where exactly once is decided:
refresh the table, compare its transaction version with the batch's, commit with no retries, and on a refusal
look again. A version of a newer generation raises Fenced; the batch's own version means it is done already.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from pathlib import Path

from deltalake import CommitProperties, DeltaTable, Schema, Transaction
from deltalake import Field as DeltaField
from deltalake.exceptions import CommitFailedError, TableNotFoundError
from deltalake.transaction import AddAction, RemoveAction
from pyspark.sql.types import ArrayType, DataType, MapType, StructField, StructType

from streaming_jobs.column_types import checked_new_partitions, checked_types
from streaming_jobs.durations import milliseconds
from streaming_jobs.errors import CommitImpossible, CommitRefused, Fenced, ForeignWrite, OutputMismatch, RecourseError
from streaming_jobs.failures import classify
from streaming_jobs.files import private_folder, sync_tree
from streaming_jobs.ledger import LedgerEntry, Txn, app_id
from streaming_jobs.settings import Settings, TableSettings
from streaming_jobs.sinks.delta import column_bounds, unencoded_paths
from streaming_jobs.sinks.delta.durable_commits import sync_commits
from streaming_jobs.sinks.delta.log import walk
from streaming_jobs.sinks.delta.upsert_order import is_position
from streaming_jobs.stream import DeltaTable as Declared
from streaming_jobs.stream import checked_order

STREAM_PROPERTY = "recourse.stream"
_ATTEMPTS = 20
_OPEN_END = 5
"""Commits that a driver may have made and not synced before it was killed: one batch, upkeep, a change of schema."""
_WATERMARK = "spark.watermarkDelayMs"  # EventTimeWatermark.delayKey
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

    def __init__(self, path: Path, declared: Declared, stream: str, handle: DeltaTable) -> None:
        self.path = path
        self.declared = declared
        self.stream = stream
        self.app_id = app_id(stream, declared.name)
        self.handle = handle
        self.removed_bytes = 0
        self._known = handle.version()
        self._synced = handle.version() - _OPEN_END
        self._sized: tuple[int, float] | None = None
        self._at: tuple[int, Txn | None] | None = None
        self._read_schema()

    @property
    def name(self) -> str:
        """The table's name."""
        return self.declared.name

    @property
    def table_id(self) -> str:
        """Delta's id of the table; a table made anew has another."""
        return str(self.handle.metadata().id)

    @property
    def position(self) -> Txn | None:
        """The newest batch in the table, as of the last refresh. Asking deltalake takes a millisecond."""
        version = self.handle.version()
        if self._at is None or self._at[0] != version:
            self._at = (version, _position(self.handle, self.app_id))
        return self._at[1]

    @property
    def megabytes(self) -> float:
        """Size of the table's live files, MB; looked at again after each hundred versions."""
        version = self.handle.version()
        if self._sized is None or version >= self._sized[0] + 100:
            sizes = self.handle.get_add_actions(flatten=True)["size_bytes"].to_pylist()
            self._sized = (version, sum(sizes) / 2**20)
        return self._sized[1]

    @property
    def bounded(self) -> tuple[str, ...]:
        """The columns that have bounds in the table's log."""
        return column_bounds.decode(self.handle.metadata().configuration.get(column_bounds.PROPERTY, ""))

    @property
    def direct(self) -> bool:
        """True if deltalake may write this table; False sends every write through delta-spark."""
        protocol = self.handle.protocol()
        features = set(protocol.writer_features or ())
        constrained = any(key.startswith("delta.constraints.") for key in self.handle.metadata().configuration)
        generated = any("delta.generationExpression" in (f.metadata or {}) for f in self.schema.fields)
        plain = protocol.min_writer_version < 7 or features <= _DIRECT_WRITER_FEATURES
        mapped = self.handle.metadata().configuration.get("delta.columnMapping.mode", "none") != "none"
        return plain and not constrained and not generated and not mapped

    def refresh(self) -> None:
        """Read what was committed since.

        Listing the log takes deltalake a few microseconds a file; two looks at names say whether there is anything.
        The handle's own commit must still be in the log: otherwise the log is another one, or went on without us.
        """
        log, version = self.path / "_delta_log", self.handle.version()
        if (log / f"{version + 1:020d}.json").exists() or not (log / f"{version:020d}.json").exists():
            self.handle.update_incremental()

    def commit(self, entry: LedgerEntry, write: Callable[[DeltaTable, CommitProperties], object]) -> int | None:
        """Commit once for the entry's batch; the table's new version, or None when the batch is in it already.

        `write` must make exactly one commit with the properties it is given, through the handle it is given.
        If it makes none (a merge that changes nothing), a commit without data follows. Raises Fenced when the
        table is in a newer generation, ForeignWrite when somebody else changed its rows since the last commit,
        CommitRefused when other commits keep coming first, CommitImpossible when the table takes no such commit.
        """
        for _ in range(_ATTEMPTS):
            if self.holds(entry):
                self.sync()
                return None
            at, version = self.position, self.handle.version()
            try:
                write(self.handle, self.properties(entry))
                self.refresh()
                if self.position == at:
                    self.commit_actions([], self.properties(entry))
            except CommitFailedError as error:
                self.refresh()
                if self.handle.version() == version:  # nobody came first, so this was no race
                    raise self._failed(error) from error
                continue
            return self.committed()
        raise CommitRefused(f"table {self.name} was committed to by others {_ATTEMPTS} times during one commit")

    def _failed(self, error: CommitFailedError) -> RecourseError:
        if "append-only" in str(error):
            return CommitImpossible(
                f"table {self.name} is append-only (delta.appendOnly), and this commit takes rows out: {error}",
                f"let it take rows out: ALTER TABLE delta.`{self.path}` UNSET TBLPROPERTIES ('delta.appendOnly')",
            )
        return classify(error)

    def holds(self, entry: LedgerEntry) -> bool:
        """True if the table, as it is now, has the entry's batch; raises Fenced and ForeignWrite."""
        self.refresh()
        at = self.position
        if at is not None and at.generation > entry.generation:
            raise self.fenced(at, entry)
        self._refuse_foreign()
        return at is not None and at >= entry.txn

    def committed(self) -> int:
        """Take note of a commit of our own, and have it on disk; the table's version."""
        version = int(self.handle.version())
        self.sync()
        if version == self._known + 1:  # with more between, the next look reads them
            self._known = version
        return version

    def sync(self) -> None:
        """Have everything up to the handle's version on disk; counts the bytes of files that went in `removed_bytes`.

        Also what a driver before this one may have left in memory only when it was killed.
        """
        version = int(self.handle.version())
        self.removed_bytes += sync_commits(self.path, range(max(self._synced + 1, 0), version + 1))
        self._synced = version

    def _refuse_foreign(self) -> None:
        """Look at the commits since the last look, if there are any that are not known to be ours."""
        version = self.handle.version()
        if version == self._known:
            return
        for commit in walk(self.path):
            if commit.version <= self._known:
                break
            if commit.changes_data and (commit.entry is None or commit.entry.stream != self.stream):
                operation = commit.operation or "unknown operation"
                raise ForeignWrite(
                    f"version {commit.version} of table {self.name} ({operation}) changed rows while stream "
                    f"{self.stream} was writing the table",
                    f"undo it, or if it is right: recourse streams accept {self.stream} --table {self.name} "
                    f"--version {commit.version} --why '...'",
                )
        self._known = version

    def fenced(self, at: Txn, entry: LedgerEntry) -> Fenced:
        """The error for a driver whose table has moved to a newer generation."""
        return Fenced(
            f"table {self.name} is in generation {at.generation}, this driver belongs to {entry.generation}",
            "let this driver end; the newer generation goes on without it",
        )

    def commit_actions(self, actions: list[AddAction | RemoveAction], properties: CommitProperties) -> None:
        """One commit of exactly these actions."""
        self.handle.create_write_transaction(
            actions,
            mode="append",
            schema=self.handle.schema(),
            partition_by=list(self.declared.partition_by) or None,
            commit_properties=properties,
        )
        self.refresh()

    def properties(self, entry: LedgerEntry) -> CommitProperties:
        """Commit properties that carry the entry and its transaction, and allow no retry."""
        transaction = Transaction(self.app_id, entry.txn.version, int(time.time() * 1000))
        return CommitProperties(
            custom_metadata={"userMetadata": entry.encode()}, max_commit_retries=0, app_transactions=[transaction]
        )

    def _read_schema(self) -> None:
        self.schema = _spark_schema(self.handle)


def open_sink(settings: Settings, declared: Declared, stream: str) -> DeltaSink | None:
    """The table if it exists, whoever made it."""
    path = settings.tables / declared.name
    try:
        return DeltaSink(path, declared, stream, DeltaTable(path))
    except TableNotFoundError:
        return None


def ensure_sink(
    settings: Settings, declared: Declared, stream: str, output: StructType, *, generation: int
) -> DeltaSink:
    """Open the table, made or widened to hold `output`; raises OutputMismatch for any other difference.

    A new table opens the generation: its first commit carries the transaction of batch -1. A column that
    `output` has and the table has not is added, null in all rows that are there.
    """
    contract = _contract(declared, output)
    sink = open_sink(settings, declared, stream)
    if sink is None:
        if generation == 1:  # the tables of a later one are a recovery's: they take the place of a table that is there
            checked_new_partitions(declared.name, contract, declared.partition_by)
        path = private_folder(settings.tables) / declared.name
        entry = _entry("schema", stream, declared.name, generation, "table made")
        DeltaTable.create(
            path,
            Schema.from_json(contract.json()),
            partition_by=list(declared.partition_by) or None,
            name=declared.name,
            description=declared.description or None,
            configuration={
                STREAM_PROPERTY: stream,
                column_bounds.PROPERTY: column_bounds.encode(
                    column_bounds.boundable(contract, declared.partition_by, _sought(declared))
                ),
                **_properties(settings.table, declared),
            },
            raise_if_key_not_exists=False,
            commit_properties=CommitProperties(
                custom_metadata={"userMetadata": entry.encode()},
                app_transactions=[
                    Transaction(app_id(stream, declared.name), entry.txn.version, int(time.time() * 1000))
                ],
            ),
        )
        sync_tree(path)
        return DeltaSink(path, declared, stream, DeltaTable(path))
    _check_layout(sink, declared)
    if added := _added(sink, contract):
        entry = _entry("schema", stream, declared.name, generation, f"added {', '.join(f.name for f in added)}")
        fields = [DeltaField.from_json(f.json()) for f in added]
        sink.handle.alter.add_columns(
            fields, commit_properties=CommitProperties(custom_metadata={"userMetadata": entry.encode()})
        )
        sink.refresh()
        sink._read_schema()
    bounded = column_bounds.wanted(sink.handle, sink.schema, declared.partition_by, _sought(declared))
    _apply_properties(sink, {**_properties(settings.table, declared), column_bounds.PROPERTY: bounded}, generation)
    if declared.partition_by and sink.direct:
        unencoded_paths.rename(sink, generation)
    sink.sync()
    return sink


def _contract(declared: Declared, output: StructType) -> StructType:
    """What the table must hold: the declared schema if there is one, checked against the function's output.

    The position that Recourse adds is no part of what the function returns.
    """
    position = [field for field in output.fields if is_position(field)]
    output = StructType([field for field in output.fields if not is_position(field)])
    if declared.schema is not None:
        wanted, got = _types(declared.schema), _types(output)
        if differences := _differences(wanted, got):
            raise OutputMismatch(
                f"the function's output is not what table {declared.name} declares: {differences}",
                "correct the function or the declared schema",
            )
    for column in (*declared.keys, *declared.partition_by):
        if column not in output.fieldNames():
            raise OutputMismatch(f"the output for table {declared.name} has no column '{column}'", "add it")
    checked_types(declared.name, output, declared.partition_by)
    checked_order(declared.name, declared.order_by, output)
    return _nullable(StructType([*(declared.schema or output).fields, *position]))


def _differences(wanted: Mapping[str, str], got: Mapping[str, str]) -> str:
    said = [f"column {n} is missing" for n in wanted.keys() - got.keys()]
    said += [f"column {n} is not declared" for n in got.keys() - wanted.keys()]
    said += [f"column {n} is {got[n]}, declared {wanted[n]}" for n in wanted.keys() & got.keys() if wanted[n] != got[n]]
    return "; ".join(sorted(said))


def _added(sink: DeltaSink, contract: StructType) -> list[StructField]:
    table, wanted = _types(sink.schema), _types(contract)
    own = {field.name for field in sink.schema.fields if is_position(field)}
    said = [f"column {n} is gone" for n in table.keys() - wanted.keys() - own]
    said += [
        f"column {n} would change from {table[n]} to {wanted[n]}"
        for n in table.keys() & wanted.keys()
        if table[n] != wanted[n]
    ]
    if said:
        raise OutputMismatch(
            f"table {sink.name} cannot take the new output: {'; '.join(sorted(said))}",
            "a table gains columns only: keep the old column beside the new one, or write a new table",
        )
    return [field for field in contract.fields if field.name not in table]


def _check_layout(sink: DeltaSink, declared: Declared) -> None:
    now = tuple(sink.handle.metadata().partition_columns)
    if now != tuple(declared.partition_by):
        raise OutputMismatch(
            f"table {sink.name} is partitioned by {list(now)}, the sink declares {list(declared.partition_by)}",
            "keep the partitioning, or write a new table",
        )


def _sought(declared: Declared) -> tuple[str, ...]:
    """Columns that every merge looks for: theirs are the bounds that matter most."""
    return (*declared.keys, *declared.order_by)


def _apply_properties(sink: DeltaSink, wanted: dict[str, str], generation: int) -> None:
    now = sink.handle.metadata().configuration
    changed = {key: value for key, value in wanted.items() if now.get(key) != value}
    if changed and sink.direct:
        entry = _entry("schema", sink.stream, sink.name, generation, f"set {', '.join(changed)}")
        sink.handle.alter.set_table_properties(
            changed, commit_properties=CommitProperties(custom_metadata={"userMetadata": entry.encode()})
        )
        sink.refresh()


def _properties(table: TableSettings, declared: Declared) -> dict[str, str]:
    """Properties of every table; delta-spark puts files of a partitioned one into folders without partition values.

    It writes a value that is not ASCII into the log as it is, deltalake percent-encodes it: a file that deltalake
    removes would then stay in the table, with its rows a second time.
    """
    return {**_upkeep_properties(table), **({"delta.randomizeFilePrefixes": "true"} if declared.partition_by else {})}


def _upkeep_properties(table: TableSettings) -> dict[str, str]:
    return {
        "delta.logRetentionDuration": f"interval {milliseconds(table.log_retention) // 1000} seconds",
        "delta.deletedFileRetentionDuration": f"interval {milliseconds(table.deleted_file_retention) // 1000} seconds",
        "delta.checkpointInterval": str(table.checkpoint_interval),
        # Upkeep does it: deltalake would look at each file of the log in each commit, and knows ages only.
        "delta.enableExpiredLogCleanup": "false",
    }


def _entry(kind: str, stream: str, table: str, generation: int, note: str) -> LedgerEntry:
    assert kind in ("schema", "upkeep")
    return LedgerEntry(kind, stream, table, generation, -1, note=note)  # type: ignore[arg-type]


def _position(handle: DeltaTable, app: str) -> Txn | None:
    version = handle.transaction_version(app)
    return None if version is None else Txn.of(version)


def _spark_schema(handle: DeltaTable) -> StructType:
    import json

    return StructType.fromJson(json.loads(handle.schema().to_json()))


def _types(schema: StructType) -> dict[str, str]:
    return {field.name: field.dataType.simpleString() for field in schema.fields}


def _nullable(schema: StructType) -> StructType:
    """The same columns, all nullable: Delta then needs no invariants. Comments stay.

    A watermark does not: in the table's schema it would pass for one in every stream that reads the table.
    """
    return StructType([StructField(f.name, _nullable_type(f.dataType), True, _comments(f)) for f in schema.fields])


def _comments(field: StructField) -> dict[str, object]:
    return {key: value for key, value in field.metadata.items() if key != _WATERMARK}


def _nullable_type(kind: DataType) -> DataType:
    if isinstance(kind, StructType):
        return _nullable(kind)
    if isinstance(kind, ArrayType):
        return ArrayType(_nullable_type(kind.elementType), True)
    if isinstance(kind, MapType):
        return MapType(_nullable_type(kind.keyType), _nullable_type(kind.valueType), True)
    return kind
