"""The strict reading of JSON gives the exact reason and words of a refusal, and never fails."""

from __future__ import annotations

import json
import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyspark.sql.types import (
    ArrayType,
    BinaryType,
    ByteType,
    DataType,
    DateType,
    DecimalType,
    DoubleType,
    FloatType,
    IntegerType,
    LongType,
    MapType,
    StringType,
    StructField,
    StructType,
    TimestampNTZType,
    TimestampType,
    VariantType,
)

from streaming_jobs.errors import UsageError
from streaming_jobs.formats import Json
from streaming_jobs.formats.json_reading import MAX_DETAIL, Refused, read_record

LEG = StructType([StructField("to", StringType(), nullable=False), StructField("minutes", IntegerType())])
RECORD = StructType(
    [
        StructField("id", LongType(), nullable=False),
        StructField("name", StringType()),
        StructField("tiny", ByteType()),
        StructField("real", DoubleType()),
        StructField("single", FloatType()),
        StructField("money", DecimalType(5, 2)),
        StructField("day", DateType()),
        StructField("at", TimestampType()),
        StructField("local", TimestampNTZType()),
        StructField("leg", LEG),
        StructField("legs", ArrayType(LEG, containsNull=False)),
    ]
)
FORMAT = Json(RECORD)
REASONS = {
    *("empty_value", "invalid_utf8", "malformed_json", "trailing_data", "not_an_object"),
    *("wrong_type", "missing_field", "unreadable"),
}


def one(name: str, text: str) -> bytes:
    return f'{{"id":1,"{name}":{text}}}'.encode()


@pytest.mark.parametrize(
    ("value", "reason", "words"),
    [
        (None, "empty_value", "null, empty or blank"),
        (b"", "empty_value", "null, empty or blank"),
        (b" \r\n\t", "empty_value", "null, empty or blank"),
        (b'{"id":1,"name":"a\xffb"}', "invalid_utf8", "byte 0xff at byte 17"),
        (b'{"id":1,"name":"\xed\xa0\x80"}', "invalid_utf8", "byte 0xed at byte 16"),
        (b'\xef\xbb\xbf{"id":1}', "malformed_json", "byte order mark"),
        (b'{"id":1', "malformed_json", "the value ends too early"),
        (b'{"id":1,}', "malformed_json", "at character"),
        (b"{'id':1}", "malformed_json", "at character 1"),
        (b'{"id":1,"real":NaN}', "malformed_json", "NaN is not JSON"),
        (b'{"id":1,"real":-Infinity}', "malformed_json", "-Infinity is not JSON"),
        (b'{"id":1,"name":"a\tb"}', "malformed_json", "control character"),
        (b'{"id":1,"name":"\\ud83d"}', "malformed_json", "half of a surrogate pair"),
        (b'{"id":1,"x":' + b"[" * 300 + b"]" * 300 + b"}", "malformed_json", "deeper than 200"),
        (b'{"id":1,"x":' + b"7" * 1001 + b"}", "malformed_json", "more than 1000 digits"),
        (b'{"id":1}{"id":2}', "trailing_data", "ends at character 8, then comes '{\"id\":2}'"),
        (b'{"id":1},', "trailing_data", "then comes ','"),
        (b"null", "not_an_object", "found null"),
        (b"[1]", "not_an_object", "found an array"),
        (b"true", "not_an_object", "found a boolean"),
        (b"1.5", "not_an_object", "found the number '1.5'"),
        (b'"x"', "not_an_object", "found the string 'x'"),
        (b"{}", "missing_field", "field 'id': required, found no such field"),
        (b'{"id":null}', "missing_field", "field 'id': required, found null"),
        (one("leg", "{}"), "missing_field", "field 'leg.to': required, found no such field"),
        (one("legs", "[null]"), "missing_field", "field 'legs[0]': required, found null"),
        (one("legs", '[{"to":"x"},{"to":null}]'), "missing_field", "field 'legs[1].to': required, found null"),
        (b'{"id":"1"}', "wrong_type", "field 'id': expected bigint, found the string '1'"),
        (b'{"id":1.0}', "wrong_type", "field 'id': expected bigint, found the number '1.0'"),
        (b'{"id":true}', "wrong_type", "field 'id': expected bigint, found a boolean"),
        (b'{"id":9223372036854775808}', "wrong_type", "'9223372036854775808' does not fit bigint"),
        (one("name", "5"), "wrong_type", "field 'name': expected string, found the number '5'"),
        (one("name", "{}"), "wrong_type", "field 'name': expected string, found an object"),
        (one("name", "[]"), "wrong_type", "field 'name': expected string, found an array"),
        (one("tiny", "200"), "wrong_type", "'200' does not fit tinyint"),
        (one("real", '"NaN"'), "wrong_type", "field 'real': expected double, found the string 'NaN'"),
        (one("real", "1e400"), "wrong_type", "'1e400' does not fit double"),
        (one("single", "1e39"), "wrong_type", "'1e39' does not fit float"),
        (one("money", "1.005"), "wrong_type", "'1.005' does not fit decimal(5,2)"),
        (one("money", "1e2"), "wrong_type", "field 'money': expected decimal(5,2), found the number '1e2'"),
        (one("day", '"2013-02-29"'), "wrong_type", "field 'day': expected date"),
        (one("at", "1357016767"), "wrong_type", "field 'at': expected timestamp, found the number '1357016767'"),
        (one("at", '"2013-01-01"'), "wrong_type", "field 'at': expected timestamp, found the string '2013-01-01'"),
        (one("at", '"2013-01-01T05:00:00+18:01"'), "wrong_type", "field 'at': expected timestamp"),
        (one("local", '"2013-01-01T05:00:00Z"'), "wrong_type", "field 'local': expected timestamp_ntz"),
        (one("leg", "[]"), "wrong_type", "field 'leg': expected object, found an array"),
        (
            one("leg", '{"to":"x","minutes":"5"}'),
            "wrong_type",
            "field 'leg.minutes': expected int, found the string '5'",
        ),
        (one("legs", '[{"to":7}]'), "wrong_type", "field 'legs[0].to': expected string, found the number '7'"),
        (b'{"id":"x","id":1}', "wrong_type", "field 'id': expected bigint, found the string 'x'"),
        (b'{"id":1,"\\u0001":true}', "wrong_type", "the name is reserved"),
        (b'{"id":1}', "unreadable", "nothing wrong"),
    ],
)
def test_a_refusal_names_reason_place_and_what_was_found(value: bytes | None, reason: str, words: str) -> None:
    actual, detail = FORMAT.diagnose(value)
    assert actual == reason
    assert words.lower() in detail.lower()


