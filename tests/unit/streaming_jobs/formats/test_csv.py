"""Separated values: what a record is, what each type accepts, and the same verdict at once and one by one."""

from __future__ import annotations

import pickle
import re
from datetime import UTC, date, datetime
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.types import BinaryType, StructField, StructType

from streaming_jobs import Csv, KafkaSink, KafkaTopic
from streaming_jobs.errors import UsageError
from streaming_jobs.formats.csv_records import _Judge

ORDER = {"id": "bigint not null", "note": "string", "at": "timestamp", "price": "decimal(5,2)", "paid": "boolean"}


def read(declared: Csv, *values: bytes | None) -> list[Any]:
    """The record of each value as a tuple, or the reason of its refusal."""
    block = declared.reader().read(values)
    rows = [tuple(row.values()) for row in block.columns.to_pylist()]
    return [block.refused[row].reason if row in block.refused else rows[row] for row in range(len(values))]


def test_a_record_is_one_line_with_a_field_for_each_column_in_order() -> None:
    at = datetime(2026, 1, 31, 5, 6, 7, tzinfo=UTC)
    assert read(Csv(ORDER), b"1,a b,2026-01-31T05:06:07Z,1.5,true", b"2,,,,FALSE\r\n", b"3,,,,\n") == [
        (1, "a b", at, Decimal("1.50"), True),
        (2, None, None, None, False),
        (3, None, None, None, None),
    ]
    assert read(Csv(ORDER, delimiter=";", null="\\N"), b"4;;\\N;\\N;\\N") == [(4, "", None, None, None)]
    assert read(Csv(ORDER, delimiter="¦"), "5¦é¦¦¦".encode()) == [(5, "é", None, None, None)]
    assert Csv(ORDER).reader(["note"]).read([b"1,x,,,", b"x,x,,,"]).columns.to_pydict() == {"note": ["x", None]}


def test_quotes_hold_delimiters_lines_and_themselves_and_tell_an_empty_text_from_null() -> None:
    texts = Csv({"a": "string", "b": "string"})
    assert read(texts, b'"x,""y""\r\nz",', b'"",""\n', b'a,"b"', b'"a",b') == [
        ('x,"y"\r\nz', None), ("", ""), ("a", "b"), ("a", "b"),
    ]  # fmt: skip
    assert read(Csv({"a": "string", "b": "string"}, quote=None), b'"a","b') == [('"a"', '"b')]
    assert read(Csv({"a": "string", "b": "string"}, quote="'"), b"'a,b',\"") == [("a,b", '"')]


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        (None, "empty_value"),
        (b"", "empty_value"),
        (b"\r\n", "empty_value"),
        (b"\xff,,,,", "invalid_utf8"),
        (b"1,a", "field_count"),
        (b"1,a,,,,", "field_count"),
        (b'1,"a,b",,', "field_count"),
        (b'1,"a,,,', "malformed_csv"),
        (b'1,"a"b,,,', "malformed_csv"),
        (b'1,a"b,,,', "malformed_csv"),
        (b"1,a\nb,,,", "malformed_csv"),
        (b'1,a\nb,"",,', "malformed_csv"),
        (b"1,a,,,\n\n", "malformed_csv"),
        (b",a,,,", "missing_field"),
        (b"1.0,,,,", "wrong_type"),
        (b" 1,,,,", "wrong_type"),
        (b"+1,,,,", "wrong_type"),
        (b"9223372036854775808,,,,", "wrong_type"),
        (b"1" * 5000 + b",,,,", "wrong_type"),
        (b"1,,2026-02-29T00:00:00,,", "wrong_type"),
        (b"1,,,1.234,", "wrong_type"),
        (b"1,,,null,", "wrong_type"),
        (b"1,,,,1", "wrong_type"),
    ],
)
def test_each_refusal_has_its_reason_and_the_records_beside_it_stay_good(value: bytes | None, reason: str) -> None:
    good = b"1,x,,,"
    assert read(Csv(ORDER), good, value, good) == [(1, "x", None, None, None), reason, (1, "x", None, None, None)]
    assert reason in Csv(ORDER).reasons


def test_a_record_that_is_short_by_what_the_next_one_has_too_much_moves_no_field_to_it() -> None:
    assert read(THREE, b"a,b", b"c,d,e,f", b"g,h,i") == ["field_count", "field_count", ("g", "h", "i")]


def test_numbers_are_those_of_the_declared_type() -> None:
    wide = {"b": "tinyint", "s": "smallint", "i": "int", "l": "bigint", "f": "float", "d": "double"}
    assert read(Csv(wide), b"-128,007,2147483647,-9223372036854775808,1.5,1e300") == [
        (-128, 7, 2147483647, -9223372036854775808, 1.5, 1e300)
    ]
    assert read(Csv({"d": "double"}), b".5", b"1.", b"-1E-2", b"nan", b"1e400", b"0x1", b"1_0") == [
        *((0.5,), (1.0,), (-0.01,)),
        *["wrong_type"] * 4,
    ]
    assert read(Csv({"f": "float"}), b"1e300") == read(Csv({"b": "tinyint"}), b"128") == ["wrong_type"]
    assert read(Csv({"d": "date"}), b"2024-02-29", b"2024-2-9") == [(date(2024, 2, 29),), "wrong_type"]


