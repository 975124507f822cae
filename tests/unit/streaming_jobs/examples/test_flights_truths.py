"""The shipped truths: as many flights as were read, wherever in the topic, and nothing that is no flight."""

from __future__ import annotations

import pytest

from streaming_jobs.catalog.topology import Topology, truths_in
from streaming_jobs.catalog.truths import NotComparable, Record
from streaming_jobs.examples.flights import dataset, truth
from streaming_jobs.examples.flights.content import rank

pytestmark = pytest.mark.slow

COUNT = 3_000


def records(partitions: int, end: int = COUNT) -> list[Record]:
    """The first flights as they lie in a topic of so many partitions."""
    keys = dataset.keys_of(truth._all_flights())[:end]
    places = truth._partition(keys, partitions)
    ranks = rank(places).tolist()
    return [Record("flights", p, o, 0, key, b"", None) for p, o, key in zip(places.tolist(), ranks, keys, strict=True)]


def test_every_shipped_table_has_a_truth() -> None:
    topology = Topology.load(["streaming_jobs.examples.flights.streams"])
    tables = [sink.name for stream in topology.streams.values() for sink in stream.sinks.values()]
    assert (
        {declared.table for declared in truths_in(["streaming_jobs.examples.flights.streams"], tables)}
        == set(truth.KEYS)
        == set(tables)
    )


@pytest.mark.parametrize("partitions", [4, 7])
def test_of_one_feed_it_is_what_the_share_of_the_flights_makes(partitions: int) -> None:
    share = COUNT / dataset.TOTAL
    for table, keys in truth.KEYS.items():
        due = truth.truth(table, share, partitions=partitions)
        assert truth.differences(due, truth.truth_of(table, records(partitions)), keys) == []


def test_partitions_that_were_read_to_different_ends_are_no_matter() -> None:
    half = [record for record in records(4) if record.partition != 1 or record.offset < 5]
    assert truth.truth_of("carrier_totals", half)["flights"].sum() == len(half)


def test_records_that_are_no_flights_are_not_compared() -> None:
    first, *others = records(4)
    alien = Record("flights", first.partition, first.offset, 0, others[0].key, b"", None)
    with pytest.raises(NotComparable):
        truth.truth_of("carrier_totals", [alien, *others])
