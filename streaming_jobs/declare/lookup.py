"""The declaration of a Delta table that a stream looks up: its whole content, at one version per batch.

    @stream(source=PAYMENTS, lookups={"rates": Lookup("rates")}, sink=DeltaTable("converted"))
    def converted(payments: DataFrame, rates: DataFrame) -> DataFrame:
        return payments.join(rates, "currency", "left").withColumn("usd", F.col("amount") * F.col("rate"))

A source has records, which make batches; a lookup has none. Its version is chosen when a batch is planned, and recorded
with the batch. docs/lookup.md has the contract.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from streaming_jobs.declare.names import checked_name, checked_names, checked_schema
from streaming_jobs.errors import UsageError

if TYPE_CHECKING:
    from pyspark.sql.types import StructType


@dataclass(frozen=True)
class Lookup:
    """A Delta table below `tables`, or at `path`: a folder, or a URL of an object store (settings in `storage`).

    The function sees the columns of `schema`, all nullable; columns that the table does not have are null. `schema` may
    be left out if one of our streams writes the table with a declared schema. Rows may be added to the table, changed
    and deleted.
    """

    name: str
    schema: StructType | Mapping[str, Any] | None = None
    path: str | Path | None = None
    description: str = ""
    owners: Sequence[str] = ()

    def __post_init__(self) -> None:
        checked_name("table", self.name)
        object.__setattr__(self, "schema", checked_schema(f"table {self.name}", self.schema))
        object.__setattr__(self, "owners", checked_names(f"table {self.name}", "owners", self.owners))
        if self.path is not None:
            object.__setattr__(self, "path", str(self.path))

    @property
    def place(self) -> str:
        """Its path; its name, if it is below `tables`."""
        return self.name if self.path is None else str(self.path)

    @property
    def columns(self) -> StructType:
        """The declared columns; raises UsageError if neither the lookup nor the table's writer declares any."""
        if self.schema is None:
            raise UsageError(
                f"the columns of table {self.name} are not known: no stream here declares a schema for it",
                f'give the lookup its schema: Lookup("{self.name}", schema=...)',
            )
        return cast("StructType", self.schema)


def checked_lookups(stream: str, lookups: Mapping[str, Lookup], read: set[str], written: set[str]) -> None:
    """Raise UsageError for what is no lookup, and for a table that the stream also reads, writes or looks up twice."""
    for parameter, lookup in lookups.items():
        if not isinstance(lookup, Lookup):
            raise UsageError(
                f"stream {stream}: lookup {parameter} is {lookup!r}, not a Lookup",
                f'write lookups={{"{parameter}": Lookup("TABLE")}}',
            )
    names = [lookup.name for lookup in lookups.values()]
    if len(set(names)) < len(names):
        raise UsageError(f"stream {stream} looks up a table twice: {names}", "declare it once")
    ours = {lookup.name for lookup in lookups.values() if lookup.path is None}
    if own := sorted(ours & written):
        raise UsageError(
            f"stream {stream} looks up table {own[0]}, which it writes: a repeated batch would see its own rows",
            "keep what depends on earlier records as state: an aggregation, or a processor (docs/operators.md)",
        )
    if both := sorted(ours & read):
        raise UsageError(
            f"stream {stream} reads table {both[0]} as a source and looks it up",
            "make two streams of it, or join the source with a table that has what is looked up",
        )
