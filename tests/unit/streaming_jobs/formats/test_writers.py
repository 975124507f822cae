"""What a topic's format writes, its own reader reads back equal; what it could not read back is refused."""

from __future__ import annotations

from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from typing import Any

import msgspec
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pyspark.sql.pandas.types import to_arrow_type
from pyspark.sql.types import (
    ArrayType,
    BinaryType,
    BooleanType,
    ByteType,
    DataType,
    DateType,
    DecimalType,
    DoubleType,
    FloatType,
    IntegerType,
    LongType,
    ShortType,
    StringType,
    StructField,
    StructType,
    TimestampNTZType,
    TimestampType,
)

from streaming_jobs import Json, Raw, Text
from streaming_jobs.formats.json_records import INTEGER_BITS
from tests.support.json_corpus import RICH

pytestmark = pytest.mark.slow

_TEXT = st.text(st.characters(exclude_categories=("Cs",)), max_size=8)


def values(kind: DataType) -> st.SearchStrategy[Any]:
    """Values of a type, as Python has them."""
    if isinstance(kind, StructType):
        fields = {f.name: values(f.dataType) if not f.nullable else st.none() | values(f.dataType) for f in kind.fields}
        return st.fixed_dictionaries(fields)
    if isinstance(kind, ArrayType):
        inner = values(kind.elementType)
        return st.lists(st.none() | inner if kind.containsNull else inner, max_size=3)
    if isinstance(kind, DecimalType):
        most = 10**kind.precision - 1
        scale = kind.scale
        return st.integers(-most, most).map(lambda n: Decimal(n).scaleb(-scale))
    for types, strategy in _LEAVES:
        if isinstance(kind, types):
            return strategy
    bits = INTEGER_BITS[type(kind)]
    return st.integers(-(1 << bits - 1), (1 << bits - 1) - 1)


_NAIVE = st.datetimes()
_LEAVES: tuple[tuple[type[DataType], st.SearchStrategy[Any]], ...] = (
    (StringType, _TEXT),
    (BooleanType, st.booleans()),
    (DoubleType, st.floats(allow_nan=False, allow_infinity=False)),
    (FloatType, st.floats(allow_nan=False, allow_infinity=False, width=32)),
    (DateType, st.dates()),
    (TimestampNTZType, _NAIVE),
    (TimestampType, _NAIVE.map(lambda naive: naive.replace(tzinfo=UTC))),
)


def batch(schema: StructType, rows: list[Any]) -> pa.RecordBatch:
    """Rows as Spark's toArrow gives them."""
    columns = {
        field.name: pa.array([row[field.name] for row in rows], to_arrow_type(field.dataType, timezone="UTC"))
        for field in schema.fields
    }
    return pa.RecordBatch.from_pydict(columns)


@settings(max_examples=100, deadline=None)
@given(st.lists(values(RICH), min_size=1, max_size=5))
def test_rows_of_every_type_come_back_as_they_were(rows: list[Any]) -> None:
    declared = Json(RICH)
    written = declared.writer().write(batch(RICH, rows))
    assert written.refused == {}
    block = declared.reader().read(written.values)
    assert dict(block.refused) == {}
    assert block.columns.to_pylist() == rows


def test_a_record_reads_as_people_write_it() -> None:
    schema = StructType(
        [
            StructField("id", LongType(), nullable=False),
            StructField("price", DecimalType(12, 10)),
            StructField("at", TimestampType()),
            StructField("local", TimestampNTZType()),
            StructField("day", DateType()),
            StructField("note", StringType()),
        ]
    )
    at = datetime(2013, 1, 31, 5, 6, 7, 1, UTC)
    rows = [
        {"id": 1, "price": Decimal("1E-10"), "at": at, "local": at.replace(tzinfo=None), "day": date(1, 1, 1)}
        | {"note": None}
    ]
    (value,) = Json(schema).writer().write(batch(schema, rows)).values
    assert value == (
        b'{"id":1,"price":0.0000000001,"at":"2013-01-31T05:06:07.000001Z","local":"2013-01-31T05:06:07.000001",'
        b'"day":"0001-01-01","note":null}'
    )


INNER = StructType([StructField("x", IntegerType(), nullable=False)])
NESTED = StructType(
    [
        StructField("id", ShortType(), nullable=False),
        StructField("inner", INNER),
        StructField("xs", ArrayType(INNER, containsNull=False)),
        StructField("real", DoubleType()),
        StructField("at", TimestampType()),
        StructField("day", DateType()),
        StructField("small", ByteType()),
    ]
)
FINE = {"id": 1, "inner": {"x": 1}, "xs": [{"x": 1}], "real": 1.5, "at": None, "day": None, "small": 1}
FAR = timedelta(days=200_000 * 365) // timedelta(microseconds=1)


