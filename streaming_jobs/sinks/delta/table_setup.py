"""A stream's Delta table before its first batch: made, widened to the output of today's code, its properties set."""

from __future__ import annotations

from collections.abc import Mapping

import structlog
from deltalake import DeltaTable, Schema
from pyspark.sql.types import ArrayType, DataType, MapType, StructField, StructType

from streaming_jobs.declare.columns import checked_keys, checked_new_partitions, checked_order, checked_types
from streaming_jobs.declare.table import DeclaredTable
from streaming_jobs.errors import OutputMismatch
from streaming_jobs.ledger.entry import LedgerEntry, app_id
from streaming_jobs.platform.files import private_folder, sync_tree
from streaming_jobs.settings import Settings, TableSettings
from streaming_jobs.sinks.delta import column_bounds, unencoded_paths
from streaming_jobs.sinks.delta.commit_properties import STREAM_PROPERTY, moving
from streaming_jobs.sinks.delta.sink import DeltaSink, open_sink
from streaming_jobs.sinks.schemas import is_position
from streaming_jobs.text.durations import milliseconds

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
        path = private_folder(settings.tables) / declared.name
        entry = LedgerEntry("schema", stream, declared.name, generation, -1, note="table made")
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
            commit_properties=moving(entry, app_id(stream, declared.name)),
        )
        sync_tree(path)
        return DeltaSink(path, declared, stream, DeltaTable(path))
    _check_layout(sink, declared)
    if added := _added(sink, contract):
        sink.add_columns(added, generation)
    if absent := sorted(_types(sink.schema).keys() - _types(contract).keys() - _positions(sink)):
        log.warning("columns_left_null", stream=stream, table=declared.name, columns=absent)
    bounded = column_bounds.wanted(sink.handle, sink.schema, declared.partition_by, _sought(declared))
    _apply_properties(sink, {**_properties(settings.table, declared), column_bounds.PROPERTY: bounded}, generation)
    if declared.partition_by and sink.direct:
        unencoded_paths.rename(sink, generation)
    sink.sync()
    return sink


def check_output(settings: Settings, declared: DeclaredTable, stream: str, output: StructType) -> None:
    """Raise OutputMismatch if `ensure_sink` would; changes nothing."""
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


def _properties(table: TableSettings, declared: DeclaredTable) -> dict[str, str]:
    """Properties of every table; those of a partitioned one make delta-spark use folder names without partition values.

    In a path, delta-spark writes a value that is not ASCII into the log as it is, and deltalake percent-encodes it: a
    file that deltalake removes would then stay in the table, with its rows a second time.
    """
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
