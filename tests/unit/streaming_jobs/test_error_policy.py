"""The declaration of what happens to records that fail."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest

from streaming_jobs import DeltaSource, DeltaTable, ErrorPolicy, stream
from streaming_jobs.declare.error_policy import Budget, parse_budget
from streaming_jobs.errors import RecourseError, UsageError
from streaming_jobs.runtime.code_version import code_version
from tests.support.things import THINGS


def declared(source: Any = THINGS, **options: Any) -> Any:
    @stream(source=source, sink=DeltaTable("out"), **options)
    def out(things: Any) -> Any:
        return things

    return out


def test_the_default_is_what_streams_did_before_and_leaves_the_version_of_their_code_as_it_was() -> None:
    plain, same, other = (
        declared(),
        declared(errors=ErrorPolicy()),
        declared(errors=ErrorPolicy(function="dead_letter")),
    )
    assert plain.errors == ErrorPolicy("dead_letter", "fail", "dead_letter", None)
    hashes = [code_version(each, ()).hash for each in (plain, same, other)]
    assert hashes[0] == hashes[1] != hashes[2], "a supervised session starts again with another policy"


@pytest.mark.parametrize(
    ("text", "budget"),
    [
        ("1%", Budget(share=0.01)),
        ("0.5 %", Budget(share=0.005)),
        ("100%", Budget(share=1.0)),
        ("100 per hour", Budget(100, timedelta(hours=1))),
        ("5 per 10 minutes", Budget(5, timedelta(minutes=10))),
    ],
)
def test_a_budget_is_a_share_of_a_batch_or_a_number_per_time(text: str, budget: Budget) -> None:
    assert parse_budget(text) == budget == ErrorPolicy(budget=text).bound


def test_a_share_allows_one_record_of_a_small_batch_and_a_rate_what_its_time_has_left() -> None:
    assert [Budget(share=0.01).allowed(records, 7) for records in (5, 100, 1_000)] == [1, 1, 10]
    assert [Budget(10, timedelta(hours=1)).allowed(5, spent) for spent in (0, 7, 10, 12)] == [10, 3, 0, 0]
    assert ErrorPolicy().bound == Budget(100, timedelta(hours=1))


@pytest.mark.parametrize("text", ["", "many", "0%", "101%", "0 per hour", "1 per lightyear", "5 per 0 hours", "-1%"])
def test_any_other_budget_is_refused(text: str) -> None:
    with pytest.raises(RecourseError, match="budget"):
        ErrorPolicy(budget=text)


def test_an_unknown_action_a_policy_of_another_type_and_a_table_as_source_are_refused() -> None:
    with pytest.raises(UsageError, match="errors: function='dead_leter'") as unknown:
        ErrorPolicy(function="dead_leter")  # type: ignore[arg-type]
    assert "dead_letter" in unknown.value.next_step
    with pytest.raises(UsageError, match=r"errors is 'drop', not an ErrorPolicy"):
        declared(errors="drop")
    with pytest.raises(UsageError, match="reads table rows, and errors has function='drop'"):
        declared(DeltaSource("rows", schema=THINGS.records.schema), errors=ErrorPolicy(function="drop"))
    declared(DeltaSource("rows", schema=THINGS.records.schema), errors=ErrorPolicy(decode="fail"))
