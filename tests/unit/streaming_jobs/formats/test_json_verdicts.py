"""Each verdict on a JSON record is that of an independent strict reading, and each good record holds its values."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import pytest
from pyspark.sql.types import StructField, StructType

from streaming_jobs.formats import Json
from tests.support.json_corpus import BAD, FLAT, GOOD, ODD, RICH, WITHOUT_TEXT, corpus
from tests.support.strict_json import Difference, Verdict, differences, judge

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
