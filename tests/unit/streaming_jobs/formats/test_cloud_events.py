"""CloudEvents in both modes: data by an inner format, attributes as columns, and each refusal."""

from __future__ import annotations

import base64
import json
import pickle
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyspark.sql.pandas.types import to_arrow_schema

from streaming_jobs import Avro, CloudEvents, Csv, Debezium, Json, KafkaSink, KafkaTopic, Raw, Text
from streaming_jobs.declare.format import Format, Refused
from streaming_jobs.errors import UsageError
from streaming_jobs.formats.event_records import BINARY
from streaming_jobs.sources.record_blocks import HEADERS_ARROW, RecordBlocks
from streaming_jobs.testing.consumer import record as message
from tests.unit.streaming_jobs.formats.test_avro import Known, encoded, record

DATA = {"id": "bigint not null", "name": "string"}
ALL = CloudEvents(DATA, attributes=["id", "source", "type", "time", "subject", "traceid"])
BASE = {"specversion": "1.0", "id": "e1", "source": "/shop", "type": "order"}
AT = datetime(2026, 1, 31, 5, 6, 7, tzinfo=UTC)


def event(data: Any = None, **more: Any) -> bytes:
    return json.dumps({**BASE, **({} if data is None else {"data": data}), **more}).encode()


def headers(**attributes: str) -> list[tuple[str, bytes | None]]:
    return [(f"ce_{name}", text.encode()) for name, text in {**BASE, **attributes}.items()]


def reasons(declared: CloudEvents, *values: bytes | None) -> list[str | None]:
    refused = declared.reader().read(values).refused
    return [refused[row].reason if row in refused else None for row in range(len(values))]


def test_structured_events_give_their_data_and_the_attributes_that_are_asked_for() -> None:
    values = [
        event({"id": 1, "name": "a"}, time="2026-01-31T05:06:07Z", subject="s", traceid=7),
        event({"id": 2}, traceid=True, unknown={"any": ["thing"]}),
    ]
    block = ALL.reader().read(values)
    common = {"ce_id": "e1", "ce_source": "/shop", "ce_type": "order"}
    assert not block.refused and block.columns.to_pylist() == [
        {"id": 1, "name": "a", **common, "ce_time": AT, "ce_subject": "s", "ce_traceid": "7"},
        {"id": 2, "name": None, **common, "ce_time": None, "ce_subject": None, "ce_traceid": "true"},
    ]
    assert ALL.reader(["ce_type", "name"]).read(values).columns.to_pydict() == {
        "name": ["a", None],
        "ce_type": ["order", "order"],
    }
    assert CloudEvents(DATA).read(values[0]) == {"id": 1, "name": "a"}
    assert not ALL.schema["ce_source"].nullable and ALL.schema["ce_time"].nullable


def test_a_record_with_attributes_in_headers_is_read_like_a_structured_one_in_the_same_block() -> None:
    frame = ALL.header_frame
    binary = [*headers(time="2026-01-31T05:06:07Z", subject="s"), ("other", b"x"), ("ce_traceid", None)]
    values = [b'{"id": 1, "name": "a"}', event({"id": 2}), None]
    pairs = [[{"key": k, "value": v} for k, v in binary], None, [{"key": "ce_specversion", "value": b"1.0"}]]
    framed = frame.block(values, pa.array(pairs, HEADERS_ARROW))
    assert framed == [frame.one(values[0] or b"", binary), values[1], None]
    block = ALL.reader().read(framed)
    assert block.refused.keys() == {2}
    first, second, _ = block.columns.to_pylist()
    assert (first["id"], first["ce_id"], first["ce_time"], first["ce_subject"]) == (1, "e1", AT, "s")
    assert first["ce_traceid"] is None and second["id"] == 2


def test_no_value_can_claim_to_be_in_binary_mode_by_its_own_bytes() -> None:
    forged = ALL.header_frame.one(b'{"id": 1}', headers())
    assert forged.startswith(BINARY)
    assert reasons(ALL, ALL.header_frame.one(forged, [])) == ["invalid_utf8"], "of MessagePack's bytes"
    short = BINARY + b"\0\0\0\1"
    (only,) = ALL.header_frame.block([BINARY], pa.array([None], HEADERS_ARROW))
    assert reasons(ALL, only, ALL.header_frame.one(short, [])) == ["malformed_json"] * 2


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        (None, "empty_value"),
        (b" ", "empty_value"),
        (b"{", "malformed_json"),
        (b"[]", "not_an_object"),
        (event({"id": 1}) + b"{}", "trailing_data"),
        (b'{"id": "\xff"}', "invalid_utf8"),
        (event(), "empty_value"),
        (event(data_base64=None), "empty_value"),
        (event({"id": 1}, id=""), "missing_field"),
        (event({"id": 1}, source=None), "missing_field"),
        (event({"id": 1}, specversion="0.3"), "unknown_version"),
        (event({"id": 1}, type={"a": 1}), "wrong_type"),
        (event({"id": 1}, subject=1.5), "wrong_type"),
        (event({"id": 1}, time="yesterday"), "wrong_type"),
        (event({"id": "x"}), "wrong_type"),
        (event({"name": "x"}), "missing_field"),
        (event("text"), "not_an_object"),
        (event({"id": 1}, data_base64="e30="), "ambiguous_data"),
        (event(data_base64="e30"), "malformed_base64"),
        (event(data_base64="ä"), "malformed_base64"),
        (event(data_base64=5), "wrong_type"),
        (b"\1", "malformed_json"),
        (b"\1\0\0\0\5junk", "malformed_json"),
    ],
)
def test_each_refusal_has_its_reason_and_the_events_beside_it_stay_good(value: bytes | None, reason: str) -> None:
    good = event({"id": 1})
    assert reasons(ALL, good, value, good) == [None, reason, None]
    assert reason in ALL.reasons
    assert ALL.reader([]).read([value]).refused[0].reason == reason, "whichever columns are built"


