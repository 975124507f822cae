"""Outcomes from what an engine has evaluated: numbers in words, and failing rows with their keys."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from decimal import Decimal
from typing import Any, SupportsFloat

from quality.engines.great_expectations import Evaluated
from quality.validation import MOST_ROWS, CheckOutcome

Rows = Mapping[int, Mapping[str, Any]]


def outcome_of(evaluated: Evaluated, rows: Rows, key: Sequence[str], *, rows_in_sample: int) -> CheckOutcome:
    """The outcome of one expectation; `rows` has failing rows by their positions."""
    named = evaluated.named
    looked_at = evaluated.rows
    if looked_at is None and evaluated.failing is not None:
        looked_at = rows_in_sample
    number = _number(evaluated, looked_at)
    return CheckOutcome(
        expectation=named.name,
        kind=named.kind,
        passed=evaluated.passed and not evaluated.error,
        severity=named.severity,
        observed=_observed(evaluated, looked_at, number),
        number=number,
        rows=looked_at,
        failing=evaluated.failing,
        sample=tuple(_shown(rows[at], key, named.columns) for at in evaluated.positions[:MOST_ROWS] if at in rows),
        error=evaluated.error,
    )


def error_outcome(name: str, kind: str, error: Exception) -> CheckOutcome:
    """The outcome of something that raised an exception: it has not passed."""
    return CheckOutcome(name, kind, passed=False, error=f"{type(error).__name__}: {error}"[:500])


def _shown(row: Mapping[str, Any], key: Sequence[str], columns: Sequence[str]) -> dict[str, Any]:
    """The key's columns, then those that the expectation is about; the whole row where it is about none."""
    wanted = dict.fromkeys([*key, *(columns or row)])
    return {column: row[column] for column in wanted if column in row}


def _number(evaluated: Evaluated, rows: int | None) -> float | None:
    """The observed value, or the failing rows in percent."""
    if evaluated.error:
        return None
    if evaluated.failing is not None and rows is not None:
        return 100 * evaluated.failing / rows if rows else 0.0
    return _as_float(evaluated.observed)


def _as_float(value: object) -> float | None:
    if value is None or isinstance(value, (str, bool)) or not isinstance(value, SupportsFloat):
        return None
    try:
        number = float(value)
    except (TypeError, ValueError):  # pandas' NA
        return None
    return number if math.isfinite(number) else None


def _observed(evaluated: Evaluated, rows: int | None, number: float | None) -> str:
    if evaluated.error:
        return ""
    if evaluated.failing is not None and rows is not None:
        if not evaluated.failing:
            return f"none of {rows:,} rows failed" if rows else "no rows"
        return f"{evaluated.failing:,} of {rows:,} rows failed ({_percent(evaluated.failing, rows)})"
    return _value(evaluated.observed, number)


def _percent(part: int, whole: int) -> str:
    """A share that is not rounded to nothing, nor to everything."""
    if not whole or not part:
        return "0%"
    share = 100 * part / whole
    if share < 0.01:
        return "under 0.01%"
    text = f"{share:.2f}".rstrip("0").rstrip(".")
    return "over 99.99%" if text == "100" and part < whole else f"{text}%"


def _value(value: object, number: float | None) -> str:
    """An observed value as text, the same from both engines."""
    if value is None:
        return ""
    if number is not None:
        return f"{number:,.0f}" if number == int(number) else f"{number:,.6g}"
    if isinstance(value, (list, tuple, set)):
        return ", ".join(sorted(_value(each, _as_float(each)) for each in value))[:500]
    if isinstance(value, Decimal):
        return f"{value:f}"
    return str(value)[:500]
