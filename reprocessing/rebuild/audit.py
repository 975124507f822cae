"""The difference of the rebuilt rows from the published ones, computed before publishing.

DataFusion reads both tables through deltalake, without Spark (`StoredTable.readable`). A table with keys is compared
key by key, any other as a multiset of rows. If the table has a time column, differences are counted by period too. The
sample shows the rows whose numbers differ most, each column measured by its largest difference.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from deltalake import DeltaTable, QueryBuilder
from pyspark.sql.types import StructField

from reprocessing.planning.conditions import quoted
from reprocessing.rebuild.audit_groups import NO_KEYS, NO_TIMES, ByKey, ByTime, by_key, by_time
from reprocessing.rebuild.audit_sql import joined, net, one, opened, rows_of
from streaming_jobs.sinks.schemas import is_position

_SAMPLE = 5
_NOTHING = "CAST(0 AS DOUBLE)"
_TIMES = {"timestamp", "timestamp_ntz", "date"}
_NUMBERS = {"byte", "short", "integer", "long", "float", "double"}


@dataclass(frozen=True)
class Difference:
    """The difference of a rebuilt table from the published one. `totals` by numeric column: (published, rebuilt).

    `by_time`: start of the period (text), then the numbers of rows that vanish, appear and change; the periods are
    equally long, in order, and only those with differences are listed. `timeline` has the same in shorter periods.
    `keyed` is True if the table has keys; only then the differences are known by key.
    """

    table: str
    old_rows: int
    new_rows: int
    only_old: int
    only_new: int
    changed: int
    totals: Mapping[str, tuple[Any, Any]]
    sample: Sequence[Mapping[str, Any]]
    time_column: str = ""
    by_time: Sequence[tuple[str, int, int, int]] = ()
    keyed: bool = False
    timeline: ByTime = NO_TIMES
    by_key: ByKey = NO_KEYS

    @classmethod
    def decode(cls, value: Mapping[str, Any]) -> Difference:
        """The difference from the fields in a journal; journals of earlier versions lack some."""
        nested = {"timeline": ByTime(**value.get("timeline", {})), "by_key": ByKey(**value.get("by_key", {}))}
        return cls(**{**value, **nested})

    @property
    def corrected(self) -> int:
        """Rows with other values; without keys, pairs of a row that vanishes and one that appears."""
        return paired(self.only_old, self.only_new, self.changed, keyed=self.keyed)[0]

    @property
    def new(self) -> int:
        """Rows that are only in the rebuilt table."""
        return paired(self.only_old, self.only_new, self.changed, keyed=self.keyed)[1]

    @property
    def gone(self) -> int:
        """Rows that are only in the published table."""
        return paired(self.only_old, self.only_new, self.changed, keyed=self.keyed)[2]

    @property
    def share(self) -> float:
        """Rows that change, vanish or appear, as a share of the published rows."""
        return (self.only_old + self.only_new + self.changed) / max(self.old_rows, 1)


def paired(gone: int, came: int, changed: int, *, keyed: bool) -> tuple[int, int, int]:
    """(corrected, new, gone): without keys, a row that vanishes and one that appears count as one corrected row."""
    both = 0 if keyed else min(gone, came)
    return changed + both, came - both, gone - both


def stored(differences: Sequence[Difference]) -> list[dict[str, Any]]:
    """Differences as a journal stores them: without the sample, whose values may have any type."""
    return [asdict(replace(each, sample=())) for each in differences]


def compare(table: str, old: DeltaTable, new: DeltaTable, keys: Sequence[str]) -> Difference:
    """The difference of two tables with the same name; columns that only one of them has are left out.

    The position that Recourse adds is left out too: rows of an earlier version have none.
    """
    shared = {field["name"] for field in _fields(old)}
    columns = [f for f in _fields(new) if f["name"] in shared and not _is_position(f)]
    names = [field["name"] for field in columns]
    data = opened({"old": old, "new": new})
    counted = one(data, 'SELECT (SELECT count(*) FROM "old") AS o, (SELECT count(*) FROM "new") AS n', table)
    numbers = {str(f["name"]): str(f["type"]) for f in columns if _is_number(f["type"]) and f["name"] not in keys}
    totals = {name: _totals(data, table, name, kind) for name, kind in numbers.items()}
    gone, came, changed, sample = (_by_key if keys else _by_row)(data, table, names, keys, list(numbers))
    difference = Difference(table, counted["o"], counted["n"], gone, came, changed, totals, sample, keyed=bool(keys))
    if not (gone or came or changed):
        return difference
    times = [str(f["name"]) for f in columns if str(f["type"]) in _TIMES]
    if keys:
        difference = replace(difference, by_key=by_key(data, table, names, keys, times))
    if not times:
        return difference
    timeline = by_time(data, table, names, keys, times[0])
    return replace(difference, time_column=times[0], by_time=timeline.rough(), timeline=timeline)


def _is_number(kind: object) -> bool:
    return isinstance(kind, str) and (kind in _NUMBERS or kind.startswith("decimal("))


def _totals(data: QueryBuilder, table: str, name: str, kind: str) -> tuple[Any, Any]:
    """The sums of a column in both tables: exact but for floating point, wider than the column; decimals as text."""
    q = quoted(name)
    if kind not in ("float", "double"):
        scale = kind.rstrip(")").rpartition(",")[2].strip() if kind.startswith("decimal(") else "0"
        q = f"arrow_cast({q}, 'Decimal256(76, {scale})')"
    sums = one(data, f'SELECT (SELECT sum({q}) FROM "old") AS o, (SELECT sum({q}) FROM "new") AS n', table)
    return _plain(sums["o"], kind), _plain(sums["n"], kind)


def _plain(total: Any, kind: str) -> Any:
    """A sum in a form that the journal's JSON can hold."""
    if total is None or kind in ("float", "double"):
        return total
    return f"{total:f}" if kind.startswith("decimal(") else int(total)


