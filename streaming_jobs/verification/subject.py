"""What is judged: one stream's tables, the topics they are made from, and the outcome of each comparison."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple

if TYPE_CHECKING:
    from streaming_jobs.verification.table_rules import Rule

Outcome = Literal["ok", "wrong", "unproved", "not compared"]


class Comparison(NamedTuple):
    """What was compared of one table, and what came of it.

    `unproved`: it could have been compared if something that is gone were still there. `not compared`: nothing is
    there that it could be compared with, because none is declared or because it was made by other code.
    """

    table: str
    what: str
    verdict: Outcome
    text: str


@dataclass(frozen=True)
class Elsewhere:
    """A further table of a stream whose rows are records, with the columns that name their place in the topic."""

    table: str
    partition: str
    offset: str


@dataclass(frozen=True)
class Table:
    """One table of a stream: the keys of an upsert, and the name under which the primary's entries count its rows.

    A table that remembers deletes is not counted.
    """

    name: str
    counted: str
    keys: tuple[str, ...] = ()


@dataclass(frozen=True)
class Subject:
    """One stream: its primary table, the topic or topics it is made from, the rule for its rows, its other tables.

    `rule` and `secondary` are for the kill loop, which knows what its streams make of a record before they have run;
    `tables` are compared by what is declared of them and what the stream's own plans say.
    """

    stream: str
    table: str
    topic: str
    rule: Rule | None = None
    secondary: tuple[Elsewhere, ...] = ()
    others: tuple[str, ...] = ()
    tables: tuple[Table, ...] = ()

    @property
    def topics(self) -> tuple[str, ...]:
        """All topics."""
        return (self.topic, *self.others)

    @property
    def outputs(self) -> int:
        """How many tables take the stream's rows."""
        return sum(1 for table in self.tables if table.counted and table.name != self.dead_letters)

    @property
    def dead_letters(self) -> str:
        """The table of records that were refused."""
        return f"{self.stream}_dead_letters"

    @property
    def elsewhere(self) -> tuple[Elsewhere, ...]:
        """Where a record of the stream may have its row instead."""
        return (*self.secondary, Elsewhere(self.dead_letters, "partition", "offset"))