@pytest.mark.parametrize(
    ("change", "reason", "place"),
    [
        ({"id": None}, "missing_field", "id"),
        ({"inner": {"x": None}}, "missing_field", "inner.x"),
        ({"xs": [{"x": 1}, {"x": None}]}, "missing_field", "xs[].x"),
        ({"xs": [None]}, "missing_field", "xs holds a null"),
        ({"real": float("nan")}, "not_finite", "real"),
        ({"real": float("-inf")}, "not_finite", "real"),
        ({"at": FAR}, "time_out_of_range", "at"),
        ({"at": -FAR}, "time_out_of_range", "at"),
        ({"day": 3_000_000}, "time_out_of_range", "day"),
    ],
)
def test_a_row_that_could_not_be_read_back_is_refused_and_its_neighbours_are_written(
    change: dict[str, Any], reason: str, place: str
) -> None:
    written = Json(NESTED).writer().write(batch(NESTED, [FINE, {**FINE, **change}, FINE]))
    assert set(written.refused) == {1}
    assert written.refused[1].reason == reason
    assert place in written.refused[1].detail
    assert written.values[1] is None
    assert dict(Json(NESTED).reader().read([written.values[0], written.values[2]]).refused) == {}


def test_a_null_struct_and_a_null_list_hide_nothing_of_their_neighbours() -> None:
    rows = [{**FINE, "inner": None, "xs": None}, {**FINE, "xs": []}, FINE]
    written = Json(NESTED).writer().write(batch(NESTED, rows))
    assert [msgspec.json.decode(value or b"null") for value in written.values] == rows


def test_a_text_that_is_not_utf8_is_refused_in_json_and_in_text() -> None:
    schema = StructType([StructField("value", StringType())])
    broken = pa.RecordBatch.from_pydict(
        {
            "value": pa.StringArray.from_buffers(
                2, pa.array([0, 1, 3], pa.int32()).buffers()[1], pa.py_buffer(b"a\xff\xfe")
            )
        }
    )
    for declared in (Json(schema), Text()):
        written = declared.writer().write(broken)
        assert {index: refusal.reason for index, refusal in written.refused.items()} == {1: "not_utf8"}
        assert written.values[0] is not None and written.values[1] is None


def test_bytes_and_text_are_written_as_they_are_and_null_is_refused() -> None:
    given_bytes = [b"\x00\xff", b"", None]
    written = (
        Raw()
        .writer()
        .write(batch(StructType([StructField("value", BinaryType())]), [{"value": v} for v in given_bytes]))
    )
    assert (list(written.values), set(written.refused)) == (given_bytes, {2})
    written = (
        Text()
        .writer()
        .write(batch(StructType([StructField("value", StringType())]), [{"value": "é"}, {"value": None}]))
    )
    assert (list(written.values), set(written.refused)) == (["é".encode(), None], {1})


@settings(max_examples=100, deadline=None)
@given(st.lists(values(RICH), min_size=1, max_size=8), st.data())
def test_a_slice_of_rows_is_written_as_the_rows_alone(rows: list[Any], data: st.DataObject) -> None:
    begin = data.draw(st.integers(0, len(rows) - 1))
    writer = Json(RICH).writer()
    whole = writer.write(batch(RICH, rows)).values
    assert writer.write(batch(RICH, rows).slice(begin)).values == whole[begin:]
    assert [writer.write(batch(RICH, [row])).values[0] for row in rows] == whole


@pytest.mark.parametrize(
    "text", ['a "quoted" one', "back\\slash", "line\nbreak", "\x00", "\x1f", "\x7f", "ü\u2028€𝄞", ""]
)
def test_texts_that_need_escapes_are_written_beside_those_that_do_not(text: str) -> None:
    schema = StructType([StructField("a", StringType()), StructField("b", StringType())])
    rows = [{"a": "plain", "b": text}, {"a": text, "b": None}, {"a": None, "b": "plain"}]
    for part in (rows, rows[:1], rows[2:]):
        written = Json(schema).writer().write(batch(schema, part))
        assert [*map(msgspec.json.decode, written.values)] == part  # type: ignore[arg-type]
        assert written.values == [msgspec.json.encode(row) for row in part]
