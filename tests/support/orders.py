"""Events of upserts with an order, the definition of what a table must hold after them, and tables to try it on."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, date, datetime
from decimal import Decimal
from itertools import product
from pathlib import Path
from typing import Any

import pyarrow as pa
from pyspark.sql import DataFrame
from pyspark.sql.types import (
    BinaryType,
    BooleanType,
    DataType,
    DateType,
    DecimalType,
    DoubleType,
    FloatType,
    LongType,
    StringType,
    StructField,
    StructType,
    TimestampType,
)

from streaming_jobs.declare.columns import POSITION_COLUMN
from streaming_jobs.ledger.entry import LedgerEntry
from streaming_jobs.platform.table_rows import rows as rows_of
from streaming_jobs.settings import Settings
from streaming_jobs.sinks import schemas
from streaming_jobs.sinks.base import PendingWrite
from streaming_jobs.sinks.delta.pending_writes import ArrowMerge
from streaming_jobs.sinks.delta.row_engine import RowEngine
from streaming_jobs.sinks.delta.sink import DeltaSink
from streaming_jobs.sinks.delta.store import ensure_sink
from streaming_jobs.sinks.delta.upsert_order import DELETE_COLUMN, order_of
from streaming_jobs.sinks.delta.writers import Preparation, prepare_write, remembered_in
from streaming_jobs.sinks.schemas import POSITION_FIELD
from streaming_jobs.stream import DeltaTable as Declared

STREAM = "ordered"
NAN, MINUS_NAN = float("nan"), math.copysign(float("nan"), -1)
COLUMNS = {"k": LongType(), "at": DoubleType(), "n": LongType(), "value": LongType()}
HOSTILE: dict[DataType, list[Any]] = {  # ascending, but for those that are equal: they come in a list
    DoubleType(): [None, -math.inf, -1e308, -5e-324, [-0.0, 0.0], 5e-324, 1.5, math.inf, [NAN, MINUS_NAN]],
    FloatType(): [None, -math.inf, -1.5, [-0.0, 0.0], 1.5, math.inf, [NAN, MINUS_NAN]],
    LongType(): [None, -(2**63), -1, 0, 9007199254740992, 9007199254740993, 2**63 - 1],
    DecimalType(38, 4): [
        None,
        Decimal("-9999999999999999999999999999999999.9999"),
        Decimal("0"),
        Decimal("9007199254740992.0001"),
        Decimal("9007199254740992.0002"),
    ],
    StringType(): [None, "", "A", "a", "ab", "a\u2028b", "z", "é", "\uffff", "\U0001f600"],
    BinaryType(): [None, b"", b"\x00", b"\x7f", b"\x80", b"\xff\x00"],
    BooleanType(): [None, False, True],
    DateType(): [None, date(1, 1, 1), date(1582, 10, 10), date(1970, 1, 1), date(9999, 12, 31)],
    TimestampType(): [
        None,
        datetime(1, 1, 1, tzinfo=UTC),
        datetime(1969, 12, 31, 23, 59, 59, 999999, tzinfo=UTC),
        datetime(2262, 4, 12, tzinfo=UTC),
        datetime(9999, 12, 31, 23, 59, 59, 999999, tzinfo=UTC),
    ],
}


@dataclass(frozen=True)
class Event:
    """One record of a key. A delete without `at` and `n` is a tombstone."""

    key: int
    at: float | None
    n: int | None
    delete: bool
    partition: int
    offset: int = 0

    @property
    def tombstone(self) -> bool:
        return self.delete and self.at is None and self.n is None

    @property
    def position(self) -> int:
        return self.partition << 46 | self.offset

    @property
    def order(self) -> tuple[Any, ...]:
        """As Python compares it."""
        at = (0, 0.0) if self.at is None else (2, 0.0) if math.isnan(self.at) else (1, self.at + 0.0)
        return (at, (0, 0) if self.n is None else (1, self.n))


def read(events: Iterable[Event]) -> list[Event]:
    """The events in the order in which they are read, each with its offset."""
    ends: dict[int, int] = {}
    numbered = []
    for event in events:
        offset = ends[event.partition] = ends.get(event.partition, -1) + 1
        numbered.append(replace(event, offset=offset))
    return numbered


def expected(events: Sequence[Event], *, by_position: bool) -> dict[int, int]:
    """The definition: by key, the number of the event that the table must show."""
    shown = {}
    for key in {event.key for event in events}:
        mine = [(number, event) for number, event in enumerate(events) if event.key == key]
        last = max((place for place, (_, event) in enumerate(mine) if event.tombstone), default=-1)
        left = mine[last + 1 :]
        if left:
            number, greatest = max(left, key=lambda m: (m[1].order, m[1].position if by_position else m[0]))
            if not greatest.delete:
                shown[key] = number
    return shown


def output(events: Sequence[tuple[int, Event]]) -> pa.Table:
    """Numbered events as a stream's function returns them."""
    source = {
        "topic": pa.array(["t"] * len(events), pa.string()),
        "partition": pa.array([e.partition for _, e in events], pa.int32()),
        "offset": pa.array([e.offset for _, e in events], pa.int64()),
    }
    columns = {name: arrow(events, by_position=False)[name] for name in COLUMNS}
    columns["gone"] = pa.array([e.delete for _, e in events], pa.bool_())
    return pa.table(columns | {"_source": pa.StructArray.from_arrays(list(source.values()), list(source))})


