"""A block of JSON records becomes the columns asked for; each verdict is that of an independent strict reading."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from functools import cache

import pyarrow as pa
import pytest
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.types import (
    ArrayType,
    DataType,
    LongType,
    StructField,
    StructType,
)

from streaming_jobs.formats import Json
from tests.support.json_corpus import BAD, FLAT, GOOD, ODD, RICH, WITHOUT_TEXT, corpus
from tests.support.strict_json import Difference, Verdict, differences, judge


def nullable_everywhere(kind: DataType) -> DataType:
    if isinstance(kind, StructType):
        return StructType([StructField(f.name, nullable_everywhere(f.dataType)) for f in kind.fields])
    return ArrayType(nullable_everywhere(kind.elementType)) if isinstance(kind, ArrayType) else kind


@pytest.mark.parametrize("values", [[], [b'{"id":1,"name":"x"}'], [b"junk", None]], ids=["none", "good", "bad"])
def test_the_columns_have_the_types_of_spark_and_are_nullable_at_every_depth(values: list[bytes | None]) -> None:
    expected = nullable_everywhere(RICH)
    assert isinstance(expected, StructType)
    block = Json(RICH).reader().read(values)
    assert block.columns.schema == to_arrow_schema(expected, timezone="UTC")
    assert block.columns.num_rows == len(values)


def test_only_the_fields_asked_for_are_built_and_in_the_order_of_the_schema() -> None:
    values = [b'{"id":1,"name":"x","at":"2013-01-01T00:00:00"}', b'{"id":2,"name":"y"}']
    block = Json(FLAT).reader(["at", "id"]).read(values)
    assert block.columns.schema.names == ["id", "at"]
    assert block.columns.column("id").to_pylist() == [1, 2]
    empty = Json(FLAT).reader([]).read(values)
    assert (empty.columns.num_columns, empty.columns.num_rows) == (0, 2)


@pytest.mark.parametrize("field", ['"whole":"5"', '"at":"today"', '"real":1e400', '"ok":1'])
@pytest.mark.parametrize("fields", [None, ["id"], []], ids=["all", "one", "none"])
def test_a_verdict_does_not_depend_on_the_fields_asked_for(fields: list[str] | None, field: str) -> None:
    values = [b'{"id":1,"name":"x"}', f'{{"id":2,"name":"x",{field}}}'.encode(), b'{"id":3,"name":"x"}']
    block = Json(FLAT).reader(fields).read(values)
    assert list(block.refused) == [1]
    assert block.columns.num_rows == 3
    if fields != []:
        assert block.columns.column("id").to_pylist() == [1, None, 3]


def test_the_row_of_a_refused_value_is_null_in_every_column() -> None:
    good = b'{"id":1,"name":"x","tags":["a"],"place":{"city":"y"},"legs":[{"to":"z"}],"money":1.5}'
    late = good[:-1] + b',"day":"2013-02-29"}'
    early = good[:-1] + b',"ok":5}'
    unseen = good[:-1] + b',"other":"\xff"}'
    block = Json(RICH).reader().read([good, late, early, unseen, None, good])
    assert {index: refusal.reason for index, refusal in block.refused.items()} == {
        1: "wrong_type",
        2: "wrong_type",
        3: "invalid_utf8",
        4: "empty_value",
    }
    rows = block.columns.to_pylist()
    assert rows[0] == rows[5] and rows[0]["legs"] == [{"to": "z", "at": None, "cost": None}]
    assert all(item is None for row in rows[1:5] for item in row.values())


def test_a_format_travels_to_other_processes_after_it_was_used() -> None:
    declared = Json(RICH)
    assert declared.diagnose(b"{}")[0] == "missing_field"
    there = pickle.loads(pickle.dumps(declared))
    assert there == declared and there.diagnose(b"{}") == declared.diagnose(b"{}")


@pytest.mark.parametrize("name", ["", " ", "a.b", "a`b", "ä", "😀", "self", "f0", "class", "\x7f", "$", "x" * 5000])
def test_a_field_may_have_any_printable_name(name: str) -> None:
    schema = StructType([StructField("f1", LongType()), StructField(name, LongType(), nullable=False)])
    declared = Json(schema)
    assert declared.read(f'{{"{name}":5}}'.encode()) == {"f1": None, name: 5}
    reason, words = declared.diagnose(b"{}")
    assert reason == "missing_field" and len(words) <= 400
    assert declared.diagnose(f'{{"{name}":null}}'.encode())[0] == "missing_field"
    assert declared.diagnose(f'{{"{name}":"x"}}'.encode())[0] == "wrong_type"


def test_a_name_may_be_written_with_escapes() -> None:
    schema = StructType([StructField("ä", LongType())])
    assert Json(schema).read(b'{"\\u00e4":5}') == {"ä": 5}


def test_faults_of_one_record_do_not_spread_to_its_neighbours_and_a_block_may_hold_many_bad_records_only() -> None:
    good = b'{"id":1,"name":"x"}'
    halves = [
        b'{"id":1,"name":"x\xe2\x82',
        b'\xac"}',
        b'{"id":1,"name":"\\ud83d',
        b'\\ude00"}',
        b'{"id":1',
        b',"name":"x"}',
    ]
    values = [item for half in halves for item in (good, half)] + [good]
    block = Json(FLAT).reader().read(values)
    assert sorted(block.refused) == list(range(1, 12, 2))
    values = [b'{"id":1,"name":"x","at":"noon"}', b"{", b"", None, b'{"id":1,"name":"\xff"}'] * 2000
    block = Json(FLAT).reader().read(values)
    assert len(block.refused) == block.columns.num_rows == 10_000
    assert block.columns.column("id").null_count == 10_000


@pytest.mark.parametrize(
    "other", ['"\\ud83d"', '"\\ude00\\ud83d"', '"\\\\\\ud83d"', '{"\\ud83dx":1}', '"\\uD83D\\\\uDE00"']
)
def test_half_of_a_surrogate_pair_is_refused_where_nothing_is_declared(other: str) -> None:
    block = Json(FLAT).reader().read([b'{"id":1,"name":"x"}', f'{{"id":1,"name":"x","other":{other}}}'.encode()])
    assert {index: refusal.reason for index, refusal in block.refused.items()} == {1: "malformed_json"}


@pytest.mark.parametrize(("opening", "closing"), [("[", "]"), ('{"a":', "}"), ('{"[[":', "}")])
def test_a_record_is_at_most_200_deep(opening: str, closing: str) -> None:
    def deep(levels: int) -> bytes:
        text = "[{" * 300  # in a text brackets do not count
        return f'{{"id":1,"name":"{text}","z":{opening * (levels - 1)}1{closing * (levels - 1)}}}'.encode()

    block = Json(FLAT).reader().read([deep(200), deep(201)])
    assert list(block.refused) == [1]
    assert block.refused[1].reason == "malformed_json" and "deeper than 200" in block.refused[1].detail


def test_a_record_deeper_than_any_reader_goes_is_refused_and_a_wide_one_with_long_names_and_numbers_is_good() -> None:
    values = [b'{"id":1,"name":"x","z":' + b"[" * 100_000, b'{"id":1,"name":"x"}']
    block = Json(FLAT).reader().read(values)
    assert {i: refusal.reason for i, refusal in block.refused.items()} == {0: "malformed_json"}
    assert "deeper than 200" in block.refused[0].detail
    value = b'{"id":1,"name":"x","z":[' + b",".join([b'{"a":[{}]}'] * 5000) + b"]}"
    assert Json(FLAT).reader().read([value]).refused == {}
    value = b'{"id":1,"name":"x","' + b"k" * 100_000 + b'":' + b"9" * 100_000 + b',"\\u0001":true}'
    assert Json(FLAT).reader().read([value]).refused == {}
    texts = ["\\\\ud83d", "\\ud83d\\ude00", "\\\\\\ud83d\\ude00", "\\\\\\\\uD800", "\\u00e4\\n\\\\"]
    values = [f'{{"id":1,"name":"x","other":"{text}"}}'.encode() for text in texts]
    assert Json(FLAT).reader().read(values).refused == {}


def test_a_batch_of_the_columns_goes_through_arrow_unchanged() -> None:
    """Also where rows were taken out again: the arrays are valid to the last bit."""
    values = [
        b'{"id":1,"name":"x","legs":[{"to":"y","at":"noon"}]}',
        b'{"id":2,"name":"z","legs":[{"to":"y"}],"tags":[]}',
    ]
    batch = Json(RICH).reader().read(values).columns
    batch.validate(full=True)
    assert pa.Table.from_batches([batch]).num_rows == 2


SCHEMAS = {"rich": RICH, "flat": FLAT, "without_text": WITHOUT_TEXT}

EXAMPLES = [60, pytest.param(1500, marks=pytest.mark.long)]
"""800 records, and 20,000 of them; `tests/support/json_fuzz.py` judges millions."""


@cache
def judged(name: str, examples: int) -> list[Verdict]:
    """The judge's verdicts on the corpus, for one of the schemas."""
    return [judge(SCHEMAS[name], value) for value in corpus(examples)]


