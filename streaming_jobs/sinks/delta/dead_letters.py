"""The Delta table of the records that a stream refused, each in it exactly once.

Each row has the record's position (topic, partition, offset), the record (key, value, headers, timestamp) and the
reason (`reason`, a stable word, and `detail`). Output rows without their key are in it too, with the row as JSON in
`value`, reason `null_key`, and the source position if the output carries one; so are output rows that no table can
hold (`refused_rows.py`).
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import pyarrow as pa

from streaming_jobs.declare.columns import DETAIL_COLUMN, REASON_COLUMN
from streaming_jobs.ledger.positions import OffsetRange
from streaming_jobs.sinks.base import BatchOfRows, PendingWrite
from streaming_jobs.sinks.delta.fitting import fitted
from streaming_jobs.sinks.delta.pending_writes import ArrowAppend
from streaming_jobs.sinks.delta.refused_rows import DETAILS, with_bytes, without_outside
from streaming_jobs.sinks.delta.writers import prepare_write
from streaming_jobs.sinks.schemas import DEAD_LETTERS
from streaming_jobs.sources.base import Source

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from streaming_jobs.sinks.delta.sink import DeltaSink


_TIME = DEAD_LETTERS.fieldNames().index("timestamp")
_DRIVER_ROWS = 50_000


def prepared(
    sink: DeltaSink,
    spark: SparkSession,
    refused: Sequence[tuple[Source, OffsetRange, int]],
    rejected: Sequence[pa.Table],
    batch: BatchOfRows,
) -> PendingWrite:
    """The refused rows for `sink`; many of them, and all if `batch.driver` is false, stay on the executors."""
    if not batch.driver or sum(count for _, _, count in refused) > _DRIVER_ROWS or not sink.direct:
        frames = [source.bad_records(spark, r).mapInArrow(_storable, DEAD_LETTERS) for source, r, _ in refused]
        frames += [spark.createDataFrame(_from_rows(rows), DEAD_LETTERS) for rows in rejected]
        whole = frames[0]
        for frame in frames[1:]:
            whole = whole.unionByName(frame)
        number = (batch.generation, batch.batch)
        rows = fitted(sink.declared, sink.schema, whole, [])
        return prepare_write(sink, rows, driver=False, spark_commits=not sink.direct, batch=number)
    schema = _arrow_schema()
    tables = []
    for source, offsets, count in refused:
        batches = source.bad_rows(spark, offsets, count).to_batches()
        tables.append(pa.Table.from_batches([*_storable(iter(batches))], schema))
    tables += [_from_rows(rows) for rows in rejected]
    return ArrowAppend(sink, pa.concat_tables(tables))


def _storable(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Yields the records in the table's types; a timestamp that no table can hold becomes null."""
    schema = _arrow_schema()
    for batch in batches:
        columns = [batch.column(name) for name in schema.names]
        columns[_TIME] = without_outside(columns[_TIME])
        arrays = [array.cast(field.type) for array, field in zip(columns, schema, strict=True)]
        yield pa.RecordBatch.from_arrays(arrays, schema=schema)


def _from_rows(rows: pa.Table) -> pa.Table:
    """Output rows that were not written as dead letters: rows without their key, and what a table cannot hold."""
    letters = []
    for row in with_bytes(rows).to_pylist():
        topic, partition, offset = (row.pop(name, None) for name in ("__topic", "__partition", "__offset"))
        row.pop("__delete", None)
        reason = _shown(row.pop(REASON_COLUMN, None) or b"null_key")
        detail = row.pop(DETAIL_COLUMN, None)
        value = json.dumps(row, default=_shown).encode()
        letters.append(
            {
                "topic": None if topic is None else _shown(topic),
                "partition": partition,
                "offset": offset,
                "value": value,
                "reason": reason,
                "detail": _shown(detail) if detail else DETAILS.get(reason, "an output row has no key"),
            }
        )
    return pa.Table.from_pylist(letters, schema=_arrow_schema())


def _shown(value: object) -> str:
    """Bytes as text, with `\\xff` for a byte that is not UTF-8; any other value as Python writes it."""
    return value.decode("utf-8", "backslashreplace") if isinstance(value, bytes) else str(value)


def _arrow_schema() -> pa.Schema:
    header = pa.struct([("key", pa.string()), ("value", pa.binary())])
    return pa.schema(
        [
            ("topic", pa.string()),
            ("partition", pa.int32()),
            ("offset", pa.int64()),
            ("timestamp", pa.timestamp("us", tz="UTC")),
            ("key", pa.binary()),
            ("value", pa.binary()),
            ("headers", pa.list_(header)),
            ("reason", pa.string()),
            ("detail", pa.string()),
        ]
    )
