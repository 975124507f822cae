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

from streaming_jobs.declare.rules import NO_RULES, RowRules

if TYPE_CHECKING:
    from streaming_jobs.sinks.delta.sink import DeltaSink


@dataclass(frozen=True)
class TableRules:
    """The rules of a table, and the open quarantine for the rows that they set aside; None if no rule does."""

    rules: RowRules = NO_RULES
    quarantine: DeltaSink | None = None


NO_TABLE_RULES = TableRules()
