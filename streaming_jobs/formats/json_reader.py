"""The reading of JSON records, a block at a time: msgspec decodes and checks, Arrow checks what JSON has no type for.

The order: every value into a record, or a refusal; the faults that msgspec does not see; the columns, in which text
that is no time, or digits that do not fit, refuse further records.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from operator import attrgetter
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
import numpy as np
import pyarrow as pa

from streaming_jobs.declare.format import Block, Refusal, checked_fields, record_batch, with_null_rows
from streaming_jobs.formats.json_columns import JsonColumn, ValueFault, field_column
from streaming_jobs.formats.json_records import attribute, blank, record_class
from streaming_jobs.formats.utf8 import joined, not_utf8, utf8_refusal

if TYPE_CHECKING:
    from pyspark.sql.types import StructType


# Faults of a JSON record that msgspec does not see: bytes in what it skips, depth. And the words of those it sees.

MAX_DEPTH = 200
"""Objects and arrays within each other; a deeper record is refused."""

_SPACE = b" \t\n\r"
_DEEP_BYTES = 2 * (MAX_DEPTH + 1)  # the shortest record that can be too deep
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")
_PAIR = re.compile(rb"\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}")
_STRING = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"', re.DOTALL)
_OTHER_THAN_BRACKETS = bytes(set(range(256)) - set(b"[]{}"))

_TOO_DEEP = Refusal("malformed_json", f"objects and arrays are nested deeper than {MAX_DEPTH}")
_HALF = Refusal("malformed_json", "JSON is malformed: an escape is half of a surrogate pair")
_EMPTY = Refusal("empty_value", "the value is null, empty or blank")


def unseen_faults(values: Sequence[bytes | None]) -> dict[int, Refusal]:
    """The refusals of values that msgspec has decoded although they are bad, by index; None for those it has refused.

    The whole block is checked first; for a good block this costs a few nanoseconds per record.
    """
    refusals = not_utf8(values, joined(values))
    if max(map(len, filter(None, values)), default=0) >= _DEEP_BYTES:
        long = ((i, value) for i, value in enumerate(values) if value is not None and len(value) >= _DEEP_BYTES)
        refusals |= {i: _TOO_DEEP for i, value in long if too_deep(value)}
    return refusals


def refusal_of(value: bytes | None, error: Exception) -> Refusal:
    """The refusal of a value that msgspec has not decoded, from what it raised."""
    if not value or not value.strip(_SPACE):
        return _EMPTY
    if isinstance(error, RecursionError):
        return utf8_refusal(value) or _TOO_DEEP
    words = str(error)
    if words.startswith("Input data was truncated") and half_of_a_pair(value):
        return utf8_refusal(value) or _HALF  # msgspec misses the second half, not the end of the record
    return utf8_refusal(value) or Refusal(_reason(words), words)


def half_of_a_pair(value: bytes) -> bool:
    r"""True for a value with an escape such as `\ud83d` without its second half."""
    return _SURROGATE.search(_PAIR.sub(b" ", value.replace(rb"\\", b"  "))) is not None


def too_deep(value: bytes) -> bool:
    """True for a record, otherwise well-formed, that is nested deeper than allowed."""
    if value.count(b"[") + value.count(b"{") <= MAX_DEPTH:
        return False
    brackets = np.frombuffer(_STRING.sub(b"", value).translate(None, _OTHER_THAN_BRACKETS), np.uint8)
    opening = (brackets == ord("[")) | (brackets == ord("{"))
    return int(np.where(opening, 1, -1).cumsum().max()) > MAX_DEPTH


def _reason(words: str) -> str:
    """The reason in msgspec's words; these are pinned by tests, as is its version by the project."""
    if words.startswith("JSON is malformed: trailing characters"):
        return "trailing_data"
    if words.startswith(("JSON is malformed", "Input data was truncated")):
        return "malformed_json"
    if words.startswith("Object missing required field"):
        return "missing_field"
    if " - at `$" not in words:
        return "not_an_object"
    return "missing_field" if re.match("Expected `[^`]*`, got `null`", words) else "wrong_type"


class _Field(NamedTuple):
    name: str
    of: Callable[[Any], Any]
    column: JsonColumn
    asked_for: bool


class JsonReader:
    """The reader of records of one schema. It checks all fields, but builds only requested ones."""

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
        rows, refused = self._records(values)
        decoded = [None if index in refused else value for index, value in enumerate(values)] if refused else values
        for index, refusal in unseen_faults(decoded).items():
            refused[index] = refusal
            rows[index] = self._blank
        columns, late = self._columns(rows)
        batch = record_batch(len(values), columns)
        if late:
            batch = with_null_rows(batch, late)
        return Block(batch, refused | late)

    def _records(self, values: Sequence[bytes | None]) -> tuple[list[Any], dict[int, Refusal]]:
        """A record for each value, blank where the value is refused."""
        rows: list[Any] = []
        refused: dict[int, Refusal] = {}
        decoded = map(self._decode, values)
        while len(rows) < len(values):
            try:
                # The loop of a good block runs in C. An error leaves in the list what came before it, and the next
                # round continues after the value that raised it.
                rows.extend(decoded)
            except (ValueError, RecursionError, TypeError) as error:
                value = values[len(rows)]
                if isinstance(error, TypeError) and value is not None:
                    raise
                refused[len(rows)] = refusal_of(value, error)
                rows.append(self._blank)
        return rows, refused

    def _columns(self, rows: list[Any]) -> tuple[dict[str, pa.Array], dict[int, Refusal]]:
        """The requested columns, and the refusals from all columns."""
        columns: dict[str, pa.Array] = {}
        refused: dict[int, Refusal] = {}
        for field in self._fields:
            array, faults = field.column.build(list(map(field.of, rows)))
            if field.asked_for:
                columns[field.name] = array
            _add(refused, field.name, faults)
        return columns, refused


def _add(refused: dict[int, Refusal], name: str, faults: Iterable[ValueFault]) -> None:
    for fault in faults:
        refused.setdefault(fault.position, Refusal(fault.reason, f"{fault.words} - at `$.{name}{fault.place}`"))
