"""The reading of JSON gives the exact reason and words of a refusal, and never fails."""

from __future__ import annotations

import json
import pickle

import pytest
from hypothesis import given, settings
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

from streaming_jobs.declare.format import MAX_DETAIL, Refused
from streaming_jobs.errors import UsageError
from streaming_jobs.formats import Json

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
    ("value", "reason", "detail"),
    [
        (None, "empty_value", "the value is null, empty or blank"),
        (b"", "empty_value", "the value is null, empty or blank"),
        (b" \r\n\t", "empty_value", "the value is null, empty or blank"),
        (b'{"id":1,"name":"a\xffb"}', "invalid_utf8", "byte 0xff at byte 17 is not UTF-8"),
        (b'{"id":1,"name":"\xed\xa0\x80"}', "invalid_utf8", "byte 0xed at byte 16 is not UTF-8"),
        (b'\xef\xbb\xbf{"id":1}', "malformed_json", "JSON is malformed: invalid character (byte 0)"),
        (b'{"id":1', "malformed_json", "Input data was truncated"),
        (b'{"id":1,}', "malformed_json", "JSON is malformed: trailing comma in object (byte 8)"),
        (b"{'id':1}", "malformed_json", "JSON is malformed: object keys must be strings (byte 1)"),
        (b'{"id":1,"real":NaN}', "malformed_json", "JSON is malformed: invalid character (byte 15)"),
        (b'{"id":1,"real":-Infinity}', "malformed_json", "JSON is malformed: invalid character (byte 16)"),
        (b'{"id":1,"name":"a\tb"}', "malformed_json", "JSON is malformed: invalid character (byte 17)"),
        (b'{"id":1,"name":"\\ud83d"}', "malformed_json", "JSON is malformed: an escape is half of a surrogate pair"),
        (b'{"id":1,"x":"\\\\\\ud83d"}', "malformed_json", "JSON is malformed: an escape is half of a surrogate pair"),
        (b'{"id":1,"name":"\\ud83d\\ude00', "malformed_json", "Input data was truncated"),
        (b'{"id":1,"name":"\\\\ud83d', "malformed_json", "Input data was truncated"),
        (
            b'{"id":1,"x":' + b"[" * 300 + b"]" * 300 + b"}",
            "malformed_json",
            "objects and arrays are nested deeper than 200",
        ),
        (b'{"id":1}{"id":2}', "trailing_data", "JSON is malformed: trailing characters (byte 9)"),
        (b'{"id":1},', "trailing_data", "JSON is malformed: trailing characters (byte 9)"),
        (b"null", "not_an_object", "Expected `object`, got `null`"),
        (b"[1]", "not_an_object", "Expected `object`, got `array`"),
        (b"true", "not_an_object", "Expected `object`, got `bool`"),
        (b"1.5", "not_an_object", "Expected `object`, got `float`"),
        (b'"x"', "not_an_object", "Expected `object`, got `str`"),
        (b"{}", "missing_field", "Object missing required field `id`"),
        (b'{"id":null}', "missing_field", "Expected `int`, got `null` - at `$.id`"),
        (one("leg", "{}"), "missing_field", "Object missing required field `to` - at `$.leg`"),
        (one("legs", "[null]"), "missing_field", "Expected `object`, got `null` - at `$.legs[0]`"),
        (one("legs", '[{"to":"x"},{"to":null}]'), "missing_field", "Expected `str`, got `null` - at `$.legs[1].to`"),
        (b'{"id":"1"}', "wrong_type", "Expected `int`, got `str` - at `$.id`"),
        (b'{"id":1.0}', "wrong_type", "Expected `int`, got `float` - at `$.id`"),
        (b'{"id":true}', "wrong_type", "Expected `int`, got `bool` - at `$.id`"),
        (b'{"id":9223372036854775808}', "wrong_type", "Expected `int` <= 9223372036854775807 - at `$.id`"),
        (one("name", "5"), "wrong_type", "Expected `str | null`, got `int` - at `$.name`"),
        (one("name", "{}"), "wrong_type", "Expected `str | null`, got `object` - at `$.name`"),
        (one("name", "[]"), "wrong_type", "Expected `str | null`, got `array` - at `$.name`"),
        (one("tiny", "200"), "wrong_type", "Expected `int` <= 127 - at `$.tiny`"),
        (one("real", '"NaN"'), "wrong_type", "Expected `float | null`, got `str` - at `$.real`"),
        (one("real", "1e400"), "wrong_type", "Number out of range - at `$.real`"),
        (one("single", "1e39"), "wrong_type", "Number out of range - at `$.single`"),
        (one("money", "1.005"), "wrong_type", "Expected `decimal(5,2)`, got '1.005' - at `$.money`"),
        (one("money", "1e2"), "wrong_type", "Expected `decimal(5,2)`, got '1e2' - at `$.money`"),
        (one("day", '"2013-02-29"'), "wrong_type", "Expected `date`, got '2013-02-29' - at `$.day`"),
        (one("at", "1357016767"), "wrong_type", "Expected `str | null`, got `int` - at `$.at`"),
        (one("at", '"2013-01-01"'), "wrong_type", "Expected `timestamp`, got '2013-01-01' - at `$.at`"),
        (
            one("at", '"2013-01-01T05:00:00+18:01"'),
            "wrong_type",
            "Expected `timestamp`, got '2013-01-01T05:00:00+18:01' - at `$.at`",
        ),
        (
            one("local", '"2013-01-01T05:00:00Z"'),
            "wrong_type",
            "Expected `timestamp_ntz`, got '2013-01-01T05:00:00Z' - at `$.local`",
        ),
        (one("leg", "[]"), "wrong_type", "Expected `object | null`, got `array` - at `$.leg`"),
        (one("leg", '{"to":"x","minutes":"5"}'), "wrong_type", "Expected `int | null`, got `str` - at `$.leg.minutes`"),
        (one("legs", '[{"to":7}]'), "wrong_type", "Expected `str`, got `int` - at `$.legs[0].to`"),
        (b'{"id":"x","id":1}', "wrong_type", "Expected `int`, got `str` - at `$.id`"),
    ],
)
def test_a_refusal_names_reason_place_and_what_was_found(value: bytes | None, reason: str, detail: str) -> None:
    assert FORMAT.diagnose(value) == (reason, detail)


