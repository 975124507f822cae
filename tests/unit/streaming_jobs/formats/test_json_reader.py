"""A block of JSON records becomes the columns that were asked for, and every record is checked whole."""

from __future__ import annotations

import pickle
from datetime import UTC, date, datetime
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql.pandas.types import to_arrow_schema
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

from streaming_jobs.errors import UsageError
from streaming_jobs.formats import Json
from streaming_jobs.formats.base import Block, Refusal
from tests.support.json_corpus import FLAT, RICH


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


def nullable_everywhere(kind: DataType) -> DataType:
    if isinstance(kind, StructType):
        return StructType([StructField(f.name, nullable_everywhere(f.dataType)) for f in kind.fields])
    return ArrayType(nullable_everywhere(kind.elementType)) if isinstance(kind, ArrayType) else kind


@pytest.mark.parametrize("values", [[], [b'{"id":1,"name":"x"}'], [b"junk", None]], ids=["none", "good", "bad"])
def test_the_columns_have_the_types_of_spark_and_are_nullable_at_every_depth(values: list[bytes | None]) -> None:
    expected = nullable_everywhere(RICH)
    assert isinstance(expected, StructType)
    block = Json(RICH).reader().read(values)
    assert block.columns.schema == to_arrow_schema(expected, timezone="UTC")
    assert block.columns.num_rows == len(values)


def test_only_the_fields_asked_for_are_built_and_in_the_order_of_the_schema() -> None:
    values = [b'{"id":1,"name":"x","at":"2013-01-01T00:00:00"}', b'{"id":2,"name":"y"}']
    block = Json(FLAT).reader(["at", "id"]).read(values)
    assert block.columns.schema.names == ["id", "at"]
    assert block.columns.column("id").to_pylist() == [1, 2]
    empty = Json(FLAT).reader([]).read(values)
    assert (empty.columns.num_columns, empty.columns.num_rows) == (0, 2)


@pytest.mark.parametrize("field", ['"whole":"5"', '"at":"today"', '"real":1e400', '"ok":1'])
@pytest.mark.parametrize("fields", [None, ["id"], []], ids=["all", "one", "none"])
def test_a_verdict_does_not_depend_on_the_fields_asked_for(fields: list[str] | None, field: str) -> None:
    values = [b'{"id":1,"name":"x"}', f'{{"id":2,"name":"x",{field}}}'.encode(), b'{"id":3,"name":"x"}']
    block = Json(FLAT).reader(fields).read(values)
    assert list(block.refused) == [1]
    assert block.columns.num_rows == 3
    if fields != []:
        assert block.columns.column("id").to_pylist() == [1, None, 3]


def test_a_field_that_is_not_there_cannot_be_asked_for() -> None:
    with pytest.raises(UsageError, match="'nane' is not a field"):
        Json(FLAT).reader(["nane"])


def test_the_row_of_a_refused_value_is_null_in_every_column() -> None:
    good = b'{"id":1,"name":"x","tags":["a"],"place":{"city":"y"},"legs":[{"to":"z"}],"money":1.5}'
    late = good[:-1] + b',"day":"2013-02-29"}'
    early = good[:-1] + b',"ok":5}'
    unseen = good[:-1] + b',"other":"\xff"}'
    block = Json(RICH).reader().read([good, late, early, unseen, None, good])
    assert {index: refusal.reason for index, refusal in block.refused.items()} == {
        1: "wrong_type",
        2: "wrong_type",
        3: "invalid_utf8",
        4: "empty_value",
    }
    rows = block.columns.to_pylist()
    assert rows[0] == rows[5] and rows[0]["legs"] == [{"to": "z", "at": None, "cost": None}]
    assert all(item is None for row in rows[1:5] for item in row.values())


def test_a_format_travels_to_other_processes_after_it_was_used() -> None:
    declared = Json(RICH)
    assert declared.diagnose(b"{}")[0] == "missing_field"
    there = pickle.loads(pickle.dumps(declared))
    assert there == declared and there.diagnose(b"{}") == declared.diagnose(b"{}")


# Text that is read by column.


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


def test_a_required_decimal_may_not_be_null() -> None:
    block = read(DecimalType(5, 2), "null", "1", nullable=False)
    assert block.refused == {0: Refusal("missing_field", "Expected `decimal(5,2)`, got `null` - at `$.x`")}
    assert Json(StructType([StructField("x", DecimalType(5, 2), False)])).diagnose(b"{}")[0] == "missing_field"


def test_a_number_that_overflows_a_float_is_refused() -> None:
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


# Names and blocks.


