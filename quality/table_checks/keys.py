"""Keys: no key in two rows, and every reference to another table is followed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from quality.table_checks.base import Check, CheckedTable, checked_column, checked_table_name, quoted, type_of
from quality.validation import MOST_ROWS, CheckOutcome, Severity
from streaming_jobs.declare.names import checked_names
from streaming_jobs.errors import UsageError
from streaming_jobs.text.spelling import counted

_NESTED = ("map", "array", "struct")
_WHOLE = ("byte", "short", "integer", "long")


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

    def _judge(self, checked: CheckedTable) -> CheckOutcome:
        columns = self.columns or checked.keys
        if not columns:
            raise UsageError(f"table {checked.declared.name} has no keys", "write UniqueKey(['column', ...])")
        for column in columns:
            if (kind := checked.column(column)) in _NESTED:
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


@dataclass(frozen=True)
class References(Check):
    """Every value of `column` that is not null is a value of `other_column` in the newest version of `other_table`."""

    column: str
    other_table: str
    other_column: str
    severity: Severity = "critical"

    kind = "references"

    @property
    def name(self) -> str:
        """One per pair of columns."""
        return f"{self.column} references {self.other_table}.{self.other_column}"

    def _validate(self) -> None:
        checked_column(self.kind, "column", self.column)
        checked_table_name(self.kind, "other_table", self.other_table)
        checked_column(self.kind, "other_column", self.other_column)

    def _judge(self, checked: CheckedTable) -> CheckOutcome:
        other = checked.other(self.other_table)
        kinds = checked.column(self.column), type_of(other, self.other_table, self.other_column)
        if any(kind in _NESTED for kind in kinds) or not _comparable(*kinds):
            raise UsageError(
                f"{self.column} has the type {kinds[0]}, {self.other_table}.{self.other_column} {kinds[1]}",
                "compare columns of one type",
            )
        # Values are grouped first, under nullif: no filter of the join reaches the scans, which skip by statistics.
        missing = (
            f'WITH a AS (SELECT nullif({quoted(self.column)}, NULL) AS v, count(*) AS n FROM "t" GROUP BY 1), '
            f'b AS (SELECT nullif({quoted(self.other_column)}, NULL) AS v FROM "o" GROUP BY 1) '
            "SELECT a.v AS v, a.n AS n FROM a LEFT JOIN b ON a.v = b.v WHERE b.v IS NULL AND a.v IS NOT NULL"
        )
        [found] = checked.sql(f"SELECT count(*) AS keys, sum(n) AS failing FROM ({missing}) AS m", o=other)
        rows, failing = checked.rows(), int(found["failing"] or 0)
        target = f"{self.other_table}.{self.other_column} (version {other.version()})"
        text = f"every value of {self.column} is in {target}"
        sample: tuple[dict[str, object], ...] = ()
        if failing:
            text = f"{counted(failing, 'row')} with {counted(found['keys'], 'value')} of {self.column} not in {target}"
            names = dict.fromkeys([*(k for k in checked.keys if k in checked.types), self.column, *checked.types])
            shown = ", ".join(f"s.{quoted(name)} AS {quoted(name)}" for name in names)
            sample = tuple(
                checked.sql(
                    f'SELECT {shown} FROM "t" AS s JOIN ({missing}) AS m '
                    f"ON nullif(s.{quoted(self.column)}, NULL) = m.v LIMIT {MOST_ROWS}",
                    o=other,
                )
            )
        return self.outcome(
            passed=not failing, observed=text, number=float(failing), rows=rows, failing=failing, sample=sample
        )


def _comparable(one: str, other: str) -> bool:
    """True for equal types, whole numbers of any size, and decimals of any scale."""
    return one == other or {one, other} <= {*_WHOLE} or (one.startswith("decimal") and other.startswith("decimal"))
