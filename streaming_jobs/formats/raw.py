"""Values that are taken as they are: bytes, or text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pyspark.sql.types import BinaryType, StringType, StructField, StructType

from streaming_jobs.declare.format import Block, Refusal, Written, checked_fields, record_batch
from streaming_jobs.formats.utf8 import joined, not_utf8

if TYPE_CHECKING:
    import pyarrow as pa

_VALUE = "value"
_BINARY = StructType([StructField(_VALUE, BinaryType(), nullable=False)])
_STRING = StructType([StructField(_VALUE, StringType(), nullable=False)])
_NULL = Refusal("empty_value", "the value is null")
_NOT_UTF8 = Refusal("not_utf8", "the text is not UTF-8")


@dataclass(frozen=True)
class Raw:
    """The bytes of a value, unchanged, in the column `value`. An empty value is good, a null one refused."""

    @property
    def schema(self) -> StructType:
        """One field, `value`, BINARY."""
        return _BINARY

    @property
    def reasons(self) -> frozenset[str]:
        return frozenset({_NULL.reason})

    def reader(self, fields: Sequence[str] | None = None) -> RawReader:
        """A reader; raises UsageError for a field other than `value`."""
        return RawReader(_VALUE in checked_fields(_BINARY, fields))

    def writer(self) -> ValueWriter:
        return ValueWriter()


@dataclass(frozen=True)
class RawReader:
    """The reader of `Raw`; `built`: with the column, or the verdicts only."""

    built: bool

    def read(self, values: Sequence[bytes | None]) -> Block:
        import pyarrow as pa

        columns = {_VALUE: pa.array(values, pa.binary())} if self.built else {}
        return Block(record_batch(len(values), columns), _nulls(values))


@dataclass(frozen=True)
class Text:
    """The text of a value in the column `value`. An empty text is good; null and bytes that are not UTF-8 are not."""

    @property
    def schema(self) -> StructType:
        """One field, `value`, STRING."""
        return _STRING

    @property
    def reasons(self) -> frozenset[str]:
        return frozenset({_NULL.reason, "invalid_utf8"})

    def reader(self, fields: Sequence[str] | None = None) -> TextReader:
        """A reader; raises UsageError for a field other than `value`."""
        return TextReader(_VALUE in checked_fields(_STRING, fields))

    def writer(self) -> ValueWriter:
        return ValueWriter(text=True)


@dataclass(frozen=True)
class TextReader:
    """The reader of `Text`; `built`: with the column, or the verdicts only."""

    built: bool

    def read(self, values: Sequence[bytes | None]) -> Block:
        import pyarrow as pa

        refused = {**_nulls(values), **not_utf8(values, joined(values))}
        if not self.built:
            return Block(record_batch(len(values), {}), refused)
        good = [None if index in refused else value for index, value in enumerate(values)] if refused else values
        return Block(record_batch(len(values), {_VALUE: pa.array(good, pa.string())}), refused)


@dataclass(frozen=True)
class ValueWriter:
    """The writer of `Raw`, or with `text` of `Text`."""

    text: bool = False

    def write(self, rows: pa.RecordBatch) -> Written:
        """The column as it is; a null is refused, and a text that is not UTF-8."""
        import pyarrow as pa

        values: list[bytes | None] = rows.column(_VALUE).cast(pa.binary()).to_pylist()
        refused = dict(_nulls(values))
        if self.text:
            refused |= {index: _NOT_UTF8 for index in not_utf8(values, joined(values)) if index not in refused}
        return Written([None if index in refused else value for index, value in enumerate(values)], refused)


def _nulls(values: Sequence[bytes | None]) -> dict[int, Refusal]:
    return {index: _NULL for index, value in enumerate(values) if value is None} if None in values else {}
