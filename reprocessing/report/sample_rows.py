"""Rows of a difference as the head and the lines of a table, for the page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import date, datetime
from typing import Any

_CHARACTERS = 120
"""Of a value."""
_BOTH = (" published", " rebuilt")


def sample_table(rows: Sequence[Mapping[str, Any]]) -> tuple[list[str], list[list[str]]]:
    """Column names and the rows' values as text.

    A row with the values of both sides has them as `<column> published` and `<column> rebuilt`; such a pair is left out
    if it is equal in every row.
    """
    columns = list(dict.fromkeys(column for row in rows for column in row))
    shown = [column for column in columns if not _equal(column, rows)]
    return shown, [[_text(row[column]) if column in row else "" for column in shown] for row in rows]


def _equal(column: str, rows: Sequence[Mapping[str, Any]]) -> bool:
    """True if both sides of the column are the same in all rows."""
    for own, other in (_BOTH, _BOTH[::-1]):
        if column.endswith(own):
            twin = column.removesuffix(own) + other
            return all(column in row and twin in row and row[column] == row[twin] for row in rows)
    return False


def _text(value: object) -> str:
    if isinstance(value, datetime):
        text = f"{value:%Y-%m-%d %H:%M:%S}" + (f".{value:%f}" if value.microsecond else "")
    elif isinstance(value, date):
        text = value.isoformat()
    elif value is None:
        text = "null"
    else:
        text = str(value)
    return text if len(text) <= _CHARACTERS else text[:_CHARACTERS] + " ..."
