"""The truths of the stream of two tables, on records by hand."""

from __future__ import annotations

import json

from streaming_jobs.catalog.truths import Record
from streaming_jobs.verification.chaos.flight_streams import long_flights, short_flights


def record(offset: int, distance: int) -> Record:
    value = {"carrier": "UA", "flight": offset, "distance": distance}
    return Record("flights", 2, offset, 0, b"UA", json.dumps(value).encode(), json.loads)


def test_each_flight_is_due_in_the_table_that_its_distance_demands_with_its_place() -> None:
    records = [record(4, 999), record(5, 1000), record(6, 2000)]
    short = {"carrier": "UA", "flight": 4, "source_partition": 2, "source_offset": 4}
    assert short_flights(records) == [short]
    assert [row["source_offset"] for row in long_flights(records)] == [5, 6]
