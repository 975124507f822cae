"""Names and values in SQL, in the two dialects that evaluate conditions: Spark's and DataFusion's."""

from __future__ import annotations

import math
from datetime import UTC, date, datetime
from decimal import Decimal
from typing import Literal

from streaming_jobs.errors import UsageError

Dialect = Literal["spark", "datafusion"]
Value = bool | int | float | Decimal | str | date | datetime


def quoted(name: str, dialect: Dialect) -> str:
    return f"`{name.replace('`', '``')}`" if dialect == "spark" else '"' + name.replace('"', '""') + '"'


def literal(value: Value, dialect: Dialect) -> str:
    """A value in SQL; raises UsageError for one of another type."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int):
        return str(value)
    if isinstance(value, float):
        return repr(value) + "D" * (dialect == "spark") if math.isfinite(value) else f"CAST('{value}' AS DOUBLE)"
    if isinstance(value, Decimal) and value.is_finite():
        return f"CAST('{value:f}' AS DECIMAL(38, {max(-int(value.as_tuple().exponent), 0)}))"
    if isinstance(value, datetime):
        if value.tzinfo is None:
            raise UsageError(f"the time {value} has no time zone", "write datetime(..., tzinfo=UTC)")
        return f"TIMESTAMP '{value.astimezone(UTC).isoformat()}'"
    if isinstance(value, date):
        return f"DATE '{value.isoformat()}'"
    if isinstance(value, str):
        if dialect == "spark":
            return "'" + value.replace("\\", "\\\\").replace("'", "\\'") + "'"
        return "'" + value.replace("'", "''") + "'"
    raise UsageError(f"{value!r} cannot be a value of a rule", "use a number, a text, a date or a time")
