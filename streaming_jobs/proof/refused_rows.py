"""The dead letters that say why a record has no row in a table: the record was refused, or the row made of it was.

A refused row's letter names its record where the output kept `_source`, or where the row itself has the record's place.
Older versions of the code noted no place for the rows of tables that are appended to.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from deltalake import DeltaTable

from streaming_jobs import table_rows
from streaming_jobs.proof.judged import Judged
from streaming_jobs.proof.letters import OF_ROWS
from streaming_jobs.proof.rules import Packed, packed, place_of

LETTERS = ("topic", "partition", "offset", "reason")
"""What is read of dead letters."""
_NOT_HELD = sorted(OF_ROWS - {"null_key"})
"""Reasons of rows that a table cannot hold; a row without its key is one of an upsert, where no record is missed."""


@dataclass(frozen=True)
class RowLetter:
    """A refused row: the place of its record where that is known, and the row's columns."""

    place: int | None
    columns: frozenset[str]


@dataclass(frozen=True)
class Letters:
    """`whole` are the places of refused records, `rows` the refused rows."""

    whole: Packed
    rows: tuple[RowLetter, ...]

    @classmethod
    def of(cls, judged: Judged, position: tuple[str, str] | None) -> Letters:
        """Those of a stream's topic at its position; `position` are the columns of a row that hold its record's place.

        Raises VersionGone.
        """
        name, topic = judged.subject.dead_letters, judged.subject.topic
        version = judged.version_of(name)
        if version is None:
            return cls(packed([], []), ())
        path = judged.tables / name
        rows = table_rows.rows(path, version, LETTERS)
        mine = pc.and_(pc.equal(rows["topic"], topic), pc.is_valid(rows["offset"]))
        whole = rows.filter(pc.and_(mine, pc.invert(pc.is_in(rows["reason"], pa.array(sorted(OF_ROWS))))))
        refused = [
            RowLetter(_place(row, value, topic, position), frozenset(value))
            for row in _refused(path, version)
            for value in (_value(row),)
        ]
        return cls(packed(whole["partition"], whole["offset"]), tuple(refused))

    @property
    def placed(self) -> Packed:
        """Places of all records that have no row, or one less."""
        rows = np.array([row.place for row in self.rows if row.place is not None], dtype=np.int64)
        return np.union1d(self.whole, rows)

    @property
    def unplaced(self) -> int:
        """Refused rows of which nothing says what record they come from."""
        return sum(1 for row in self.rows if row.place is None)

    def fitting(self, columns: frozenset[str]) -> int:
        """How many of the refused rows have only columns of a table."""
        return sum(1 for row in self.rows if row.columns <= columns)


def _refused(path: Any, version: int) -> list[dict[str, Any]]:
    found = table_rows.dataset(DeltaTable(path, version=version), path)
    columns = [name for name in (*LETTERS, "value") if name in found.schema.names]
    table = found.to_table(columns=columns, filter=pc.field("reason").isin(_NOT_HELD))
    return list(table.to_pylist())


def _value(row: Mapping[str, Any]) -> dict[str, Any]:
    """The refused row itself, which its letter has as JSON."""
    try:
        value = json.loads(row.get("value") or b"{}")
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}


def _place(
    row: Mapping[str, Any], value: Mapping[str, Any], topic: str, position: tuple[str, str] | None
) -> int | None:
    if row["offset"] is not None and row["topic"] == topic:
        return place_of(row["partition"], row["offset"])
    if position is None:
        return None
    partition, offset = (value.get(name) for name in position)
    return place_of(partition, offset) if isinstance(partition, int) and isinstance(offset, int) else None