def _score(data: QueryBuilder, table: str, sizes: Mapping[str, str], source: str) -> str:
    """SQL for the size of a row's difference: per column as a share of the largest one, summed."""
    if not sizes:
        return _NOTHING
    largest = ", ".join(f"max({size}) AS {quoted(name)}" for name, size in sizes.items())
    maxima = one(data, f"SELECT {largest} {source}", table)
    shares = [f"coalesce({size} / {maxima[name]!r}, 0)" for name, size in sizes.items() if maxima[name]]
    return " + ".join(shares) or _NOTHING


def _finite(value: str) -> str:
    """SQL for a number as a double; null if it is not finite, or too large to be compared."""
    number = f"CAST({value} AS DOUBLE)"
    return f"CASE WHEN abs({number}) < 1e300 THEN {number} END"


def _by_key(
    data: QueryBuilder, table: str, names: Sequence[str], keys: Sequence[str], numbers: Sequence[str]
) -> tuple[int, int, int, list[dict[str, Any]]]:
    on, first, differs = joined(names, keys)
    rest = [n for n in names if n not in keys]
    both_tables = f'FROM "old" o FULL JOIN "new" n ON {on}'
    both = f"o.{first} IS NOT NULL AND n.{first} IS NOT NULL"
    counts = one(
        data,
        f"SELECT count(*) FILTER (WHERE n.{first} IS NULL) AS gone, count(*) FILTER (WHERE o.{first} IS NULL) AS came, "
        f"count(*) FILTER (WHERE {both} AND ({differs})) AS changed {both_tables}",
        table,
    )
    shown = ", ".join(
        [f"coalesce(o.{quoted(k)}, n.{quoted(k)}) AS {quoted(k)}" for k in keys]
        + [f"o.{quoted(n)} AS {quoted(n + ' published')}, n.{quoted(n)} AS {quoted(n + ' rebuilt')}" for n in rest]
    )
    differing = f"{both_tables} WHERE o.{first} IS NULL OR n.{first} IS NULL OR {differs}"
    sizes = {
        name: f"abs(coalesce({_finite(f'n.{quoted(name)}')}, 0) - coalesce({_finite(f'o.{quoted(name)}')}, 0))"
        for name in numbers
    }
    order = ", ".join(quoted(k) for k in keys)
    score = _score(data, table, sizes, differing)
    rows = rows_of(
        data,
        f'SELECT {shown}, {score} AS "__score" {differing} ORDER BY "__score" DESC, {order} LIMIT {_SAMPLE}',
        table,
    )
    for row in rows:
        row.pop("__score")
    return counts["gone"], counts["came"], counts["changed"], rows


def _by_row(
    data: QueryBuilder, table: str, names: Sequence[str], _: Sequence[str], numbers: Sequence[str]
) -> tuple[int, int, int, list[dict[str, Any]]]:
    columns = ", ".join(quoted(n) for n in names)
    differing = net(names)
    counts = one(
        data,
        'SELECT coalesce(-sum("__net") FILTER (WHERE "__net" < 0), 0) AS gone, '
        f'coalesce(sum("__net") FILTER (WHERE "__net" > 0), 0) AS came FROM ({differing}) d',
        table,
    )
    score = _score(data, table, {name: f"abs({_finite(quoted(name))})" for name in numbers}, f"FROM ({differing}) d")
    rows = rows_of(data, f"SELECT * FROM ({differing}) d ORDER BY {score} DESC, {columns} LIMIT {_SAMPLE}", table)
    shown = [{("rebuilt" if r["__net"] > 0 else "published"): {n: r[n] for n in names}} for r in rows]
    return int(counts["gone"]), int(counts["came"]), 0, shown


def _fields(table: DeltaTable) -> list[dict[str, Any]]:
    return list(json.loads(table.schema().to_json())["fields"])


def _is_position(field: Mapping[str, Any]) -> bool:
    return is_position(StructField.fromJson(dict(field)))
