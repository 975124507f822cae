"""The difference of the rebuilt rows from the published ones, computed before publishing.

DataFusion reads both tables through deltalake, without Spark (`StoredTable.readable`), and of each only the files that
the other table does not have. Both are compared as multisets of rows; the rows that differ are then matched by key if
the table has keys. The sample shows the rows whose numbers differ most, each column measured by its largest difference.

Differences are counted by time and by key, in a bounded number of groups, so that a journal can hold them. Times are in
seconds since 1970: DataFusion's TIMESTAMP counts nanoseconds and ends in the year 2262.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, date, datetime
from pathlib import Path
from typing import Any

import msgspec
from deltalake import DeltaTable, QueryBuilder, write_deltalake
from pyspark.sql.types import StructField

from reprocessing.plan.conditions import quoted
from reprocessing.replay.words import RowCounts
from streaming_jobs.declare.table import DeclaredTable
from streaming_jobs.platform.table_rows import failed, opened, rows_of
from streaming_jobs.settings import Settings
from streaming_jobs.sinks.schemas import is_position
from streaming_jobs.sinks.stored import LATE, StoredTable
from streaming_jobs.sinks.tables import all_tables, copied_table
from streaming_jobs.storage.locations import Location, local_scratch, remove_tree
from streaming_jobs.stream import Stream

DIFFERING = "differing"
"""The table of the rows whose counts differ: the columns, and `__net`."""


PERIODS = 10
"""Periods at most in the text of a difference."""
FINE_PERIODS = 60
"""Periods at most in its plot."""
KEYS = 20
"""Keys at most that are listed by name."""
KEY_LENGTH = 60
"""Characters at most of a key's text."""
TOUCHED_KEYS = 1_000
"""Keys at most that are noted in full."""
_TOUCHED_LENGTH, _RANGE_LENGTH = 64_000, 1_000
"""Characters at most of the JSON of these keys, and of one range: a journal holds them."""
_FIRST_SECOND = -62_135_596_800  # 0001-01-01; the period that contains it may begin before
_LAST_SECOND = 253_402_300_799  # of 9999
# Each divides the next ones of the rough widths, so that fine periods can be joined to rough ones.
_ROUGH = (60, 600, 3_600, 6 * 3_600, 86_400, 7 * 86_400, 28 * 86_400, 364 * 86_400)
_FINE = tuple(sorted({*_ROUGH, 120, 300, 1_200, 1_800, 7_200, 10_800, 2 * 21_600}))
_DECADE = 3_640 * 86_400
_SAMPLE = 5
_NOTHING = "CAST(0 AS DOUBLE)"
_TIMES = {"timestamp", "timestamp_ntz", "date"}
_WITHOUT_ORDER = {"boolean", "binary"}
_NUMBERS = {"byte", "short", "integer", "long", "float", "double"}


def net(names: Sequence[str]) -> str:
    """SQL for the rows whose counts differ; `__net` is the rebuilt table's count less the published one's."""
    columns = ", ".join(quoted(n) for n in names)
    return (
        f'SELECT {columns}, sum("__w") AS "__net" FROM (SELECT {columns}, 1 AS "__w" FROM "new" UNION ALL '
        f'SELECT {columns}, -1 AS "__w" FROM "old") u GROUP BY {columns} HAVING sum("__w") <> 0'
    )


def matched(names: Sequence[str], nested: Sequence[str], keys: Sequence[str]) -> str:
    """SQL for the differing rows by key: `__gone`, `__came`, `__changed` (one of them is 1), the keys, and each other
    column of both sides as `old` and `new` name it.

    A join would hold one side in memory. `nested` are columns of lists, maps and structs: they have no maximum.
    """
    by = ", ".join(quoted(k) for k in keys)
    sides = ", ".join(
        f'{"first_value" if n in nested else "max"}({quoted(n)}) FILTER (WHERE "__net" {sign} 0) AS {side(n)}'
        for n in names
        if n not in keys
        for sign, side in (("<", old), (">", new))
    )
    both = 'count(*) FILTER (WHERE "__net" < 0) > 0 AS "__o", count(*) FILTER (WHERE "__net" > 0) > 0 AS "__n"'
    grouped = f'SELECT {", ".join(filter(None, [by, both, sides]))} FROM "{DIFFERING}" GROUP BY {by}'
    kinds = (("gone", 'NOT "__n"'), ("came", 'NOT "__o"'), ("changed", '"__o" AND "__n"'))
    counts = ", ".join(f'CASE WHEN {when} THEN 1 ELSE 0 END AS "__{kind}"' for kind, when in kinds)
    return f"SELECT *, {counts} FROM ({grouped}) g"


