"""A table whose slices can be replaced, as their rebuild and the driver see it; not every store has such tables.

`sinks/delta/slice_staging.py` is that of Delta tables. A rebuilt slice is staged beside the table, invisibly; the
change that it makes is a value (JSON), which the process that may write the table commits later.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from streaming_jobs.declare.rules import RowRules
from streaming_jobs.declare.slices import SliceRange
from streaming_jobs.errors import TransientError, UsageError
from streaming_jobs.ledger.entry import LedgerEntry
from streaming_jobs.sinks.stored import StoredTable
from streaming_jobs.storage.locations import Location

if TYPE_CHECKING:
    import pyarrow as pa
    from deltalake import DeltaTable
    from pyspark.sql import DataFrame


class SliceOutdated(TransientError):
    """The table changed while the slice was being rebuilt; rebuild it on the newest version."""


@dataclass(frozen=True)
class Rebuilt:
    """Rows that were computed for a slice: the numbers of staged, removed and refused rows."""

    rows: int
    taken_out: int
    refused: int


class StagedSlice(Protocol):
    """The files of one rebuilt slice, beside the table."""

    folder: Location
    """Where they lie; it goes with `remove`."""

    def split(self, chosen: SliceRange) -> int:
        """Stage the rows of the slice as they are, and the other rows of their files; returns the slice's rows."""

    def write(self, rows: DataFrame, chosen: SliceRange, topics: Sequence[str], rules: RowRules) -> Rebuilt:
        """Compute rows as the function returns them, and stage the slice's rows. Raises RuleBroken."""

    def put(self, rows: pa.Table) -> None:
        """Stage rows that are in the table's columns as those of the slice."""

    def before(self) -> DeltaTable:
        """The rows of the slice as they are."""

    def held(self, most: int) -> pa.Table:
        """The rows of the slice as they are, in memory; raises PreflightRefused if there are more than so many."""

    def after(self) -> DeltaTable:
        """The rebuilt rows."""

    def quarantined(self, most: int) -> pa.Table | None:
        """The computed rows of the slice that rules set aside, in memory; None without a rule that sets rows aside.

        Raises PreflightRefused if there are more than so many.
        """

    def change(self) -> Mapping[str, Any]:
        """The change that the slice makes to the table, as JSON."""

    def remove(self) -> None:
        """Remove the staged files."""


class SlicedTable(Protocol):
    def stage(self, name: str) -> StagedSlice:
        """A new folder for the slice of that name, relative to the version that the table is open at."""

    def remove_staged(self, needed: Collection[str]) -> None:
        """Remove the staged files of all slices but the needed ones."""

    def check(self, change: Mapping[str, Any], entry: LedgerEntry) -> None:
        """Raise SliceOutdated for a change that `replace` would not commit now."""

    def replace(self, change: Mapping[str, Any], entry: LedgerEntry, at: Callable[[str], None]) -> int:
        """Commit a change once; returns the table's version. Raises SliceOutdated, with nothing changed."""


def sliced(table: StoredTable) -> SlicedTable:
    """The table as one whose slices can be replaced; raises UsageError if its store has none."""
    made: Callable[[], SlicedTable] | None = getattr(table, "sliced", None)
    if made is None:
        raise UsageError(f"slices of table {table.name} cannot be rebuilt: its store offers none")
    return made()
