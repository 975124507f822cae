"""Columns that Recourse defines, for every store: of dead letters, late records, remembered deletes, `_position`."""

from __future__ import annotations

from pyspark.sql import types as T

from streaming_jobs.declare.columns import DELETED_AT_COLUMN, OWN_COLUMN, POSITION_COLUMN
from streaming_jobs.declare.table import DeclaredTable
from streaming_jobs.errors import UsageError


def _column(name: str, kind: T.DataType, comment: str) -> T.StructField:
    return T.StructField(name, kind, True, {"comment": comment})


DEAD_LETTERS = T.StructType(
    [
        _column("topic", T.StringType(), "topic the record lies in"),
        _column("partition", T.IntegerType(), "its partition"),
        _column("offset", T.LongType(), "its offset"),
        _column("timestamp", T.TimestampType(), "time the record carries"),
        _column("key", T.BinaryType(), "its key"),
        _column("value", T.BinaryType(), "its value as it came"),
        _column(
            "headers",
            T.ArrayType(T.StructType([T.StructField("key", T.StringType()), T.StructField("value", T.BinaryType())])),
            "its headers",
        ),
        _column("reason", T.StringType(), "why it was refused, a stable word"),
        _column("detail", T.StringType(), "why it was refused, in words"),
    ]
)
"""The columns of a table of dead letters."""

LATE_RECORDS = T.StructType(
    [
        _column("topic", T.StringType(), "topic the record lies in"),
        _column("partition", T.IntegerType(), "its partition"),
        _column("offset", T.LongType(), "its offset"),
        _column("key", T.BinaryType(), "its key"),
        _column("event_time", T.TimestampType(), "its event time"),
        _column("watermark", T.TimestampType(), "the watermark behind which it came"),
        _column("days", T.ArrayType(T.DateType()), "the days of the table's slices that lack it"),
        _column("generation", T.IntegerType(), "generation of the batch that read it"),
        _column("batch", T.LongType(), "number of the batch that read it"),
    ]
)
"""The columns of a table of late records."""

BATCHES = T.StructType(
    [
        _column("generation", T.IntegerType(), "generation of the batch"),
        _column("batch", T.LongType(), "its number"),
        _column("topic", T.StringType(), "a topic that it wrote"),
        _column("topic_id", T.StringType(), "the topic's id"),
        _column("partition", T.IntegerType(), "a partition of the topic"),
        _column("first_offset", T.LongType(), "the offset of its first record there"),
        _column("end_offset", T.LongType(), "the offset after its last record there"),
        _column("records", T.LongType(), "its records there; others may lie among them"),
    ]
)
"""The columns of the primary table of a stream that writes no other Delta table."""

QUARANTINE_FIELDS = (
    _column("_rules", T.ArrayType(T.StringType()), "the row rules that the row breaks"),
    _column("_reason", T.StringType(), "the same in words"),
    _column("_topic", T.StringType(), "topic of its record, if the output has `_source`"),
    _column("_partition", T.IntegerType(), "partition of its record"),
    _column("_offset", T.LongType(), "offset of its record"),
    _column("_generation", T.IntegerType(), "generation of the batch that made it"),
    _column("_batch", T.LongType(), "number of the batch that made it"),
)
"""The columns of a quarantine besides its table's columns."""

POSITION_FIELD = T.StructField(
    POSITION_COLUMN,
    T.LongType(),
    True,
    {
        "comment": "place in the source of the record that wrote the row: breaks ties of the order",
        OWN_COLUMN: "position",
    },
)
"""The column of a table with `order_by` that holds the source position of each row's record."""

TOPICS = 8
"""The number of topics that `_position` can distinguish."""

_DELETED_AT = T.StructField(DELETED_AT_COLUMN, T.TimestampType(), True, {"comment": "when the delete was noted"})


def is_position(field: T.StructField) -> bool:
    """True if a table's column is the `_position` that Recourse has added."""
    return field.name == POSITION_COLUMN and field.metadata.get(OWN_COLUMN) == "position"


def deletes_of(table: DeclaredTable, output: T.StructType) -> T.StructType:
    """The columns of a table's remembered deletes: keys, order, position, time."""
    names = dict.fromkeys([*table.keys, *table.order_by])
    return T.StructType([*(_plain(output[name]) for name in names), POSITION_FIELD, _DELETED_AT])


def quarantine_of(table: str, output: T.StructType) -> T.StructType:
    """The columns of a table's quarantine; raises UsageError if the table has a column of one of its own names."""
    own = {field.name.lower() for field in QUARANTINE_FIELDS}
    columns = [field for field in output.fields if not is_position(field)]
    for field in columns:
        if field.name.lower() in own:
            raise UsageError(
                f"table {table}: the column name {field.name} is one of its quarantine's own", "rename the column"
            )
    return T.StructType([*(_plain(field) for field in columns), *QUARANTINE_FIELDS])


def _plain(field: T.StructField) -> T.StructField:
    """The name and type of a table's column, without its metadata, also in what is nested in it.

    Metadata are part of the table they are of: the ids of column mapping, the expression of a generated column, an
    invariant. In another table they would refuse its rows, or the table itself.
    """
    return T.StructField(field.name, _plain_type(field.dataType))


def _plain_type(kind: T.DataType) -> T.DataType:
    if isinstance(kind, T.StructType):
        return T.StructType([_plain(field) for field in kind.fields])
    if isinstance(kind, T.ArrayType):
        return T.ArrayType(_plain_type(kind.elementType))
    if isinstance(kind, T.MapType):
        return T.MapType(_plain_type(kind.keyType), _plain_type(kind.valueType))
    return kind
