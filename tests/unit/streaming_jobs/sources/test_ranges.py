"""Ranges whose beginning Kafka no longer has: which part comes from where, and what is in neither place.

And void ranges of a topic: what is left of ranges and of records, and where reading goes on.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta

import pytest

from streaming_jobs.errors import OffsetsLost
from streaming_jobs.ledger.positions import Archived
from streaming_jobs.sources.archived_ranges import gone, hole, parted, read_ranges, readable_from
from streaming_jobs.sources.base import Span
from streaming_jobs.sources.range_reader import RangeReader
from streaming_jobs.sources.record_blocks import KafkaMessages, SourceRecords
from streaming_jobs.sources.void_ranges import NO_VOID, VoidRanges
from streaming_jobs.testing.consumer import TOPIC, MemoryConsumer, record
from tests.support.memory_archive import MemoryArchive


def reader(consumer: MemoryConsumer) -> RangeReader:
    return RangeReader(TOPIC, {"bootstrap.servers": "x:1"}, timedelta(seconds=5), connect=lambda _: consumer)


def kafka(offsets: Mapping[int, list[int]], ends: Mapping[int, int], first: Mapping[int, int]) -> MemoryConsumer:
    log = {p: {o: record(p, o) for o in each if o >= first.get(p, 0)} for p, each in offsets.items()}
    return MemoryConsumer(log, ends, first=dict(first))


def places(records: list[SourceRecords]) -> list[tuple[int, int]]:
    return [
        place
        for each in records
        for place in zip(each.column("partition").to_pylist(), each.column("offset").to_pylist(), strict=True)
    ]


WITH_GAPS = {0: [o for o in range(100) if o % 7 and not 40 <= o < 55], 1: list(range(0, 100, 3))}
"""Offsets with markers, aborted records and compacted ones missing."""


@pytest.mark.parametrize("first", [0, 1, 30, 45, 60, 99, 100])
def test_a_range_has_the_same_records_wherever_kafka_begins(first: int) -> None:
    spans, firsts = {0: (5, 90), 1: (0, 100)}, {0: first, 1: first}
    expected = [(p, o) for p, (start, end) in spans.items() for o in WITH_GAPS[p] if start <= o < end]
    archive = MemoryArchive(WITH_GAPS, {0: (0, 100), 1: (0, 100)})
    consumer = kafka(WITH_GAPS, {0: 100, 1: 100}, firsts)
    found = places(list(read_ranges(reader(consumer), spans, 10, archive, firsts, lambda: firsts)))
    assert sorted(found) == expected, "in two places, each record once"
    for partition in spans:
        offsets = [o for p, o in found if p == partition]
        assert offsets == sorted(offsets), "in the order of offsets"
    wanted = [(p, (start, min(first, end))) for p, (start, end) in spans.items() if start < first]
    assert archive.asked == wanted, "only what Kafka has no longer"


def test_retention_that_moves_after_the_look_is_found_out_and_nothing_is_read_twice() -> None:
    consumer = kafka(WITH_GAPS, {0: 100, 1: 100}, {})
    looks: list[dict[int, int]] = [{0: 70, 1: 0}]
    archive = MemoryArchive(WITH_GAPS, {0: (0, 80), 1: (0, 100)})
    records: list[SourceRecords] = []
    spans = {0: (0, 100), 1: (0, 100)}
    for each in read_ranges(reader(consumer), spans, 10, archive, {0: 0, 1: 0}, looks.pop):
        records.append(each)
        if len(records) == 1:  # Kafka deletes while the range is read
            consumer.first, consumer.most = {0: 70}, 10
            consumer.positions[0] = 30
            consumer.log = {p: {o: m for o, m in each.items() if p or o >= 70} for p, each in consumer.log.items()}
    found = places(records)
    assert sorted(found) == [(p, o) for p, each in WITH_GAPS.items() for o in each]
    assert len(set(found)) == len(found) and len(archive.asked) == 1 and not looks


def test_what_an_archive_does_not_have_either_is_an_error_with_its_offsets() -> None:
    with pytest.raises(OffsetsLost, match="no longer in the topic"):
        list(read_ranges(reader(kafka(WITH_GAPS, {0: 100, 1: 100}, {0: 30})), {0: (5, 90)}, 10))
    archive = MemoryArchive(WITH_GAPS, {0: (0, 50)})
    consumer = kafka(WITH_GAPS, {0: 100, 1: 100}, {0: 60})
    with pytest.raises(OffsetsLost, match=r"offsets 50 to 59 of topic things, partition 0, are gone: archive "):
        list(read_ranges(reader(consumer), {0: (5, 90)}, 10, archive, {0: 60}, lambda: {0: 60}))
    assert archive.asked == [], "nothing of a range is read that is not whole"
    # The broker says that offsets are gone, and that it begins before them: reading again would never end.
    consumer = kafka(WITH_GAPS, {0: 100, 1: 100}, {0: 60})
    archive = MemoryArchive(WITH_GAPS, {0: (0, 100)})
    with pytest.raises(OffsetsLost, match="no longer in the topic"):
        list(read_ranges(reader(consumer), {0: (5, 90)}, 10, archive, {}, lambda: {0: 0}))


@pytest.mark.parametrize(
    ("begin", "first", "covered", "missing"),
    [
        (5, 5, None, None),
        (5, 9, (0, 9), None),
        (5, 9, (5, 20), None),
        (5, 9, None, (5, 9)),
        (5, 9, (0, 7), (7, 9)),
        (5, 9, (6, 9), (5, 6)),
        (5, 9, (20, 30), (5, 9)),
        (5, 9, (0, 4), (5, 9)),
    ],
)
def test_a_hole_is_what_neither_has(begin: int, first: int, covered: Span | None, missing: Span | None) -> None:
    assert hole(begin, first, covered) == missing
    words = gone(Archived("a", {} if covered is None else {0: covered}, {0: first}), "t", 0, begin, first)
    if missing:
        assert words.startswith(
            f"offsets {missing[0]} to {missing[1] - 1} of topic t, partition 0, are gone: archive a"
        )


def test_ranges_part_where_kafka_begins_and_the_first_offset_is_before_no_hole() -> None:
    spans: dict[int, Span] = {0: (0, 10), 1: (5, 9), 2: (0, 3)}
    assert parted(spans, {0: 4, 1: 5, 2: 9}) == ({0: (0, 4), 2: (0, 3)}, {0: (4, 10), 1: (5, 9)})
    first = {0: 50, 1: 50, 2: 50, 3: 50, 4: 0}
    bounds = {0: (10, 50), 1: (10, 49), 2: (10, 90), 3: (60, 90), 4: (0, 9)}
    assert readable_from(first, bounds) == {0: 10, 1: 50, 2: 10, 3: 50, 4: 0}


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
