"""Rows of processors (`transformWithState`) in and out of Arrow by columns.

PySpark takes each value of a row out of Arrow by itself, makes a dict of each row that a processor returns, and sends
an Arrow batch for each key: most of the CPU time of a processor that does little. Here the same rows are made from
whole columns, and the returned rows of many keys are one batch.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from operator import itemgetter
from typing import IO, Any

import pyarrow as pa
import pyarrow.types as kinds
from pyspark.sql import Row
from pyspark.sql.pandas import serializers
from pyspark.sql.pandas.types import to_arrow_type
from pyspark.sql.streaming.stateful_processor_util import TransformWithStateInPandasFuncMode as Mode

_MOST = 10_000
"""Returned rows of a batch, from which on it is sent; the rows of one key are never taken apart."""


def rows_by_columns() -> None:
    """Have the workers that are forked from this process read and write the rows of processors by columns."""
    serializer: Any = serializers.TransformWithStateInPySparkRowSerializer
    serializer.load_stream, serializer.dump_stream = _load_stream, _dump_stream


def _load_stream(self: Any, stream: IO[bytes]) -> Iterator[tuple[Mode, Any, Iterator[Row] | None]]:
    """The rows of each key, then the calls for timers and for the end."""

    def rows() -> Iterator[tuple[tuple[Any, ...], Row]]:
        for batch in serializers.ArrowStreamSerializer.load_stream(self, stream):
            names, columns = Row(*batch.schema.names), [column.to_pylist() for column in batch.columns]
            keys = zip(*(columns[place] for place in self.key_offsets), strict=True)
            for key, values in zip(keys, zip(*columns, strict=True), strict=True):
                row = tuple.__new__(Row, values)
                row.__fields__ = names
                yield key, row

    for key, of_the_key in groupby(rows(), key=itemgetter(0)):
        yield Mode.PROCESS_DATA, key, map(itemgetter(1), of_the_key)
    yield Mode.PROCESS_TIMER, None, None
    yield Mode.COMPLETE, None, None


def _dump_stream(self: Any, iterator: Iterable[Any], stream: IO[bytes]) -> None:
    """Write what a processor returns; an item is a list of one pair, the rows of a key and their type."""

    def batches() -> Iterator[tuple[pa.RecordBatch]]:
        waiting: list[Row] = []
        schema = None
        for [(returned, declared)] in iterator:
            schema = schema or pa.schema(list(to_arrow_type(declared, timezone="UTC", prefers_large_types=False)))
            waiting += returned
            if len(waiting) >= _MOST:
                yield (_batch(waiting, schema),)
                waiting = []
        if schema is not None:
            yield (_batch(waiting, schema),)

    serializer: Any = serializers.ArrowStreamUDFSerializer
    serializer.dump_stream(self, batches(), stream)


def _batch(rows: Sequence[Row], schema: pa.Schema) -> pa.RecordBatch:
    """The rows with the fields of the schema by name, as PySpark makes them of their dicts."""
    as_declared = schema.names, tuple(schema.names)  # of a Row by keywords, and of a Row by a class of Rows
    nested = any(kinds.is_nested(kind) for kind in schema.types)
    if nested or not rows or not all(getattr(row, "__fields__", None) in as_declared for row in rows):
        return pa.RecordBatch.from_pylist([row.asDict(True) for row in rows], schema=schema)
    columns = zip(*rows, strict=True)
    arrays = [pa.array(values, field.type) for values, field in zip(columns, schema, strict=True)]
    return pa.RecordBatch.from_arrays(arrays, schema=schema)
