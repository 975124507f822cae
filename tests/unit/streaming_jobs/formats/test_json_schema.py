"""JSON Schema: the columns of a document, and records that are valid JSON, but not by the document."""

from __future__ import annotations

import json
import pickle
from collections.abc import Mapping, Sequence
from datetime import date
from pathlib import Path
from typing import Any

import pytest

from streaming_jobs import JsonSchema
from streaming_jobs.declare.format import Refusal, RegisteredSchema
from streaming_jobs.errors import UsageError
from streaming_jobs.platform.extras import MissingExtra

ORDER: dict[str, Any] = {
    "type": "object",
    "properties": {
        "id": {"type": "integer", "minimum": 1},
        "state": {"enum": ["NEW", "PAID"]},
        "note": {"type": ["string", "null"]},
        "day": {"type": "string", "format": "date"},
        "legs": {"type": "array", "items": {"type": "object", "properties": {"minutes": {"type": "number"}}}},
        "paid": {"oneOf": [{"type": "null"}, {"type": "boolean"}]},
    },
    "required": ["id", "note", "paid", "legs"],
}
GOOD: dict[str, Any] = {
    "id": 1,
    "state": "NEW",
    "note": None,
    "day": "2026-01-02",
    "legs": [{"minutes": 1.5}],
    "paid": True,
}


class Known:
    def __init__(self, kind: str = "JSON") -> None:
        self.schema = RegisteredSchema(kind, json.dumps(ORDER))

    def of(self, prefixes: Sequence[bytes]) -> Mapping[bytes, RegisteredSchema | Refusal]:
        return dict.fromkeys(prefixes, self.schema)

    def prefix(self, subject: str, schema: RegisteredSchema) -> bytes:
        return b"\0\0\0\0\3"


def framed(*records: Any) -> list[bytes]:
    return [b"\0\0\0\0\3" + json.dumps(record).encode() for record in records]


def test_the_columns_are_the_properties() -> None:
    declared = JsonSchema(ORDER)
    assert declared.schema.simpleString() == (
        "struct<id:bigint,state:string,note:string,day:date,legs:array<struct<minutes:double>>,paid:boolean>"
    )
    assert [field.name for field in declared.schema if not field.nullable] == ["id", "legs"]
    assert JsonSchema(ORDER, columns={"id": "bigint not null"}).schema.fieldNames() == ["id"]
    assert pickle.loads(pickle.dumps(declared)) == declared != JsonSchema(ORDER, ids="none")


def test_a_record_has_to_be_valid_by_the_document() -> None:
    bound = JsonSchema(ORDER).bound(Known(), "orders")
    bad = [{**GOOD, "id": 0}, {**GOOD, "state": "LOST"}, {**GOOD, "legs": [{"minutes": "x"}]}, {"id": 1}]
    values = [*framed(GOOD, *bad), b"\0\0\0\0\3{", b"{}"]
    block = bound.reader().read(values)
    assert block.columns.to_pylist()[0] == {**GOOD, "day": date(2026, 1, 2)}
    assert [block.refused[row].reason for row in range(1, 7)] == [
        *("invalid_by_schema", "invalid_by_schema", "wrong_type", "missing_field", "malformed_json", "not_framed"),
    ]
    assert block.refused[1].detail == "0 is less than the minimum of 1 - at `$.id`"
    assert all(value is None for row in block.columns.to_pylist()[1:] for value in row.values())
    assert bound.reader([]).read(values).refused == block.refused
    good = block.columns.slice(0, 1)
    assert bound.reader().read(bound.writer().write(good).values).columns == good


def test_a_schema_of_another_kind_is_refused() -> None:
    reader = JsonSchema(ORDER).bound(Known("AVRO"), "orders").reader()
    assert reader.read(framed(GOOD)).refused[0].reason == "incompatible_schema"


@pytest.mark.parametrize(
    ("document", "words"),
    [
        ("{", "is not JSON"),
        ("[]", "not an object"),
        (Path("/nowhere/order.json"), "No such file"),
        ({"type": "nothing", "properties": {"a": {"type": "string"}}}, "no object with properties"),
        ({"properties": {"a": {}}}, "property 'a' has no type"),
        ({"properties": {"a": {"type": ["string", "integer"]}}}, "property 'a' has the types"),
        ({"properties": {"a": {"type": "integer", "minimum": "x"}}}, "is no JSON Schema"),
    ],
)
def test_a_document_without_columns_is_refused_when_it_is_declared(document: Any, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        JsonSchema(document)


def test_without_the_extra_the_declaration_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("streaming_jobs.platform.extras.installed", lambda extra: False)
    with pytest.raises(MissingExtra, match=r"recourse-streams\[json-schema\]"):
        JsonSchema(ORDER)
