"""Change events of Debezium: inserts, updates, snapshots, deletes; events without a row; JSON and Avro."""

from __future__ import annotations

import json
import pickle
from typing import Any

import pytest

from streaming_jobs import Avro, Debezium, Json, KafkaTopic
from streaming_jobs.declare.topic import EpochMillis
from streaming_jobs.errors import UsageError
from tests.unit.streaming_jobs.formats.test_avro import Known, encoded, record

ROW = {"id": "bigint not null", "name": "string", "tags": ["string"]}
ANNA: dict[str, Any] = {"id": 1, "name": "Anna", "tags": ["a"]}


def event(op: str, before: Any = None, after: Any = None, **more: Any) -> dict[str, Any]:
    return {"before": before, "after": after, "op": op, "ts_ms": 5, "source": {"lsn": 7}, **more}


def lines(*events: Any) -> list[bytes]:
    return [json.dumps(each).encode() for each in events]


def row(op: str, **fields: Any) -> dict[str, Any]:
    return {"id": None, "name": None, "tags": None, **fields, "_op": op, "_ts_ms": 5}


CHANGES = [
    event("c", None, ANNA),
    event("u", {"id": 1}, {**ANNA, "name": "Anne"}),
    event("r", None, {"id": 2, "name": None}),
    event("d", {"id": 1}),
    event("d", ANNA),
]
ROWS = [row("c", **ANNA), row("u", **{**ANNA, "name": "Anne"}), row("r", id=2), row("d", id=1), row("d", **ANNA)]


def test_a_change_is_the_row_after_it_and_a_delete_the_row_before_it() -> None:
    block = Debezium(ROW).reader().read(lines(*CHANGES))
    assert not block.refused and block.columns.to_pylist() == ROWS
    wrapped = [{"schema": {"type": "struct"}, "payload": each} for each in CHANGES]
    assert Debezium(ROW, payload=True).reader().read(lines(*wrapped)).columns.to_pylist() == ROWS
    assert Debezium(ROW).reader(["name"]).read(lines(*CHANGES)).columns.to_pydict() == {
        "name": [each["name"] for each in ROWS]
    }
    assert Debezium(ROW).read(lines(CHANGES[0])[0]) == ROWS[0]


def test_an_event_without_a_row_is_refused_and_so_is_what_the_inner_format_refuses() -> None:
    bad = [event("t"), event("m"), event("c"), event("d", None, ANNA), event("c", None, {"name": "x"}), {"op": "c"}]
    values = [*lines(*bad), b"{", None, *lines(CHANGES[0])]
    block = Debezium(ROW).reader().read(values)
    assert [block.refused[index].reason for index in range(8)] == [
        *("unknown_op", "unknown_op", "missing_row", "missing_row"),
        *("missing_field", "missing_row", "malformed_json", "empty_value"),
    ]
    assert "REPLICA IDENTITY" in block.refused[3].detail
    assert block.columns.to_pylist()[8] == ROWS[0]
    assert all(value is None for each in block.columns.to_pylist()[:8] for value in each.values())
    assert Debezium(ROW).reader([]).read(values).refused == block.refused
    assert {refusal.reason for refusal in block.refused.values()} <= Debezium(ROW).reasons


def test_events_in_avro_are_read_with_the_registry() -> None:
    value = record(("id", "long"), ("name", ["null", "string"]), name="Value")
    fields = (("before", ["null", value]), ("after", ["null", "Value"]), ("op", "string"), ("ts_ms", ["null", "long"]))
    envelope = record(*fields, name="Envelope")
    written = record(*fields, ("source", record(("lsn", "long"), name="Source")), name="Envelope")
    source = {"lsn": 7}
    events = [
        {"before": None, "after": {"id": 1, "name": "Anna"}, "op": "c", "ts_ms": 5, "source": source},
        {"before": {"id": 1, "name": None}, "after": None, "op": "d", "ts_ms": 6, "source": source},
    ]
    topic = KafkaTopic(
        "db.customers", value=Debezium(Avro(envelope)), event_time=EpochMillis("_ts_ms"), lateness="1 hour"
    ).bound(Known(written))
    block = pickle.loads(pickle.dumps(topic.value)).reader().read([b"\0\0\0\0\1" + encoded(written, e) for e in events])
    assert block.columns.to_pylist() == [
        {"id": 1, "name": "Anna", "_op": "c", "_ts_ms": 5},
        {"id": 1, "name": None, "_op": "d", "_ts_ms": 6},
    ]


def test_a_declaration_that_has_no_envelope_is_refused() -> None:
    both = {"id": "bigint"}
    for value, words in (
        (Json({"after": both, "op": "string", "ts_ms": "bigint"}), "no field `before`"),
        (Json({"before": both, "after": both, "ts_ms": "bigint"}), "no field `op`"),
        (Json({"before": both, "after": {"x": "int"}, "op": "string", "ts_ms": "bigint"}), "different columns"),
        ({"id": "bigint", "_op": "string"}, "has a column _op"),
    ):
        with pytest.raises(UsageError, match=words):
            Debezium(value)
    declared = Debezium(ROW)
    assert declared == pickle.loads(pickle.dumps(declared)) != Debezium(ROW, payload=True)
    assert KafkaTopic("t", value=declared).bound(Known()).value == declared
