"""The SQL of all parts of the audit: two tables joined by key, or counted as multisets of rows. DataFusion runs it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pyarrow as pa
from deltalake import DeltaTable, QueryBuilder

from reprocessing.planning.conditions import quoted
from streaming_jobs.errors import UsageError


def joined(names: Sequence[str], keys: Sequence[str]) -> tuple[str, str, str]:
    """SQL for a join of both tables by their keys: its condition, the first key, and the test that two rows differ."""
    on = " AND ".join(f"o.{quoted(k)} = n.{quoted(k)}" for k in keys)
    rest = [n for n in names if n not in keys]
    return (
        on,
        quoted(keys[0]),
        " OR ".join(f"(o.{quoted(n)} IS DISTINCT FROM n.{quoted(n)})" for n in rest) or "FALSE",
    )


def net(names: Sequence[str]) -> str:
    """SQL for the rows whose counts differ, with the rebuilt table's count less the published one's."""
    columns = ", ".join(quoted(n) for n in names)
    return (
        f'SELECT {columns}, sum("__w") AS "__net" FROM (SELECT {columns}, 1 AS "__w" FROM "new" UNION ALL '
        f'SELECT {columns}, -1 AS "__w" FROM "old") u GROUP BY {columns} HAVING sum("__w") <> 0'
    )


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


def opened(tables: Mapping[str, DeltaTable]) -> QueryBuilder:
    """Tables by the names that queries have for them."""
    data = QueryBuilder()
    for name, table in tables.items():
        data = data.register(name, table)
    return data


def one(data: QueryBuilder, sql: str, table: str) -> dict[str, Any]:
    """The first row of a query."""
    return rows_of(data, sql, table)[0]


def rows_of(data: QueryBuilder, sql: str, table: str) -> list[dict[str, Any]]:
    """The rows of a query; raises UsageError if it fails, which names the table."""
    try:
        return list(pa.table(data.execute(sql).read_all()).to_pylist())
    except Exception as error:  # errors while a query runs, deltalake raises as a plain Exception
        raise UsageError(
            f"the query on table {table} failed: {str(error).splitlines()[-1][:300]}",
            "write a SQL condition on the table's columns",
        ) from error
