"""The statements by which a batch's rows get into their table.

An append is one COPY. Of an upsert, the events of the batch, one for each key (`sinks/delta/upsert_order.py`), are
copied into a temporary table; then statements over whole tables let the greater event of each key win. The order is
that of `EventOrder`: nulls are lowest, text compares by bytes; PostgreSQL itself has NaN above all numbers, and -0.0
equal to 0.0.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.csv as pa_csv
from psycopg import sql

from streaming_jobs.declare.columns import DELETED_AT_COLUMN, POSITION_COLUMN
from streaming_jobs.declare.postgres_table import PostgresTable
from streaming_jobs.sinks.delta.upsert_order import DELETE_COLUMN, FLAGS, RESET_COLUMN, EventOrder
from streaming_jobs.sinks.postgres.database import Connection, Database, names
from streaming_jobs.text.durations import parse_duration

if TYPE_CHECKING:
    from pyspark.sql.types import StructType

_EVENTS = sql.Identifier("pg_temp", "recourse_events")
_BLOCK = 10_000


@dataclass(frozen=True)
class TableWriter:
    """Writes batches of one table; `schema` are the columns that the stream writes, in the order of its rows."""

    database: Database
    declared: PostgresTable
    schema: StructType
    order: EventOrder

    def append(self, connection: Connection, rows: pa.Table) -> None:
        self._copy(connection, self._table, self._columns, rows)

    def upsert(self, connection: Connection, events: pa.Table) -> None:
        """Let events win that are not older than the table's row, and the remembered delete, of their key."""
        self._copy_events(connection, events)
        if self.declared.deletes is not None:
            self._remember(connection)
        gone = sql.SQL("e.{reset} OR (e.{delete} AND {wins})").format(
            reset=_quoted(RESET_COLUMN), delete=_quoted(DELETE_COLUMN), wins=self._wins("e", "t")
        )
        self._run(connection, "DELETE FROM {table} AS t USING {events} AS e WHERE {same} AND ({gone})", gone=gone)
        others = [name for name in self._columns if name not in self.declared.keys]
        update: sql.Composable = sql.SQL("DO NOTHING")
        if others:
            changes = [sql.SQL("{0} = excluded.{0}").format(sql.Identifier(name)) for name in others]
            update = sql.SQL("DO UPDATE SET {} WHERE {}").format(
                sql.SQL(", ").join(changes), self._wins("excluded", "t")
            )
        self._run(
            connection,
            "INSERT INTO {table} AS t ({columns}) SELECT {columns} FROM {events} AS e WHERE NOT e.{delete} "
            "ON CONFLICT ({keys}) {update}",
            update=update,
        )

    def _remember(self, connection: Connection) -> None:
        """Drop events that are older than a remembered delete, and change what is remembered."""
        not_null = [sql.SQL("e.{} IS NOT NULL").format(_quoted(column)) for column in self.order.columns]
        ordered = sql.SQL("(e.{} AND ({}))").format(_quoted(DELETE_COLUMN), sql.SQL(" OR ").join(not_null))
        wins = self._wins("e", "d")
        self._run(
            connection,
            "DELETE FROM {events} AS e USING {deletes} AS d WHERE {same_deleted} AND NOT e.{reset} AND NOT e.{delete} "
            "AND NOT {wins}",
            wins=wins,
        )
        self._run(
            connection,
            "DELETE FROM {deletes} AS d USING {events} AS e WHERE {same_deleted} AND (e.{reset} OR ({ordered} AND "
            "{wins}))",
            wins=wins,
            ordered=ordered,
        )
        kept = dict.fromkeys([*self.declared.keys, *self.order.all])
        self._run(
            connection,
            "INSERT INTO {deletes} ({kept}, {at}) SELECT {kept}, now() FROM {events} AS e WHERE {ordered} "
            "ON CONFLICT ({keys}) DO NOTHING",
            kept=names(list(kept)),
            at=_quoted(DELETED_AT_COLUMN),
            ordered=ordered,
        )
        self._run(
            connection,
            "DELETE FROM {deletes} AS d WHERE d.{at} < now() - make_interval(secs => {age})",
            at=_quoted(DELETED_AT_COLUMN),
            age=sql.Literal(parse_duration(self.declared.deletes_kept).total_seconds()),
        )

    def _copy_events(self, connection: Connection, events: pa.Table) -> None:
        """The events in a temporary table that ends with the transaction."""
        for flag in FLAGS:
            if flag not in events.column_names:
                events = events.append_column(flag, pa.array([False] * events.num_rows, pa.bool_()))
        self._run(
            connection,
            "CREATE TEMPORARY TABLE recourse_events ON COMMIT DROP AS "
            "SELECT {columns}, false AS {delete}, false AS {reset} FROM {table} WITH NO DATA",
        )
        columns = [*self._columns, *FLAGS]
        self._copy(connection, _EVENTS, columns, events.select(columns))
        connection.execute(sql.SQL("ANALYZE {}").format(_EVENTS))

    def _copy(self, connection: Connection, table: sql.Composable, columns: Sequence[str], rows: pa.Table) -> None:
        statement = sql.SQL("COPY {} ({}) FROM STDIN (FORMAT csv)").format(table, names(columns))
        with connection.cursor() as cursor, cursor.copy(statement) as copy:
            for block in csv_blocks(rows.select(columns)):
                copy.write(block)

    def _run(self, connection: Connection, statement: str, **parts: sql.Composable) -> None:
        deletes = self.declared.deletes
        known: dict[str, sql.Composable] = {
            "table": self._table,
            "events": _EVENTS,
            "columns": names(self._columns),
            "keys": names(self.declared.keys),
            "same": self._same("t"),
            "same_deleted": self._same("d"),
            "delete": _quoted(DELETE_COLUMN),
            "reset": _quoted(RESET_COLUMN),
        }
        if deletes is not None:
            known["deletes"] = self.database.name(deletes.name)
        connection.execute(sql.SQL(statement).format(**known, **parts))

    def _wins(self, event: str, other: str) -> sql.Composable:
        return at_least(self.order, self.schema, event, other)

    def _same(self, other: str) -> sql.Composable:
        pairs = [sql.SQL("e.{0} = {1}.{0}").format(_quoted(key), _quoted(other)) for key in self.declared.keys]
        return sql.SQL(" AND ").join(pairs)

    @property
    def _table(self) -> sql.Identifier:
        return self.database.name(self.declared.name)

    @property
    def _columns(self) -> list[str]:
        return list(self.schema.fieldNames())


