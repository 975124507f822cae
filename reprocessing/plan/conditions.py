"""SQL conditions that a person has written, evaluated on a table: the number of rows that meet or break them.

DataFusion reads the table through deltalake, without Spark (`StoredTable.readable`). Rows are counted by a filter of
the aggregate, not of the scan: a scan skips files by their statistics, and statistics written by earlier versions may
be wrong (decimals). An error of DataFusion is reworded: it names the unknown column or function first, and suggests
another name only if that is similar.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
from deltalake import DeltaTable, QueryBuilder

from streaming_jobs.errors import UsageError
from streaming_jobs.platform.table_rows import failed, is_of_surroundings
from streaming_jobs.text.spelling import counted

_SAMPLE = 3
_COLUMNS = 6
_NEAR = 0.7
_COLUMN = re.compile(r"No field named (.+?)\.(?: Did you mean|\s*$)", re.MULTILINE)
_FUNCTION = re.compile(r"Invalid function '(.+?)'")
_MEANT = re.compile(r"Did you mean '(.+?)'\?")


class UnknownColumn(UsageError):
    def __init__(self, found: str, next_step: str, column: str) -> None:
        super().__init__(found, next_step)
        self.column = column


@dataclass(frozen=True)
class Broken:
    """The number of rows that break a rule, the number of those for which it is null (unknown), and a sample."""

    rows: int
    null: int
    sample: Sequence[Mapping[str, Any]] = ()

    def words(self, rule: str) -> str:
        """The breach in one line; the sample has rows for which the rule is false, if there are any."""
        if self.null == self.rows:
            why = f"for {'it' if self.rows == 1 else 'all of them'} it is null (unknown)"
        else:
            why = f"for {self.null:,} it is null (unknown), for {self.rows - self.null:,} false"
        shown = "; ".join(", ".join(f"{n} {_short(v)}" for n, v in row.items()) for row in self.sample)
        return f"{counted(self.rows, 'row', 'breaks', 'break')} the rule {rule}: {why} ({shown})"


def bad_rows(table: DeltaTable, condition: str, *, now: DeltaTable | None = None) -> int:
    """The number of rows that meet the condition; raises UsageError if it cannot be evaluated.

    With `now`, columns that only the newest version has are null, as its readers see them in old rows.
    """
    source, tables = '"t"', {"t": table}
    if now is not None and (added := added_columns(table, now)):
        nulls = ", ".join(f'(SELECT {quoted(c)} FROM "now" WHERE FALSE) AS {quoted(c)}' for c in added)
        source, tables = f'(SELECT *, {nulls} FROM "t") AS t', {"t": table, "now": now}
    return int(_evaluate(tables, f"SELECT count(*) FILTER (WHERE ({condition})) AS n FROM {source}", condition)[0]["n"])


def added_columns(old: DeltaTable, now: DeltaTable) -> list[str]:
    """Columns that the table has now and did not have in the `old` version."""
    had = columns(old)
    return [name for name in columns(now) if name not in had]


def refuse_unaskable(table: DeltaTable, rules: Sequence[str]) -> None:
    """Raise UsageError for a rule that cannot be evaluated on the table; no row is read."""
    for rule in rules:
        sql = f'SELECT count(*) AS n FROM (SELECT * FROM "t" LIMIT 0) AS t WHERE ({rule})'
        _evaluate({"t": table}, sql, rule)


def broken(table: DeltaTable, rule: str) -> Broken:
    """Rows that break a rule: a SQL condition that has to hold for every row. Unknown (null) counts as broken.

    Raises UnknownColumn for a rule on a missing column, UsageError for any other rule that cannot be evaluated.
    """
    # nullif: DataFusion fails if a column is null that its plan declares never null.
    holds = f'SELECT nullif(({rule}), NULL) AS holds FROM "t"'
    counts = "count(*) FILTER (WHERE holds IS NOT TRUE) AS n, count(*) FILTER (WHERE holds IS NULL) AS unknown"
    counted_rows = _evaluate({"t": table}, f"SELECT {counts} FROM ({holds}) AS t", rule)[0]
    if not counted_rows["n"]:
        return Broken(0, 0)
    names = columns(table)
    named = [name for name in names if re.search(rf"\b{re.escape(name)}\b", rule)]
    others = [name for name in names if name not in named][: max(_COLUMNS - len(named), 1)]
    shown = ", ".join(quoted(name) for name in names if name in named or name in others)
    rows = _evaluate(
        {"t": table},
        f'SELECT {shown} FROM "t" WHERE ({rule}) IS NOT TRUE ORDER BY ({rule}) IS NULL LIMIT {_SAMPLE}',
        rule,
    )
    return Broken(int(counted_rows["n"]), int(counted_rows["unknown"]), rows)


def columns(table: DeltaTable) -> list[str]:
    return [field.name for field in table.schema().fields]


def quoted(name: str) -> str:
    """A column's name in quotes, with quotes in it doubled, for SQL."""
    return '"' + name.replace('"', '""') + '"'


def _evaluate(tables: Mapping[str, DeltaTable], sql: str, condition: str) -> list[dict[str, Any]]:
    data = QueryBuilder()
    for name, table in tables.items():
        data = data.register(name, table)
    try:
        return list(pa.table(data.execute(sql).read_all()).to_pylist())
    except Exception as error:  # errors while a query runs, deltalake raises as a plain Exception
        if is_of_surroundings(error):
            raise failed(error, next(iter(tables))) from error
        known = [name for table in tables.values() for name in columns(table)]
        raise _not_evaluated(condition, str(error), list(dict.fromkeys(known))) from error


def _not_evaluated(condition: str, text: str, known: Sequence[str]) -> UsageError:
    start = f"the condition '{condition}' cannot be evaluated: "
    if match := _COLUMN.search(text):
        name = match[1].strip("'\"").removeprefix("t.").strip('"')
        exact = next((c for c in known if c.lower() == name.lower()), None)
        if exact is not None:
            near = f'; did you mean "{exact}", with the quotes'
        else:
            near = _near(name, difflib.get_close_matches(name, known, 1, _NEAR))
        listed = "" if near else f"; the columns are {', '.join(known)}"
        return UnknownColumn(
            f"{start}there is no column {name}{near}{listed}"[:600],
            "write a SQL condition on the table's columns",
            name,
        )
    if match := _FUNCTION.search(text):
        near = _near(match[1], _MEANT.findall(text))
        return UsageError(f"{start}there is no function {match[1]}{near}", "use a function that DataFusion has")
    reason = " ".join(line for line in text.splitlines() if line and line != "caused by")
    return UsageError(f"{start}{reason[:300]}", "write a SQL condition on the table's columns")


def _near(name: str, others: Sequence[str]) -> str:
    """A suggestion of the most similar of some names; empty if none is similar enough."""
    similar = [other for other in others if difflib.SequenceMatcher(None, name, other).ratio() >= _NEAR]
    return f"; did you mean {similar[0]}" if similar else ""


def _short(value: object) -> str:
    text = "null" if value is None else str(value)
    return text if len(text) <= 60 else text[:60] + " ..."
