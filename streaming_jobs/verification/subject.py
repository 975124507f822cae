"""The subject of a verification: one stream's tables and topics, and the outcome of each comparison."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

QUARANTINED, DROPPED, LATE = "quarantined:", "dropped:", "late:"
"""Begin the names under which entries count the rows that row rules took out of a table, or its late records."""

ComparisonOutcome = Literal["ok", "wrong", "unproved", "not compared"]


class Comparison(NamedTuple):
    """One comparison of one table: its kind (`what`), its outcome, and the details in words.

    `unproved`: the evidence for the comparison existed and is gone. `not compared`: there is nothing to compare with,
    because none is declared or because other code made the rows.
    """

    table: str
    what: str
    verdict: ComparisonOutcome
    text: str


@dataclass(frozen=True)
class StreamTable:
    """One table of a stream: the keys of an upsert, and the name under which the primary's entries count its rows.

    A table that remembers deletes is not counted. `quarantine` has the rows that row rules took out of the table; it is
    empty for a table without one.
    """

    name: str
    counted: str
    keys: tuple[str, ...] = ()
    quarantine: str = ""

    @property
    def is_beside(self) -> bool:
        """True for a table of rows that were taken out of another one, or of records that came too late for it."""
        return self.counted.startswith((QUARANTINED, LATE))


@dataclass(frozen=True)
class Subject:
    """One stream: its primary table, the topic or topics it is made from, and all its tables.

    `tables` are compared by their declarations and by the recorded plans of the stream. A stream that `reads_void`
    reads void ranges like all other records: an archive.
    """

    stream: str
    table: str
    topic: str
    others: tuple[str, ...] = ()
    tables: tuple[StreamTable, ...] = ()
    reads_void: bool = False

    @property
    def topics(self) -> tuple[str, ...]:
        return (self.topic, *self.others)

    @property
    def outputs(self) -> int:
        """Number of tables for the stream's rows; dead letters and what is kept beside a table are none."""
        tables = (table for table in self.tables if table.counted and not table.is_beside)
        return sum(1 for table in tables if table.name != self.dead_letters)

    @property
    def dead_letters(self) -> str:
        return f"{self.stream}_dead_letters"