def disagreements(
    schema: StructType, values: Sequence[bytes | None], block: int = 1000, verdicts: Sequence[Verdict] | None = None
) -> list[Difference]:
    """Values on which reader and judge differ, read in blocks of a size."""
    reader = Json(schema).reader()
    differing: list[Difference] = []
    for begin in range(0, len(values), block):
        part = slice(begin, begin + block)
        known = verdicts[part] if verdicts is not None else None
        differing += differences(schema, values[part], reader.read(values[part]), known)
    return differing


@pytest.mark.parametrize("examples", EXAMPLES)
@pytest.mark.parametrize("block", [1, 7, 1000])
@pytest.mark.parametrize("name", SCHEMAS)
def test_the_reader_agrees_with_the_judge_on_every_record(name: str, block: int, examples: int) -> None:
    values, verdicts = corpus(examples), judged(name, examples)
    refused = sum(not verdict.good for verdict in verdicts)
    assert len(values) * 0.1 < refused < len(values) * 0.95, "the corpus has to hold both kinds"
    assert disagreements(SCHEMAS[name], values, block, verdicts)[:3] == []


@pytest.mark.parametrize("field", RICH.fields, ids=RICH.fieldNames())
def test_every_odd_value_of_every_type_has_its_verdict(field: StructField) -> None:
    schema = StructType([field])
    values = [f'{{"{field.name}":{text}}}'.encode("utf-8", "surrogatepass") for text in ODD]
    values += [f'{{"{field.name}":{text},"other":{{}}}}'.encode("utf-8", "surrogatepass") for text in ODD]
    assert disagreements(schema, values) == []


