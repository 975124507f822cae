"""The search for the records of a batch on which the function raises, on numbers instead of records."""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyspark.logger import PySparkLogger

from streaming_jobs.errors import FunctionRaised, TransientError
from streaming_jobs.ledger.positions import OffsetRange
from streaming_jobs.runtime.isolation import Failure, TooManyRaise, _stopped_within, raising, unreported
from streaming_jobs.runtime.kept_records import KeptRecords, Places
from streaming_jobs.runtime.planned_once import PlannedOnce, RowsCounted
from streaming_jobs.sources.base import Span

Near = Callable[[int], Sequence[Span]]


class Function:
    """Raises on some numbers, on those of `once` in only one of their runs alone; counts its runs, and those alone.

    It says that it stopped `near` some numbers.
    """

    def __init__(self, bad: Collection[int], *, once: Collection[int] = (), near: Near = lambda _: ()) -> None:
        self.bad, self.once, self.near, self.runs, self.alone = set(bad), set(once), near, 0, list[int]()

    def __call__(self, spans: Sequence[Span]) -> Failure | None:
        assert all(begin < end for begin, end in spans) and spans, "no run is without records"
        self.runs += 1
        numbers = {number for span in spans for number in range(*span)}
        if len(numbers) == 1:
            self.alone += numbers
        met = sorted(self.bad & numbers)
        if len(numbers) == 1 and numbers <= self.once:
            self.bad -= numbers
        return Failure(FunctionRaised(f"no place for {met[0]}"), self.near(met[0])) if met else None


@pytest.mark.parametrize("bad", [0, 1, 4_999, 5_000, 9_999])
def test_one_record_of_ten_thousand_is_found_in_seventeen_runs_and_run_twice_alone(bad: int) -> None:
    function = Function([bad])
    found = raising(10_000, function, allowed=1)
    assert {number: error.found for number, error in found.items()} == {bad: f"no place for {bad}"}
    assert function.runs <= math.ceil(math.log2(10_000)) + 3
    assert function.alone.count(bad) >= 2


def pointed(function: Function, count: int, allowed: int = 100) -> dict[int, FunctionRaised]:
    return raising(count, function, allowed, first=function([(0, count)]))