def arrow(events: Sequence[tuple[int, Event]], *, by_position: bool) -> pa.Table:
    """Numbered events as they come out of Spark on the driver's path."""
    columns: dict[str, Any] = {
        "k": pa.array([e.key for _, e in events], pa.int64()),
        "at": pa.array([e.at for _, e in events], pa.float64()),
        "n": pa.array([e.n for _, e in events], pa.int64()),
        "value": pa.array([number for number, _ in events], pa.int64()),
    }
    columns[POSITION_COLUMN] = pa.array([e.position if by_position else None for _, e in events], pa.int64())
    if by_position:
        columns["__topic"] = pa.array(["t"] * len(events))
        columns["__partition"] = pa.array([e.partition for _, e in events], pa.int32())
        columns["__offset"] = pa.array([e.offset for _, e in events], pa.int64())
    return pa.table(columns | {DELETE_COLUMN: pa.array([e.delete for _, e in events], pa.bool_())})


def merged(sink: DeltaSink, rows: pa.Table, kept: DeltaSink | None = None, *, by_position: bool) -> ArrowMerge:
    """Prepare an upsert of rows in the driver's memory."""
    order = order_of(sink.schema, sink.declared.order_by, by_position=by_position)
    remembered = None if kept is None else remembered_in(kept)
    engine = RowEngine(sink.declared, sink.schema, order, remembered=remembered)
    made = Preparation(sink, engine, deletes_table=kept).in_memory(rows)
    assert isinstance(made, ArrowMerge)
    return made


@dataclass
class Tables:
    """A table with an order, and the one that remembers its deletes. Rows of a frame take a path with `stage`."""

    sink: DeltaSink
    kept: DeltaSink
    batch: int = -1

    def stage(self, frame: DataFrame, *, driver: bool) -> None:
        """One batch of a stream's output, by the given path."""
        self.batch += 1
        at = (1, self.batch)
        self.kept.refresh()
        staged = prepare_write(
            self.sink,
            self.sink.fit(frame, ["t"]),
            driver=driver,
            spark_commits=not driver and isinstance(self.sink.path, Path),
            batch=at,
            topics=["t"],
            deletes_table=self.kept,
        )
        try:
            self.commit(staged)
        finally:
            staged.close()

    @classmethod
    def make(cls, settings: Settings, name: str = "rows", types: Mapping[str, DataType] = COLUMNS) -> Tables:
        order_by = [column for column in types if column not in ("k", "value")]
        declared = Declared(name, keys=["k"], order_by=order_by, delete_when="gone")
        assert declared.deletes is not None
        output = StructType([*(StructField(c, kind) for c, kind in types.items()), POSITION_FIELD])
        remembers = schemas.deletes_of(declared, output)
        sink = ensure_sink(settings, declared, STREAM, output, generation=1)
        return cls(sink, ensure_sink(settings, declared.deletes, STREAM, remembers, generation=1))

    def upsert(self, rows: pa.Table, *, by_position: bool, crash: bool = False) -> None:
        """One batch as the pipeline does it; with `crash` it dies between the two tables and is repeated."""
        self.batch += 1
        for last in (False, True) if crash else (True,):
            self.commit(merged(self.sink, rows, self.kept, by_position=by_position), primary=last)

    def commit(self, staged: PendingWrite, *, primary: bool = True) -> None:
        """Commit the prepared write of a batch."""
        self.kept.refresh()
        for tombstones in staged.before:
            tombstones.commit(self.entry(self.kept))
        if primary:
            staged.commit(self.entry(self.sink))

    def entry(self, sink: DeltaSink) -> LedgerEntry:
        return LedgerEntry("batch", STREAM, sink.name, 1, self.batch)

    def shown(self) -> dict[int, int]:
        """The table's rows: key and the number of the event."""
        stored = rows_of(self.sink.path).to_pylist()
        rows = {row["k"]: row["value"] for row in stored}
        assert len(rows) == len(stored), "a key has two rows"
        return rows


def pairs(values: Sequence[Any]) -> list[tuple[Any, Any, int]]:
    """All pairs of hostile values; the second is above (1), equal to (0) or below (-1) the first."""
    ranked = [(v, rank) for rank, each in enumerate(values) for v in (each if isinstance(each, list) else [each])]
    return [(a, b, (rb > ra) - (rb < ra)) for (a, ra), (b, rb) in product(ranked, ranked)]
