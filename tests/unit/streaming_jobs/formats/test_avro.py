"""Avro: which columns a schema has, how schemas evolve, the verdict on each kind of record, and what is written."""

from __future__ import annotations

import io
import json
import pickle
import re
from collections.abc import Mapping, Sequence
from datetime import UTC, date, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import fastavro
import pyarrow as pa
import pytest

from streaming_jobs import Avro, KafkaSink, KafkaTopic
from streaming_jobs.declare.format import Block, Refusal, RegisteredSchema
from streaming_jobs.declare.schemas import arrow_struct
from streaming_jobs.errors import UsageError
from streaming_jobs.formats.framing import ID_HEADER, IdFrame
from streaming_jobs.sources.record_blocks import HEADERS_ARROW

RICH = {
    "type": "record",
    "name": "Order",
    "namespace": "shop",
    "fields": [
        {"name": "id", "type": "long"},
        {"name": "name", "type": "string"},
        {"name": "note", "type": ["null", "string"], "default": None},
        {"name": "price", "type": {"type": "bytes", "logicalType": "decimal", "precision": 10, "scale": 2}},
        {"name": "at", "type": {"type": "long", "logicalType": "timestamp-millis"}},
        {"name": "day", "type": {"type": "int", "logicalType": "date"}},
        {"name": "local", "type": {"type": "long", "logicalType": "local-timestamp-micros"}},
        {"name": "state", "type": {"type": "enum", "name": "State", "symbols": ["NEW", "PAID"]}},
        {"name": "hash", "type": {"type": "fixed", "name": "Hash", "size": 4}},
        {"name": "legs", "type": {"type": "array", "items": {"type": "record", "name": "Leg", "fields": [
            {"name": "minutes", "type": ["int", "null"]}]}}},
        {"name": "tags", "type": {"type": "map", "values": "double"}},
    ],
}  # fmt: skip
ROW = {
    "id": 1,
    "name": "größer",
    "note": None,
    "price": Decimal("-12.30"),
    "at": datetime(2026, 1, 2, 3, 4, 5, 6000, UTC),
    "day": date(2026, 1, 2),
    "local": datetime(2026, 1, 2, 3, 4, 5, 6),
    "state": "PAID",
    "hash": b"abcd",
    "legs": [{"minutes": 5}, {"minutes": None}],
    "tags": [{"key": "a", "value": 1.5}],
}


class Known:
    """Schemas by id, 1 and up; others are unknown."""

    def __init__(self, *texts: Any) -> None:
        self.texts = [RegisteredSchema("AVRO", json.dumps(text)) for text in texts]
        self.written: list[tuple[str, RegisteredSchema]] = []

    def of(self, prefixes: Sequence[bytes]) -> Mapping[bytes, RegisteredSchema | Refusal]:
        known = {b"\0" + number.to_bytes(4, "big"): each for number, each in enumerate(self.texts, 1)}
        return {prefix: known.get(prefix, Refusal("unknown_schema", "nobody knows it")) for prefix in prefixes}

    def prefix(self, subject: str, schema: RegisteredSchema) -> bytes:
        self.written.append((subject, schema))
        return b"\0\0\0\0\1"


def record(*fields: Any, name: str = "Order") -> dict[str, Any]:
    pairs = [each if isinstance(each, dict) else {"name": each[0], "type": each[1]} for each in fields]
    return {"type": "record", "name": name, "fields": pairs}


def encoded(schema: Any, value: Any) -> bytes:
    file = io.BytesIO()
    fastavro.schemaless_writer(file, fastavro.parse_schema(schema), value)
    return file.getvalue()


def read(writer: Any, reader: Any, *values: Any) -> Block:
    """Records of a writer's schema, read by the reader's."""
    framed = [b"\0\0\0\0\1" + (each if isinstance(each, bytes) else encoded(writer, each)) for each in values]
    return Avro(reader).bound(Known(writer), "orders").reader().read(framed)


