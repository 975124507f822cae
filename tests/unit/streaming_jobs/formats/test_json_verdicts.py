"""Each verdict on a JSON record is that of an independent strict reading, and each good record holds its values."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from pyspark.sql.types import StructField, StructType

from streaming_jobs.formats import Json
from streaming_jobs.formats.base import MAX_DETAIL
from tests.support.json_corpus import BAD, FLAT, GOOD, ODD, RICH, WITHOUT_TEXT, corpus
from tests.support.strict_json import Verdict, judge

EXAMPLES = 400
"""Some 5,000 records; `benchmarks/fuzz_formats.py` judges millions."""


def disagreements(schema: StructType, values: Sequence[bytes | None], block: int = 1000) -> list[Any]:
    """Values on which reader and judge differ, in verdict, reason or content."""
    reader = Json(schema).reader()
    verdicts = [judge(schema, value) for value in values]
    differing: list[Any] = []
    for begin in range(0, len(values), block):
        part = values[begin : begin + block]
        read = reader.read(part)
        rows = read.columns.to_pylist()
        assert len(rows) == len(part)
        for index, (value, row) in enumerate(zip(part, rows, strict=True)):
            refusal = read.refused.get(index)
            if not agree(verdicts[begin + index], row, refusal.reason if refusal else None):
                differing.append({"value": value, "reader": refusal or row, "judge": verdicts[begin + index]})
            if refusal:
                assert 0 < len(refusal.detail) <= MAX_DETAIL
                refusal.detail.encode("utf-8")
                assert not any(item is not None for item in row.values()), "a refused value's row is null"
    return differing


def agree(verdict: Verdict, row: dict[str, Any], reason: str | None) -> bool:
    if reason is None:
        return verdict.good and row == verdict.record
    return not verdict.good and verdict.allows(reason)


@pytest.mark.parametrize("block", [1, 7, 1000])
@pytest.mark.parametrize("schema", [RICH, FLAT, WITHOUT_TEXT], ids=["rich", "flat", "without_text"])
def test_the_reader_agrees_with_the_judge_on_every_record(schema: StructType, block: int) -> None:
    values = corpus(EXAMPLES)[: 1300 if block == 1 else None]
    refused = sum(not judge(schema, value).good for value in values)
    assert len(values) * 0.1 < refused < len(values) * 0.95, "the corpus has to hold both kinds"
    assert disagreements(schema, values, block)[:3] == []


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
