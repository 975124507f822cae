"""Rows as Avro values of the declared schema, a column at a time: each becomes the bytes of its fields.

A time in a field of milliseconds is cut to them; every other value is read back as it was, or its row is refused:

| reason              | row                                                                   |
|---------------------|-----------------------------------------------------------------------|
| `missing_field`     | a null where the schema allows none                                   |
| `not_utf8`          | a text that is not UTF-8                                              |
| `time_out_of_range` | a date or time outside of the years 1 to 9999, or of 64 bits of nanos |
| `unknown_symbol`    | a text that is no symbol of its enum                                  |
| `wrong_length`      | bytes of another length than their fixed type has                     |
"""

from __future__ import annotations

from decimal import Context, Decimal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql.types import StructType

from streaming_jobs.declare.format import Refusal, Written
from streaming_jobs.formats.avro_schema import (
    MICROS_PER,
    Array,
    Enum,
    Fixed,
    Map,
    Node,
    Primitive,
    Record,
    Union,
    optional,
)
from streaming_jobs.formats.binary_columns import (
    Encoded,
    joined,
    not_utf8,
    refusals,
    runs,
    slices,
    with_length,
    zigzags,
)
from streaming_jobs.formats.json_columns import FIRST_DAY, FIRST_MICROSECOND, LAST_DAY, LAST_MICROSECOND
from streaming_jobs.formats.wire import spread

_EXACT = Context(prec=80)
_NOTHING = b"\0"
"""A count of 0, which ends an array."""


class AvroWriter:
    """A writer of rows by one schema; it belongs to one process."""

    def __init__(self, node: Node, schema: StructType) -> None:
        assert isinstance(node, Record)
        self._node = node
        self._names = schema.fieldNames()

    def write(self, rows: pa.RecordBatch) -> Written:
        """The value of each row; `rows` has the schema's fields."""
        made = _fields(self._node, [rows.column(name) for name in self._names], rows.num_rows, "")
        values = made.values.to_pylist()
        for row in made.refused:
            values[row] = None
        return Written(values, made.refused)


def _fields(record: Record, arrays: list[pa.Array], rows: int, place: str) -> Encoded:
    refused: dict[int, Refusal] = {}
    parts = []
    for each, array in zip(record.fields, arrays, strict=True):
        encoded = _value(each.node, array, f"{place}{each.name}")
        parts.append(encoded.values)
        refused = {**encoded.refused, **refused}
    return Encoded(joined(*parts) if parts else pa.array([b""] * rows, pa.binary()), refused)


def _value(declared: Node, array: pa.Array, place: str) -> Encoded:
    """The bytes of a column, with the branch of its union."""
    node, may_be_null = optional(declared)
    if not array.null_count:
        encoded = _present(node, array, place)
    else:
        rows = np.flatnonzero(np.asarray(pc.is_valid(array)))
        some = _present(node, array.take(pa.array(rows)), place)
        refused = {int(rows[row]): refusal for row, refusal in some.refused.items()}
        encoded = Encoded(spread(some.values, rows, len(array)), refused)
    if isinstance(declared, Union):
        branch = bytes([2 * declared.branches.index(node)])
        null = bytes([2 * declared.branches.index(Primitive("null"))]) if may_be_null else b""
        values = joined(pa.repeat(pa.scalar(branch, pa.binary()), len(array)), encoded.values)
        encoded = Encoded(values.fill_null(null), encoded.refused)
    if array.null_count and not may_be_null:
        nulls = np.flatnonzero(np.asarray(pc.is_null(array)))
        missing = refusals(nulls, "missing_field", f"{place} is null, and the topic's schema requires it")
        return Encoded(encoded.values.fill_null(b""), {**encoded.refused, **missing})
    return encoded


