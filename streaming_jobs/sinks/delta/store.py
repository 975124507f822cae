"""The store of Delta tables: opens them, makes them, retains their files for savepoints (`sinks/stored.py`).

    <tables>/<table>/_delta_log/...                               the table's own log
    <tables>/<table>/_savepoints/<stream>-g0001-b000000041/...    hard links of the files that a savepoint retains
    <the savepoint's folder>/files.json.gz                        these files, as the table's log adds them

A link keeps a file's bytes when its name is removed, by compaction, maintenance, or a VACUUM by hand. On a store the
table has `_savepoints/<stream>-g0001-b000000041.json.gz` in place of the links: the names of these files, which
maintenance then leaves where they are (`retained.py`).
"""

from __future__ import annotations

import gzip
import json
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

import structlog
from deltalake import CommitProperties, DeltaTable, Schema
from deltalake.exceptions import DeltaError
from pyspark.sql.types import ArrayType, DataType, MapType, StructField, StructType

from streaming_jobs.declare.columns import checked_keys, checked_new_partitions, checked_order, checked_types
from streaming_jobs.declare.table import DeclaredTable
from streaming_jobs.errors import OutputMismatch
from streaming_jobs.ledger.entry import LedgerEntry, app_id
from streaming_jobs.settings import Settings, TableSettings
from streaming_jobs.sinks.delta import column_bounds, retained, truncated_commits
from streaming_jobs.sinks.delta.content import DeltaContent, delta_content, make_table
from streaming_jobs.sinks.delta.log import STREAM_PROPERTY, moving, walk
from streaming_jobs.sinks.delta.orphan_files import AT_LEAST_ON_STORES
from streaming_jobs.sinks.delta.replace_rows import rename_unencoded
from streaming_jobs.sinks.delta.sink import DeltaSink, delta_sink, open_sink
from streaming_jobs.sinks.delta.table_files import TableFile, on_disk, table_files
from streaming_jobs.sinks.schemas import is_position
from streaming_jobs.sinks.stored import (
    Commit,
    Content,
    ReliedOn,
    SavedAs,
    SavedTable,
    StoredTable,
    TruncatedEnd,
)
from streaming_jobs.storage.files import hard_link, sync, sync_names
from streaming_jobs.storage.locations import Location, delta_options, delta_table, made_folder, sync_location
from streaming_jobs.stream import DeltaTable as Declared
from streaming_jobs.text.durations import milliseconds

_FILES = "files.json.gz"


class DeltaStore:
    """Delta tables in folders and on object stores."""

    kind = "deltalake"
    faults: tuple[type[Exception], ...] = (DeltaError,)

    def open(self, settings: Settings, declared: DeclaredTable, stream: str) -> DeltaSink | None:
        return open_sink(settings, declared, stream)

    def commits(self, settings: Settings, declared: DeclaredTable, *, up_to: int | None = None) -> Iterator[Commit]:
        return walk(settings.tables / declared.name, up_to)

    def ensure(
        self, settings: Settings, declared: DeclaredTable, stream: str, output: StructType, *, generation: int
    ) -> DeltaSink:
        return ensure_sink(settings, declared, stream, output, generation=generation)

    def check_output(self, settings: Settings, declared: DeclaredTable, stream: str, output: StructType) -> None:
        check_output(settings, declared, stream, output)

    def create(
        self, settings: Settings, declared: DeclaredTable, stream: str, content: Content, entry: LedgerEntry | None
    ) -> DeltaSink:
        properties = CommitProperties() if entry is None else moving(entry, app_id(stream, declared.name))
        path = settings.tables / declared.name
        rewritten = declared.mode == "upsert" and entry is not None  # batches merge into it
        make_table(path, declared.name, delta_content(content), stream, properties, rewritten=rewritten)
        return DeltaSink(path, declared, stream, delta_table(path))

    def companion(
        self, name: str, description: str, *, owners: Sequence[str] = (), schema: StructType | None = None
    ) -> DeclaredTable:
        return Declared(name, schema=schema, description=description, owners=owners)

    def retain(self, versions: Sequence[tuple[StoredTable, int]], saved: SavedAs) -> list[SavedTable]:
        """Link the files of these versions, and write their `add` actions into the savepoint's folder."""
        files: dict[str, list[TableFile]] = {}
        tables = []
        for table, version in versions:
            path = delta_sink(table).path
            files[table.name] = list(table_files(path, version).values())
            if isinstance(path, Path):
                _link(path, files[table.name], _links(path, saved))
            else:
                retained.write(path, saved, files[table.name])
            handle = delta_table(path, version)
            tables.append(
                SavedTable(
                    name=table.name,
                    table_id=str(handle.metadata().id),
                    version=version,
                    schema=handle.schema().to_json(),
                    partition_by=tuple(handle.metadata().partition_columns),
                    files=len(files[table.name]),
                )
            )
        listed = {table: [asdict(file) for file in of_table] for table, of_table in files.items()}
        (packed := saved.folder / _FILES).write_bytes(gzip.compress(json.dumps(listed).encode()))
        if isinstance(packed, Path):
            sync(packed)
        return tables

    def retained(self, settings: Settings, tables: Sequence[SavedTable], saved: SavedAs) -> dict[str, DeltaContent]:
        listed = json.loads(gzip.decompress((saved.folder / _FILES).read_bytes()))
        return {
            table.name: DeltaContent(
                {file["path"]: TableFile(**file) for file in listed[table.name]},
                _kept(settings.tables / table.name, saved),
                table.schema,
                table.partition_by,
            )
            for table in tables
        }

    def release(self, settings: Settings, saved: SavedAs) -> None:
        if not isinstance(settings.tables, Path):
            retained.release(settings.tables, saved)
        elif settings.tables.is_dir():
            for links in settings.tables.glob(f"*/_savepoints/{saved.stream}-{saved.name}"):
                shutil.rmtree(links, ignore_errors=True)

    def retained_in(self, settings: Settings, table: str, saved: SavedAs) -> Sequence[Path]:
        path = settings.tables / table
        return (_links(path, saved),) if isinstance(path, Path) else ()

    def log_place(self, settings: Settings, declared: DeclaredTable) -> Location:
        return settings.tables / declared.name / "_delta_log"

    def truncated_copies(self, settings: Settings, declared: DeclaredTable) -> Iterator[Path]:
        """Remove truncated checkpoints of the log; an object is never truncated."""
        path = settings.tables / declared.name
        return truncated_commits.truncated_copies(path) if isinstance(path, Path) else iter(())

    def truncated_end(
        self, settings: Settings, declared: DeclaredTable, stream: str, relied: ReliedOn
    ) -> TruncatedEnd | None:
        path = settings.tables / declared.name
        return truncated_commits.truncated_end(path, stream, relied) if isinstance(path, Path) else None