def test_a_good_record_is_read_whole() -> None:
    text = '{"name":"x","id":1,"unknown":[{}],"leg":{"to":"y"},"legs":[],"at":"2013-01-01T05:00:00.1234567+05:30"}'
    record = read_record(RECORD, text.encode())
    assert (record["id"], record["name"], record["legs"], record["real"]) == (1, "x", [], None)
    assert record["leg"] == {"to": "y", "minutes": None}
    assert record["at"].isoformat() == "2012-12-31T23:30:00.123456+00:00"
    assert "unknown" not in record


def test_the_last_of_two_fields_wins() -> None:
    assert read_record(RECORD, b'{"id":1,"id":2,"name":5,"name":"x"}')["id"] == 2
    assert FORMAT.diagnose(b'{"id":1,"name":"x","name":5}')[0] == "wrong_type"
    assert FORMAT.diagnose(b'{"id":1,"id":null}')[0] == "missing_field"


def never_fails(value: bytes) -> None:
    reason, detail = FORMAT.diagnose(value)
    assert reason in REASONS
    assert 0 < len(detail) <= MAX_DETAIL
    detail.encode("utf-8")


@given(st.binary(max_size=200))
def test_no_bytes_make_it_fail(value: bytes) -> None:
    never_fails(value)


@given(st.recursive(st.none() | st.booleans() | st.floats() | st.integers() | st.text(), st.lists, max_leaves=8))
def test_no_json_makes_it_fail(item: object) -> None:
    for name in RECORD.fieldNames():
        never_fails(json.dumps({"id": 1, name: item}).encode())
        never_fails(json.dumps({"id": 1, name: {"to": item, "minutes": item}}).encode())
        never_fails(json.dumps({"id": 1, name: [{"to": item, "minutes": item}]}).encode())


@pytest.mark.parametrize(
    "value",
    [
        b"[" * 1_000_000,
        b'{"a":' * 100_000,
        b'{"id":' + b"9" * 1_000_000 + b"}",
        b'{"' + b"k" * 1_000_000 + b'":1}',
        b'{"id":"' + b"\\ud800" * 100_000 + b'"}',
        b'{"name":"' + b"\\" * 1_000_001 + b'"}',
        b'"' * 1_000_000,
    ],
)
def test_large_and_deep_values_are_refused_in_few_words(value: bytes) -> None:
    never_fails(value)
    assert FORMAT.diagnose(value)[0] in ("malformed_json", "not_an_object", "trailing_data")


def test_a_fault_of_the_reading_itself_is_unreadable_and_no_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(schema: StructType, value: bytes | None) -> None:
        raise RecursionError("too deep")

    monkeypatch.setattr("streaming_jobs.formats.json.read_record", fail)
    assert FORMAT.diagnose(b"{}") == ("unreadable", "reading it again failed: RecursionError")


def test_long_names_and_types_are_cut() -> None:
    deep: DataType = IntegerType()
    for _ in range(40):
        deep = StructType([StructField("name" * 20, deep, nullable=False)])
    assert isinstance(deep, StructType)
    reason, detail = Json(deep).diagnose(json.dumps({"name" * 20: {"name" * 20: 5}}).encode())
    assert reason == "wrong_type"
    assert len(detail) <= MAX_DETAIL


@pytest.mark.parametrize(
    ("schema", "words"),
    [
        (StructType([]), "declares no field"),
        (StructType([StructField("a", LongType()), StructField("A", LongType())]), "'a'"),
        (StructType([StructField("a", BinaryType())]), "field 'a' is binary"),
        (StructType([StructField("a", VariantType())]), "field 'a' is variant"),
        (StructType([StructField("a", StringType("UNICODE"))]), "field 'a' is string collate UNICODE"),
        (
            StructType([StructField("a", ArrayType(MapType(StringType(), LongType())))]),
            "an element of field 'a' is map",
        ),
        (StructType([StructField("\x01", LongType())]), "reserved"),
    ],
)
def test_a_schema_without_a_strict_reading_is_refused(schema: StructType, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        Json(schema)


def test_it_travels_to_other_processes() -> None:
    assert pickle.loads(pickle.dumps(FORMAT)).diagnose(b"{}") == FORMAT.diagnose(b"{}")


def test_a_refusal_carries_reason_and_detail() -> None:
    with pytest.raises(Refused) as caught:
        read_record(RECORD, b"[]")
    assert (caught.value.reason, caught.value.detail) == ("not_an_object", "expected an object, found an array")
