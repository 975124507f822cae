"""Protobuf: which columns a message has, how messages evolve, the verdict on each kind of record, what is written."""

from __future__ import annotations

import base64
import pickle
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from google.protobuf import descriptor_pool, message_factory, timestamp_pb2, wrappers_pb2
from google.protobuf.descriptor_pb2 import FileDescriptorProto, FileDescriptorSet

from streaming_jobs import KafkaTopic, Protobuf
from streaming_jobs.declare.format import Refusal, RegisteredSchema
from streaming_jobs.declare.schemas import arrow_struct
from streaming_jobs.errors import UsageError
from streaming_jobs.formats.protobuf_schema import message_name
from streaming_jobs.platform.extras import MissingExtra

SOURCE = """
syntax = "proto3";  // message Comment { }
package shop;
option java_package = "message Text {";
message Other { message Inner {} enum Kind { NONE = 0; } }
/* message Comment { */
message Order { int64 id = 1; message Leg { int32 minutes = 1; } oneof either { string a = 2; } message Last {} }
"""


def file_of(text: str) -> FileDescriptorProto:
    """A file with a message `Order`, of lines `name number type [repeated|optional] [message]`."""
    file = FileDescriptorProto(name="order.proto", package="shop", syntax="proto3")
    file.dependency.extend(["google/protobuf/timestamp.proto", "google/protobuf/wrappers.proto"])
    file.message_type.add(name="Other").field.add(name="x", number=1, type=5, label=1)
    order = file.message_type.add(name="Order")
    leg = order.nested_type.add(name="Leg")
    leg.field.add(name="minutes", number=1, type=5, label=1)
    state = file.enum_type.add(name="State")
    for number, name in enumerate(("NEW", "PAID")):
        state.value.add(name=name, number=number)
    for line in filter(None, map(str.split, text.splitlines())):
        name, number, kind, label, *of = [*line, "", ""][: 5 if len(line) > 3 else 4]
        field = order.field.add(name=name, number=int(number), type=int(kind), label=3 if label == "repeated" else 1)
        if of and of[0]:
            field.type_name = f".{of[0]}"
        if label == "optional":
            field.proto3_optional, field.oneof_index = True, len(order.oneof_decl)
            order.oneof_decl.add(name=f"_{name}")
    return file


def files(file: FileDescriptorProto) -> bytes:
    found = FileDescriptorSet()
    for each in (timestamp_pb2, wrappers_pb2):
        each.DESCRIPTOR.CopyToProto(found.file.add())
    found.file.add().CopyFrom(file)
    return found.SerializeToString()


def generated(file: FileDescriptorProto, name: str = "shop.Order") -> Any:
    pool = descriptor_pool.DescriptorPool()
    for each in FileDescriptorSet.FromString(files(file)).file:
        pool.Add(each)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName(name))


RICH = file_of(
    """
    id 1 3
    total 2 4
    name 3 9
    note 4 9 optional
    state 5 14 one shop.State
    at 6 11 one google.protobuf.Timestamp
    rate 7 11 one google.protobuf.DoubleValue
    legs 8 11 repeated shop.Order.Leg
    sizes 9 5 repeated
    leg 10 11 one shop.Order.Leg
    """
)
ORDER = generated(RICH)


class Known:
    def __init__(self, text: str, kind: str = "PROTOBUF") -> None:
        self.schema = RegisteredSchema(kind, text)

    def of(self, prefixes: Sequence[bytes]) -> Mapping[bytes, RegisteredSchema | Refusal]:
        return dict.fromkeys(prefixes, self.schema)

    def prefix(self, subject: str, schema: RegisteredSchema) -> bytes:
        return b"\0\0\0\0\7"


def reading(file: FileDescriptorProto) -> Any:
    return Protobuf(files(file), "shop.Order", ids="none").reader()


def test_every_type_becomes_a_column_and_comes_back_equal() -> None:
    message = ORDER(id=-1, total=2**64 - 1, name="größer", state=1, sizes=[1, -2, 300])
    message.at.seconds, message.at.nanos = 1_767_323_045, 6_000
    message.rate.value = 0.0
    message.legs.add(minutes=5)
    message.legs.add()
    declared = Protobuf(ORDER, ids="none")
    block = declared.reader().read([message.SerializeToString(), b""])
    assert not block.refused
    first, empty = block.columns.to_pylist()
    assert first == {
        "id": -1, "total": Decimal(2**64 - 1), "name": "größer", "note": None, "state": "PAID",
        "at": datetime(2026, 1, 2, 3, 4, 5, 6, UTC), "rate": 0.0, "legs": [{"minutes": 5}, {"minutes": 0}],
        "sizes": [1, -2, 300], "leg": None,
    }  # fmt: skip
    assert empty == {
        "id": 0, "total": Decimal(0), "name": "", "note": None, "state": "NEW", "at": None, "rate": None, "legs": [],
        "sizes": [], "leg": None,
    }  # fmt: skip
    assert block.columns.schema.types == [field.type for field in arrow_struct(declared.schema)]
    assert [f.name for f in declared.schema if f.nullable] == ["note", "at", "rate", "leg"]
    assert declared.reader().read(declared.writer().write(block.columns).values).columns == block.columns