@pytest.mark.parametrize("field", RICH.fields, ids=RICH.fieldNames())
def test_of_two_fields_the_last_one_counts_and_both_have_the_type(field: StructField) -> None:
    schema = StructType([field])
    values = [
        f'{{"{field.name}":{first},"{field.name}":{last}}}'.encode("utf-8", "surrogatepass")
        for index, first in enumerate(ODD)
        for last in ("null", first, ODD[index - 1], '"2013-01-01"', '"2013-01-01T05:06:07"', "1", '{"city":"x"}', "[]")
    ]
    assert disagreements(schema, values) == []


@pytest.mark.parametrize("block", [1, 7, 1000])
@pytest.mark.parametrize("schema", [RICH, FLAT], ids=["rich", "flat"])
def test_written_examples_have_their_verdict(schema: StructType, block: int) -> None:
    reader = Json(schema).reader()
    assert reader.read(GOOD).refused == {}
    assert sorted(reader.read([*BAD, None]).refused) == list(range(len(BAD) + 1))
    assert disagreements(schema, [*GOOD, *BAD, None], block) == []


def test_a_record_that_is_cut_off_anywhere_has_one_reason() -> None:
    text = '{"id":1,"name":"ä\\u00e4\\ud83d\\ude00","legs":[{"to":"x","cost":-1.5e3}],"other":{"a":[true,null]}}'
    whole = text.encode()
    for length in range(1, len(whole)):
        reason, _ = Json(RICH).diagnose(whole[:length])
        assert reason == ("invalid_utf8" if whole[length] & 0xC0 == 0x80 else "malformed_json")
