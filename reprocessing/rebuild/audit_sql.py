"""The SQL of all parts of the audit: rows of two tables counted as multisets, and those that differ matched by key."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from deltalake import QueryBuilder

from reprocessing.planning.conditions import quoted
from streaming_jobs.platform.table_rows import rows_of

DIFFERING = "differing"
"""The table of the rows whose counts differ: the columns, and `__net`."""


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
    """The first row of a query."""
    return rows_of(data, sql, table)[0]
