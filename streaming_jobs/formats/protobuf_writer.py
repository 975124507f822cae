"""Rows as Protobuf messages, a column at a time. What could not be read back equal is refused:

| reason              | row                                                                  |
|---------------------|----------------------------------------------------------------------|
| `missing_field`     | a null in a field that has no presence, in a list, or that is required |
| `not_utf8`          | a text that is not UTF-8                                             |
| `out_of_range`      | a number that the field's type does not hold                         |
| `several_of_oneof`  | values in two fields of one `oneof`                                  |
| `time_out_of_range` | a time outside of the years 1 to 9999                                |
| `unknown_symbol`    | a text that is no name of the enum                                   |
"""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from google.protobuf.descriptor import Descriptor, FieldDescriptor

from streaming_jobs.declare.format import Refusal, Written
from streaming_jobs.formats.binary_columns import (
    Encoded,
    joined,
    not_utf8,
    refusals,
    runs,
    slices,
    varints,
    with_length,
    zigzags,
)
from streaming_jobs.formats.json_columns import FIRST_MICROSECOND, LAST_MICROSECOND
from streaming_jobs.formats.protobuf_schema import TIMESTAMP, WRAPPERS, is_repeated, is_required
from streaming_jobs.formats.protobuf_steps import BYTES, EIGHT, FOUR, VARINT
from streaming_jobs.formats.wire import spread

_F = FieldDescriptor
_WIRES = {
    **dict.fromkeys((_F.TYPE_FIXED32, _F.TYPE_SFIXED32, _F.TYPE_FLOAT), FOUR),
    **dict.fromkeys((_F.TYPE_FIXED64, _F.TYPE_SFIXED64, _F.TYPE_DOUBLE), EIGHT),
    **dict.fromkeys((_F.TYPE_STRING, _F.TYPE_BYTES, _F.TYPE_MESSAGE), BYTES),
}
_UNSIGNED = {
    _F.TYPE_UINT32: (1 << 32) - 1,
    _F.TYPE_FIXED32: (1 << 32) - 1,
    _F.TYPE_UINT64: (1 << 64) - 1,
    _F.TYPE_FIXED64: (1 << 64) - 1,
}
_LAYOUT = {
    _F.TYPE_FIXED32: "<u4",
    _F.TYPE_SFIXED32: "<i4",
    _F.TYPE_FLOAT: "<f4",
    _F.TYPE_FIXED64: "<u8",
    _F.TYPE_SFIXED64: "<i8",
    _F.TYPE_DOUBLE: "<f8",
}


class ProtobufWriter:
    """A writer of rows by one message; it belongs to one process."""

    def __init__(self, message: Descriptor) -> None:
        self._message = message

    def write(self, rows: pa.RecordBatch) -> Written:
        """The value of each row; `rows` has the message's fields."""
        columns = {field.name: rows.column(field.name) for field in self._message.fields}
        made = _fields(self._message, columns, rows.num_rows, "")
        values = made.values.to_pylist()
        for row in made.refused:
            values[row] = None
        return Written(values, made.refused)


def _fields(message: Descriptor, columns: dict[str, pa.Array], rows: int, place: str) -> Encoded:
    parts = [pa.repeat(pa.scalar(b"", pa.binary()), rows)]
    refused: dict[int, Refusal] = {}
    seen: dict[str, np.ndarray] = {}
    for field in sorted(message.fields, key=lambda each: each.number):
        array, where = columns[field.name], f"{place}{field.name}"
        made = (_repeated if is_repeated(field) else _singular)(field, array, where)
        parts.append(made.values)
        refused |= made.refused
        if field.containing_oneof is not None:
            oneof, there = field.containing_oneof.name, np.asarray(pc.is_valid(array))
            both = np.flatnonzero(seen.get(oneof, False) & there)
            refused |= refusals(both, "several_of_oneof", f"{where} is not the only value of its oneof {oneof}")
            seen[oneof] = seen.get(oneof, False) | there
    return Encoded(joined(*parts), refused)


def _singular(field: FieldDescriptor, array: pa.Array, place: str) -> Encoded:
    rows = np.flatnonzero(np.asarray(pc.is_valid(array)))
    made = _values(field, array.take(pa.array(rows)) if array.null_count else array, place)
    tagged = _tagged(field, _WIRES.get(field.type, VARINT), made.values)
    if not array.null_count:
        return Encoded(tagged, made.refused)
    refused = {int(rows[row]): refusal for row, refusal in made.refused.items()}
    if not field.has_presence or is_required(field):
        nulls = np.flatnonzero(np.asarray(pc.is_null(array)))
        refused |= refusals(nulls, "missing_field", f"{place} is null, and its field always has a value")
    return Encoded(spread(tagged, rows, len(array)).fill_null(b""), refused)


