"""Csv and CloudEvents through a whole stream: decoded, set aside, with an event time of an attribute, after a crash."""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

from pyspark.sql import DataFrame

from streaming_jobs import CloudEvents, Csv, DeltaTable, KafkaSink, KafkaTopic, stream
from streaming_jobs.testing.stream_test import StreamTest

LINES = KafkaTopic("lines", value=Csv({"id": "bigint not null", "note": "string", "at": "timestamp"}, delimiter=";"))
COPIES = KafkaTopic("line-copies", value=Csv({"id": "bigint not null", "note": "string"}))
EVENTS = KafkaTopic(
    "events",
    value=CloudEvents({"id": "bigint not null"}, attributes=["id", "time"]),
    event_time="ce_time",
    lateness="1 hour",
    max_ahead=None,
)
NOON = datetime(2026, 1, 1, 12, tzinfo=UTC)


@stream(source=LINES, sink={"table": DeltaTable("lines"), "topic": KafkaSink(COPIES)})
def copied_lines(lines: DataFrame) -> dict[str, DataFrame]:
    return {"table": lines.drop("_source"), "topic": lines.drop("at")}


@stream(source=EVENTS, sink=DeltaTable("events"))
def kept_events(events: DataFrame) -> DataFrame:
    return events.drop("_source")


def test_lines_become_rows_and_records_or_dead_letters_and_a_crash_changes_nothing(
    stream_test: Callable[..., StreamTest],
) -> None:
    test = stream_test(copied_lines)
    for line in (b'1;"a,b";2026-01-01T12:00:00Z', b"2;;\r\n", b"x;;", b"3", b'4;"'):
        test.send(line)
    test.send({"id": 5, "note": "c;d", "at": NOON})
    test.crash_at("primary_committed")
    test.run()
    test.run()
    assert test.rows("lines") == [
        {"id": 1, "note": "a,b", "at": NOON},
        {"id": 2, "note": None, "at": None},
        {"id": 5, "note": "c;d", "at": NOON},
    ]
    assert sorted(letter["reason"] for letter in test.dead_letters()) == ["field_count", "malformed_csv", "wrong_type"]
    assert sorted(record.value for record in test.topic()) == [b'1,"a,b"', b"2,", b"5,c;d"]


def test_events_of_both_modes_become_rows_and_their_time_moves_the_watermark(
    stream_test: Callable[..., StreamTest],
) -> None:
    test = stream_test(kept_events)
    base: dict[str, Any] = {"specversion": "1.0", "source": "/shop", "type": "order"}
    test.send(json.dumps({**base, "id": "a", "time": "2026-01-01T12:00:00Z", "data": {"id": 1}}).encode())
    binary = {**base, "id": "b", "time": "2026-01-01T13:00:00Z"}
    test.send(b'{"id": 2}', headers={f"ce_{name}": text.encode() for name, text in binary.items()})
    test.send(b'{"id": 3}')
    test.run()
    assert [(row["id"], row["ce_id"]) for row in test.rows()] == [(1, "a"), (2, "b")]
    assert [(each["reason"], each["value"]) for each in test.dead_letters()] == [("missing_field", b'{"id": 3}')]
    assert test.watermark == NOON