def _present(node: Node, array: pa.Array, place: str) -> Encoded:
    """The bytes of a column without nulls."""
    if isinstance(node, Record):
        return _fields(node, [array.field(index) for index in range(len(node.fields))], len(array), f"{place}.")
    if isinstance(node, (Array, Map)):
        return _lists(node, array, place)
    if isinstance(node, Enum):
        index = pc.index_in(array, pa.array(node.symbols, pa.string()))
        unknown = np.flatnonzero(np.asarray(pc.is_null(index)))
        refused = refusals(unknown, "unknown_symbol", f"{place} is no symbol of the enum {node}")
        return Encoded(zigzags(np.asarray(pc.fill_null(index, 0)).astype(np.int64)), refused)
    assert not isinstance(node, Union)
    if node.precision:
        return _decimals(node, array, place)
    if isinstance(node, Fixed):
        wrong = np.flatnonzero(np.asarray(pc.not_equal(pc.binary_length(array), node.size)))
        return Encoded(array.cast(pa.binary()), refusals(wrong, "wrong_length", f"{place} has not {node.size} bytes"))
    return _primitive(node, array, place)


def _primitive(node: Primitive, array: pa.Array, place: str) -> Encoded:
    if node.logical:
        numbers, refused = _times(node, array, place)
        return Encoded(zigzags(numbers), refused)
    if node.kind in ("int", "long"):
        return Encoded(zigzags(np.asarray(array).astype(np.int64)))
    if node.kind in ("float", "double"):
        content = np.asarray(array).astype("<f4" if node.kind == "float" else "<f8")
        return Encoded(slices(content.tobytes(), np.full(len(array), content.itemsize)))
    if node.kind == "boolean":
        return Encoded(slices(np.asarray(array).astype(np.uint8).tobytes(), np.ones(len(array), np.int64)))
    refused = {}
    if node.kind == "string":
        refused = not_utf8(array, place)
    return Encoded(with_length(array.cast(pa.binary()), zigzags), refused)


def _times(node: Primitive, array: pa.Array, place: str) -> tuple[np.ndarray, dict[int, Refusal]]:
    """The numbers of dates and times; 0 for those that are refused."""
    if node.logical == "date":
        numbers, first, last = np.asarray(array.cast(pa.int32())).astype(np.int64), FIRST_DAY, LAST_DAY
    else:
        micros = array.cast(pa.timestamp("us", array.type.tz)).view(pa.int64())
        numbers, first, last = np.asarray(micros), FIRST_MICROSECOND, LAST_MICROSECOND
    factor, divisor = MICROS_PER.get(node.logical.rpartition("-")[2], (1, 1))
    bounds = np.iinfo(np.int64)
    first, last = max(first, -(-bounds.min // divisor)), min(last, bounds.max // divisor)
    outside = (numbers < first) | (numbers > last)
    refused = refusals(np.flatnonzero(outside), "time_out_of_range", f"{place} is not in the years 1 to 9999")
    return np.where(outside, 0, numbers) * divisor // factor, refused


def _decimals(node: Primitive | Fixed, array: pa.Array, place: str) -> Encoded:
    size = node.size if isinstance(node, Fixed) else None
    values: list[bytes] = []
    refused: dict[int, Refusal] = {}
    for row, value in enumerate(array.to_pylist()):
        number = int(Decimal(value).scaleb(node.scale, _EXACT))
        try:
            values.append(number.to_bytes(size or (number + (number < 0)).bit_length() // 8 + 1, "big", signed=True))
        except OverflowError:
            values.append(b"")
            refused[row] = Refusal("wrong_length", f"{place} does not fit into {size} bytes")
    content = pa.array(values, pa.binary())
    return Encoded(content if size is not None else with_length(content, zigzags), refused)


def _lists(node: Array | Map, array: pa.Array, place: str) -> Encoded:
    flat = array.flatten()
    lengths = np.asarray(pc.list_value_length(array)).astype(np.int64)
    if isinstance(node, Map):
        keys = _value(Primitive("string"), flat.field("key"), f"{place}[].key")
        inner = _value(node.values, flat.field("value"), f"{place}[].value")
        inner = Encoded(joined(keys.values, inner.values), {**inner.refused, **keys.refused})
    else:
        inner = _value(node.items, flat, f"{place}[]")
    items = runs(inner.values, lengths)
    counts = zigzags(lengths)
    ended = pa.repeat(pa.scalar(_NOTHING, pa.binary()), len(array))
    filled = pc.if_else(pa.array(lengths > 0), joined(counts, items, ended), ended)
    owners = np.repeat(np.arange(len(array)), lengths)
    return Encoded(filled, {int(owners[element]): refusal for element, refusal in inner.refused.items()})
