"""JSON records of a schema registry: read as `Json` reads them, and checked against the declared JSON Schema.

    JsonSchema(Path(__file__).with_name("order.json"))
    JsonSchema(document, columns={"id": "bigint not null", "amount": "decimal(10,2)"})

The columns come from the document's properties, or from `columns`; docs/registry.md has the rules and the verdicts.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pyspark.sql.types import (
    ArrayType,
    BooleanType,
    DataType,
    DateType,
    DoubleType,
    LongType,
    StringType,
    StructField,
    StructType,
    TimestampType,
)

from streaming_jobs.declare.format import Block, Refusal, RegisteredSchema, with_null_rows
from streaming_jobs.declare.schemas import schema_of
from streaming_jobs.errors import UsageError
from streaming_jobs.formats.framing import Ids, WithId, checked_ids
from streaming_jobs.formats.json import REASONS, Json
from streaming_jobs.platform.extras import require

if TYPE_CHECKING:
    from streaming_jobs.declare.format import BlockReader, BlockWriter
    from streaming_jobs.formats.framing import PayloadReader


@dataclass(frozen=True, init=False)
class JsonSchema(WithId):
    """Records of a JSON Schema: a file of it, which is read at the declaration, its text, or a mapping.

    A record has to be valid by this document, whichever version has written it. `columns` is the schema of the
    columns, as `Json` takes it; None: the document's properties. `ids` and `subject` are those of `Avro`.

    Raises UsageError for a document that is no schema, or whose properties are no columns, and MissingExtra without
    `recourse-streams[json-schema]`.
    """

    text: str
    columns: StructType
    ids: Ids = "prefix"
    subject: str | None = None

    def __init__(
        self,
        document: str | Mapping[str, Any] | Path,
        *,
        columns: StructType | Mapping[str, object] | None = None,
        ids: Ids = "prefix",
        subject: str | None = None,
    ) -> None:
        require("json-schema", "the format JsonSchema")
        text = _text(document)
        schema = _columns(json.loads(text), "the document") if columns is None else schema_of(columns)
        for option, value in {"text": text, "columns": schema, "ids": checked_ids("JsonSchema", ids)}.items():
            object.__setattr__(self, option, value)
        object.__setattr__(self, "subject", subject)
        _ = self._json, self._validator

    @property
    def schema(self) -> StructType:
        return self.columns

    @cached_property
    def _json(self) -> Json:
        return Json(self.columns)

    @cached_property
    def _validator(self) -> Any:
        import jsonschema_rs

        try:
            return jsonschema_rs.validator_for(json.loads(self.text), validate_formats=True)
        except (jsonschema_rs.ValidationError, ValueError) as error:
            raise UsageError(f"the document is no JSON Schema: {str(error)[:200]}", "correct the document") from error

    @property
    def registered(self) -> RegisteredSchema:
        return RegisteredSchema("JSON", self.text)

    @property
    def payload_reasons(self) -> frozenset[str]:
        return REASONS | {"invalid_by_schema"}

    def reader_of(self, written: RegisteredSchema, names: Sequence[str]) -> PayloadReader | Refusal:
        """A reader of values of a writer's schema, of which only the kind matters."""
        if written.kind != "JSON":
            return Refusal("incompatible_schema", f"the record's schema is of {written.kind}, not of JSON")
        return JsonSchemaReader(self, self._json.reader(names))

    def payload_writer(self) -> BlockWriter:
        return self._json.writer()


@dataclass
class JsonSchemaReader:
    """Reads JSON, and refuses what the document does not allow."""

    declared: JsonSchema
    reader: BlockReader

    def read(self, values: Sequence[bytes], skip: int) -> Block:
        import msgspec

        payloads = [value[skip:] for value in values] if skip else values
        block = self.reader.read(payloads)
        validator, decode = self.declared._validator, msgspec.json.Decoder().decode
        invalid = {
            row: Refusal("invalid_by_schema", _words(validator, value))
            for row, value in enumerate(payloads)
            if row not in block.refused and not validator.is_valid(decode(value))
        }
        return Block(with_null_rows(block.columns, invalid), {**block.refused, **invalid})


def _words(validator: Any, value: bytes) -> str:
    error = next(validator.iter_errors(json.loads(value)))
    place = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in error.instance_path)
    return f"{error.message} - at `${place}`"


def _text(document: str | Mapping[str, Any] | Path) -> str:
    try:
        if isinstance(document, Path):
            document = document.read_text(encoding="utf-8")
        found = json.loads(document) if isinstance(document, str) else document
    except OSError as error:
        raise UsageError(f"the JSON Schema {error.filename}: {error.strerror}", "name a file of it") from error
    except ValueError as error:
        raise UsageError(f"the JSON Schema is not JSON: {error}", "write a Path, the text, or a mapping") from error
    if not isinstance(found, Mapping):
        raise UsageError(f"the JSON Schema is {found!r:.80}, not an object", "write a Path, the text, or a mapping")
    return json.dumps(found, separators=(",", ":"))


_FORMATS: dict[str, DataType] = {"date": DateType(), "date-time": TimestampType()}
_TYPES: dict[str, DataType] = {"boolean": BooleanType(), "integer": LongType(), "number": DoubleType()}


def _columns(document: Mapping[str, Any], where: str) -> StructType:
    """The columns of an object's properties; raises UsageError where the document leaves them open."""
    properties = document.get("properties")
    if document.get("type", "object") != "object" or not isinstance(properties, Mapping) or not properties:
        raise _no_column(f"{where} is no object with properties")
    required = document.get("required", ())
    fields = []
    for name, declared in properties.items():
        kind, may_be_null = _without_null(declared, f"property '{name}'")
        fields.append(StructField(name, _type(kind, f"property '{name}'"), may_be_null or name not in required))
    return StructType(fields)


def _without_null(declared: Any, where: str) -> tuple[Mapping[str, Any], bool]:
    """A property's schema, and True if it may be null: {"type": ["string", "null"]}, or oneOf or anyOf with null."""
    if not isinstance(declared, Mapping):
        raise _no_column(f"{where} is {declared!r}")
    for union in ("oneOf", "anyOf"):
        if union in declared:
            others = [each for each in declared[union] if each != {"type": "null"}]
            if len(others) == 1 and isinstance(others[0], Mapping):
                return others[0], len(others) < len(declared[union])
    kind = declared.get("type")
    if isinstance(kind, list):
        others = [each for each in kind if each != "null"]
        if len(others) != 1:
            raise _no_column(f"{where} has the types {kind}")
        return {**declared, "type": others[0]}, "null" in kind
    return declared, False


def _type(declared: Mapping[str, Any], where: str) -> DataType:
    kind = declared.get("type")
    if kind == "object":
        return _columns(declared, where)
    if kind == "array":
        items, may_be_null = _without_null(declared.get("items"), f"an element of {where}")
        return ArrayType(_type(items, f"an element of {where}"), may_be_null)
    if kind == "string" or (kind is None and all(isinstance(each, str) for each in declared.get("enum", [0]))):
        return _FORMATS.get(str(declared.get("format")), StringType())
    if kind not in _TYPES:
        raise _no_column(f"{where} has no type, or several")
    return _TYPES[kind]


def _no_column(found: str) -> UsageError:
    return UsageError(f"the JSON Schema does not say which columns to make: {found}", "name them: columns={...}")