def old(name: str) -> str:
    """The published value of a column in `matched`."""
    return quoted(f"o {name}")


def new(name: str) -> str:
    """The rebuilt value of a column in `matched`."""
    return quoted(f"n {name}")


def unequal(names: Sequence[str], tables: Mapping[str, tuple[int, Sequence[str]]]) -> str:
    """SQL for the number of rows whose weighed counts do not add up to zero; by table, its weight and columns.

    A column that a table does not have is null in its rows.
    """
    columns = ", ".join(quoted(n) for n in names)
    parts = (
        f"SELECT {', '.join(quoted(n) if n in here else f'NULL AS {quoted(n)}' for n in names)}, "
        f'{weight} AS "__w" FROM "{table}"'
        for table, (weight, here) in tables.items()
    )
    sums = f'SELECT sum("__w") AS "__net" FROM ({" UNION ALL ".join(parts)}) u GROUP BY {columns}'
    return f'SELECT coalesce(sum(abs("__net")), 0) AS n FROM ({sums}) d'


def one(data: QueryBuilder, sql: str, table: str) -> dict[str, Any]:
    return rows_of(data, sql, table)[0]


Period = tuple[int, int, int, int]
"""Start in seconds since 1970, then the numbers of rows that vanish, appear and change."""


@dataclass(frozen=True)
class ByTime:
    """The differences by time: periods of `seconds` each, in order, and only those with differences."""

    seconds: int = 0
    periods: Sequence[Period] = ()

    def rough(self) -> list[tuple[str, int, int, int]]:
        """The same in at most `PERIODS` longer periods, the start as text."""
        if not self.periods:
            return []
        width = _width(self.periods[-1][0] - self.periods[0][0], _ROUGH, PERIODS)
        width += -width % self.seconds
        sums: dict[int, list[int]] = {}
        for start, *counts in self.periods:
            into = sums.setdefault(start - start % width, [0, 0, 0])
            for place, count in enumerate(counts):
                into[place] += count
        return [(minute(start), gone, came, changed) for start, (gone, came, changed) in sums.items()]


@dataclass(frozen=True)
class ByKey:
    """The keys with most differences: `columns` name the part of the key that groups rows, `groups` how many differ.

    `largest`: at most `KEYS` of them, each with its text, the numbers of rows that vanish, appear and change, and the
    number of values that differ in these rows; most rows first, then most values.
    """

    columns: Sequence[str] = ()
    groups: int = 0
    largest: Sequence[tuple[str, int, int, int, int]] = ()


@dataclass(frozen=True)
class Touched:
    """Where the rows that differ are: their keys in the order of `columns`, and the smallest and largest values.

    `keys` is None for a table without keys, and if too many differ. `ranges` are of the key columns and of columns of
    times. Values are those of JSON: times in ISO 8601, UTC; decimals as text; bytes as hexadecimal digits.
    """

    columns: Sequence[str] = ()
    keys: Sequence[Sequence[Any]] | None = None
    ranges: Mapping[str, tuple[Any, Any]] = field(default_factory=dict)


NO_TIMES = ByTime()
NO_KEYS = ByKey()


def minute(seconds: int) -> str:
    """A time as text, in UTC; before the year 1 its first minute, after 9999 its last."""
    return datetime.fromtimestamp(min(max(seconds, _FIRST_SECOND), _LAST_SECOND), UTC).isoformat(" ", "minutes")[:16]


