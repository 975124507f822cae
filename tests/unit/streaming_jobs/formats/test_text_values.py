"""Dates, times, decimals and single floats are read by column: exactly, or refused with the place in the record."""

from __future__ import annotations

from datetime import UTC, date, datetime
from decimal import Decimal
from typing import Any

import pytest
from pyspark.sql.types import (
    ArrayType,
    ByteType,
    DataType,
    DateType,
    DecimalType,
    FloatType,
    LongType,
    StructField,
    StructType,
    TimestampNTZType,
    TimestampType,
)

from streaming_jobs.declare.format import Block, Refusal
from streaming_jobs.formats import Json


def read(kind: DataType, *texts: str, nullable: bool = True) -> Block:
    """The block of records that hold these texts as their field `x`."""
    schema = StructType([StructField("x", kind, nullable)])
    return Json(schema).reader().read([f'{{"x":{text}}}'.encode() for text in texts])


def column(block: Block) -> list[Any]:
    values: list[Any] = block.columns.column("x").to_pylist()
    return values


def detail(kind: DataType, text: str, *, nullable: bool = True) -> str:
    """The detail of the refusal of one text."""
    return read(kind, text, nullable=nullable).refused[0].detail


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("2013-01-31T05:06:07", datetime(2013, 1, 31, 5, 6, 7)),
        ("2013-01-31T05:06:07Z", datetime(2013, 1, 31, 5, 6, 7)),
        ("2013-01-31T05:06:07.1", datetime(2013, 1, 31, 5, 6, 7, 100_000)),
        ("2013-01-31T05:06:07.123456", datetime(2013, 1, 31, 5, 6, 7, 123_456)),
        ("2013-01-31T05:06:07.123456789+05:30", datetime(2013, 1, 30, 23, 36, 7, 123_456)),
        ("2013-01-31T05:06:07-18:00", datetime(2013, 1, 31, 23, 6, 7)),
        ("2013-01-31T05:06:07+18:00", datetime(2013, 1, 30, 11, 6, 7)),
        ("2012-02-29T23:59:59.999999999Z", datetime(2012, 2, 29, 23, 59, 59, 999_999)),
        ("2000-02-29T00:00:00Z", datetime(2000, 2, 29)),
        ("0001-01-01T00:00:00Z", datetime(1, 1, 1)),
        ("9999-12-31T23:59:59.999999", datetime(9999, 12, 31, 23, 59, 59, 999_999)),
        ("1969-12-31T23:59:59.999999999Z", datetime(1969, 12, 31, 23, 59, 59, 999_999)),
    ],
)
def test_a_timestamp_is_its_moment_in_utc(text: str, expected: datetime) -> None:
    usual = '"2013-01-31T05:06:07Z"'
    assert column(read(TimestampType(), f'"{text}"')) == [expected.replace(tzinfo=UTC)]
    assert column(read(TimestampType(), usual, f'"{text}"', "null"))[1:] == [expected.replace(tzinfo=UTC), None]


@pytest.mark.parametrize(
    "text",
    [
        "2013-02-29T00:00:00Z",
        "1900-02-29T00:00:00Z",
        "2013-04-31T00:00:00Z",
        "2013-00-01T00:00:00Z",
        "2013-01-01T24:00:00Z",
        "2013-01-01T00:60:00Z",
        "2013-01-01T00:00:60Z",
        "2013-01-01T00:00:00+18:01",
        "2013-01-01T00:00:00+17:60",
        "2013-01-01T00:00:00+0530",
        "2013-01-01T00:00:00.Z",
        "2013-01-01T00:00:00.1234567890Z",
        "2013-01-01 00:00:00Z",
        "2013-01-01T00:00Z",
        "2013-01-01",
        "2013-01-01T00:00:00z",
        "0000-12-31T23:59:59Z",
        "0000-12-31T23:59:59-01:00",
        "0001-01-01T00:00:00+00:01",
        "9999-12-31T23:59:59-00:01",
        " 2013-01-01T00:00:00Z",
        "2013-01-01T00:00:00Z ",
        "2013-01-01T00:00:00Z\\n",
        "2013-01-01T00:00:00Z\\n2013-01-01T00:00:00Z",
        "\uff12013-01-01T00:00:00Z",
        "",
    ],
)
def test_other_text_is_no_timestamp(text: str) -> None:
    block = read(TimestampType(), '"2013-01-01T00:00:00Z"', f'"{text}"')
    assert list(block.refused) == [1]
    assert block.refused[1].reason == "wrong_type"
    assert block.refused[1].detail.startswith("Expected `timestamp`, got '")
    assert block.refused[1].detail.isascii()