def at_least(order: EventOrder, schema: StructType, event: str, other: str) -> sql.Composable:
    """The condition, never null, that an event is not older than a row; true if the table has no order."""
    texts = {field.name for field in schema.fields if field.dataType.typeName() == "string"}
    condition: sql.Composable = sql.SQL("true")
    for column in reversed(order.all):
        by_bytes = sql.SQL(' COLLATE "C"' if column in texts and column != POSITION_COLUMN else "")
        e, o = (sql.SQL("{}.{}{}").format(_quoted(side), _quoted(column), by_bytes) for side in (event, other))
        condition = sql.SQL(
            "(({e} IS NOT NULL AND ({o} IS NULL OR {e} > {o})) OR ({e} IS NOT DISTINCT FROM {o} AND {then}))"
        ).format(e=e, o=o, then=condition)
    return condition


def csv_blocks(rows: pa.Table) -> Iterator[memoryview]:
    """The rows as COPY reads them in the format csv: a null is nothing, an empty text two quotes."""
    for batch in _with_hex(rows).to_batches(max_chunksize=_BLOCK):
        out = pa.BufferOutputStream()
        pa_csv.write_csv(batch, out, pa_csv.WriteOptions(include_header=False, quoting_style="all_valid"))
        yield memoryview(out.getvalue())


def _with_hex(rows: pa.Table) -> pa.Table:
    for index, column in enumerate(rows.schema):
        if pa.types.is_binary(column.type) or pa.types.is_large_binary(column.type):
            texts = [None if value is None else f"\\x{value.hex()}" for value in rows.column(index).to_pylist()]
            rows = rows.set_column(index, column.name, pa.array(texts, pa.string()))
    return rows


def _quoted(name: str) -> sql.Identifier:
    return sql.Identifier(name)