def by_time(data: QueryBuilder, table: str, found: str) -> ByTime:
    """The differences in at most `FINE_PERIODS` periods; `found` is SQL with columns at, gone, came and changed.

    A changed row counts in the period of its published time.
    """
    epoch = "CAST(arrow_cast(at, 'Timestamp(Second, None)') AS BIGINT)"
    seconds = f"SELECT {epoch} AS s, gone, came, changed FROM ({found}) d"
    ends = one(data, f"SELECT min(s) AS a, max(s) AS b FROM ({seconds}) x WHERE s IS NOT NULL", table)
    if ends["a"] is None:
        return ByTime()
    width = _width(ends["b"] - ends["a"], _FINE, FINE_PERIODS)
    period = f"s - ((s % {width}) + {width}) % {width}"  # % keeps the sign, and times may lie before 1970
    rows = rows_of(
        data,
        f"SELECT {period} AS p, sum(gone) AS gone, sum(came) AS came, sum(changed) AS changed "
        f"FROM ({seconds}) x WHERE s IS NOT NULL GROUP BY {period} ORDER BY p",
        table,
    )
    return ByTime(width, [(int(r["p"]), int(r["gone"]), int(r["came"]), int(r["changed"])) for r in rows])


def by_key(
    data: QueryBuilder, table: str, found: str, names: Sequence[str], keys: Sequence[str], times: Sequence[str]
) -> ByKey:
    """The differences by the part of the key that is no time, by the whole key if all of it is. `found`: `matched`."""
    columns = [name for name in keys if name not in times] or list(keys)
    rest = [name for name in names if name not in keys]
    values = " + ".join(f"CASE WHEN {old(n)} IS DISTINCT FROM {new(n)} THEN 1 ELSE 0 END" for n in rest) or "0"
    parts = ", ".join(f'{quoted(k)} AS "__k{place}"' for place, k in enumerate(columns))
    named = ", ".join(f'"__k{place}"' for place in range(len(columns)))
    grouped = (
        f'SELECT {named}, sum("__gone") AS gone, sum("__came") AS came, sum("__changed") AS changed, '
        f'sum("__values") AS "__values", count(*) AS "__rows" FROM (SELECT {parts}, "__gone", "__came", "__changed", '
        f'CASE WHEN "__changed" = 1 THEN {values} ELSE {max(len(rest), 1)} END AS "__values" FROM ({found}) f) d '
        f"GROUP BY {named}"
    )
    groups = one(data, f"SELECT count(*) AS c FROM ({grouped}) g", table)["c"]
    rows = rows_of(data, f'{grouped} ORDER BY "__rows" DESC, "__values" DESC, {named} LIMIT {KEYS}', table)
    return ByKey(
        columns,
        groups,
        [
            (
                _text([r[f"__k{place}"] for place in range(len(columns))]),
                int(r["gone"]),
                int(r["came"]),
                int(r["changed"]),
                int(r["__values"]),
            )
            for r in rows
        ],
    )


def _text(parts: Sequence[object]) -> str:
    text = ", ".join(part.hex() if isinstance(part, bytes) else str(part) for part in parts)
    return text if len(text) <= KEY_LENGTH else text[: KEY_LENGTH - 3] + "..."