def test_a_local_time_has_no_zone_and_a_date_no_time() -> None:
    local = read(TimestampNTZType(), '"2013-01-31T05:06:07.1234567"', '"2013-01-31T05:06:07Z"')
    assert column(local) == [datetime(2013, 1, 31, 5, 6, 7, 123_456), None]
    assert local.refused[1].detail == "Expected `timestamp_ntz`, got '2013-01-31T05:06:07Z' - at `$.x`"
    days = read(DateType(), '"0001-01-01"', '"9999-12-31"', '"0000-12-31"', '"2013-1-1"')
    assert column(days) == [date.min, date.max, None, None]
    assert sorted(days.refused) == [2, 3]


@pytest.mark.parametrize(
    ("kind", "text", "good"),
    [
        (DecimalType(5, 2), "1.5", True),
        (DecimalType(5, 2), "-999.99", True),
        (DecimalType(5, 2), "1.5000", True),
        (DecimalType(5, 2), "1.505", False),
        (DecimalType(5, 2), "1000", False),
        (DecimalType(5, 2), "1e2", False),
        (DecimalType(5, 2), '"1.5"', False),
        (DecimalType(5, 2), "true", False),
        (DecimalType(5, 2), "[1.5]", False),
        (DecimalType(5, 2), "1." + "0" * 37, True),
        (DecimalType(5, 2), "1." + "0" * 38, False),
        (DecimalType(5, 2), "0." + "0" * 38, True),
        (DecimalType(5, 2), "0." + "0" * 39, False),
        (DecimalType(2, 2), "0.25", True),
        (DecimalType(2, 2), "1.25", False),
        (DecimalType(3, 0), "-0.0", True),
        (DecimalType(38, 0), "9" * 38, True),
        (DecimalType(38, 0), "9" * 39, False),
        (DecimalType(38, 38), "0." + "9" * 38, True),
        (DecimalType(38, 2), "9" * 36 + ".000", False),
    ],
)
def test_a_decimal_is_held_exactly_or_refused(kind: DecimalType, text: str, good: bool) -> None:
    block = read(kind, "0", text, "null")
    assert list(block.refused) == ([] if good else [1])
    assert column(block) == [0, Decimal(text) if good else None, None]
    if not good:
        assert block.refused[1].detail.startswith(f"Expected `decimal({kind.precision},{kind.scale})`, got ")


def test_a_required_decimal_may_not_be_null_and_a_float_not_overflow() -> None:
    block = read(DecimalType(5, 2), "null", "1", nullable=False)
    assert block.refused == {0: Refusal("missing_field", "Expected `decimal(5,2)`, got `null` - at `$.x`")}
    assert Json(StructType([StructField("x", DecimalType(5, 2), False)])).diagnose(b"{}")[0] == "missing_field"
    block = read(FloatType(), "3.4e38", "3.5e38", "-1e39", "1e-400")
    assert block.refused == {i: Refusal("wrong_type", "Number out of range - at `$.x`") for i in (1, 2)}
    assert column(block)[3] == 0


def test_the_words_name_the_place_at_any_depth() -> None:
    leg = StructType([StructField("at", TimestampType()), StructField("cost", DecimalType(3, 1), nullable=False)])
    kind = StructType([StructField("legs", ArrayType(ArrayType(leg)))])
    bad = '{"legs":[[],null,[{"cost":1},{"at":"noon","cost":1}]]}'
    worse = '{"legs":[[{"cost":null}]]}'
    good = '{"legs":[[null],[],null,[{"at":"2013-01-01T00:00:00","cost":1.5}]]}'
    block = read(kind, "null", '{"legs":null}', bad, good, worse)
    assert block.refused == {
        2: Refusal("wrong_type", "Expected `timestamp`, got 'noon' - at `$.x.legs[2][1].at`"),
        4: Refusal("missing_field", "Expected `decimal(3,1)`, got `null` - at `$.x.legs[0][0].cost`"),
    }
    last = {"at": datetime(2013, 1, 1, tzinfo=UTC), "cost": Decimal("1.5")}
    assert column(block) == [None, {"legs": None}, None, {"legs": [[None], [], None, [last]]}, None]


@pytest.mark.parametrize("kind", [TimestampType(), DecimalType(3, 1), DateType(), LongType()])
def test_a_null_in_an_array_that_holds_none_is_a_missing_field(kind: DataType) -> None:
    block = read(ArrayType(kind, containsNull=False), "[]", "[null]")
    assert {index: refusal.reason for index, refusal in block.refused.items()} == {1: "missing_field"}
    assert "$.x[0]" in block.refused[1].detail
    assert column(read(ArrayType(kind), "[null]")) == [[None]]


def test_what_was_found_is_shown_shortly_and_in_ascii() -> None:
    assert detail(DateType(), '"' + "é" * 500 + '"') == "Expected `date`, got '" + "\\xe9" * 40 + "'... - at `$.x`"
    assert detail(DecimalType(3, 1), '{"a":[1,2]}') == "Expected `decimal(3,1)`, got '{\"a\":[1,2]}' - at `$.x`"
    assert detail(ByteType(), "128") == "Expected `int` <= 127 - at `$.x`"