def test_a_good_record_is_read_whole_and_has_no_reason_to_be_refused() -> None:
    text = '{"name":"x","id":1,"unknown":[{}],"leg":{"to":"y"},"legs":[],"at":"2013-01-01T05:00:00.1234567+05:30"}'
    record = FORMAT.read(text.encode())
    assert (record["id"], record["name"], record["legs"], record["real"]) == (1, "x", [], None)
    assert record["leg"] == {"to": "y", "minutes": None}
    assert record["at"].isoformat() == "2012-12-31T23:30:00.123456+00:00"
    assert "unknown" not in record
    assert FORMAT.diagnose(b'{"id":1}')[0] == "unreadable"


def test_the_last_of_two_fields_wins() -> None:
    assert FORMAT.read(b'{"id":1,"id":2,"name":"y","name":"x"}')["id"] == 2
    assert FORMAT.read(b'{"id":1,"at":"noon","at":"2013-01-01T00:00:00","money":"?","money":1.5}')["money"] == 1.5
    assert FORMAT.diagnose(b'{"id":1,"name":5,"name":"x"}')[0] == "wrong_type"
    assert FORMAT.diagnose(b'{"id":1,"name":"x","name":5}')[0] == "wrong_type"
    assert FORMAT.diagnose(b'{"id":1,"id":null}')[0] == "missing_field"


def never_fails(value: bytes) -> None:
    reason, detail = FORMAT.diagnose(value)
    assert reason in REASONS
    assert 0 < len(detail) <= MAX_DETAIL
    detail.encode("utf-8")


@settings(deadline=None)
@given(st.binary(max_size=200))
def test_no_bytes_make_it_fail(value: bytes) -> None:
    never_fails(value)


@settings(deadline=None)
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
    assert FORMAT.diagnose(value)[0] != "unreadable"


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
        (StructType([StructField("\x01", LongType())]), "field name '.x01'"),
        (StructType([StructField('a"b', LongType())]), "field name 'a\"b'"),
        (StructType([StructField("a\\b", LongType())]), "quotes, backslashes"),
        (
            StructType([StructField("a", StructType([StructField("\ud800", LongType())]))]),
            "field 'a' has the field name",
        ),
    ],
)
def test_a_schema_without_a_strict_reading_is_refused(schema: StructType, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        Json(schema)


def test_a_refusal_carries_reason_and_detail() -> None:
    with pytest.raises(Refused) as caught:
        FORMAT.read(b"[]")
    assert (caught.value.reason, caught.value.detail) == ("not_an_object", "Expected `object`, got `array`")
    there = pickle.loads(pickle.dumps(caught.value))
    assert (there.reason, there.detail) == (caught.value.reason, caught.value.detail)
