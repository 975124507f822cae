"""The four requests, and a record of each format, with a registry that is none of ours: Apicurio."""

from __future__ import annotations

import json
from datetime import timedelta
from pathlib import Path

import pyarrow as pa
import pytest

from streaming_jobs import Avro, JsonSchema, KafkaTopic, Protobuf
from streaming_jobs.declare.format import Format, RegisteredSchema
from streaming_jobs.declare.schemas import arrow_struct
from streaming_jobs.errors import ConfigurationError, SchemaUnavailable
from streaming_jobs.registry.client import Registry, RegistryAddress
from streaming_jobs.registry.schemas import StoredSchemas
from tests.support.apicurio import apicurio
from tests.unit.streaming_jobs.formats.test_protobuf import file_of, files

pytestmark = [pytest.mark.slow, pytest.mark.long]

ORDER = {"type": "record", "name": "Order", "fields": [{"name": "id", "type": "long"}]}
FORMATS: dict[str, Format] = {
    "avro": Avro(ORDER),
    "avro-header": Avro(ORDER, ids="header"),
    "protobuf": Protobuf(files(file_of("id 1 3")), "shop.Order"),
    "json": JsonSchema({"type": "object", "properties": {"id": {"type": "integer"}}, "required": ["id"]}),
}


def test_each_format_is_registered_written_and_read_without_the_registry_afterwards(tmp_path: Path) -> None:
    folder = tmp_path / "_schemas"
    with apicurio(tmp_path) as url:
        address = RegistryAddress((url,), 60.0)
        schemas = StoredSchemas(folder, address, registers=True)
        values = {}
        for name, declared in FORMATS.items():
            topic = KafkaTopic(name, value=declared).bound(schemas)
            rows = pa.RecordBatch.from_struct_array(pa.array([{"id": 7}], arrow_struct(declared.schema)))
            writer = topic.value.writer()  # type: ignore[attr-defined]
            ids = b"".join(content for _, content in getattr(writer, "headers", ()))
            values[name] = [ids + value for value in writer.write(rows).values]
        registry = Registry(address)
        for subject in ("avro-value", "protobuf-value", "json-value"):
            found = registry.latest(subject)
            assert found is not None and found.kind == subject.partition("-")[0].upper()
        assert registry.latest("nobody-value") is None
        others = StoredSchemas(tmp_path / "others", address, timedelta(minutes=5))
        for name, declared in FORMATS.items():
            block = KafkaTopic(name, value=declared).bound(others).value.reader().read(values[name])
            assert block.columns.to_pylist() == [{"id": 7}], (name, block.refused)
        with pytest.raises(SchemaUnavailable, match="does not know id-4000"):
            others.of([b"\0" + (4000).to_bytes(4, "big")])
        with pytest.raises(ConfigurationError, match="no schema of subject avro-value"):
            others.prefix("avro-value", RegisteredSchema("AVRO", json.dumps({**ORDER, "name": "Other"})))
    for name, declared in FORMATS.items():
        gone = StoredSchemas(folder if name != "protobuf" else tmp_path / "others", address)
        block = KafkaTopic(name, value=declared).bound(gone).value.reader().read(values[name])
        assert block.columns.to_pylist() == [{"id": 7}], "the registry has ended"
