"""The records of topics: which void ranges hold on which path of generations, and who may read meanwhile."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from streaming_jobs.errors import PreflightRefused, UsageError
from streaming_jobs.settings import Settings
from streaming_jobs.state.topic_records import VoidRange, declare_void, load, under_way_of, void_of


def declare(
    home: Settings, path: Sequence[int], *spans: tuple[int, int], generation: int = 2, plan: str = "a-0001", **rest: str
) -> None:
    ranges = [VoidRange(0, begin, end, plan, generation, 1.0) for begin, end in spans]
    topic_id = rest.pop("topic_id", "id")
    declare_void(home, "t", topic_id, writer="a", path=path, ranges=ranges, under_way=rest.get("under_way"))


def spans(home: Settings) -> tuple[tuple[int, int], ...]:
    return void_of(home, "t", "id").spans.get(0, ())


def test_a_topic_of_which_nothing_is_void_has_no_record_and_nobody_reads_while_a_plan_appends(home: Settings) -> None:
    declare(home, [1, 2])
    assert load(home, "t") is None and spans(home) == ()
    declare(home, [1, 2], (10, 20), under_way="a-0001")
    with pytest.raises(PreflightRefused, match="a-0001 is appending"):
        spans(home)
    declare(home, [1, 2])
    assert spans(home) == ((10, 20),)


def test_a_range_holds_while_its_generation_is_on_the_path_and_is_replaced_by_the_same_plan(home: Settings) -> None:
    declare(home, [1, 2], (10, 25))
    declare(home, [1, 2], (10, 20))
    assert spans(home) == ((10, 20),)
    declare(home, [1, 3], (20, 40), generation=3, plan="a-0002")  # an undo
    assert spans(home) == ((20, 40),)
    declare(home, [1, 2, 4], (40, 50), generation=4, plan="a-0003")  # and that one undone
    assert spans(home) == ((10, 20), (40, 50))


def test_a_topic_that_was_made_anew_has_no_void_ranges(home: Settings) -> None:
    declare(home, [1, 2], (10, 20))
    assert void_of(home, "t", "another").spans == {}
    declare(home, [1, 2, 3], (5, 6), generation=3, topic_id="another")
    assert void_of(home, "t", "another").spans == {0: ((5, 6),)}


def test_a_damaged_record_is_refused_and_a_name_is_no_path(home: Settings) -> None:
    declare(home, [1, 2], (10, 20))
    (home.state / "_topics" / "t.json").write_text("{")
    with pytest.raises(PreflightRefused, match="cannot be read"):
        spans(home)
    with pytest.raises(UsageError):
        load(home, "../t")


def test_ranges_of_another_writer_hold_for_good(home: Settings) -> None:
    declare(home, [1, 2], (10, 20))
    declare_void(home, "t", "id", writer="b", path=[1], under_way="b-0001")
    assert [each.topic for each in under_way_of(home, "b-0001")] == ["t"]
    declare_void(home, "t", "id", writer="b", path=[1, 3])
    assert spans(home) == ((10, 20),) and under_way_of(home, "b-0001") == []
