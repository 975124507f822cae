"""A stream on disk whose table has slices: batch N reads day N of March 2013, one record and one row an hour."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pyarrow as pa
from deltalake import DeltaTable, write_deltalake
from pyspark.sql.types import LongType, StructField, StructType, TimestampType

from streaming_jobs.declare.rules import Holds
from streaming_jobs.declare.slices import SliceRange, Slices, slice_range
from streaming_jobs.declare.table import LateRows
from streaming_jobs.formats import Json
from streaming_jobs.ledger.entry import CodeVersion, LedgerEntry
from streaming_jobs.runtime.slice_commits import carry_out
from streaming_jobs.settings import Settings
from streaming_jobs.sinks.delta.sink import DeltaSink, open_sink
from streaming_jobs.sinks.delta.slice_staging import DeltaStagedSlice
from streaming_jobs.sinks.sliced import SlicedTable, sliced
from streaming_jobs.sinks.tables import open_tables
from streaming_jobs.state.slice_requests import SliceCommitRequest, SliceRequests
from streaming_jobs.stream import DeltaTable as Declared
from streaming_jobs.stream import KafkaTopic, Stream
from tests.support.stream_on_disk import OnePartition, StreamOnDisk, append

TOPIC_ID = "topic-1"
BEGIN = datetime(2013, 3, 1, tzinfo=UTC)
HOURS = 24
RECORD = StructType([StructField("at", TimestampType(), False), StructField("n", LongType(), False)])
KINDS = pa.schema([("at", pa.timestamp("us", "UTC")), ("n", pa.int64())])


def days(value: Any) -> Any:
    """The stream's function; nobody calls it here."""
    return value


def declared(
    slices: Slices | None = Slices("at"),  # noqa: B008
    topic: Mapping[str, Any] | None = None,
    late_rows: LateRows = "count",
) -> Stream:
    """The stream, with other slices or another topic."""
    source = KafkaTopic("days", Json(RECORD), **{"event_time": "at", "lateness": "1 hour", **(topic or {})})
    return Stream("days", days, {"value": source}, {"days": Declared("days", slices=slices, late_rows=late_rows)})


def guarded() -> Stream:
    """The stream with a rule that sets rows aside."""
    return replace(declared(), rules={"days": [Holds("n >= 0", name="small", on_fail="quarantine")]})


class Topics(OnePartition):
    """A record an hour, whose timestamp is its event time."""

    def __init__(self, first: int = 0, end: int = 10_000, topic_id: str = TOPIC_ID) -> None:
        super().__init__(first, end, topic_id)

    def mean_size(self, _: str, starts: Mapping[int, int]) -> float:
        raise AssertionError(f"a slice needs no sizes: {starts}")

    def offsets_for_time(self, _: str, ms: int) -> dict[int, int]:
        hours = -(-(ms - int(BEGIN.timestamp() * 1000)) // 3_600_000)
        return {0: min(max(hours, self.first), self.end)}


class Days(StreamOnDisk):
    """The stream on disk; `batch` adds a day to everything."""

    topic, topic_id, per_batch, columns = "days", TOPIC_ID, {0: HOURS}, RECORD

    @classmethod
    def of(cls, home: Path, batches: int, stream: Stream | None = None) -> Days:
        """The stream after so many days."""
        made = cls(Settings.load({"home": home}), stream or declared()).make()
        for number in range(batches):
            made.batch(number)
        return made

    def entry(self, batch: int, generation: int = 1) -> LedgerEntry:
        return LedgerEntry(
            "batch",
            "days",
            "days",
            generation,
            batch,
            (self.offsets(batch),),
            {"written": HOURS},
            code=CodeVersion("a", "1"),
        )

    def batch(self, number: int) -> None:
        """The batch of a day."""
        self.plan(number)
        table = self.stored()
        append(table, rows_of(number), self.entry(number))
        self.ledger_file.append(self.entry(number), {"days": table.version})
        self.finish(number)

    def sink(self) -> DeltaSink:
        """The table, opened anew."""
        sink = open_sink(self.settings, self.stream.primary, "days")
        assert sink is not None
        return sink

    def sliced(self) -> SlicedTable:
        """The table as one whose slices can be replaced."""
        return sliced(self.stored())

    @property
    def requests(self) -> SliceRequests:
        """The stream's slices."""
        return SliceRequests.of(self.settings, "days")

    def rebuilt(self, name: str, day: int, n: int, *, seconds: float = 60.0) -> SliceCommitRequest:
        """The request of a rebuilt day, whose rows all have this number; its files are staged."""
        staged = self.sliced().stage(name)
        before = staged.split(range_of(day))
        assert isinstance(staged, DeltaStagedSlice)
        rows = pa.table({"at": rows_of(day)["at"], "n": [n] * HOURS}, schema=KINDS)
        write_deltalake(staged._empty("after"), rows, mode="append")
        entry = LedgerEntry("slice", "days", "days", 1, 0, rows={"before": before, "after": HOURS}, plan=name)
        return SliceCommitRequest(name, "days", "days", entry.encode(), staged.change(), time.time() + seconds)

    def numbers(self) -> dict[int, set[int]]:
        """The numbers of each day's rows; every row is there once."""
        rows = DeltaTable(self.sink().path).to_pyarrow_table().to_pylist()
        assert len({row["at"] for row in rows}) == len(rows)
        by_day: dict[int, set[int]] = {}
        for row in rows:
            by_day.setdefault((row["at"] - BEGIN).days, set()).add(row["n"])
        return by_day


def rows_of(day: int) -> pa.Table:
    """The rows of a day, as its batch writes them: the number is the day's."""
    hours = [BEGIN + timedelta(days=day, hours=hour) for hour in range(HOURS)]
    return pa.table({"at": hours, "n": [day] * HOURS}, schema=KINDS)


def range_of(day: int, to: int | None = None) -> SliceRange:
    """The slice of a day, or of several."""
    first, last = (BEGIN + timedelta(days=each) for each in (day, day + 1 if to is None else to))
    return slice_range(Slices("at"), "timestamp", f"{first:%Y-%m-%d}", f"{last:%Y-%m-%d}")


if __name__ == "__main__":  # what a driver does at a batch border, in a process of its own that can be killed
    there = Days(Settings.load({"home": Path(sys.argv[1])}), guarded() if sys.argv[2:] else declared())
    carry_out(there.requests, open_tables(there.settings, there.stream))