def test_messages_of_other_versions_are_read() -> None:
    new = generated(file_of("id 1 3\nname 3 9\nmore 20 9\nlegs 8 11 repeated shop.Order.Leg\nfirst 2 6"))
    value = new(id=7, name="x", more="unknown", first=5).SerializeToString()
    block = reading(file_of("id 1 3\nname 3 9\nadded 30 9 optional")).read([value])
    assert block.columns.to_pylist() == [{"id": 7, "name": "x", "added": None}] and not block.refused


def test_a_message_may_be_written_in_parts_and_in_any_order() -> None:
    """As the encoding allows: fields twice, mixed, packed or not, a message in parts, an unknown group."""
    one, two = ORDER(id=1, sizes=[1, 2]), ORDER(name="a", id=2)
    one.leg.minutes, two.sizes[:] = 5, [3]
    two.leg.SetInParent()
    unpacked = b"\x48\x09"
    group = b"\xa3\x06\x08\x01\xa4\x06"
    value = two.SerializeToString() + unpacked + group + one.SerializeToString() + ORDER(sizes=[4]).SerializeToString()
    block = reading(RICH).read([value])
    row, expected = block.columns.to_pylist()[0], ORDER.FromString(value)
    assert not block.refused and row["id"] == expected.id == 1
    assert row["sizes"] == list(expected.sizes) == [3, 9, 1, 2, 4]
    assert row["leg"] == {"minutes": 5} and row["name"] == "a"


def test_of_a_oneof_the_last_value_counts() -> None:
    file = file_of("id 1 3")
    file.message_type[1].oneof_decl.add(name="either")
    for number in (20, 21):
        file.message_type[1].field.add(name=f"o{number}", number=number, type=5, label=1, oneof_index=0)
    first, second = b"\xa0\x01\x05", b"\xa8\x01\x06"
    block = reading(file).read([first + second, second + first, first])
    rows = [(row["o20"], row["o21"]) for row in block.columns.to_pylist()]
    assert rows == [(None, 6), (5, None), (5, None)] and not block.refused


def test_each_kind_of_bad_record_has_its_reason() -> None:
    good = ORDER(id=1, name="ab").SerializeToString()
    late = ORDER()
    late.at.seconds = 300_000_000_000
    bad = {
        "malformed": (
            good[:-1],
            b"\x88\x80\x80\x80\x80\x00\x01",
            b"\xa0\x86\x80\x80\x80\x00\x01",
            b"\x00",
            b"\xff" * 12,
            b"\xa7\x06",
            b"\xa3\x06\x08\x01",
            b"\x52\x01\x08" * 2,  # two parts of a message, neither of which is one
        ),
        "invalid_utf8": (b"\x1a\x02\xff\xfe",),
        "wrong_type": (b"\x0d\0\0\0\0", b"\x1b\x1c", ORDER(id=1).SerializeToString() + b"\x28\x09"),
        "out_of_range": (late.SerializeToString(),),
    }
    for reason, values in bad.items():
        block = reading(RICH).read([good, *values, good])
        assert {refusal.reason for refusal in block.refused.values()} == {reason}, block.refused
        assert sorted(block.refused) == list(range(1, 1 + len(values)))
        assert block.columns.column("name").to_pylist() == ["ab", *[None] * len(values), "ab"]


def test_a_message_of_the_schema_is_found_by_its_place() -> None:
    places: dict[tuple[int, ...], str | None] = {
        (0,): "Other", (0, 0): "Other.Inner", (1,): "Order", (1, 0): "Order.Leg", (1, 1): "Order.Last", (2,): None,
        (0, 1): None,
    }  # fmt: skip
    assert {place: message_name(SOURCE, place) for place in places} == places
    text = base64.b64encode(RICH.SerializeToString()).decode()
    assert [message_name(text, place) for place in ((0,), (1,), (1, 0), (2,))] == ["Other", "Order", "Order.Leg", None]


