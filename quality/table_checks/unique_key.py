"""No key in two rows, and none with a null."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from quality.table_checks.base import Check, CheckedTable, checked_column, quoted
from quality.validation import MOST_ROWS, Outcome, Severity
from streaming_jobs.declare.names import checked_names
from streaming_jobs.errors import UsageError
from streaming_jobs.text.spelling import counted


@dataclass(frozen=True)
class UniqueKey(Check):
    """No two rows of the whole table have the same `columns`, and none of these is null.

    Without `columns`, those of the suite's key or of the table's keys. NaN equals NaN, and -0.0 equals 0.0. Rows are
    grouped by DataFusion within a bound of memory; more goes through temporary files.
    """

    columns: Sequence[str] = ()
    severity: Severity = "critical"

    kind = "unique_key"

    @property
    def name(self) -> str:
        """One per set of columns."""
        return f"{self.kind} of {', '.join(self.columns)}" if self.columns else self.kind

    def _validate(self) -> None:
        object.__setattr__(self, "columns", checked_names(self.kind, "columns", self.columns))
        for column in self.columns:
            checked_column(self.kind, "columns", column)

    def _judge(self, checked: CheckedTable) -> Outcome:
        columns = self.columns or checked.keys
        if not columns:
            raise UsageError(f"table {checked.declared.name} has no keys", "write UniqueKey(['column', ...])")
        for column in columns:
            if (kind := checked.column(column)) in ("map", "array", "struct"):
                raise UsageError(f"column {column} has the type {kind}, which cannot be a key", "name other columns")
        names = ", ".join(quoted(column) for column in columns)
        null = " OR ".join(f"k{number} IS NULL" for number, _ in enumerate(columns))
        keyed = ", ".join(f"{quoted(c)} AS k{number}" for number, c in enumerate(columns))
        group = ", ".join(f"k{number}" for number, _ in enumerate(columns))
        bad = (
            f'SELECT {group}, count(*) AS n FROM (SELECT {keyed} FROM "t") AS t GROUP BY {group} '
            f"HAVING count(*) > 1 OR {null}"
        )
        [found] = checked.sql(
            f"SELECT sum(n) AS failing, count(*) FILTER (WHERE NOT ({null})) AS keys, "
            f"sum(n) FILTER (WHERE {null}) AS nulls FROM ({bad}) AS b"
        )
        rows, failing, keys, nulls = checked.rows(), int(found["failing"] or 0), found["keys"], found["nulls"] or 0
        text = f"no key is null or in two of {counted(rows, 'row')}"
        parts = [f"{counted(keys, 'key', 'is', 'are')} in more than one row"] * bool(keys)
        parts += [f"{counted(nulls, 'row')} with a null in the key"] * bool(nulls)
        sample = checked.sql(f"{bad} ORDER BY n DESC LIMIT {MOST_ROWS}") if failing else []
        shown = tuple({c: row[f"k{i}"] for i, c in enumerate(columns)} | {"rows": row["n"]} for row in sample)
        return self.outcome(
            passed=not failing,
            observed=f"{' and '.join(parts)} ({names})" if parts else text,
            number=float(failing),
            rows=rows,
            failing=failing,
            sample=shown,
        )
