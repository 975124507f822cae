"""The Delta table of rows that row rules have set aside: `<table>_quarantine`, in the same ledger as the table.

A row in it has the table's columns, and these:

| column         | what                                                                          |
|----------------|-------------------------------------------------------------------------------|
| `_rules`       | the names of the rules that it breaks                                         |
| `_reason`      | the same in words                                                             |
| `_topic`, `_partition`, `_offset` | its record, if the stream's output has the column `_source`    |
| `_generation`, `_batch` | the batch that made it                                               |
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import pyarrow as pa
from pyspark.sql import functions as F

from streaming_jobs.declare.rules import NO_RULES, RowRules
from streaming_jobs.sinks.delta.fitting import PLACE, as_returned, named
from streaming_jobs.sinks.delta.sink import DeltaSink
from streaming_jobs.sinks.row_rules import BROKEN_COLUMN, set_aside
from streaming_jobs.sinks.schemas import QUARANTINE_FIELDS, is_position
from streaming_jobs.stream import DeltaTable
from streaming_jobs.text.sql import literal

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pyspark.sql import Column, DataFrame

    from streaming_jobs.declare.table import DeclaredTable


@dataclass(frozen=True)
class Judge:
    """The rules of a table, and the sink of the rows that they set aside; None if no rule does."""

    rules: RowRules = NO_RULES
    quarantine: DeltaSink | None = None


NO_JUDGE = Judge()


def declared_quarantine(name: str, table: DeclaredTable, stream: str) -> DeltaTable:
    """The declaration of the quarantine of a stream's table."""
    return DeltaTable(
        name, description=f"Rows that stream {stream} did not write to {table.name}, and why", owners=table.owners
    )


def rows_aside(
    sink: DeltaSink, rows: pa.Table, rules: RowRules, batch: tuple[int, int], topics: Sequence[str]
) -> pa.Table:
    """Quarantined rows, which have the column `__broken`, in the quarantine's columns."""
    rows = named(as_returned(sink, rows), topics)
    place = [rows[name] if name in rows.column_names else None for name in PLACE]
    columns = [field.name for field in sink.schema.fields if not is_position(field)]
    return set_aside(rows.select([*columns, BROKEN_COLUMN]), rules, batch, place)


def frame_aside(
    sink: DeltaSink, rows: DataFrame, rules: RowRules, batch: tuple[int, int], topics: Sequence[str]
) -> DataFrame:
    """`rows_aside` of rows on the executors."""
    broken = [(1 << n, rule) for n, rule in enumerate(rules.rules) if rule.on_fail == "quarantine"]

    def each(texts: list[str]) -> Column:
        known = (
            f"CASE WHEN {BROKEN_COLUMN} & {bit} <> 0 THEN {literal(text, 'spark')} END"
            for (bit, _), text in zip(broken, texts, strict=True)
        )
        return F.expr(f"filter(array({', '.join(known)}), each -> each IS NOT NULL)")

    places = [F.col(c) if c in rows.columns else F.lit(None) for c in PLACE]
    if PLACE[0] not in rows.columns and PLACE[2] in rows.columns and len(topics) == 1:
        places[0] = F.when(F.col(PLACE[2]).isNotNull(), F.lit(topics[0]))
    own = [
        each([rule.name for _, rule in broken]),
        F.concat_ws("; ", each([rule.words for _, rule in broken])),
        *places,
        F.lit(batch[0]),
        F.lit(batch[1]),
    ]
    columns = [f"`{field.name}`" for field in sink.schema.fields if not is_position(field)]
    added = [value.cast(f.dataType).alias(f.name) for f, value in zip(QUARANTINE_FIELDS, own, strict=True)]
    return rows.select(*columns, *added)