def _width(seconds: int, widths: Sequence[int], periods: int) -> int:
    """The length of a period in seconds: the shortest with which so many `periods` cover the time."""
    for width in widths:
        if seconds <= width * (periods - 1):
            return width
    return _DECADE * -(-seconds // (_DECADE * (periods - 1)))


def touched(data: QueryBuilder, table: str, keys: Sequence[str], ordered: Sequence[str]) -> Touched:
    """Where the rows of `DIFFERING` are; `ordered` are the columns whose ranges are noted."""
    named = ", ".join(quoted(key) for key in keys)
    noted: list[list[Any]] | None = None
    if keys:
        query = f'SELECT DISTINCT {named} FROM "{DIFFERING}" ORDER BY {named} LIMIT {TOUCHED_KEYS + 1}'
        noted = [[_in_json(row[key]) for key in keys] for row in rows_of(data, query, table)]
        if len(noted) > TOUCHED_KEYS or len(json.dumps(noted)) > _TOUCHED_LENGTH:
            noted = None
    ends = ", ".join(f'min({quoted(n)}) AS "a{at}", max({quoted(n)}) AS "b{at}"' for at, n in enumerate(ordered))
    row = one(data, f'SELECT {ends} FROM "{DIFFERING}"', table) if ordered else {}
    ranges = {name: (_in_json(row[f"a{at}"]), _in_json(row[f"b{at}"])) for at, name in enumerate(ordered)}
    return Touched(
        tuple(keys), noted, {n: ends for n, ends in ranges.items() if len(json.dumps(ends)) <= _RANGE_LENGTH}
    )


def _in_json(value: Any) -> Any:
    if isinstance(value, datetime):
        return (value if value.tzinfo is None else value.astimezone(UTC)).isoformat()
    if isinstance(value, date):
        return value.isoformat()
    if isinstance(value, bytes):
        return value.hex()
    return value if value is None or isinstance(value, (bool, int, str)) else str(value)


def dated_by_key(found: str, keys: Sequence[str], when: str) -> str:
    at = quoted(when) if when in keys else f"coalesce({old(when)}, {new(when)})"
    return f'SELECT {at} AS at, "__gone" AS gone, "__came" AS came, "__changed" AS changed FROM ({found}) f'


def dated_by_row(when: str) -> str:
    return (
        f'SELECT {quoted(when)} AS at, CASE WHEN "__net" < 0 THEN -"__net" ELSE 0 END AS gone, '
        f'CASE WHEN "__net" > 0 THEN "__net" ELSE 0 END AS came, 0 AS changed FROM "{DIFFERING}"'
    )


@dataclass(frozen=True)
class Difference:
    """The difference of a rebuilt table from the published one. `totals` by numeric column: (published, rebuilt).

    `keyed` is True if the table has keys; only then the differences are known by key. The sums are made over the rows
    `read` (published, rebuilt) of files that only one of the tables has; None: of all files. `unknown` is the reason
    why the tables could not be compared; then all numbers are zero. `touched` is None if nothing differs.
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
    keyed: bool = False
    timeline: ByTime = NO_TIMES
    by_key: ByKey = NO_KEYS
    read: tuple[int, int] | None = None
    unknown: str = ""
    touched: Touched | None = None

    @classmethod
    def decode(cls, value: Mapping[str, Any]) -> Difference:
        """The difference from the fields in a journal; journals of earlier versions lack some."""
        return msgspec.convert(value, cls)

    @property
    def by_time(self) -> list[tuple[str, int, int, int]]:
        """By start of a period, as text, the numbers of rows that vanish, appear and change, as a text lists them."""
        return self.timeline.rough()

    @property
    def counts(self) -> RowCounts:
        return RowCounts.of(self.only_old, self.only_new, self.changed, keyed=self.keyed)

    @property
    def figures(self) -> dict[str, int]:
        """The numbers of rows by their names, in the order in which they are shown."""
        return {"published_rows": self.old_rows, "rebuilt_rows": self.new_rows, **self.counts._asdict()}

    def read_words(self) -> str:
        """The rows over which the sums are made, in words."""
        before, after = self.read or (self.old_rows, self.new_rows)
        return f"{before:,} published and {after:,} rebuilt rows that were compared"

    @property
    def share(self) -> float:
        """Rows that change, vanish or appear, as a share of the published rows."""
        return (self.only_old + self.only_new + self.changed) / max(self.old_rows, 1)


def for_journal(differences: Sequence[Difference]) -> list[dict[str, Any]]:
    """Differences as a journal stores them: without the sample, whose values may have any type."""
    return [{**asdict(replace(each, sample=())), "by_time": each.by_time} for each in differences]


def compared_tables(stream: Stream) -> list[DeclaredTable]:
    """The tables with rows of their own; the others follow from these, and depend on the batches that noted them."""
    return [declared for declared, role in all_tables(stream) if role not in LATE]


def compare_stored(
    settings: Settings,
    folder: Location,
    declared: DeclaredTable,
    stream: str,
    published: StoredTable,
    rebuilt: StoredTable,
) -> Difference:
    """The difference of two tables in a store, read from the pieces that only one of them has.

    A piece of both has the same rows on both sides, so they cancel out as multisets; and in a table with keys, a key of
    a shared piece is in no other piece of either side. `folder` is for tables of those pieces; it is gone afterwards.
    """
    here, there = published.content(), rebuilt.content()
    remove_tree(folder)
    try:
        differing = [
            copied_table(settings, folder / side, declared, stream, content)
            for side, content in (("published", here.without(there)), ("rebuilt", there.without(here)))
        ]
        before, after = (table.readable() for table in differing)
        with local_scratch(folder) as scratch:
            difference = compare(declared.name, before, after, declared.keys, scratch / "rows")
            rows = (row_count(table.readable(), declared.name, scratch) for table in (published, rebuilt))
            return replace(
                difference, read=(difference.old_rows, difference.new_rows), old_rows=next(rows), new_rows=next(rows)
            )
    finally:
        remove_tree(folder)


def not_compared(table: str, why: str) -> Difference:
    return Difference(table, 0, 0, 0, 0, 0, {}, (), unknown=why)


def row_count(table: DeltaTable, name: str, spill: Path) -> int:
    """The number of a table's rows, mostly from its log alone."""
    return int(one(opened({"t": table}, spill), 'SELECT count(*) AS n FROM "t"', name)["n"])


def compare(table: str, published: DeltaTable, rebuilt: DeltaTable, keys: Sequence[str], folder: Path) -> Difference:
    """The difference of two tables with the same name; columns that only one of them has are left out.

    The position that Recourse adds is left out too: rows of an earlier version have none. The rows that differ are
    found once, in one pass over both tables as multisets, and written below `folder`, where the query spills too; the
    rest is made of them. The folder is gone afterwards. Raises QueryFailed if memory and disk are not enough.
    """
    try:
        return _compare(table, published, rebuilt, keys, folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _compare(table: str, published: DeltaTable, rebuilt: DeltaTable, keys: Sequence[str], folder: Path) -> Difference:
    shared = {f["name"] for f in _fields(published)}
    columns = [f for f in _fields(rebuilt) if f["name"] in shared and not _is_position(f)]
    names = [f["name"] for f in columns]
    data = opened({"old": published, "new": rebuilt}, folder / "_spill")
    counted = one(data, 'SELECT (SELECT count(*) FROM "old") AS o, (SELECT count(*) FROM "new") AS n', table)
    numbers = {str(f["name"]): str(f["type"]) for f in columns if _is_number(f["type"]) and f["name"] not in keys}
    totals = _totals(data, table, numbers)
    _find(data, table, names, folder / "_differing")
    rows = matched(names, [f["name"] for f in columns if isinstance(f["type"], dict)], keys) if keys else ""
    gone, came, changed, sample = (
        _by_key(data, table, rows, names, keys, list(numbers)) if keys else _by_row(data, table, names, list(numbers))
    )
    difference = Difference(table, counted["o"], counted["n"], gone, came, changed, totals, sample, keyed=bool(keys))
    if not (gone or came or changed):
        return difference
    times = [str(f["name"]) for f in columns if str(f["type"]) in _TIMES]
    plain = {str(f["name"]) for f in columns if isinstance(f["type"], str) and f["type"] not in _WITHOUT_ORDER}
    ordered = [name for name in dict.fromkeys([*keys, *times]) if name in plain]
    difference = replace(difference, touched=touched(data, table, keys, ordered))
    if keys:
        difference = replace(difference, by_key=by_key(data, table, rows, names, keys, times))
    if not times:
        return difference
    timeline = by_time(data, table, dated_by_key(rows, keys, times[0]) if keys else dated_by_row(times[0]))
    return replace(difference, time_column=times[0], timeline=timeline)


def _find(data: QueryBuilder, table: str, names: Sequence[str], path: Path) -> None:
    """Write the rows whose counts differ to a table of their own, and add it to the session."""
    try:
        write_deltalake(path, data.execute(net(names)), mode="overwrite", schema_mode="overwrite")
    except Exception as error:  # errors while a query runs, deltalake raises as a plain Exception
        raise failed(error, table) from error
    data.register(DIFFERING, DeltaTable(path))


def _is_number(kind: object) -> bool:
    return isinstance(kind, str) and (kind in _NUMBERS or kind.startswith("decimal("))


def _totals(data: QueryBuilder, table: str, numbers: Mapping[str, str]) -> dict[str, tuple[Any, Any]]:
    """The sums of columns in both tables: exact but for floating point, wider than the column; decimals as text."""
    if not numbers:
        return {}
    sums = ", ".join(f"sum({_wide(name, kind)}) AS {quoted(name)}" for name, kind in numbers.items())
    before, after = (one(data, f'SELECT {sums} FROM "{side}"', table) for side in ("old", "new"))
    return {name: (_plain(before[name], kind), _plain(after[name], kind)) for name, kind in numbers.items()}


def _wide(name: str, kind: str) -> str:
    if kind in ("float", "double"):
        return quoted(name)
    scale = kind.rstrip(")").rpartition(",")[2].strip() if kind.startswith("decimal(") else "0"
    return f"arrow_cast({quoted(name)}, 'Decimal256(76, {scale})')"


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
    data: QueryBuilder, table: str, found: str, names: Sequence[str], keys: Sequence[str], numbers: Sequence[str]
) -> tuple[int, int, int, list[dict[str, Any]]]:
    kinds = ", ".join(f'coalesce(sum("__{kind}"), 0) AS {kind}' for kind in ("gone", "came", "changed"))
    counts = one(data, f"SELECT {kinds} FROM ({found}) f", table)
    shown = ", ".join(
        [quoted(k) for k in keys]
        + [
            f"{old(n)} AS {quoted(n + ' published')}, {new(n)} AS {quoted(n + ' rebuilt')}"
            for n in names
            if n not in keys
        ]
    )
    sizes = {name: f"abs(coalesce({_finite(new(name))}, 0) - coalesce({_finite(old(name))}, 0))" for name in numbers}
    order = ", ".join(quoted(k) for k in keys)
    score = _score(data, table, sizes, f"FROM ({found}) f")
    rows = rows_of(
        data,
        f'SELECT {shown}, {score} AS "__score" FROM ({found}) f ORDER BY "__score" DESC, {order} LIMIT {_SAMPLE}',
        table,
    )
    for row in rows:
        row.pop("__score")
    return int(counts["gone"]), int(counts["came"]), int(counts["changed"]), rows


def _by_row(
    data: QueryBuilder, table: str, names: Sequence[str], numbers: Sequence[str]
) -> tuple[int, int, int, list[dict[str, Any]]]:
    columns = ", ".join(quoted(n) for n in names)
    counts = one(
        data,
        'SELECT coalesce(-sum("__net") FILTER (WHERE "__net" < 0), 0) AS gone, '
        f'coalesce(sum("__net") FILTER (WHERE "__net" > 0), 0) AS came FROM "{DIFFERING}"',
        table,
    )
    sizes = {name: f"abs({_finite(quoted(name))})" for name in numbers}
    score = _score(data, table, sizes, f'FROM "{DIFFERING}"')
    rows = rows_of(data, f'SELECT * FROM "{DIFFERING}" ORDER BY {score} DESC, {columns} LIMIT {_SAMPLE}', table)
    shown = [{("rebuilt" if r["__net"] > 0 else "published"): {n: r[n] for n in names}} for r in rows]
    return int(counts["gone"]), int(counts["came"]), 0, shown


def _fields(table: DeltaTable) -> list[dict[str, Any]]:
    return list(json.loads(table.schema().to_json())["fields"])


def _is_position(field: Mapping[str, Any]) -> bool:
    return is_position(StructField.fromJson(dict(field)))
