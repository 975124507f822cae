"""Dead letters beside what the formats refuse: a record is one of them once, its output rows may be several."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest

from streaming_jobs.sinks.delta.refused_rows import DETAILS
from streaming_jobs.verification.dead_letters import OF_ROWS, Refusals, compare_letters
from streaming_jobs.verification.truths import refused_whole


def letters(*reasons: str) -> pa.Table:
    """A dead letter each, all of the record at offset 7."""
    rows = [{"topic": "things", "partition": 0, "offset": 7, "reason": reason} for reason in reasons]
    return pa.Table.from_pylist(rows)


def verdict(rows: pa.Table, **due: str) -> str:
    refusals = Refusals({"things": lambda value: None}, reasons=frozenset({"empty_value"}))
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
    refusals = Refusals({"things": lambda value: None}, reasons=frozenset({"empty_value"}))
    ((comparison,), _) = compare_letters("things_dead_letters", rows, {"things": np.array([7], np.int64)}, refusals)
    assert comparison.verdict == "ok" and "output row" not in comparison.text
    assert "1 record refused for an event time that is too far ahead (event_time_ahead)" in comparison.text
    assert refused_whole(rows) == {"things": frozenset({7})}


def test_a_record_that_the_format_refuses_is_a_dead_letter_once() -> None:
    assert verdict(letters("empty_value"), due="empty_value") == "ok"
    assert verdict(letters("empty_value", "empty_value"), due="empty_value") == "wrong"
    assert verdict(letters("empty_value")) == "wrong"
    assert refused_whole(letters("empty_value")) == {"things": frozenset({7})}
