"""A table that takes part in redrives, as the process that commits them sees it; not every store has such tables.

Records that a stream has set aside (dead letters, quarantined rows) are sent through the code of today. Their rows are
added to the stream's tables, and what was set aside is taken out of its own table: each table takes each redrive once.
`sinks/delta/redriven.py` is such a table of Delta.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol

from streaming_jobs.errors import TransientError, UsageError
from streaming_jobs.ledger.entry import LedgerEntry
from streaming_jobs.sinks.stored import StoredTable

if TYPE_CHECKING:
    import pyarrow as pa

Place = tuple[str, int, int]
"""Topic, partition, offset."""
Kind = Literal["dead letters", "quarantine"]
Outcome = Literal["row", "no row", "redriven", "rebuilt", "dropped", "quarantined", "dead again"]
"""What became of a record that was set aside.

`redriven`: its rows do not name it, so that they are only counted. `rebuilt`: the windows that it belongs to were
rebuilt from their records, with this one among them; of a quarantined row: the rows of its slice were made anew.
"""
PLACE: Mapping[Kind, tuple[str, str, str]] = {
    "dead letters": ("topic", "partition", "offset"),
    "quarantine": ("_topic", "_partition", "_offset"),
}
"""The columns of a record's place in a table of what was set aside."""


class RedriveOutdated(TransientError):
    """What a redrive has taken up is no longer set aside, or its tables have changed; select it anew."""


@dataclass(frozen=True)
class RedrivenRow:
    """A quarantined row of a window, which names no record, and what became of it.

    `at` is its value of the table's column of slices, `reason` the rules that it broke.
    """

    at: str
    reason: str
    outcome: Outcome


@dataclass(frozen=True)
class RedrivenRecord:
    """A record that was set aside, and what became of it.

    `reason` is that of its dead letter, or the rules of its quarantined row. A dead letter that is dead again for
    another reason stays, with `reason_now` and `detail_now`.
    """

    topic: str
    partition: int
    offset: int
    reason: str
    outcome: Outcome
    reason_now: str = ""
    detail_now: str = ""

    @property
    def place(self) -> Place:
        return self.topic, self.partition, self.offset


class RedrivenTable(Protocol):
    def has(self, entry: LedgerEntry) -> bool:
        """True if it has the redrive. Raises Fenced, LeaseLost and ForeignWrite."""

    def check(self, kind: Kind, records: Sequence[RedrivenRecord]) -> None:
        """Raise RedriveOutdated unless each of the records is still set aside in it."""

    def check_rows(self, rows: pa.Table) -> None:
        """Raise RedriveOutdated for rows with columns that it lacks."""

    def add(self, rows: pa.Table, entry: LedgerEntry) -> int | None:
        """Add rows, or merge them by its order, once; returns its version, None if it has the redrive already."""

    def take_out(self, kind: Kind, records: Sequence[RedrivenRecord], entry: LedgerEntry) -> int | None:
        """Take records out, or give dead letters their new reason, once; returns its version as `add` does."""


def redriven(table: StoredTable) -> RedrivenTable:
    """The table as one that takes redrives; raises UsageError if its store has none."""
    made: Callable[[], RedrivenTable] | None = getattr(table, "redriven", None)
    if made is None:
        raise UsageError(f"table {table.name} takes no redrives: its store offers none")
    return made()
