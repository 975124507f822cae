"""Void ranges of a topic: what is left of ranges and of records, and where reading goes on."""

from __future__ import annotations

import pytest

from streaming_jobs.sources.record_blocks import KafkaMessages
from streaming_jobs.sources.void_ranges import NO_VOID, VoidRanges
from tests.support.memory_consumer import record

VOID = VoidRanges.of([(0, 10, 20), (1, 5, 5), (0, 15, 30), (0, 40, 50)])


def test_overlapping_ranges_are_one_and_empty_ones_are_none() -> None:
    assert VOID.spans == {0: ((10, 30), (40, 50))}
    assert VoidRanges.of([(0, 30, 40)]).joined(VOID).spans == {0: ((10, 50),)}


@pytest.mark.parametrize(
    ("span", "left"),
    [
        ((0, 10), (0, 10)),
        ((0, 20), (0, 10)),
        ((10, 30), None),
        ((12, 29), None),
        ((12, 35), (30, 35)),
        ((5, 60), (5, 60)),
        ((30, 50), (30, 40)),
        ((20, 45), (30, 40)),
    ],
)
def test_a_range_loses_the_void_at_its_ends(span: tuple[int, int], left: tuple[int, int] | None) -> None:
    assert VOID.clipped({0: span}) == ({} if left is None else {0: left})


def test_a_position_in_a_void_range_goes_on_after_it_and_void_offsets_are_counted() -> None:
    assert VOID.after({0: 10, 1: 7}) == {0: 30, 1: 7}
    assert VOID.after({0: 9}) == {0: 9}
    assert VOID.after({0: 30}) == {0: 30}
    assert VOID.after({0: 49}) == {0: 50}
    assert VOID.count({0: (0, 100), 1: (0, 100)}) == 30
    assert VOID.count({0: (25, 45)}) == 10


def test_records_in_void_ranges_are_left_out_and_the_others_keep_their_order() -> None:
    records = KafkaMessages([record(0, offset) for offset in (9, 10, 29, 30, 45, 50)])
    assert VOID.kept(records).column("offset").to_pylist() == [9, 30, 50]
    other = KafkaMessages([record(1, offset) for offset in (9, 10)])
    assert VOID.kept(other) is other
    assert NO_VOID.kept(records) is records