def _repeated(field: FieldDescriptor, array: pa.Array, place: str) -> Encoded:
    flat = array.flatten()
    lengths = np.asarray(pc.fill_null(pc.list_value_length(array), 0)).astype(np.int64)
    owners = np.repeat(np.arange(len(array)), lengths)
    refused = refusals(owners[np.asarray(pc.is_null(flat))], "missing_field", f"{place} holds a null")
    refused |= refusals(np.flatnonzero(np.asarray(pc.is_null(array))), "missing_field", f"{place} is null")
    if flat.null_count:  # of refused rows
        lengths = lengths - np.bincount(owners[np.asarray(pc.is_null(flat))], minlength=len(array))
        owners = owners[np.asarray(pc.is_valid(flat))]
        flat = flat.drop_null()
    made = _values(field, flat, f"{place}[]")
    refused |= {int(owners[row]): refusal for row, refusal in made.refused.items()}
    wire = _WIRES.get(field.type, VARINT)
    if wire == BYTES:
        return Encoded(runs(_tagged(field, wire, made.values), lengths), refused)
    packed = _tagged(field, BYTES, with_length(runs(made.values, lengths), varints))
    nothing = pa.repeat(pa.scalar(b"", pa.binary()), len(array))
    return Encoded(pc.if_else(pa.array(lengths > 0), packed, nothing), refused)


def _tagged(field: FieldDescriptor, wire: int, values: pa.Array) -> pa.Array:
    key = varints(np.array([field.number << 3 | wire]))[0]
    return joined(pa.repeat(key, len(values)), values)


def _values(field: FieldDescriptor, array: pa.Array, place: str) -> Encoded:
    """The bytes of values without nulls, without their field."""
    if field.type == _F.TYPE_MESSAGE:
        made = _message(field.message_type, array, place)
        return Encoded(with_length(made.values, varints), made.refused)
    if field.type in (_F.TYPE_STRING, _F.TYPE_BYTES):
        refused = not_utf8(array, place) if field.type == _F.TYPE_STRING else {}
        return Encoded(with_length(array.cast(pa.binary()), varints), refused)
    if field.type == _F.TYPE_ENUM:
        names = [value.name for value in field.enum_type.values]
        numbers = np.array([value.number for value in field.enum_type.values], np.int64)
        index = pc.index_in(array, pa.array(names, pa.string()))
        unknown = np.flatnonzero(np.asarray(pc.is_null(index)))
        chosen = numbers[np.asarray(pc.fill_null(index, 0))]
        refused = refusals(unknown, "unknown_symbol", f"{place} is no name of the enum {field.enum_type.full_name}")
        return Encoded(varints(chosen), refused)
    numbers, refused = _numbers(field, array, place)
    if (layout := _LAYOUT.get(field.type)) is not None:
        content = numbers.astype(layout)
        return Encoded(slices(content.tobytes(), np.full(len(array), content.itemsize)), refused)
    if field.type in (_F.TYPE_SINT32, _F.TYPE_SINT64):
        return Encoded(zigzags(numbers.astype(np.int64)), refused)
    return Encoded(varints(_as_unsigned(numbers)), refused)


def _as_unsigned(numbers: np.ndarray) -> np.ndarray:
    return numbers if numbers.dtype == np.uint64 else numbers.astype(np.int64).view(np.uint64)


def _numbers(field: FieldDescriptor, array: pa.Array, place: str) -> tuple[np.ndarray, dict[int, Refusal]]:
    most = _UNSIGNED.get(field.type)
    if most is None:
        return np.asarray(array), {}
    values = [int(value) for value in array.to_pylist()]
    outside = [row for row, value in enumerate(values) if not 0 <= value <= most]
    numbers = np.array([value if 0 <= value <= most else 0 for value in values], np.uint64)
    return numbers, refusals(outside, "out_of_range", f"{place} is not in the range 0 to {most}")


def _message(message: Descriptor, array: pa.Array, place: str) -> Encoded:
    if message.full_name == TIMESTAMP:
        micros = np.asarray(array.cast(pa.timestamp("us", array.type.tz)).view(pa.int64()))
        outside = np.flatnonzero((micros < FIRST_MICROSECOND) | (micros > LAST_MICROSECOND))
        columns = {
            "seconds": pa.array(micros // 1_000_000),
            "nanos": pa.array((micros % 1_000_000 * 1_000).astype(np.int32)),
        }
        late = refusals(outside, "time_out_of_range", f"{place} is not in the years 1 to 9999")
        return Encoded(_fields(message, columns, len(array), place).values, late)
    if message.full_name in WRAPPERS:
        return _fields(message, {"value": array}, len(array), f"{place}.")
    columns = {field.name: array.field(index) for index, field in enumerate(message.fields)}
    return _fields(message, columns, len(array), f"{place}.")
