"""Conditions that a person has written, asked of a table: how many rows, which ones, and what is wrong with them.

DataFusion reads it through deltalake, without Spark (`StoredTable.readable`). Rows are counted by a filter of the
aggregate, not of the scan: a scan passes over files by their statistics, and those that were written before may be
wrong (decimals). What it says of a condition that it cannot ask is put into words that name the unknown column or
function first, and another name only if that is near it.
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
from streaming_jobs.spelling import counted

_SAMPLE = 3
_COLUMNS = 6
_NEAR = 0.7
_COLUMN = re.compile(r"No field named (.+?)\.(?: Did you mean|\s*$)", re.MULTILINE)
_FUNCTION = re.compile(r"Invalid function '(.+?)'")
_MEANT = re.compile(r"Did you mean '(.+?)'\?")


class UnknownColumn(UsageError):
    """A condition names a column that the table has not."""

    def __init__(self, found: str, next_step: str, column: str) -> None:
        super().__init__(found, next_step)
        self.column = column


@dataclass(frozen=True)
class Broken:
    """How many rows break a rule, for how many of them it is null (unknown), and some of them."""

    rows: int
    null: int
    sample: Sequence[Mapping[str, Any]] = ()

    def words(self, rule: str) -> str:
        """What is wrong, in one line; the rows shown are those for which the rule is false, if there are any."""
        if self.null == self.rows:
            why = f"for {'it' if self.rows == 1 else 'all of them'} it is null (unknown)"
        else:
            why = f"for {self.null:,} it is null (unknown), for {self.rows - self.null:,} false"
        shown = "; ".join(", ".join(f"{n} {_short(v)}" for n, v in row.items()) for row in self.sample)
        return f"{counted(self.rows, 'row', 'breaks', 'break')} the rule {rule}: {why} ({shown})"


def bad_rows(table: DeltaTable, condition: str, *, now: DeltaTable | None = None) -> int:
    """How many rows meet the condition; raises UsageError for one that cannot be asked.

    With `now`, columns that only the table of now has are null, as its readers see them in old rows.
    """
    source, tables = '"t"', {"t": table}
    if now is not None and (added := added_columns(table, now)):
        nulls = ", ".join(f'(SELECT {quoted(c)} FROM "now" WHERE FALSE) AS {quoted(c)}' for c in added)
        source, tables = f'(SELECT *, {nulls} FROM "t") AS t', {"t": table, "now": now}
    return int(_asked(tables, f"SELECT count(*) FILTER (WHERE ({condition})) AS n FROM {source}", condition)[0]["n"])


def added_columns(old: DeltaTable, now: DeltaTable) -> list[str]:
    """Columns of the table as it is now that it did not have then."""
    had = columns(old)
    return [name for name in columns(now) if name not in had]


def broken(table: DeltaTable, rules: Sequence[str]) -> dict[str, Broken]:
    """Rows that break each rule: a SQL condition that has to hold for every row. Unknown (null) counts as broken.

    Raises UnknownColumn for a rule on a column that is not there, UsageError for any other that cannot be asked.
    """
    return {rule: _broken(table, rule) for rule in rules}


def refuse_unaskable(table: DeltaTable, rules: Sequence[str]) -> None:
    """Raise UsageError for a rule that cannot be asked of the table; no row is read."""
    for rule in rules:
        sql = f'SELECT count(*) AS n FROM (SELECT * FROM "t" LIMIT 0) AS t WHERE ({rule})'
        _asked({"t": table}, sql, rule)


def _broken(table: DeltaTable, rule: str) -> Broken:
    # nullif: DataFusion stops at a column that the plan calls never null, and its execution may be.
    holds = f'SELECT nullif(({rule}), NULL) AS holds FROM "t"'
    counts = "count(*) FILTER (WHERE holds IS NOT TRUE) AS n, count(*) FILTER (WHERE holds IS NULL) AS unknown"
    found = _asked({"t": table}, f"SELECT {counts} FROM ({holds}) AS t", rule)[0]
    if not found["n"]:
        return Broken(0, 0)
    names = columns(table)
    named = [name for name in names if re.search(rf"\b{re.escape(name)}\b", rule)]
    others = [name for name in names if name not in named][: max(_COLUMNS - len(named), 1)]
    shown = ", ".join(quoted(name) for name in names if name in named or name in others)
    rows = _asked(
        {"t": table},
        f'SELECT {shown} FROM "t" WHERE ({rule}) IS NOT TRUE ORDER BY ({rule}) IS NULL LIMIT {_SAMPLE}',
        rule,
    )
    return Broken(int(found["n"]), int(found["unknown"]), rows)


def columns(table: DeltaTable) -> list[str]:
    """The table's columns in order."""
    return [field.name for field in table.schema().fields]


def quoted(name: str) -> str:
    """A column's name as SQL takes it, whatever is in it."""
    return '"' + name.replace('"', '""') + '"'


def _asked(tables: Mapping[str, DeltaTable], sql: str, condition: str) -> list[dict[str, Any]]:
    data = QueryBuilder()
    for name, table in tables.items():
        data = data.register(name, table)
    try:
        return list(pa.table(data.execute(sql).read_all()).to_pylist())
    except Exception as error:  # what a condition meets while it runs, deltalake raises as a plain Exception
        known = [name for table in tables.values() for name in columns(table)]
        raise _cannot_be_asked(condition, str(error), list(dict.fromkeys(known))) from error


def _cannot_be_asked(condition: str, text: str, known: Sequence[str]) -> UsageError:
    start = f"the condition '{condition}' cannot be asked: "
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
    said = " ".join(line for line in text.splitlines() if line and line != "caused by")
    return UsageError(f"{start}{said[:300]}", "write a SQL condition on the table's columns")


def _near(name: str, others: Sequence[str]) -> str:
    """The nearest of some names, if it is near at all."""
    found = [other for other in others if difflib.SequenceMatcher(None, name, other).ratio() >= _NEAR]
    return f"; did you mean {found[0]}" if found else ""


def _short(value: object) -> str:
    text = "null" if value is None else str(value)
    return text if len(text) <= 60 else text[:60] + " ..."
