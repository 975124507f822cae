"""The stateless work on records in Avro and in Protobuf, without the ids of a schema registry."""

from __future__ import annotations

from google.protobuf.descriptor_pb2 import FieldDescriptorProto, FileDescriptorProto, FileDescriptorSet
from google.protobuf.timestamp_pb2 import DESCRIPTOR as TIMESTAMP_FILE
from pyspark.sql import DataFrame

from benchmarks.speed import flows
from benchmarks.speed.flows import TOPIC
from streaming_jobs.formats import Avro, Protobuf
from streaming_jobs.stream import DeltaTable, KafkaTopic, stream

_TIME = {"type": "long", "logicalType": "timestamp-millis"}
_FIELDS = {
    "id": "long", "account": "string", "amount": "long", "at": _TIME, "kind": "string", "currency": "string",
    "country": "string",
}  # fmt: skip
_PROTOBUF = {"long": FieldDescriptorProto.TYPE_INT64, "string": FieldDescriptorProto.TYPE_STRING}


def _descriptor() -> bytes:
    """The message `benchmark.Payment`, in a file as `protoc` writes it."""
    file = FileDescriptorProto(name="payment.proto", package="benchmark", syntax="proto3")
    file.dependency.append(TIMESTAMP_FILE.name)
    message = file.message_type.add(name="Payment")
    for number, (name, kind) in enumerate(_FIELDS.items(), 1):
        field = message.field.add(name=name, number=number, label=FieldDescriptorProto.LABEL_OPTIONAL)
        if isinstance(kind, str):
            field.type = _PROTOBUF[kind]
        else:
            field.type, field.type_name = FieldDescriptorProto.TYPE_MESSAGE, ".google.protobuf.Timestamp"
    imported = FileDescriptorProto()
    TIMESTAMP_FILE.CopyToProto(imported)
    return bytes(FileDescriptorSet(file=[imported, file]).SerializeToString())


_RECORD = {"type": "record", "name": "Payment", "fields": [{"name": n, "type": kind} for n, kind in _FIELDS.items()]}
FORMATS: dict[str, Avro | Protobuf] = {
    "avro": Avro(_RECORD, ids="none"),
    "protobuf": Protobuf(_descriptor(), "benchmark.Payment", ids="none"),
}


@stream(source=KafkaTopic(TOPIC, value=FORMATS["avro"]), sink=DeltaTable("avro"))
def avro(payments: DataFrame) -> DataFrame:
    rows: DataFrame = flows.stateless.function(payments)
    return rows


@stream(source=KafkaTopic(TOPIC, value=FORMATS["protobuf"]), sink=DeltaTable("protobuf"))
def protobuf(payments: DataFrame) -> DataFrame:
    rows: DataFrame = flows.stateless.function(payments)
    return rows
