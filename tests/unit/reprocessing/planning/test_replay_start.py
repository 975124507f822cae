"""The ranges that a replay would miss, of topics and of tables that are read."""

from __future__ import annotations

import pytest

from reprocessing.plan.replay_range import lost


@pytest.mark.parametrize(
    ("begin", "words"),
    [
        (0, ""),
        (1, "versions 1 to 9 of table numbers can no longer be read"),
        (9, "version 9 of table numbers can no longer be read"),
        (10, ""),
    ],
)
def test_a_replay_begins_with_the_whole_table_or_where_its_versions_are_left(begin: int, words: str) -> None:
    found = lost({"numbers": {0: begin}}, {"numbers": {0: 0}}, {}, {"numbers": {0: 10}})
    assert found.startswith(words) and bool(found) is bool(words)


def test_of_a_topic_only_its_first_offset_counts() -> None:
    earliest = {"things": {0: 5, 1: 0}}
    assert lost({"things": {0: 4, 1: 0}}, earliest, {"things": None}, {"things": {}}).startswith(
        "offsets 4 to 4 of topic"
    )
    assert lost({"things": {0: 5, 1: 0}}, earliest, {"things": None}, {"things": {}}) == ""