@pytest.mark.parametrize("name", ["", " ", "a.b", "a`b", "ä", "😀", "self", "f0", "class", "\x7f", "$", "x" * 5000])
def test_a_field_may_have_any_printable_name(name: str) -> None:
    schema = StructType([StructField("f1", LongType()), StructField(name, LongType(), nullable=False)])
    declared = Json(schema)
    assert declared.read(f'{{"{name}":5}}'.encode()) == {"f1": None, name: 5}
    reason, words = declared.diagnose(b"{}")
    assert reason == "missing_field" and len(words) <= 400
    assert declared.diagnose(f'{{"{name}":null}}'.encode())[0] == "missing_field"
    assert declared.diagnose(f'{{"{name}":"x"}}'.encode())[0] == "wrong_type"


def test_a_name_may_be_written_with_escapes() -> None:
    schema = StructType([StructField("ä", LongType())])
    assert Json(schema).read(b'{"\\u00e4":5}') == {"ä": 5}


def test_faults_of_one_record_do_not_spread_to_its_neighbours() -> None:
    good = b'{"id":1,"name":"x"}'
    halves = [
        b'{"id":1,"name":"x\xe2\x82',
        b'\xac"}',
        b'{"id":1,"name":"\\ud83d',
        b'\\ude00"}',
        b'{"id":1',
        b',"name":"x"}',
    ]
    values = [item for half in halves for item in (good, half)] + [good]
    block = Json(FLAT).reader().read(values)
    assert sorted(block.refused) == list(range(1, 12, 2))


def test_records_with_backslashes_and_pairs_are_good() -> None:
    texts = ["\\\\ud83d", "\\ud83d\\ude00", "\\\\\\ud83d\\ude00", "\\\\\\\\uD800", "\\u00e4\\n\\\\"]
    values = [f'{{"id":1,"name":"x","other":"{text}"}}'.encode() for text in texts]
    assert Json(FLAT).reader().read(values).refused == {}


@pytest.mark.parametrize(
    "other", ['"\\ud83d"', '"\\ude00\\ud83d"', '"\\\\\\ud83d"', '{"\\ud83dx":1}', '"\\uD83D\\\\uDE00"']
)
def test_half_of_a_surrogate_pair_is_refused_where_nothing_is_declared(other: str) -> None:
    block = Json(FLAT).reader().read([b'{"id":1,"name":"x"}', f'{{"id":1,"name":"x","other":{other}}}'.encode()])
    assert {index: refusal.reason for index, refusal in block.refused.items()} == {1: "malformed_json"}


@pytest.mark.parametrize(("opening", "closing"), [("[", "]"), ('{"a":', "}"), ('{"[[":', "}")])
def test_a_record_is_at_most_200_deep(opening: str, closing: str) -> None:
    def deep(levels: int) -> bytes:
        text = "[{" * 300  # in a text brackets do not count
        return f'{{"id":1,"name":"{text}","z":{opening * (levels - 1)}1{closing * (levels - 1)}}}'.encode()

    block = Json(FLAT).reader().read([deep(200), deep(201)])
    assert list(block.refused) == [1]
    assert block.refused[1].reason == "malformed_json" and "deeper than 200" in block.refused[1].detail


def test_a_record_that_is_deeper_than_any_reader_goes_is_refused_as_that() -> None:
    values = [b'{"id":1,"name":"x","z":' + b"[" * 100_000, b'{"id":1,"name":"x"}']
    block = Json(FLAT).reader().read(values)
    assert {i: refusal.reason for i, refusal in block.refused.items()} == {0: "malformed_json"}
    assert "deeper than 200" in block.refused[0].detail


def test_a_wide_record_is_not_a_deep_one() -> None:
    value = b'{"id":1,"name":"x","z":[' + b",".join([b'{"a":[{}]}'] * 5000) + b"]}"
    assert Json(FLAT).reader().read([value]).refused == {}


def test_numbers_and_names_may_be_long_where_nothing_is_declared() -> None:
    value = b'{"id":1,"name":"x","' + b"k" * 100_000 + b'":' + b"9" * 100_000 + b',"\\u0001":true}'
    assert Json(FLAT).reader().read([value]).refused == {}


def test_a_block_may_hold_bad_records_only_and_many_of_them() -> None:
    values = [b'{"id":1,"name":"x","at":"noon"}', b"{", b"", None, b'{"id":1,"name":"\xff"}'] * 2000
    block = Json(FLAT).reader().read(values)
    assert len(block.refused) == block.columns.num_rows == 10_000
    assert block.columns.column("id").null_count == 10_000


def test_a_batch_of_the_columns_goes_through_arrow_unchanged() -> None:
    """Also where rows were taken out again: the arrays are valid to the last bit."""
    values = [
        b'{"id":1,"name":"x","legs":[{"to":"y","at":"noon"}]}',
        b'{"id":2,"name":"z","legs":[{"to":"y"}],"tags":[]}',
    ]
    batch = Json(RICH).reader().read(values).columns
    batch.validate(full=True)
    assert pa.Table.from_batches([batch]).num_rows == 2
