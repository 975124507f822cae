"""Comparing two sets of rows in which a row may be there several times; order does not matter."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

import pyarrow as pa

from streaming_jobs.spelling import counted

Row = tuple[Any, ...]
_SHOWN = 3
_TEXT = 120


@dataclass(frozen=True)
class Difference:
    """Rows of one side that the other has not, by how often: `missing` are not found, `extra` are not expected."""

    columns: tuple[str, ...]
    missing: Mapping[Row, int]
    extra: Mapping[Row, int]

    def __bool__(self) -> bool:
        return bool(self.missing or self.extra)

    @property
    def rows(self) -> int:
        """How many rows differ: a missing one and one that is not expected may be the same row, changed."""
        return max(sum(self.missing.values()), sum(self.extra.values()))

    def words(self, keys: Sequence[str] = ()) -> list[str]:
        """What differs, the first rows named; rows that agree in `keys` by the columns in which they do not."""
        missing, extra = Counter(self.missing), Counter(self.extra)
        told = []
        if keys:
            told = self._changed(missing, extra, [self.columns.index(key) for key in keys])
        for rows, what in ((missing, "rows missing"), (extra, "rows not expected")):
            if rows:
                first = " | ".join(self._shown(row) for row in sorted(rows, key=_sortable)[:_SHOWN])
                told.append(f"{rows.total():,} {what}, first {first}")
        return told

    def _changed(self, missing: Counter[Row], extra: Counter[Row], keys: list[int]) -> list[str]:
        by_key = {tuple(row[i] for i in keys): row for row in extra}
        changed = []
        for row in sorted(missing, key=_sortable):
            found = by_key.pop(tuple(row[i] for i in keys), None)
            if found is not None and missing[row] == extra[found] == 1:
                changed.append((row, found))
                del missing[row], extra[found]
        if not changed:
            return []
        row, found = changed[0]
        place = ", ".join(f"{self.columns[i]}={_cut(row[i])}" for i in keys)
        values = ", ".join(
            f"{name} is {_cut(there)} instead of {_cut(due)}"
            for name, due, there in zip(self.columns, row, found, strict=True)
            if due != there
        )
        return [f"{counted(len(changed), 'row', 'differs', 'differ')}, first {place}: {values}"]

    def _shown(self, row: Row) -> str:
        return " ".join(f"{name}={_cut(value)}" for name, value in zip(self.columns, row, strict=True))


def compare(expected: pa.Table, found: pa.Table, tolerance: float = 0.0) -> Difference:
    """The difference of two tables of the same columns; floats may differ by `tolerance` of their value.

    That holds inside of arrays, structs and maps too. NaN equals NaN, -0.0 equals 0.0, null equals null; the entries of
    a map have no order.
    """
    due: Counter[Row] = Counter(rows_of(expected))
    extra: Counter[Row] = Counter()
    for row in rows_of(found):
        if due.get(row, 0) > 0:
            due[row] -= 1
        else:
            extra[row] += 1
    missing = +due
    if tolerance and missing and extra:
        _match_nearly(missing, extra, tolerance)
    return Difference(tuple(found.column_names), missing, extra)


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
        # Arrow hands out a map as a list of pairs, and nothing else as tuples.
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
    """Take out pairs that agree but for floats, and these nearly."""
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
    """The value with a word in the place of each float, however deep."""
    if isinstance(value, tuple):
        return tuple(_rest(item) for item in value)
    return "a float" if isinstance(value, float) else value


def _nearly(one: Any, other: Any, tolerance: float) -> bool:
    """True if the floats of two values, of which the rest is equal, agree."""
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