@pytest.mark.parametrize("text", [SOURCE, base64.b64encode(RICH.SerializeToString()).decode()])
def test_a_record_of_another_message_is_refused(text: str) -> None:
    bound = Protobuf(ORDER).bound(Known(text), "orders")
    payload = ORDER(id=5).SerializeToString()
    values = [b"\0\0\0\0\7" + index + payload for index in (b"\2\2", b"\0", b"\2\x0a", b"\2\2", b"\2", b"\x80")]
    block = bound.reader().read([*values, b"\0\0\0\0\7"])
    assert block.columns.column("id").to_pylist() == [5, None, None, 5, None, None, None]
    assert [block.refused[row].reason for row in (1, 2, 5, 6)] == [*["incompatible_schema"] * 2, *["not_framed"] * 2]
    assert "a message Other, not Order" in block.refused[1].detail
    assert bound.reader().read(values[:1]).columns.column("id").to_pylist() == [5]
    assert bound.writer().write(block.columns.slice(0, 1)).values == [b"\0\0\0\0\7\2\2" + _whole(bound)]


def test_a_message_may_be_at_any_place_of_its_file() -> None:
    file = file_of("id 1 3")
    for number in range(70):
        file.message_type.insert(0, FileDescriptorProto().message_type.add(name=f"Before{number}"))
    declared = Protobuf(files(file), "shop.Order")
    bound = declared.bound(Known(declared.registered.text), "orders")
    rows = pa.RecordBatch.from_struct_array(pa.array([{"id": 5}], arrow_struct(declared.schema)))
    (value,) = bound.writer().write(rows).values
    assert value == b"\0\0\0\0\7" + b"\2\x8e\1" + b"\x08\5", "the place 71 in two bytes"
    block = bound.reader().read([value, value[:6] + b"\x8c\1" + value[8:], value[:7], b"\0\0\0\0\7\1", value])
    assert block.columns.column("id").to_pylist() == [5, None, None, None, 5]
    assert [block.refused[row].reason for row in (1, 2, 3)] == ["incompatible_schema", "not_framed", "not_framed"]


def _whole(bound: Any) -> bytes:
    """What is written for the row of defaults with the id 5."""
    row = bound.reader().read([b"\0\0\0\0\7\2\2" + ORDER(id=5).SerializeToString()]).columns
    (value,) = Protobuf(ORDER, ids="none").writer().write(row).values
    assert ORDER.FromString(value) == ORDER(id=5)
    return bytes(value)


def test_a_schema_of_another_kind_is_refused() -> None:
    bound = Protobuf(ORDER).bound(Known("{}", "AVRO"), "orders")
    assert bound.reader().read([b"\0\0\0\0\7\0"]).refused[0].reason == "incompatible_schema"


def test_a_row_that_could_not_be_read_back_is_not_written() -> None:
    file = file_of("id 1 13\nstate 5 14 one shop.State\nname 3 9\nat 6 11 one google.protobuf.Timestamp")
    order = file.message_type[1]
    order.oneof_decl.add(name="either")
    for number in (20, 21):
        order.field.add(name=f"o{number}", number=number, type=5, label=1, oneof_index=len(order.oneof_decl) - 1)
    declared = Protobuf(files(file), "shop.Order", ids="none")
    good = {"id": 1, "state": "NEW", "name": "", "at": None, "o20": None, "o21": 5}
    rows = [good, {**good, "id": -1}, {**good, "state": "x"}, {**good, "name": None}, {**good, "o20": 1}]
    made = declared.writer().write(pa.RecordBatch.from_struct_array(pa.array(rows, arrow_struct(declared.schema))))
    reasons = ("out_of_range", "unknown_symbol", "missing_field", "several_of_oneof")
    assert [made.refused[row].reason for row in range(1, 5)] == [*reasons]
    assert declared.reader().read(made.values[:1]).columns.to_pylist() == [good]


@pytest.mark.parametrize(
    ("schema", "message", "words"),
    [
        (Path("/nowhere/order.desc"), "shop.Order", "No such file"),
        (b"\xff", "shop.Order", "no message 'shop.Order'"),
        (files(RICH), "shop.Ordre", "no message 'shop.Ordre'"),
        (files(RICH), "", "order_pb2.Order"),
        (files(file_of("next 1 11 one shop.Order")), "shop.Order", "holds itself"),
        (files(file_of("")), "shop.Order", "has no field"),
    ],
)
def test_a_message_that_no_columns_have_is_refused_when_it_is_declared(schema: Any, message: str, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        Protobuf(schema, message)


def test_a_declaration_is_pickled_and_compared_by_its_message(tmp_path: Path) -> None:
    (tmp_path / "order.desc").write_bytes(files(RICH))
    declared = Protobuf(tmp_path / "order.desc", message="shop.Order")
    assert declared == pickle.loads(pickle.dumps(declared)) and declared.schema == Protobuf(ORDER).schema
    topic = KafkaTopic("orders", value=declared, event_time="at", lateness="1 hour")
    assert pickle.loads(pickle.dumps(topic)) == topic
    assert b"Descriptor object" not in pickle.dumps(topic)


def test_without_the_extra_the_declaration_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("streaming_jobs.platform.extras.installed", lambda extra: False)
    with pytest.raises(MissingExtra, match=r"recourse-streams\[protobuf\]"):
        Protobuf(ORDER)