STORE = DeltaStore()


def _links(table: Path, saved: SavedAs) -> Path:
    return table / "_savepoints" / f"{saved.stream}-{saved.name}"


def _kept(table: Location, saved: SavedAs) -> Location:
    """The folder that the paths of a savepoint's files are relative to."""
    return _links(table, saved) if isinstance(table, Path) else table


def _link(table: Path, files: Iterable[TableFile], target: Path) -> None:
    """Link a table's files, and have the links on disk; the files were synced with the commits that added them."""
    made = []
    for file in files:
        source = on_disk(table, file.path)
        assert isinstance(source, Path)
        made.append(target / source.relative_to(table))
        hard_link(source, made[-1])
    sync_names(made, table)


# A stream's Delta table before its first batch: made, widened to the output of today's code, its properties set.


log = structlog.get_logger()

_WATERMARK = "spark.watermarkDelayMs"  # EventTimeWatermark.delayKey


def ensure_sink(
    settings: Settings, declared: DeclaredTable, stream: str, output: StructType, *, generation: int
) -> DeltaSink:
    """Open the table, made or widened to hold `output`; raises OutputMismatch for any other difference.

    The first commit of a new table opens the generation: it carries the transaction of batch -1. A column that
    `output` has and the table lacks is added, null in all existing rows.
    """
    contract = _contract(declared, output)
    sink = open_sink(settings, declared, stream)
    if sink is None:
        if generation == 1:  # the tables of a later one are a recovery's: they take the place of a table that is there
            checked_new_partitions(declared.name, contract, declared.partition_by)
        path = made_folder(settings.tables) / declared.name
        entry = LedgerEntry("schema", stream, declared.name, generation, -1, note="table made")
        DeltaTable.create(
            str(path),
            Schema.from_json(contract.json()),
            partition_by=list(declared.partition_by) or None,
            name=declared.name,
            description=declared.description or None,
            configuration={
                STREAM_PROPERTY: stream,
                column_bounds.PROPERTY: column_bounds.encode(
                    column_bounds.boundable(contract, declared.partition_by, _sought(declared))
                ),
                **_properties(settings, declared),
            },
            raise_if_key_not_exists=False,
            storage_options=delta_options(path),
            commit_properties=moving(entry, app_id(stream, declared.name)),
        )
        sync_location(path)
        return DeltaSink(path, declared, stream, delta_table(path))
    _check_layout(sink, declared)
    if added := _added(sink, contract):
        sink.add_columns(added, generation)
    if absent := sorted(_types(sink.schema).keys() - _types(contract).keys() - _positions(sink)):
        log.warning("columns_left_null", stream=stream, table=declared.name, columns=absent)
    bounded = column_bounds.wanted(sink.handle, sink.schema, declared.partition_by, _sought(declared))
    _apply_properties(sink, {**_properties(settings, declared), column_bounds.PROPERTY: bounded}, generation)
    if declared.partition_by and sink.direct:
        rename_unencoded(sink, generation)
    sink.sync()
    return sink


