"""Values that are taken as they are, and the contract that all formats keep."""

from __future__ import annotations

import pickle

import pyarrow as pa
import pytest
from pyspark.sql.pandas.types import to_arrow_schema

from streaming_jobs.declare.format import MAX_DETAIL, Format, Refusal
from streaming_jobs.errors import UsageError
from streaming_jobs.formats import Avro, CloudEvents, Csv, Json, Raw, Text
from tests.support.json_corpus import RICH

AVRO = {"type": "record", "name": "R", "fields": [{"name": "id", "type": "long"}, {"name": "name", "type": "string"}]}
SHORT = {"id": "bigint", "name": "string"}
FORMATS: list[Format] = [
    Json(RICH),
    Raw(),
    Text(),
    Avro(AVRO, ids="none"),
    Csv(SHORT),
    CloudEvents(SHORT, attributes=["id", "time"]),
]
VALUES = [b"text", b"", None, b"\xff\xfe", "größer 😀".encode(), b"\xed\xa0\x80", b'{"id":1,"name":"x"}']


@pytest.mark.parametrize("declared", FORMATS, ids=["json", "raw", "text", "avro", "csv", "cloud-events"])
def test_every_format_keeps_the_contract(declared: Format) -> None:
    there = pickle.loads(pickle.dumps(declared))
    assert there == declared
    block = there.reader().read(VALUES)
    assert block.columns.num_rows == len(VALUES)
    fields = [field.with_nullable(True) for field in to_arrow_schema(there.schema, timezone="UTC")]
    assert block.columns.schema.names == [field.name for field in fields]
    for name, kind in zip(block.columns.schema.names, block.columns.schema.types, strict=True):
        if not pa.types.is_nested(kind):
            assert kind == next(field.type for field in fields if field.name == name)
    assert {refusal.reason for refusal in block.refused.values()} <= declared.reasons
    assert block.refused[2].reason == "empty_value"
    for index in block.refused:
        assert all(block.columns.column(name)[index].as_py() is None for name in block.columns.schema.names)
    assert there.reader([]).read(VALUES).columns.num_rows == len(VALUES)
    assert there.reader([]).read(VALUES).refused == block.refused
    assert there.reader().read([]).columns.num_rows == 0
    with pytest.raises(UsageError, match="'other' is not a field"):
        there.reader(["other"])


def test_bytes_are_taken_unchanged() -> None:
    block = Raw().reader().read(VALUES)
    assert block.columns.column("value").to_pylist() == VALUES
    assert block.columns.schema.field("value").type == pa.binary()
    assert block.refused == {2: Refusal("empty_value", "the value is null")}


def test_text_is_utf8_or_refused() -> None:
    block = Text().reader().read(VALUES)
    assert block.columns.column("value").to_pylist() == [
        "text",
        "",
        None,
        None,
        "größer 😀",
        None,
        '{"id":1,"name":"x"}',
    ]
    assert block.refused == {
        2: Refusal("empty_value", "the value is null"),
        3: Refusal("invalid_utf8", "byte 0xff at byte 0 is not UTF-8"),
        5: Refusal("invalid_utf8", "byte 0xed at byte 0 is not UTF-8"),
    }
    assert Text().reader().read([b"a\xe2\x82", b"\xac"]).refused.keys() == {0, 1}, "half a character each"


def test_a_long_detail_is_cut() -> None:
    assert len(Refusal("wrong_type", "x" * MAX_DETAIL).detail) == MAX_DETAIL
    assert Refusal("wrong_type", "x" * 1000).detail == "x" * (MAX_DETAIL - 3) + "..."
