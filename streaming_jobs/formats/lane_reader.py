"""The reading of binary values: all of a block side by side, then the faulty ones again, each by itself."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import pyarrow as pa

from streaming_jobs.declare.format import Block, Refusal, Refused, record_batch
from streaming_jobs.formats.wire import LARGEST_BLOCK, Cursor, Lanes


class RecordSteps(Protocol):
    """Reads the records of one schema, in two ways that give the same values."""

    type: pa.DataType
    """The struct of all columns."""

    def columns(self, lanes: Lanes) -> dict[str, pa.Array]:
        """By name all columns; lanes that have a fault, or that were not understood, are `bad`."""

    def one(self, cursor: Cursor) -> dict[str, Any]:
        """The record, as Arrow takes it; raises Refused. What it decides counts."""


class LaneReader:
    """Reads values into the columns `names`; a value is checked in all of its fields."""

    def __init__(self, steps: RecordSteps, names: Sequence[str]) -> None:
        self._steps = steps
        self.names = names

    def read(self, values: Sequence[bytes], skip: int) -> Block:
        """Decode the values after their first `skip` bytes."""
        lengths = np.fromiter(map(len, values), np.int64, len(values))
        if len(values) > 1 and lengths.sum() > LARGEST_BLOCK:
            return self._in_halves(values, skip)
        lanes = Lanes.of(values, lengths, skip)
        columns = self._steps.columns(lanes)
        bad = lanes.bad | (lanes.at != lanes.end)
        batch = record_batch(len(values), {name: columns[name] for name in self.names})
        if not bad.any():
            return Block(batch, {})
        rows = np.flatnonzero(bad)
        judged = self.judged([values[row] for row in rows.tolist()], skip)
        refused = {int(rows[index]): refusal for index, refusal in judged.refused.items()}
        if not self.names:
            return Block(batch, refused)
        places = np.arange(len(values))
        places[rows] = np.arange(len(values), len(values) + len(rows))
        places[list(refused)] = -1
        whole = pa.concat_batches([batch, judged.columns])
        return Block(whole.take(pa.array(places, mask=places < 0)), refused)

    def judged(self, values: Sequence[bytes], skip: int) -> Block:
        """The same, each value by itself."""
        rows: list[dict[str, Any] | None] = []
        refused: dict[int, Refusal] = {}
        for row, value in enumerate(values):
            cursor = Cursor(value, skip)
            try:
                record = self._steps.one(cursor)
                if cursor.left:
                    raise Refused("trailing_data", f"{cursor.left} bytes follow the record, at byte {cursor.at}")
                rows.append(record)
            except Refused as error:
                refused[row] = error.verdict
                rows.append(None)
        struct = pa.array(rows, self._steps.type)
        columns = dict(zip((each.name for each in struct.type), struct.flatten(), strict=True))
        return Block(record_batch(len(values), {name: columns[name] for name in self.names}), refused)

    def _in_halves(self, values: Sequence[bytes], skip: int) -> Block:
        middle = len(values) // 2
        first, second = self.read(values[:middle], skip), self.read(values[middle:], skip)
        refused = {**first.refused, **{middle + row: refusal for row, refusal in second.refused.items()}}
        if not self.names:
            return Block(record_batch(len(values), {}), refused)
        return Block(pa.concat_batches([first.columns, second.columns]), refused)