def test_every_type_becomes_a_column_and_comes_back_equal() -> None:
    value = {**ROW, "tags": {"a": 1.5}}
    block = read(RICH, RICH, value, {**value, "id": -5, "note": "x", "legs": [], "tags": {}})
    assert not block.refused
    first, second = block.columns.to_pylist()
    assert first == ROW and (second["id"], second["note"], second["legs"]) == (-5, "x", [])
    declared = Avro(RICH)
    assert block.columns.schema.types == [field.type for field in arrow_struct(declared.schema)]
    assert [field.name for field in declared.schema if field.nullable] == ["note"]
    writer = declared.bound(Known(RICH), "orders").writer()
    assert (
        declared.bound(Known(RICH), "orders").reader().read(writer.write(block.columns).values).columns == block.columns
    )


EVOLUTION: list[tuple[str, Any, Any, Any, Any]] = [
    ("a field that is not declared is skipped", record(("a", "long"), ("b", ["null", "string"])), record(("a", "long")),
     {"a": 1, "b": "x"}, {"a": 1}),
    ("a field that the writer lacks has its default", record(("a", "long")),
     record(("a", "long"), {"name": "b", "type": ["null", "string"], "default": None}), {"a": 1}, {"a": 1, "b": None}),
    ("fields are in another order", record(("a", "long"), ("b", "string")), record(("b", "string"), ("a", "long")),
     {"a": 1, "b": "x"}, {"b": "x", "a": 1}),
    ("int becomes double", record(("a", "int")), record(("a", "double")), {"a": 3}, {"a": 3.0}),
    ("a field gets a null", record(("a", "string")), record(("a", ["null", "string"])), {"a": "x"}, {"a": "x"}),
    ("a field loses its null", record(("a", ["null", "string"])), record(("a", "string")), {"a": "x"}, {"a": "x"}),
    ("a field has another name", record(("old", "long")), record({"name": "a", "type": "long", "aliases": ["old"]}),
     {"old": 4}, {"a": 4}),
    ("a symbol that is new has the default", record(("s", {"type": "enum", "name": "E", "symbols": ["A", "B"]})),
     record(("s", {"type": "enum", "name": "E", "symbols": ["A"], "default": "A"})), {"s": "B"}, {"s": "A"}),
    ("milliseconds become microseconds", record(("t", {"type": "long", "logicalType": "timestamp-millis"})),
     record(("t", {"type": "long", "logicalType": "timestamp-micros"})),
     {"t": datetime(2026, 1, 1, tzinfo=UTC)}, {"t": datetime(2026, 1, 1, tzinfo=UTC)}),
]  # fmt: skip


@pytest.mark.parametrize(
    ("writer", "reader", "value", "row"), [e[1:] for e in EVOLUTION], ids=[e[0] for e in EVOLUTION]
)
def test_records_of_other_versions_are_read(writer: Any, reader: Any, value: Any, row: Any) -> None:
    block = read(writer, reader, value)
    assert not block.refused and block.columns.to_pylist() == [row]


INCOMPATIBLE: list[tuple[str, Any, Any, str]] = [
    ("a required field is missing", record(("b", "long")), record(("a", "long")), "lacks the field.* at `\\$.a`"),
    ("another type", record(("a", "string")), record(("a", "long")), "has string, the declared one long - at `\\$.a`"),
    ("within a list", record(("a", {"type": "array", "items": "string"})),
     record(("a", {"type": "array", "items": "long"})), "at `\\$.a\\[\\]`"),
    ("another scale", record(("a", {"type": "bytes", "logicalType": "decimal", "precision": 9, "scale": 2})),
     record(("a", {"type": "bytes", "logicalType": "decimal", "precision": 9, "scale": 3})), "at `\\$.a`"),
    ("a zone on one side", record(("a", {"type": "long", "logicalType": "local-timestamp-millis"})),
     record(("a", {"type": "long", "logicalType": "timestamp-millis"})), "at `\\$.a`"),
    ("another record", record(("a", "long"), name="Other"), record(("a", "long")), "Other"),
    ("no record", "long", record(("a", "long")), "long"),
    ("no schema", {"type": "nothing"}, record(("a", "long")), "'nothing' is unknown"),
    ("a part of another type", {"type": "record", "name": "Order", "fields": 5}, record(("a", "long")), "a part of"),
]  # fmt: skip


