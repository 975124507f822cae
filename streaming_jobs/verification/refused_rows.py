"""The dead letters that explain why a record has no row in a table: the record was refused, or its row was.

The dead letter of a refused row names its record where the output has `_source`, or where the row itself has the
record's place. Older versions of the code recorded no place for the rows of append tables.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from deltalake import DeltaTable

from streaming_jobs.platform import table_rows
from streaming_jobs.verification.dead_letters import OF_ROWS
from streaming_jobs.verification.judged import Judged
from streaming_jobs.verification.table_rules import Packed, packed, place_of

LETTERS = ("topic", "partition", "offset", "reason")
"""The columns of dead letters that are read."""
_NOT_HELD = sorted(OF_ROWS - {"null_key"})
"""Reasons of rows that a table cannot hold; a row without its key is one of an upsert, where no record is missed."""


@dataclass(frozen=True)
class RowLetter:
    """A refused row: the topic and place of its record where these are known, and the row's columns."""

    topic: str | None
    place: int | None
    columns: frozenset[str]


@dataclass(frozen=True)
class Letters:
    """`whole` are the places of refused records, `rows` the refused rows."""

    whole: Packed
    rows: tuple[RowLetter, ...]

    @classmethod
    def of(cls, judged: Judged, position: tuple[str, str] | None) -> Letters:
        """The dead letters of a topic at the stream's position; `position` are a row's columns with its record's place.

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
        return cls(packed(whole["partition"], whole["offset"]), tuple(refused_rows(path, version, topic, position)))

    @property
    def placed(self) -> Packed:
        """Places of all records that were refused, or of which a row was."""
        rows = np.array([row.place for row in self.rows if row.place is not None], dtype=np.int64)
        return np.union1d(self.whole, rows)

    @property
    def unplaced(self) -> int:
        """Number of refused rows whose record is not known."""
        return sum(1 for row in self.rows if row.place is None)

    def fitting(self, columns: frozenset[str]) -> int:
        """Number of refused rows that have only columns of a table, given by name."""
        return sum(1 for row in self.rows if row.columns <= columns)


def refused_rows(path: Path, version: int, topic: str, position: tuple[str, str] | None) -> Iterator[RowLetter]:
    """The refused rows among the dead letters; for a letter without a place, it is taken from the row's columns."""
    letters = table_rows.dataset(DeltaTable(path, version=version), path)
    columns = [name for name in (*LETTERS, "value") if name in letters.schema.names]
    for row in letters.to_table(columns=columns, filter=pc.field("reason").isin(_NOT_HELD)).to_pylist():
        value = _value(row)
        if row["topic"] is not None and row["offset"] is not None:
            yield RowLetter(row["topic"], place_of(row["partition"], row["offset"]), frozenset(value))
            continue
        place = None
        if position is not None:
            partition, offset = (value.get(name) for name in position)
            if isinstance(partition, int) and isinstance(offset, int):
                place = place_of(partition, offset)
        yield RowLetter(topic if place is not None else None, place, frozenset(value))


def _value(row: Mapping[str, Any]) -> dict[str, Any]:
    """The refused row, which its dead letter holds as JSON."""
    try:
        value = json.loads(row.get("value") or b"{}")
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}