def check_output(settings: Settings, declared: DeclaredTable, stream: str, output: StructType) -> None:
    contract = _contract(declared, output)
    if (sink := open_sink(settings, declared, stream)) is not None:
        _check_layout(sink, declared)
        _added(sink, contract)


def _contract(declared: DeclaredTable, output: StructType) -> StructType:
    """The columns that the table must have: the declared schema if there is one, checked against the function's output.

    The column of the position, which Recourse adds, is not part of the function's output.
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
    checked_keys(declared.name, output, declared.keys)
    checked_order(declared.name, declared.order_by, output)
    return _nullable(StructType([*(declared.schema or output).fields, *position]))


def _differences(wanted: Mapping[str, str], got: Mapping[str, str]) -> str:
    differences = [f"column {n} is missing" for n in wanted.keys() - got.keys()]
    differences += [f"column {n} is not declared" for n in got.keys() - wanted.keys()]
    differences += [
        f"column {n} is {got[n]}, declared {wanted[n]}" for n in wanted.keys() & got.keys() if wanted[n] != got[n]
    ]
    return "; ".join(sorted(differences))


def _added(sink: DeltaSink, contract: StructType) -> list[StructField]:
    """The columns that the table lacks; raises OutputMismatch for any other difference but columns that it alone has.

    Those are null in the rows of this code, which may be older than the table: a deploy that was taken back.
    """
    table, wanted = _types(sink.schema), _types(contract)
    positions = _positions(sink)
    added, gone = wanted.keys() - table.keys(), table.keys() - wanted.keys() - positions
    differences = [f"column {n} is gone" for n in gone if added]  # as after a change of its name
    differences += [
        f"column {n} would change from {table[n]} to {wanted[n]}"
        for n in table.keys() & wanted.keys()
        if table[n] != wanted[n]
    ]
    if differences:
        raise OutputMismatch(
            f"table {sink.name} cannot take the new output: {'; '.join(sorted(differences))}",
            "a table gains columns only: keep the old column beside the new one, or write a new table",
        )
    return [field for field in contract.fields if field.name not in table]


def _positions(sink: DeltaSink) -> set[str]:
    return {field.name for field in sink.schema.fields if is_position(field)}


def _check_layout(sink: DeltaSink, declared: DeclaredTable) -> None:
    now = tuple(sink.handle.metadata().partition_columns)
    if now != tuple(declared.partition_by):
        raise OutputMismatch(
            f"table {sink.name} is partitioned by {list(now)}, the sink declares {list(declared.partition_by)}",
            "keep the partitioning, or write a new table",
        )


def _sought(declared: DeclaredTable) -> tuple[str, ...]:
    """Columns that every merge searches by: their bounds matter most."""
    return (*declared.keys, *declared.order_by)


def _apply_properties(sink: DeltaSink, wanted: dict[str, str], generation: int) -> None:
    now = sink.handle.metadata().configuration
    changed = {key: value for key, value in wanted.items() if now.get(key) != value}
    if changed and sink.direct:
        sink.set_properties(changed, generation)


def _properties(settings: Settings, declared: DeclaredTable) -> dict[str, str]:
    """Properties of every table; those of a partitioned one make delta-spark use folder names without partition values.

    In a path, delta-spark writes a value that is not ASCII into the log as it is, and deltalake percent-encodes it: a
    file that deltalake removes would then stay in the table, with its rows a second time.
    """
    retention = settings.table.deleted_file_retention
    if not isinstance(settings.tables, Path):  # the log shows a removal for as long as maintenance has to wait
        retention = max(retention, AT_LEAST_ON_STORES)
    table = settings.table.model_copy(update={"deleted_file_retention": retention})
    return {**_upkeep_properties(table), **({"delta.randomizeFilePrefixes": "true"} if declared.partition_by else {})}


def _upkeep_properties(table: TableSettings) -> dict[str, str]:
    return {
        "delta.logRetentionDuration": f"interval {milliseconds(table.log_retention) // 1000} seconds",
        "delta.deletedFileRetentionDuration": f"interval {milliseconds(table.deleted_file_retention) // 1000} seconds",
        "delta.checkpointInterval": str(table.checkpoint_interval),
        # `maintenance.py` does it: deltalake would check each file of the log in each commit, and by age only.
        "delta.enableExpiredLogCleanup": "false",
    }


def _types(schema: StructType) -> dict[str, str]:
    return {field.name: field.dataType.simpleString() for field in schema.fields}


def _nullable(schema: StructType) -> StructType:
    """The same columns, all nullable: Delta then needs no invariants. Comments stay.

    The metadata of a watermark is removed: in the table's schema, every stream that reads the table would take it for
    its watermark.
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
