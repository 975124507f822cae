"""What a rebuilt slice changes in the quarantine of its table. Read `settled`, then `staged_quarantine`.

A rebuild makes all rows of its slice anew. So the quarantine gets those rows of the slice that the rules of today set
aside, in the place of the rows that it had of the slice: no row is in the table and in the quarantine, none is in
neither. Rows of batches after the slice's base stay as they are.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from hashlib import blake2b
from typing import TYPE_CHECKING

from streaming_jobs.declare.slices import SliceRange
from streaming_jobs.errors import PreflightRefused
from streaming_jobs.ledger.entry import Txn
from streaming_jobs.sinks.redriven import Outcome, RedrivenRow
from streaming_jobs.sinks.sliced import StagedSlice, sliced
from streaming_jobs.sinks.stored import StoredTable

if TYPE_CHECKING:
    import pyarrow as pa

FIGURES = ("before", "after", "gone", "came")
"""Names of the numbers of a slice's rows: those before and after, and those that one of them alone has."""
MOST = 1_000_000
"""Quarantined rows of one slice, at most: they are compared in memory."""
_OF_THE_BATCH = {"_reason", "_generation", "_batch"}
"""Columns that do not tell rows apart: the batch that a row came in, and the words of its rules."""


@dataclass(frozen=True)
class SettledRows:
    """The rows that the quarantine has of a slice after its rebuild, and those that it had.

    `stays` says of each row that was there whether it is set aside today too; `came` counts those that were not there.
    """

    before: pa.Table
    after: pa.Table
    stays: tuple[bool, ...]
    came: int

    @property
    def gone(self) -> int:
        return len(self.stays) - sum(self.stays)

    @property
    def changes(self) -> bool:
        return bool(self.came or self.gone)

    @property
    def figures(self) -> dict[str, int]:
        """The numbers of rows by their names."""
        return dict(zip(FIGURES, (self.before.num_rows, self.after.num_rows, self.gone, self.came), strict=True))

    def outcomes(self, column: str) -> list[RedrivenRow]:
        """What became of each row that was there; `column` is that of the table's slices."""
        outcomes: tuple[Outcome, Outcome] = ("rebuilt", "quarantined")
        rules, values = self.before["_rules"].to_pylist(), self.before[column].to_pylist()
        found = [
            RedrivenRow(values[number].isoformat(), ", ".join(rules[number] or ()), outcomes[stays])
            for number, stays in enumerate(self.stays)
        ]
        return sorted(found, key=lambda each: (each.at, each.outcome))


def settled(there: pa.Table, today: pa.Table) -> SettledRows:
    """Both are in the columns of the quarantine; a row of today that was there before stays as it was.

    Rows are the same if their values, their rules and the place of their record are.
    """
    import pyarrow as pa

    waiting: dict[bytes, list[int]] = defaultdict(list)
    for number, key in enumerate(_keys(today)):
        waiting[key].append(number)
    stays = list[bool]()
    for key in _keys(there):
        stays.append(bool(waiting[key]))
        if waiting[key]:
            waiting[key].pop()
    came = sorted(number for numbers in waiting.values() for number in numbers)
    after = pa.concat_tables([there.filter(pa.array(stays, pa.bool_())), today.take(pa.array(came, pa.int64()))])
    return SettledRows(there, after, tuple(stays), len(came))


def _keys(table: pa.Table) -> Iterator[bytes]:
    for batch in table.drop_columns([name for name in table.column_names if name in _OF_THE_BATCH]).to_batches():
        yield from (blake2b(repr(row).encode(), digest_size=16).digest() for row in batch.to_pylist())


@dataclass(frozen=True)
class StagedQuarantine:
    """The quarantine's side of a rebuilt slice, staged beside it under a name."""

    table: str
    name: str
    rows: SettledRows
    staged: StagedSlice


def staged_quarantine(
    table: StoredTable, name: str, chosen: SliceRange, today: pa.Table, newest: Txn
) -> StagedQuarantine:
    """Stage, under that name, what the quarantine has of a slice afterwards.

    `today` are the rows that rules of today set aside of the records up to batch `newest`. Raises PreflightRefused for
    too many rows, and for rows that the quarantine cannot hold.
    """
    import pyarrow as pa
    import pyarrow.compute as pc

    staged = sliced(table).stage(name)
    try:
        staged.split(chosen)
        held = in_columns_of(table, table.name, staged.held(MOST))
        is_later = pa.array(_after(held, newest), pa.bool_())
        new = in_columns_of(table, table.name, of_batch(today, newest)) if today.num_rows else held.slice(0, 0)
        rows = settled(held.filter(pc.invert(is_later)), new)
        if rows.changes:
            table.check_removable()
            staged.put(pa.concat_tables([rows.after, held.filter(is_later)]))
    except BaseException:
        staged.remove()
        raise
    return StagedQuarantine(table.name, name, rows, staged)


def _after(held: pa.Table, newest: Txn) -> list[bool]:
    batches = zip(held["_generation"].to_pylist(), held["_batch"].to_pylist(), strict=True)
    return [batch > (newest.generation, newest.batch) for batch in batches]


def of_batch(rows: pa.Table, batch: Txn) -> pa.Table:
    """Quarantined rows of a run as those of a batch of the stream."""
    import pyarrow as pa

    for name, value in (("_generation", batch.generation), ("_batch", batch.batch)):
        at = rows.column_names.index(name)
        rows = rows.set_column(at, rows.schema.field(name), pa.array([value] * rows.num_rows, rows[name].type))
    return rows


def in_columns_of(table: StoredTable | None, name: str, rows: pa.Table) -> pa.Table:
    """Rows of a run in the columns of the table, as a batch would write them; raises PreflightRefused."""
    import pyarrow as pa
    from pyspark.sql.pandas.types import to_arrow_schema

    once = "start the stream once with the code of today, then run it again"
    if table is None:
        raise PreflightRefused(f"there is no table {name} yet", once)
    columns = to_arrow_schema(table.schema, timezone="UTC")
    if unknown := [column for column in rows.column_names if column not in columns.names]:
        raise PreflightRefused(f"table {name} has no column {', '.join(unknown)} yet", once)
    try:
        arrays = [
            rows[field.name].cast(field.type) if field.name in rows.column_names else pa.nulls(len(rows), field.type)
            for field in columns
        ]
    except pa.ArrowException as error:
        raise PreflightRefused(f"table {name} cannot hold the rows: {error}", "correct the function") from error
    if nulls := [f.name for f, each in zip(columns, arrays, strict=True) if each.null_count and not f.nullable]:
        raise PreflightRefused(f"table {name} takes no null in {', '.join(nulls)}", "correct the function")
    return pa.Table.from_arrays(arrays, names=columns.names)