def test_headers_that_are_no_texts_and_missing_ones_refuse_their_record() -> None:
    frame = ALL.header_frame
    broken = [(name, b"\xff" if name == "ce_id" else content) for name, content in headers()]
    assert reasons(ALL, frame.one(b'{"id": 1}', broken)) == ["invalid_utf8"]
    assert reasons(ALL, frame.one(b'{"id": 1}', headers()[:2])) == ["missing_field"]
    assert reasons(ALL, frame.one(b"", headers())) == ["empty_value"]


def test_data_are_of_any_format_as_the_content_type_says() -> None:
    line = event("1,x", datacontenttype="text/csv")
    assert CloudEvents(Csv(DATA)).read(line) == {"id": 1, "name": "x"}
    assert CloudEvents(Csv(DATA)).read(event(data_base64=base64.b64encode(b"2,y").decode())) == {"id": 2, "name": "y"}
    assert CloudEvents(Text()).read(event("a", datacontenttype="text/plain"))["value"] == "a"
    assert CloudEvents(Text()).read(event("a", datacontenttype="application/json"))["value"] == '"a"'
    assert CloudEvents(Raw()).read(event({"b": 1}, datacontenttype="application/vnd.x+json; charset=utf-8")) == {
        "value": b'{"b": 1}'
    }
    change = {"before": None, "after": {"id": 3}, "op": "c", "ts_ms": 5}
    assert CloudEvents(Debezium({"id": "bigint"})).read(event(change))["id"] == 3


def test_the_registry_of_the_data_is_reached_through_the_envelope() -> None:
    schema = record(("id", "long"))
    declared = CloudEvents(Avro(schema), attributes=["id"]).bound(Known(schema), "orders")
    value = b"\0\0\0\0\1" + encoded(schema, {"id": 4})
    framed = declared.header_frame.one(value, headers())
    assert declared.read(framed) == {"id": 4, "ce_id": "e1"}
    assert declared.read(event(data_base64=base64.b64encode(value).decode())) == {"id": 4, "ce_id": "e1"}
    assert CloudEvents(DATA).bound(Known(schema), "orders") == CloudEvents(DATA)


def test_a_topic_reads_headers_with_its_values_and_a_dead_letter_has_the_value_as_it_was() -> None:
    topic = KafkaTopic("orders", value=ALL, event_time="ce_time", lateness="1 hour", max_ahead=None)
    pairs = [*headers(time="2026-01-31T05:06:07Z")]
    messages = [
        message(0, 0, b'{"id": 1}', topic="orders", headers=pairs),
        message(0, 1, b'{"id": "x"}', topic="orders", headers=pairs),
    ]
    batch = RecordBlocks(topic, "all").batch(messages)
    assert batch["_bad"].to_pylist() == [False, True] and batch["_record"][0]["ce_time"].as_py() == AT
    letters = RecordBlocks(topic, "refused").batch(messages)
    assert letters["value"].to_pylist() == [b'{"id": "x"}'] and letters["reason"].to_pylist() == ["wrong_type"]


def test_a_declaration_that_cannot_hold_is_refused_and_a_good_one_travels() -> None:
    taken: Format = Json({"ce_id": "string"})
    for value, attributes in ((DATA, ["ID"]), (DATA, ["data"]), (DATA, ["id", "id"]), (taken, ["id"]), (DATA, "id")):
        with pytest.raises(UsageError):
            CloudEvents(value, attributes=attributes)
    with pytest.raises(UsageError, match="ids='prefix'"):
        CloudEvents(Avro(record(("id", "long")), ids="header"))
    assert pickle.loads(pickle.dumps(ALL)) == ALL != CloudEvents(DATA)


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)
_NAMES = st.sampled_from([*BASE, "time", "subject", "traceid", "data", "data_base64", "datacontenttype", "x"])