def test_where_a_run_says_where_it_stopped_a_record_takes_two_runs_and_three_in_batches() -> None:
    exact = Function([6_666], near=lambda n: [(n, n + 1)])
    assert pointed(exact, 10_000).keys() == {6_666}
    assert (exact.runs, exact.alone) == (3, [6_666]), "all, the record alone, all others"
    in_batches = Function([6_666])
    in_batches.near = lambda n: [(n // 100 * 100, n // 100 * 100 + 100) if in_batches.runs == 1 else (n, n + 1)]
    assert pointed(in_batches, 10_000).keys() == {6_666}
    assert (in_batches.runs, in_batches.alone) == (4, [6_666])


def test_where_the_batch_itself_has_stopped_a_record_takes_one_run_and_two_in_batches() -> None:
    exact = Function([6_666], near=lambda n: [(n, n + 1)])
    alone = [(6_666, 6_667)]
    found = raising(10_000, exact, 100, first=exact(alone), within=alone)
    assert {number: error.found for number, error in found.items()} == {6_666: "no place for 6666"}
    assert (exact.runs, exact.alone) == (2, [6_666]), "the record alone, all others"
    in_batches = Function([6_666], near=lambda n: [(n, n + 1)])
    batch = [(6_600, 6_700)]
    assert raising(10_000, in_batches, 100, first=in_batches(batch), within=batch).keys() == {6_666}
    assert (in_batches.runs, in_batches.alone) == (3, [6_666])
    twice = Function([6_666, 9_000], near=lambda n: [(n, n + 1)])
    assert raising(10_000, twice, 100, first=twice(alone), within=alone).keys() == {6_666, 9_000}
    assert (twice.runs, twice.alone) == (5, [6_666, 0, 9_000]), "0 is a sample: not all raise"
    flaky = Function([0, 1], once=[1], near=lambda n: [(n, n + 1)])
    assert raising(2, flaky, 100, first=flaky([(0, 1)]), within=[(0, 1)]).keys() == {0}, "1 raised only once"
    with pytest.raises(TooManyRaise) as many:
        raising(10_000, everything := Function(range(10_000)), 100, first=everything(alone), within=alone)
    assert many.value.error.found == "no place for 6666"


def test_a_run_that_stopped_elsewhere_than_it_said_is_the_last_one_that_is_believed() -> None:
    function = Function([0])
    function.near = lambda n: [(n + function.runs, n + function.runs + 1)]
    assert pointed(function, 10_000).keys() == {0}
    assert function.runs <= math.ceil(math.log2(10_000)) + 3 + 2
    assert function.alone.count(0) >= 2, "nothing but runs of the record alone says so"
    roughly = Function([50], near=lambda n: [(n - 1, n + 1)])
    assert pointed(roughly, 100).keys() == {50}
    assert roughly.alone.count(50) == 2, "no run stopped at it alone"
    flaky = Function([77], once=[77], near=lambda n: [(n, n + 1)])
    assert pointed(flaky, 100).keys() == {77}, "it raised in two runs in a row"


def test_the_batch_that_completes_without_the_record_is_the_last_run() -> None:
    batches = list[set[int]]()

    def completes(found: Mapping[int, FunctionRaised]) -> bool:
        batches.append(set(found))
        return function.bad <= set(found)

    function = Function([5], near=lambda n: [(n, n + 1)])
    assert raising(100, function, 10, first=function([(0, 100)]), completes=completes).keys() == {5}
    assert (function.runs, batches) == (2, [{5}])
    function = Function([5, 7, 90], near=lambda n: [(n, n + 1)])
    assert raising(100, function, 100, first=function([(0, 100)]), completes=completes).keys() == {5, 7, 90}
    assert (function.runs, batches) == (7, [{5}, {5}]), "a batch is tried once"


@given(st.integers(1, 300).flatmap(lambda n: st.tuples(st.just(n), st.sets(st.integers(0, n - 1), max_size=12))))
def test_every_record_that_raises_is_found_and_no_other(case: tuple[int, set[int]]) -> None:
    count, bad = case
    function = Function(bad)
    assert raising(count, function, allowed=count).keys() == bad
    for near in (lambda n: [(n, n + 1)], lambda n: [(n - 3, n + 3), (0, 2)], lambda n: [(n + 1, count)]):
        if bad:
            assert pointed(Function(bad, near=near), count, count).keys() == bad
            hinted, within = Function(bad, near=near), [(max(bad), max(bad) + 1)]
            assert raising(count, hinted, count, first=hinted(within), within=within).keys() == bad
    assert function.runs <= (len(bad) + 1) * (math.ceil(math.log2(count + 1)) + 3) + 8


def test_a_record_that_raises_once_is_not_set_aside() -> None:
    function = Function([77], once=[77])
    assert raising(100, function, allowed=10) == {}
    assert function.alone.count(77) == 2


def test_a_batch_whose_failure_no_record_repeats_alone_ends_after_the_runs_of_one_search() -> None:
    function = Function([])
    assert raising(10_000, function, allowed=10) == {}
    assert function.runs <= math.ceil(math.log2(10_000)) + 1


def test_a_bug_that_raises_on_all_records_ends_the_search_after_the_first_record_and_samples() -> None:
    function = Function(range(10_000))
    with pytest.raises(TooManyRaise) as many:
        raising(10_000, function, allowed=100)
    assert many.value.error.found == "no place for 0"
    assert function.runs <= math.ceil(math.log2(10_000)) + 3 + 8


def test_more_records_than_the_budget_allows_end_the_search_and_as_many_do_not() -> None:
    bad = range(0, 1_000, 100)
    assert len(raising(1_000, Function(bad), allowed=10)) == 10
    with pytest.raises(TooManyRaise) as many:
        raising(1_000, Function(bad), allowed=9)
    assert many.value.found == 10
    with pytest.raises(TooManyRaise):
        raising(1_000, Function([5]), allowed=0)


def test_an_error_of_a_connection_ends_the_search() -> None:
    def away(_: Sequence[Span]) -> Failure | None:
        raise TransientError("the service is away")

    with pytest.raises(TransientError, match="the service is away"):
        raising(10, away, allowed=10)


def test_numbers_are_the_offsets_of_a_batch_topic_by_topic_and_partition_by_partition() -> None:
    ranges = [OffsetRange("a", "id", {0: 10, 1: 5}, {1: 8, 0: 12, 2: 3}), OffsetRange("b", "id", {0: 7}, {0: 7})]
    places = Places.of(ranges)
    assert len(places) == 2 + 3 + 3
    assert [places.at(number) for number in (0, 1, 2, 4, 5, 7)] == [
        ("a", 0, 10),
        ("a", 0, 11),
        ("a", 1, 5),
        ("a", 1, 7),
        ("a", 2, 0),
        ("a", 2, 2),
    ]
    assert places.within([(1, 3), (6, 8)]) == [("a", 0, 11, 12), ("a", 1, 5, 6), ("a", 2, 1, 3)]
    assert places.numbers("a", np.array([2, 0, 1, 1]), np.array([1, 11, 7, 5])).tolist() == [6, 1, 4, 2]


class HeldSource(NamedTuple):
    """A topic whose record at offset 2 its format refuses; `read` has the records of partition 1 first."""

    name: str
    parameter: str

    def read(self, rows: str, offsets: OffsetRange) -> pa.Table:
        return pa.table(
            {"partition": [1, 1, 0, 0, 0], "offset": [7, 8, 1, 2, 4], "_bad": [False, False, False, True, False]}
        )

    def held(self, spark: None, rows: pa.Table) -> pa.Table:
        return rows


def test_rows_that_a_batch_counts_are_those_of_its_good_records_by_partition_and_offset(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ranges = [OffsetRange("a", "id", {0: 1, 1: 7}, {0: 5, 1: 9})]
    source: Any = HeldSource("a", "things")
    kept = KeptRecords.of(None, [source], ranges, ExitStack(), in_driver=True)  # type: ignore[arg-type]
    monkeypatch.setattr(PlannedOnce, "of", lambda _, held, frames, numbers: (held, numbers))
    held, numbers = kept.planned(list, None)  # type: ignore[arg-type,misc]
    assert held["things"]["offset"].to_pylist() == [1, 4, 7, 8]
    assert numbers["things"].tolist() == [0, 3, 4, 5], "offset 3 is a gap"
    counted = [
        kept.counted(RowsCounted([("a", count), ("elsewhere", 9)], [(50, 100)])) for count in (0, 1, 2, 3, 4, 5, 6)
    ]
    assert [each.handed_out for each in counted] == [[("things", n)] for n in (0, 1, 1, 2, 3, 4, 4)]
    assert all(each.came_back == [(50, 100)] for each in counted)


def test_where_a_batch_has_stopped_each_record_is_once_and_few_are() -> None:
    kept: Any = SimpleNamespace(places=range(1_000), counted=lambda counted: counted)
    raised = FunctionRaised("no place")
    raised.__cause__ = ValueError()

    def within(*near: Span) -> list[Span]:
        return _stopped_within(kept, SimpleNamespace(near=lambda *_: near), RowsCounted([], []), raised)  # type: ignore[arg-type]

    assert within((10, 20), (15, 16), (5, 6), (18, 22)) == [(5, 6), (10, 20), (20, 22)]
    assert within((990, 1_010)) == [(990, 1_000)]
    assert within((0, 201)) == [] == _stopped_within(kept, None, RowsCounted([], []), raised)


def test_stack_traces_of_other_threads_are_still_written() -> None:
    written: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: written.append(record.getMessage())  # type: ignore[method-assign]
    logger = PySparkLogger.getLogger("DataFrameQueryContextLogger")
    logger.addHandler(handler)
    try:
        with unreported():
            with unreported():
                logger.error("searched")
            logger.error("searched still")
            thread = threading.Thread(target=logger.error, args=("another stream's",))
            thread.start()
            thread.join()
        logger.error("afterwards")
    finally:
        logger.removeHandler(handler)
    assert written == ["another stream's", "afterwards"]
