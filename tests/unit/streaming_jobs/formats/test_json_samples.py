"""The draft of a schema from samples: the format reads them by it, and says which it would refuse."""

from __future__ import annotations

import json
from typing import Any

import pytest

from streaming_jobs.formats.json import Json
from streaming_jobs.formats.json_samples import SampledSchema, sampled_schema


def sampled(*records: Any) -> SampledSchema:
    """The schema of records, the only field of each of which is `v`."""
    return sampled_schema([json.dumps({"v": record}).encode() for record in records])


@pytest.mark.parametrize(
    ("values", "kind"),
    [
        ((True, False), "boolean not null"),
        ((1, None), "bigint"),
        ((1, 2.5), "double not null"),
        ((1, 1 << 63), "decimal(38,0) not null"),
        (("2026-01-31", "2024-02-29"), "date not null"),
        (("2026-01-31", "2026-02-29"), "string not null"),
        (("2026-01-31T05:06:07Z", "2026-01-31T05:06:07.123456789+05:30"), "timestamp not null"),
        (("2026-01-31T05:06:07Z", "2026-01-31"), "string not null"),
        (([1], [], [2.5, None]), ["double"]),
        (({"a": 1}, {"a": 2, "b": "x"}, None), {"a": "bigint not null", "b": "string"}),
        (([{"a": 1}], [{"a": 2, "b": "x"}]), [{"a": "bigint not null", "b": "string"}]),
    ],
)
def test_the_schema_is_the_narrowest_that_takes_all_samples(values: tuple[Any, ...], kind: object) -> None:
    found = sampled(*values)
    assert found.schema == {"v": kind}
    assert (found.samples, found.refused) == (len(values), {})


def test_most_samples_decide_a_type_and_the_others_are_counted() -> None:
    found = sampled(1, 2.5, "x", "y", 3)
    assert found.schema == {"v": "double not null"} and found.refused == {"wrong_type": 2}
    assert found.remarks == ("'v' has values of several types: double 3 times, string 2 times",)


def test_what_no_record_can_be_is_counted_by_its_reason_and_makes_no_field() -> None:
    deep = b'{"v":' + b"[" * 300 + b"]" * 300 + b"}"
    deeper = b'{"v":' + b"[" * 90_000 + b"]" * 90_000 + b"}"
    found = sampled_schema([b'{"v":[]}', deep, deeper, None, b"[1]", b"{", b'{"v":["\xff"]}'])
    assert found.schema == {"v": ["string"]} and sum(found.refused.values()) == 6
    assert {"empty_value", "not_an_object", "malformed_json", "invalid_utf8"} <= found.refused.keys()
    assert sampled_schema([]) == SampledSchema({}, 0, {}, ()), "no record: no schema, and no error"


def test_fields_that_no_schema_can_have_are_left_out_with_a_remark() -> None:
    found = sampled_schema([json.dumps({"id": 1, "ID": 2, 'q"': 3, "none": {}, "nothing": None}).encode()])
    assert found.schema == {"id": "bigint not null", "nothing": "string"} and not found.refused
    assert [remark.split(" ")[0] for remark in found.remarks] == ["'ID'", "'q\"'", "'none'", "'nothing'"]
    assert Json(found.schema).read(b'{"id": 1}') == {"id": 1, "nothing": None}
