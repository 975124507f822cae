"""Values that are taken as they are: bytes, or text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pyspark.sql.types import BinaryType, StringType, StructField, StructType

from streaming_jobs.formats.utf8 import joined, not_utf8
from streaming_jobs.record_format import Block, Refusal, checked_fields, record_batch

_VALUE = "value"
_BINARY = StructType([StructField(_VALUE, BinaryType(), nullable=False)])
_STRING = StructType([StructField(_VALUE, StringType(), nullable=False)])
_NULL = Refusal("empty_value", "the value is null")


@dataclass(frozen=True)
class Raw:
    """The bytes of a value, unchanged, in the column `value`. An empty value is good, a null one refused."""

    @property
    def schema(self) -> StructType:
        """One field, `value`, BINARY."""
        return _BINARY

    @property
    def reasons(self) -> frozenset[str]:
        """The one reason of a refusal."""
        return frozenset({_NULL.reason})

    def reader(self, fields: Sequence[str] | None = None) -> RawReader:
        """A reader; raises UsageError for a field other than `value`."""
        return RawReader(_VALUE in checked_fields(_BINARY, fields))


@dataclass(frozen=True)
class RawReader:
    """The reader of `Raw`; `built`: with the column, or the verdicts only."""

    built: bool

    def read(self, values: Sequence[bytes | None]) -> Block:
        """The values as one column."""
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
        """Every reason of a refusal."""
        return frozenset({_NULL.reason, "invalid_utf8"})

    def reader(self, fields: Sequence[str] | None = None) -> TextReader:
        """A reader; raises UsageError for a field other than `value`."""
        return TextReader(_VALUE in checked_fields(_STRING, fields))


@dataclass(frozen=True)
class TextReader:
    """The reader of `Text`; `built`: with the column, or the verdicts only."""

    built: bool

    def read(self, values: Sequence[bytes | None]) -> Block:
        """The values as one column."""
        import pyarrow as pa

        refused = {**_nulls(values), **not_utf8(values, joined(values))}
        if not self.built:
            return Block(record_batch(len(values), {}), refused)
        good = [None if index in refused else value for index, value in enumerate(values)] if refused else values
        return Block(record_batch(len(values), {_VALUE: pa.array(good, pa.string())}), refused)


def _nulls(values: Sequence[bytes | None]) -> dict[int, Refusal]:
    return {index: _NULL for index, value in enumerate(values) if value is None} if None in values else {}
