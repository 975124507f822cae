"""Comparison of two multisets of rows: a row may occur several times, and order does not matter."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

import pyarrow as pa

from streaming_jobs.text.spelling import counted

Row = tuple[Any, ...]
_SHOWN = 3
_TEXT = 120


@dataclass(frozen=True)
class Difference:
    """Rows that only one side has, with their number: `missing` are expected and not there, `extra` not expected."""

    columns: tuple[str, ...]
    missing: Mapping[Row, int]
    extra: Mapping[Row, int]

    def __bool__(self) -> bool:
        return bool(self.missing or self.extra)

    @property
    def rows(self) -> int:
        """Number of rows that differ: a missing row and one that is not expected may be the same row, changed."""
        return max(sum(self.missing.values()), sum(self.extra.values()))

    def words(self, keys: Sequence[str] = ()) -> list[str]:
        """The differences in words, with the first rows; for rows of the same `keys`, the columns that differ."""
        missing, extra = Counter(self.missing), Counter(self.extra)
        texts = []
        if keys:
            texts = self._changed(missing, extra, [self.columns.index(key) for key in keys])
        for rows, what in ((missing, "rows missing"), (extra, "rows not expected")):
            if rows:
                first = " | ".join(self._shown(row) for row in sorted(rows, key=_sortable)[:_SHOWN])
                texts.append(f"{rows.total():,} {what}, first {first}")
        return texts

    def _changed(self, missing: Counter[Row], extra: Counter[Row], keys: list[int]) -> list[str]:
        by_key = {tuple(row[i] for i in keys): row for row in extra}
        changed = []
        for row in sorted(missing, key=_sortable):
            actual = by_key.pop(tuple(row[i] for i in keys), None)
            if actual is not None and missing[row] == extra[actual] == 1:
                changed.append((row, actual))
                del missing[row], extra[actual]
        if not changed:
            return []
        row, actual = changed[0]
        place = ", ".join(f"{self.columns[i]}={_cut(row[i])}" for i in keys)
        values = ", ".join(
            f"{name} is {_cut(there)} instead of {_cut(due)}"
            for name, due, there in zip(self.columns, row, actual, strict=True)
            if due != there
        )
        return [f"{counted(len(changed), 'row', 'differs', 'differ')}, first {place}: {values}"]

    def _shown(self, row: Row) -> str:
        return " ".join(f"{name}={_cut(value)}" for name, value in zip(self.columns, row, strict=True))


def compare(expected: pa.Table, actual: pa.Table, tolerance: float = 0.0) -> Difference:
    """The difference of two tables of the same columns; floats may differ by `tolerance`, relative to their value.

    The tolerance holds inside arrays, structs and maps too. NaN equals NaN, -0.0 equals 0.0, null equals null; the
    entries of a map have no order.
    """
    due: Counter[Row] = Counter(rows_of(expected))
    extra: Counter[Row] = Counter()
    for row in rows_of(actual):
        if due.get(row, 0) > 0:
            due[row] -= 1
        else:
            extra[row] += 1
    missing = +due
    if tolerance and missing and extra:
        _match_nearly(missing, extra, tolerance)
    return Difference(tuple(actual.column_names), missing, extra)


def rows_of(table: pa.Table) -> Iterator[Row]:
    """The rows as values that can be counted."""
    for batch in table.to_batches(max_chunksize=20_000):
        columns = [[_plain(value) for value in column.to_pylist()] for column in batch.columns]
        yield from zip(*columns, strict=True)


def _plain(value: Any) -> Any:
    if isinstance(value, float):
        return "NaN" if math.isnan(value) else value
    if isinstance(value, list):
        items = [_plain(item) for item in value]
        # Arrow returns a map as a list of pairs; no other type becomes tuples.
        return tuple(sorted(items, key=_by_key) if any(isinstance(item, tuple) for item in value) else items)
    if isinstance(value, tuple):
        return tuple(_plain(item) for item in value)
    if isinstance(value, dict):
        return tuple((name, _plain(item)) for name, item in value.items())
    return value


def _by_key(pair: tuple[Any, Any]) -> tuple[bool, Any, str]:
    key = pair[0]
    number = isinstance(key, int | float | Decimal)
    return (number, key if number else 0, "" if number else f"{type(key).__name__} {key}")


def _match_nearly(missing: Counter[Row], extra: Counter[Row], tolerance: float) -> None:
    """Remove pairs of rows that are equal except for floats within the tolerance."""
    by_rest: dict[Row, list[Row]] = {}
    for row in extra.elements():
        by_rest.setdefault(_rest(row), []).append(row)
    for row in list(missing.elements()):
        near = by_rest.get(_rest(row), [])
        match = next((other for other in near if _nearly(row, other, tolerance)), None)
        if match is not None:
            near.remove(match)
            _take(missing, row)
            _take(extra, match)


def _take(rows: Counter[Row], row: Row) -> None:
    rows[row] -= 1
    if not rows[row]:
        del rows[row]


def _rest(value: Any) -> Any:
    """The value with a placeholder for each float, at any depth."""
    if isinstance(value, tuple):
        return tuple(_rest(item) for item in value)
    return "a float" if isinstance(value, float) else value


def _nearly(one: Any, other: Any, tolerance: float) -> bool:
    """True if the floats of two values, which are otherwise equal, agree within the tolerance."""
    if isinstance(one, tuple):
        return all(_nearly(a, b, tolerance) for a, b in zip(one, other, strict=True))
    if isinstance(one, float):
        return bool(one == other or abs(one - other) <= tolerance * max(abs(one), 1.0))
    return True


def _sortable(row: Iterable[Any]) -> tuple[tuple[str, str], ...]:
    return tuple((type(value).__name__, str(value)) for value in row)


def _cut(value: Any) -> str:
    text = value.isoformat(sep=" ") if hasattr(value, "isoformat") and hasattr(value, "hour") else str(value)
    return text if len(text) <= _TEXT else f"{text[:_TEXT]}..."