@pytest.mark.parametrize(("writer", "reader", "words"), [e[1:] for e in INCOMPATIBLE], ids=[e[0] for e in INCOMPATIBLE])
def test_records_of_a_schema_that_does_not_fit_are_refused(writer: Any, reader: Any, words: str) -> None:
    block = read(writer, reader, b"\2\4", b"\2")
    assert {row: refusal.reason for row, refusal in block.refused.items()} == dict.fromkeys(
        (0, 1), "incompatible_schema"
    )
    assert re.search(words, block.refused[0].detail), block.refused[0].detail


def test_each_kind_of_bad_record_has_its_reason() -> None:
    schema = record(("id", "int"), ("name", "string"), ("x", ["null", "long", "string"]))
    declared = record(("id", "int"), ("name", "string"), ("x", ["null", "long"]))
    good = encoded(schema, {"id": 1, "name": "ab", "x": 5})
    bad = {
        "malformed": (good[:-1], b"\2\4a", b"\xff" * 20, good[:4] + b"\x09", b""),
        "trailing_data": (good + b"\0",),
        "invalid_utf8": (b"\2\4\xff\xfe\0",),
        "out_of_range": (b"\xfe\xff\xff\xff\x7f" + good[1:],),
        "wrong_type": (encoded(schema, {"id": 1, "name": "ab", "x": "text"}),),
    }
    for reason, values in bad.items():
        block = read(schema, declared, good, *values, good)
        assert {refusal.reason for refusal in block.refused.values()} == {reason}
        assert sorted(block.refused) == list(range(1, 1 + len(values)))
        rows = block.columns.to_pylist()
        assert rows[0] == rows[-1] == {"id": 1, "name": "ab", "x": 5} and rows[1] == dict.fromkeys(rows[0])
    assert read(schema, declared, good[:-1]).refused[0].detail.endswith("at `$.x`")


def test_the_first_bytes_name_the_schema_or_refuse_the_value() -> None:
    first, second = record(("a", "long")), record(("a", "long"), ("b", "string"))
    reader = Avro(first).bound(Known(first, second), "orders").reader()
    values = [b"\0\0\0\0\2\4\2x", b"\0\0\0\0\1\6", b"{}", b"\0\0", b"\0\0\0\0\x09\2", None, b"", b"\0\0\0\0\1"]
    block = reader.read(values)
    assert block.columns.column("a").to_pylist() == [2, 3, *[None] * 6]
    assert [block.refused[row].reason for row in range(2, 8)] == [
        *("not_framed", "not_framed", "unknown_schema", "empty_value", "empty_value", "malformed"),
    ]
    assert reader.read([]).columns.num_rows == 0 and Avro(first).bound(Known(), "o").reader([]).read(values).refused


def test_the_id_may_be_in_a_header() -> None:
    schema = record(("a", "long"))
    headers = pa.array(
        [[{"key": "x", "value": b"y"}, {"key": ID_HEADER, "value": b"\0\0\0\0\1"}], None, []], HEADERS_ARROW
    )
    values = IdFrame().block([b"\4", b"\0\0\0\0\1\6", None], headers)
    assert values == [b"\0\0\0\0\1\4", b"\0\0\0\0\1\6", None]
    bound = Avro(schema, ids="header").bound(Known(schema), "orders")
    assert bound.reader().read(values).columns.column("a").to_pylist() == [2, 3, None]
    writer = bound.writer()
    assert writer.write(pa.record_batch({"a": pa.array([2])})).values == [b"\4"]
    assert writer.headers == ((ID_HEADER, b"\0\0\0\0\1"),)