@given(st.lists(st.dictionaries(_NAMES, _JSON).map(lambda more: {**BASE, **more}), max_size=4), st.binary(max_size=20))
def test_any_event_is_read_or_refused_and_as_alone(events: list[dict[str, Any]], junk: bytes) -> None:
    values = [*(json.dumps(each).encode(errors="surrogatepass") for each in events), junk, BINARY + junk]
    block = ALL.reader().read(values)
    for row, value in enumerate(values):
        alone = ALL.reader().read([value])
        assert alone.refused.get(0) == block.refused.get(row)
        assert alone.columns.to_pylist()[0] == block.columns.to_pylist()[row]
        if row not in block.refused and row < len(events):
            assert json.loads(value)["data"]["id"] == block.columns["id"][row].as_py()


@given(st.dictionaries(_NAMES, _JSON | st.text(max_size=5)).map(lambda more: {**BASE, **more}))
def test_an_event_that_is_read_at_once_is_read_alike_attribute_by_attribute(fields: dict[str, Any]) -> None:
    value = json.dumps(fields).encode(errors="surrogatepass")
    reader = ALL.reader()

    def outcome(read: Callable[[bytes], Any]) -> Any:
        try:
            event = read(value)
        except Refused as refused:
            return refused.verdict
        return {name: text for name, text in event.attributes.items() if text is not None}, event.data

    assert outcome(reader._structured) == outcome(reader._judged)


# The writing.

TEXTS = st.text(st.characters(exclude_categories=("Cs",)), min_size=1, max_size=8)
TIMES = st.datetimes(timezones=st.just(UTC))
ROWS = st.fixed_dictionaries(
    {
        "id": st.integers(-(2**63), 2**63 - 1),
        "name": st.none() | TEXTS,
        **dict.fromkeys(("ce_id", "ce_source", "ce_type"), TEXTS),
        "ce_time": st.none() | TIMES,
        **dict.fromkeys(("ce_subject", "ce_datacontenttype"), st.none() | TEXTS),
    }
)
WRITTEN = CloudEvents(DATA, attributes=["id", "source", "type", "time", "subject", "datacontenttype"])


def batch(declared: CloudEvents, rows: list[dict[str, Any]]) -> pa.RecordBatch:
    return pa.RecordBatch.from_pylist(rows, to_arrow_schema(declared.schema, timezone="UTC"))


@given(st.lists(ROWS, max_size=4))
def test_what_is_written_reads_back_as_the_same_row(rows: list[dict[str, Any]]) -> None:
    written = WRITTEN.writer().write(batch(WRITTEN, rows))
    assert not written.refused
    block = WRITTEN.reader().read(written.values)
    assert not block.refused and block.columns.to_pylist() == rows


def test_data_in_json_are_the_value_itself_and_others_are_encoded() -> None:
    row = {"id": 1, "name": "a", "ce_id": "e1", "ce_source": "/shop", "ce_type": "order", "ce_time": AT}
    (value,) = ALL.writer().write(batch(ALL, [row])).values
    assert json.loads(value or b"") == {**BASE, "time": "2026-01-31T05:06:07.000000Z", "data": {"id": 1, "name": "a"}}
    other = {**row, "ce_datacontenttype": "text/csv"}
    (value,) = WRITTEN.writer().write(batch(WRITTEN, [other])).values
    assert base64.b64decode(json.loads(value or b"")["data_base64"]) == b'{"id":1,"name":"a"}'
    raw = CloudEvents(Raw(), attributes=["id", "source", "type"])
    (value,) = raw.writer().write(batch(raw, [{**row, "value": b"\xff"}])).values
    assert json.loads(value or b"") == {**BASE, "data_base64": "/w=="}
    assert raw.writer().headers == (("content-type", b"application/cloudevents+json; charset=UTF-8"),)  # type: ignore[attr-defined]


def test_an_event_that_no_reader_would_take_is_refused() -> None:
    declared = CloudEvents(DATA, attributes=["id", "source", "type", "specversion"])
    good = {"id": 1, "name": "a", "ce_id": "e1", "ce_source": "/shop", "ce_type": "order", "ce_specversion": "1.0"}
    rows = [
        good,
        {**good, "ce_id": ""},
        {**good, "ce_type": None},
        {**good, "ce_specversion": "0.3"},
        {**good, "id": None},
    ]
    nullable = pa.schema([field.with_nullable(True) for field in batch(declared, [good]).schema])
    written = declared.writer().write(pa.RecordBatch.from_pylist(rows, nullable))
    assert {row: refusal.reason for row, refusal in written.refused.items()} == {
        1: "missing_field",
        2: "missing_field",
        3: "unknown_version",
        4: "missing_field",
    }
    assert [value is None for value in written.values] == [False, True, True, True, True]


def test_a_sink_names_what_its_events_lack() -> None:
    with pytest.raises(UsageError, match="an event needs source, type") as raised:
        KafkaSink(KafkaTopic("events", value=CloudEvents(DATA, attributes=["id"])))
    assert "ce_source, ce_type" in raised.value.next_step
    with pytest.raises(UsageError, match="Debezium of its data only reads"):
        KafkaSink(KafkaTopic("events", value=CloudEvents(Debezium(DATA), attributes=["id", "source", "type"])))
    assert KafkaSink(KafkaTopic("events", value=ALL)).name == "events"
