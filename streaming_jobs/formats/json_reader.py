"""The reading of JSON records, a block at a time: msgspec decodes and checks, Arrow checks what JSON has no type for.

The order: every value into a record, or a refusal; the faults that msgspec does not see; the columns, in which text
that is no time, or digits that do not fit, refuse further records.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from operator import attrgetter
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
import numpy as np
import pyarrow as pa

from streaming_jobs.formats.json_guards import refusal_of, unseen_faults
from streaming_jobs.formats.json_records import attribute, blank, record_class
from streaming_jobs.formats.record_columns import Column, field_column
from streaming_jobs.formats.text_values import Fault
from streaming_jobs.record_format import Block, Refusal, checked_fields, record_batch

if TYPE_CHECKING:
    from pyspark.sql.types import StructType


class _Field(NamedTuple):
    name: str
    of: Callable[[Any], Any]
    column: Column
    asked_for: bool


class JsonReader:
    """The reader of records of one schema. Fields that are not asked for are checked, but not built."""

    def __init__(self, schema: StructType, fields: Sequence[str] | None = None) -> None:
        asked_for = checked_fields(schema, fields)
        record = record_class(schema)
        self._decode: Callable[[Any], Any] = msgspec.json.Decoder(record).decode
        self._blank = blank(record)
        every = [
            _Field(field.name, attrgetter(attribute(index)), field_column(field), field.name in asked_for)
            for index, field in enumerate(schema.fields)
        ]
        self._fields = [field for field in every if field.asked_for or field.column.checked]

    def read(self, values: Sequence[bytes | None]) -> Block:
        """The columns of the records, and the refusals."""
        rows, refused = self._records(values)
        decoded = [None if index in refused else value for index, value in enumerate(values)] if refused else values
        for index, refusal in unseen_faults(decoded).items():
            refused[index] = refusal
            rows[index] = self._blank
        columns, late = self._columns(rows)
        batch = record_batch(len(values), columns)
        if late:
            batch = _with_null_rows(batch, late)
        return Block(batch, refused | late)

    def _records(self, values: Sequence[bytes | None]) -> tuple[list[Any], dict[int, Refusal]]:
        """A record for each value, blank where the value is refused."""
        rows: list[Any] = []
        refused: dict[int, Refusal] = {}
        decoded = map(self._decode, values)
        while len(rows) < len(values):
            try:
                # The loop of a good block runs in C. An error leaves in the list what came before it, and the next
                # round goes on after the value that raised it.
                rows.extend(decoded)
            except (ValueError, RecursionError, TypeError) as error:
                value = values[len(rows)]
                if isinstance(error, TypeError) and value is not None:
                    raise
                refused[len(rows)] = refusal_of(value, error)
                rows.append(self._blank)
        return rows, refused

    def _columns(self, rows: list[Any]) -> tuple[dict[str, pa.Array], dict[int, Refusal]]:
        """The columns that are asked for, and the refusals that all columns give."""
        columns: dict[str, pa.Array] = {}
        refused: dict[int, Refusal] = {}
        for field in self._fields:
            array, faults = field.column.build(list(map(field.of, rows)))
            if field.asked_for:
                columns[field.name] = array
            _add(refused, field.name, faults)
        return columns, refused


def _add(refused: dict[int, Refusal], name: str, faults: Iterable[Fault]) -> None:
    for fault in faults:
        refused.setdefault(fault.position, Refusal(fault.reason, f"{fault.words} - at `$.{name}{fault.place}`"))


def _with_null_rows(batch: pa.RecordBatch, null: Iterable[int]) -> pa.RecordBatch:
    """The batch with null in every column of these rows."""
    if not batch.num_columns:
        return batch
    mask = np.zeros(batch.num_rows, np.bool_)
    mask[list(null)] = True
    return batch.take(pa.array(np.arange(batch.num_rows), mask=mask))