def test_a_row_that_could_not_be_read_back_is_not_written() -> None:
    symbol, two_bytes = {"type": "enum", "name": "E", "symbols": ["A"]}, {"type": "fixed", "name": "F", "size": 2}
    nanos = {"type": "long", "logicalType": "timestamp-nanos"}
    schema = record(("s", symbol), ("f", two_bytes), ("t", nanos), ("n", "string"))
    known = Known(schema)
    kinds = arrow_struct(Avro(schema).schema)
    good = {"s": "A", "f": b"xx", "t": datetime(2026, 1, 1, tzinfo=UTC), "n": "x"}
    far = {"t": datetime(9999, 1, 1, tzinfo=UTC)}
    rows = [good, {**good, "s": "B"}, {**good, "f": b"x"}, {**good, **far}, {**good, "n": None}]
    batch = pa.RecordBatch.from_struct_array(pa.array(rows, kinds))
    made = Avro(schema, subject="mine").bound(known, "orders").writer().write(batch)
    assert [made.refused[row].reason for row in range(1, 5)] == [
        *("unknown_symbol", "wrong_length", "time_out_of_range", "missing_field"),
    ]
    assert made.values[1:] == [None] * 4 and made.values[0] is not None
    assert known.written == [("mine", Avro(schema).registered)]
    Avro(schema).bound(known, "orders").writer()
    assert known.written[1][0] == "orders-value"


@pytest.mark.parametrize(
    ("schema", "words"),
    [
        ("{", "is not JSON"),
        (Path("/nowhere/order.avsc"), "No such file"),
        ({"type": "record", "name": "A"}, "without 'fields'"),
        ("\"long\"", "not a record"),
        (record(("a", ["null", "long", "string"])), "union of several types"),
        (record(("a", "null")), "always null"),
        (record(("a", "long"), ("A", "long")), "several fields named"),
        (record(("a", {"type": "bytes", "logicalType": "decimal", "precision": 39})), "39 digits"),
        (record(("next", ["null", "Order"])), "holds itself"),
        (record(), "has no field"),
    ],
)  # fmt: skip
def test_a_schema_that_no_columns_have_is_refused_when_it_is_declared(schema: Any, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        Avro(schema)


def test_a_record_that_holds_itself_may_be_skipped() -> None:
    tree = record(("left", ["null", "Tree"]), ("right", ["null", "Tree"]), name="Tree")
    writer = record(("tree", tree), ("a", "long"))
    one = {"left": {"left": None, "right": None}, "right": {"left": {"left": None, "right": None}, "right": None}}
    deep: Any = None
    for _ in range(150):
        deep = {"left": deep, "right": None}
    block = read(writer, record(("a", "long")), {"tree": one, "a": 7}, {"tree": deep, "a": 8})
    assert block.columns.to_pylist() == [{"a": 7}, {"a": None}] and "nested deeper" in block.refused[1].detail


def test_a_declaration_is_pickled_and_compared_by_its_schema(tmp_path: Path) -> None:
    (tmp_path / "order.avsc").write_text(json.dumps(RICH, indent=4))
    from_file = Avro(tmp_path / "order.avsc")
    assert from_file == Avro(RICH) == pickle.loads(pickle.dumps(from_file)) != Avro(RICH, ids="none")
    topic = KafkaTopic("orders", value=from_file, event_time="at", lateness="1 hour")
    known = Known(RICH)
    assert topic.bound(known).value.schema == from_file.schema
    assert KafkaSink(topic).bound(known).topic == topic.bound(known)
    with pytest.raises(UsageError, match="none is at hand"):
        from_file.reader()
    with pytest.raises(UsageError, match="ids='footer'"):
        Avro(RICH, ids="footer")  # type: ignore[arg-type]


def test_a_writers_schema_that_is_nested_without_end_refuses_its_records() -> None:
    text = '{"type":"array","items":' * 5_000 + '"long"' + "}" * 5_000
    known = Known()
    known.texts = [RegisteredSchema("AVRO", text)]
    block = Avro(record(("a", "long"))).bound(known, "orders").reader().read([b"\0\0\0\0\1\2"])
    assert block.refused[0].reason == "incompatible_schema" and "too deeply" in block.refused[0].detail