def test_a_declaration_that_cannot_hold_is_refused_and_a_good_one_travels() -> None:
    wrong: list[tuple[Any, dict[str, Any]]] = [
        ({"a": "array<int>"}, {}),
        (StructType([StructField("a", BinaryType())]), {}),
        ({"a": "int", "A": "int"}, {}),
        ({"a": "int"}, {"delimiter": ",,"}),
        ({"a": "int"}, {"delimiter": "\n"}),
        ({"a": "int"}, {"quote": ","}),
        ({"a": "int"}, {"null": 'a"b'}),
    ]
    for schema, options in wrong:
        with pytest.raises(UsageError, match="Csv"):
            Csv(schema, **options)
    there = pickle.loads(pickle.dumps(Csv(ORDER, delimiter=";")))
    assert there == Csv(ORDER, delimiter=";") != Csv(ORDER)
    assert there.read(b"1;x;;;")["note"] == "x"
    KafkaSink(KafkaTopic("orders", value=Csv(ORDER)))


# An independent reading of one record: a pattern for a field, anchored, as RFC 4180 draws it.

_FIELD = re.compile(r'(?:"((?:[^"]|"")*)"|([^",\r\n]*))(,|\Z)')


def by_pattern(text: str) -> list[str | None] | None:
    """The fields; None for a record that is refused."""
    line = re.sub(r"\r?\n\Z", "", text)
    fields: list[str | None] = []
    at = 0
    while line and (found := _FIELD.match(line, at)):
        quoted, plain, after = found.groups()
        fields.append(quoted.replace('""', '"') if quoted is not None else plain or None)
        if not after:
            return fields if found.end() == len(line) and len(fields) == 3 else None
        at = found.end()
    return None


_TEXTS = st.text(st.sampled_from('a",\n\rß'), max_size=12) | st.text(max_size=8)
THREE = Csv(dict.fromkeys("abc", "string"))


@given(st.lists(_TEXTS, max_size=6))
def test_a_block_is_read_as_each_record_alone_and_as_another_reading_has_it(texts: list[str]) -> None:
    values = [text.encode(errors="surrogatepass") for text in texts]
    together = read(THREE, *values)
    assert together == [read(THREE, value)[0] for value in values]
    for text, found in zip(texts, together, strict=True):
        if isinstance(found, tuple):
            assert list(found) == by_pattern(text)
        elif found not in ("invalid_utf8",):
            assert by_pattern(text) is None, (text, found)


@given(st.lists(st.tuples(*[st.text(st.characters(exclude_characters='",\r\n'), max_size=5)] * 3), min_size=1))
def test_a_block_of_plain_records_is_split_at_once_and_alike(rows: list[tuple[str, ...]]) -> None:
    texts = [",".join(row) for row in rows]
    judge = _Judge(THREE)
    at_once = judge.at_once(texts)
    assert at_once is not None
    assert [*zip(*at_once, strict=True)] == [tuple(judge.split(text) or ()) for text in texts]


_ROWS = st.fixed_dictionaries(
    {
        "id": st.integers(-(2**63), 2**63 - 1),
        "note": st.none() | _TEXTS.filter(lambda text: not any("\ud800" <= sign <= "\udfff" for sign in text)),
        "at": st.none() | st.datetimes(timezones=st.just(UTC)),
        "price": st.none() | st.integers(-99999, 99999).map(lambda number: Decimal(number).scaleb(-2)),
        "paid": st.none() | st.booleans(),
    }
)


@pytest.mark.parametrize("options", [{}, {"null": "a", "delimiter": ";"}, {"quote": None}])
@given(st.data())
def test_what_is_written_is_read_back_equal_or_refused(options: dict[str, Any], data: st.DataObject) -> None:
    declared = Csv(ORDER, **options)
    rows = data.draw(st.lists(_ROWS, max_size=5))
    batch = pa.RecordBatch.from_pylist(rows, schema=to_arrow_schema(declared.schema, timezone="UTC"))
    written = declared.writer().write(batch)
    back = declared.reader().read(written.values)
    for row, content in enumerate(back.columns.to_pylist()):
        if row in written.refused:
            assert written.refused[row].reason == "needs_quotes" and declared.quote is None
        else:
            assert content == rows[row]


def test_a_row_that_no_line_can_hold_is_refused() -> None:
    one = Csv({"a": "string"})
    rows = pa.RecordBatch.from_pydict({"a": pa.array([None, "", "x"])})
    written = one.writer().write(rows)
    assert written.values == [None, b'""', b"x"] and written.refused[0].reason == "empty_value"
    required = Csv({"a": "string not null", "b": "double"})
    rows = pa.RecordBatch.from_pydict({"a": ["x", None, "x"], "b": [float("nan"), 1.0, 1.0]})
    refused = required.writer().write(rows).refused
    assert {row: refusal.reason for row, refusal in refused.items()} == {0: "not_finite", 1: "missing_field"}
