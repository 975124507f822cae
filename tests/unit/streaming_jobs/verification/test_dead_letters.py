"""Dead letters beside what the formats refuse: a record is one of them once, its output rows may be several."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pyarrow as pa
import pytest

from streaming_jobs.sinks.delta.refused_rows import DETAILS
from streaming_jobs.verification.dead_letters import OF_ROWS, TOMBSTONE, Refusals, compare_letters
from streaming_jobs.verification.offset_ranges import place_of
from streaming_jobs.verification.topic import RawRecord, blocks
from streaming_jobs.verification.truths import refused_whole


def letters(*reasons: str) -> pa.Table:
    """A dead letter each, all of the record at offset 7."""
    rows = [{"topic": "things", "partition": 0, "offset": 7, "reason": reason} for reason in reasons]
    return pa.Table.from_pylist(rows)


def verdict(rows: pa.Table, **due: str) -> str:
    refusals = Refusals({"things": lambda records: {}}, reasons=frozenset({"empty_value"}))
    refusals.found["things"] = dict.fromkeys([7], due["due"]) if due else {}
    ((comparison,), _) = compare_letters("things_dead_letters", rows, {"things": np.array([7], np.int64)}, refusals)
    return comparison.verdict


def test_the_reasons_of_output_rows_are_those_that_the_sinks_give() -> None:
    assert {"null_key", *DETAILS} == OF_ROWS


@pytest.mark.parametrize("reason", sorted(OF_ROWS))
def test_a_record_may_have_several_output_rows_that_no_table_can_hold(reason: str) -> None:
    rows = letters(reason, reason)
    assert verdict(rows) == "ok"
    assert refused_whole(rows) == {}, "the record itself was read"


def test_an_event_time_too_far_ahead_is_told_as_that() -> None:
    """The record itself was refused, and no output row of it."""
    rows = letters("event_time_ahead")
    refusals = Refusals({"things": lambda records: {}}, reasons=frozenset({"empty_value"}))
    ((comparison,), _) = compare_letters("things_dead_letters", rows, {"things": np.array([7], np.int64)}, refusals)
    assert comparison.verdict == "ok" and "output row" not in comparison.text
    assert "1 record refused for an event time that is too far ahead (event_time_ahead)" in comparison.text
    assert refused_whole(rows) == {"things": frozenset({7})}


def test_a_record_that_the_format_refuses_is_a_dead_letter_once() -> None:
    assert verdict(letters("empty_value"), due="empty_value") == "ok"
    assert verdict(letters("empty_value", "empty_value"), due="empty_value") == "wrong"
    assert verdict(letters("empty_value")) == "wrong"
    assert refused_whole(letters("empty_value")) == {"things": frozenset({7})}


def test_a_null_value_is_no_matter_of_the_format() -> None:
    def judge(records: Sequence[RawRecord]) -> dict[int, str]:
        assert records and all(record.value is not None for record in records)
        return {number: "no_number" for number, record in enumerate(records) if not (record.value or b"").isdigit()}

    def records(topic: str, *values: bytes | None) -> list[RawRecord]:
        return [RawRecord(topic, 1, offset, 0, None, value) for offset, value in enumerate(values, 5)]

    refusals = Refusals({"things": judge, "kept": judge}, keeps=frozenset({"kept"}))
    for topic in ("things", "kept"):
        refusals.take(records(topic, None, b"1", None, b"x"))
        refusals.take(records(topic, None))
    assert refusals.found == {
        "things": {place_of(1, 5): TOMBSTONE, place_of(1, 7): TOMBSTONE, place_of(1, 8): "no_number"},
        "kept": {place_of(1, 8): "no_number"},
    }


def test_large_values_are_taken_a_few_at_a_time() -> None:
    values = [b"x" * (5 << 20)] * 9 + [b""] * 2_500
    made = [RawRecord("things", 0, offset, 0, None, value) for offset, value in enumerate(values)]
    found = list(blocks(made))
    assert [len(block) for block in found] == [4, 4, 1_000, 1_000, 501]
    assert [record for block in found for record in block] == made
