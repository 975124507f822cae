"""The declaration of a table of a PostgreSQL database as a sink. `sinks/postgres` writes it.

@stream(source=ORDERS, sink=PostgresTable("orders", keys=["id"], order_by=["changed_at"]))
def orders(orders: DataFrame) -> DataFrame: ...
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from streaming_jobs.declare.names import checked_name, checked_names, checked_schema
from streaming_jobs.declare.table import DELETES, Emit, Mode, check_options
from streaming_jobs.errors import UsageError

if TYPE_CHECKING:
    from pyspark.sql.types import StructType

POSTGRES_SINK = "postgres:"
"""Begins the name of such a sink in ledger entries, so that it may share its name with a table or a topic."""
PUT_RIGHT = (
    "declare a new stream with a new table, run it from the topic's beginning, and switch the readers over: "
    "docs/postgres_sink.md, 'Put a table right'"
)
"""What stands in for a recovery, which rebuilds no table of PostgreSQL."""
LEDGER_TABLE = "recourse_ledger"
_LONGEST = 63
"""Bytes of a name in PostgreSQL, which cuts longer ones."""


@dataclass(frozen=True)
class PostgresTable:
    """A table of the database of the setting `postgres.url` as a sink: append, or with `keys` upsert.

    The options mean what they mean for a `DeltaTable`. The first start makes the table, unless it exists: then it has
    the columns of the output, with their types, and an upsert a unique index on just the keys. With `order_by` and
    `delete_when` the table `<name>_deletes` beside it remembers deletes.
    """

    name: str
    schema: StructType | None = None
    keys: Sequence[str] = ()
    order_by: Sequence[str] = ()
    delete_when: str | None = None
    deletes_kept: str = "7 days"
    description: str = ""
    owners: Sequence[str] = ()
    emit: Emit | None = None

    def __post_init__(self) -> None:
        checked_name("table", self.name)
        if self.name == LEDGER_TABLE:
            raise UsageError(f"the table name {self.name} is taken by Recourse itself", "rename the table")
        object.__setattr__(self, "schema", checked_schema(f"table {self.name}", self.schema))
        for option in ("keys", "order_by", "owners"):
            object.__setattr__(self, option, checked_names(f"table {self.name}", option, getattr(self, option)))
        check_options(self)
        if self.schema is not None:
            check_columns(self.name, self.schema)

    @property
    def ledger_name(self) -> str:
        return f"{POSTGRES_SINK}{self.name}"

    @property
    def mode(self) -> Mode:
        """`upsert` when the table has keys."""
        return "upsert" if self.keys else "append"

    @property
    def partition_by(self) -> Sequence[str]:
        """None: whether the database partitions the table is its own affair."""
        return ()

    @property
    def fresh_within(self) -> str | None:
        """None: the freshness objective is one of Delta tables."""
        return None

    @property
    def deletes(self) -> PostgresTable | None:
        """The table that remembers this one's deletes, if `order_by` and `delete_when` are set."""
        if not (self.order_by and self.delete_when):
            return None
        return PostgresTable(f"{self.name}{DELETES}", keys=self.keys, order_by=self.order_by)

    @property
    def table_names(self) -> tuple[str, ...]:
        """The tables of the database that belong to the sink."""
        return (self.name, *([self.deletes.name] if self.deletes is not None else []))


# The types of a stream's columns, and the types that a column of the table may have for them, as `format_type` has
# them. The first is that of a table which Recourse makes.

TYPES: Mapping[str, Sequence[str]] = {
    "boolean": ("boolean",),
    "byte": ("smallint", "integer", "bigint", "numeric"),
    "short": ("smallint", "integer", "bigint", "numeric"),
    "integer": ("integer", "bigint", "numeric"),
    "long": ("bigint", "numeric"),
    "float": ("real", "double precision"),
    "double": ("double precision",),
    "string": ("text", "character varying"),
    "binary": ("bytea",),
    "date": ("date",),
    "timestamp": ("timestamp with time zone",),
    "timestamp_ntz": ("timestamp without time zone",),
}
_NESTED = ("array", "map", "struct", "variant")


def column_types(kind: object) -> Sequence[str]:
    """The types that a column of the table may have for a type of Spark; empty if there is none."""
    name = kind.typeName()  # type: ignore[attr-defined]
    if name == "decimal":
        return (f"numeric({kind.precision},{kind.scale})", "numeric")  # type: ignore[attr-defined]
    return TYPES.get(name, ())


def check_columns(table: str, schema: StructType) -> None:
    """Raise UsageError for a column that the database cannot hold under its name, or with its type."""
    for field in schema.fields:
        if not field.name or "\0" in field.name or len(field.name.encode()) > _LONGEST:
            raise UsageError(
                f"table {table}: PostgreSQL takes no column named {field.name!r}",
                f"rename it: {_LONGEST} bytes at most",
            )
        if not column_types(field.dataType):
            kind = field.dataType.typeName()
            raise UsageError(
                f"table {table}: column {field.name} has the type {kind}, which is not written to PostgreSQL",
                f"write it as text: to_json({field.name})" if kind in _NESTED else "cast it to another type",
            )


def checked_postgres_tables(stream: str, tables: Mapping[str, PostgresTable], rules: Iterable[str]) -> None:
    """Raise UsageError for a table that is written twice, or that row rules are declared for."""
    names = [name for table in tables.values() for name in table.table_names]
    if len(set(names)) < len(names):
        raise UsageError(f"stream {stream} names a table of PostgreSQL twice: {names}", "rename one")
    for name in rules:
        if name in tables:
            raise UsageError(
                f"stream {stream} has row rules of the PostgreSQL table {tables[name].name}; they are for Delta tables",
                "filter in the function, or write a Delta table too and give it the rules",
            )
