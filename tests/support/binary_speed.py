"""CPU time per record of the readers in docs/registry.md: a block side by side, and each record by itself.

python -m tests.support.binary_speed
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from google.protobuf.descriptor_pb2 import FileDescriptorProto, FileDescriptorSet
from google.protobuf.timestamp_pb2 import DESCRIPTOR as TIMESTAMP_FILE
from pyarrow import RecordBatch, array

from streaming_jobs.declare.schemas import arrow_struct
from streaming_jobs.formats import Avro, Json, Protobuf
from streaming_jobs.formats.lane_reader import LaneReader

RECORDS = 10_000
_TIME = {"type": "long", "logicalType": "timestamp-micros"}
_FIELDS: dict[str, tuple[Any, int]] = {
    "id": ("long", 3),
    "count": ("int", 5),
    "name": ("string", 9),
    "note": (["null", "string"], 9),
    "price": ("double", 1),
    "paid": ("boolean", 8),
    "at": (_TIME, 11),
}


def _message() -> bytes:
    """The same fields as `shop.Order`, with those that it imports."""
    file = FileDescriptorProto(name="order.proto", package="shop", syntax="proto3", dependency=[TIMESTAMP_FILE.name])
    order = file.message_type.add(name="Order")
    for number, (name, (_, kind)) in enumerate(_FIELDS.items(), 1):
        order.field.add(name=name, number=number, type=kind, label=1)
    order.field[3].proto3_optional, order.field[3].oneof_index = True, 0
    order.oneof_decl.add(name="_note")
    order.field[6].type_name = ".google.protobuf.Timestamp"
    imported = FileDescriptorProto()
    TIMESTAMP_FILE.CopyToProto(imported)
    return bytes(FileDescriptorSet(file=[imported, file]).SerializeToString())


def _micros(read: Callable[[], object], times: int) -> float:
    """The least CPU time of a record, in microseconds."""
    least = float("inf")
    for _ in range(times):
        begun = time.process_time()
        read()
        least = min(least, time.process_time() - begun)
    return least / RECORDS * 1e6


def main() -> None:
    avro = Avro(
        {"type": "record", "name": "Order", "fields": [{"name": n, "type": of} for n, (of, _) in _FIELDS.items()]},
        ids="none",
    )
    at = 1_767_323_045_000_006
    rows = [
        {"id": n * 7_919, "count": n % 90, "name": f"customer-{n}", "note": "a note" if n % 3 else None,
         "price": n / 7, "paid": n % 2 == 0, "at": at + n * 1_000_003}
        for n in range(RECORDS)
    ]  # fmt: skip
    batch = RecordBatch.from_struct_array(array(rows, arrow_struct(avro.schema)))
    for declared in (avro, Protobuf(_message(), "shop.Order", ids="none"), Json(avro.schema)):
        values = declared.writer().write(batch).values
        reader = declared.reader()
        assert not reader.read(values).refused
        line = f"{type(declared).__name__}: {_micros(lambda: reader.read(values), 15):.2f}"  # noqa: B023 - called at once
        if not isinstance(declared, Json):
            alone = declared.reader_of(declared.registered, declared.schema.fieldNames())
            assert isinstance(alone, LaneReader)
            line += f", each by itself {_micros(lambda: alone.judged(values, 0), 3):.0f}"  # type: ignore[arg-type] # noqa: B023
        print(f"{line} microseconds")


if __name__ == "__main__":
    main()
