"""The declared lateness of airport_hours drops no row in any order in which the topic is promised to be read.

The real records pass through the real partitions, without Kafka or Spark. A row is dropped when the end of its window
is at or before the watermark. The watermark of a batch is the greatest event time of all batches before it, less the
delay. Spark filters with the watermark of one batch earlier still, unless a batch without data lies between, so these
delays err on the safe side by at most one batch.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np
import pytest
from numpy.typing import NDArray

from streaming_jobs.examples.flights import dataset
from streaming_jobs.examples.flights.feeder import CHUNK, PARTITIONS
from streaming_jobs.examples.flights.streams import FLIGHTS_BY_SCHEDULE

HOUR_MS = 3_600_000
Positions = NDArray[np.int64]


def needed_hours(event_ms: Positions, batches: Iterable[Positions]) -> float:
    """The smallest delay in hours at which no batch drops a row; 0 where order alone is enough."""
    window_end = event_ms // HOUR_MS * HOUR_MS + HOUR_MS
    newest, needed = None, 0
    for batch in filter(len, batches):
        if newest is not None:
            # Dropped when end <= newest - delay, so the delay has to exceed newest - end, if only by 1 ms.
            needed = max(needed, int(newest - window_end[batch].min()) + 1)
        newest = max(int(event_ms[batch].max()), newest or 0)
    return needed / HOUR_MS


def in_order(count: int, size: int) -> Iterator[Positions]:
    """Records as they are sent, `size` per batch."""
    for start in range(0, count, size):
        yield np.arange(start, min(start + size, count))


def backlog(partitions: Positions, limit: int) -> Iterator[Positions]:
    """A full topic read with maxOffsetsPerTrigger = `limit`: of each partition its share of what remains, floored."""
    queues = [np.flatnonzero(partitions == p) for p in range(int(partitions.max()) + 1)]
    while remaining := sum(map(len, queues)):
        shares = [limit * (len(queue) / remaining) for queue in queues]
        sizes = [int(np.ceil(share) if share < 1 else np.floor(share)) for share in shares]
        yield np.concatenate([queue[:size] for queue, size in zip(queues, sizes, strict=True)])
        queues = [queue[size:] for queue, size in zip(queues, sizes, strict=True)]


def split_chunks(partitions: Positions, chunk: int, first: int) -> Iterator[Positions]:
    """The worst a reader can see of a feeder that flushes each `chunk`: partition `first` of it, then the rest."""
    for batch in in_order(len(partitions), chunk):
        mine = partitions[batch] == first
        yield batch[mine]
        yield batch[~mine]


def dropped(event_ms: Positions, batches: list[Positions], delay_ms: int) -> int:
    """How many rows a watermark drops, row by row: slow, and written apart from `needed_hours`."""
    watermark, count = None, 0
    for batch in batches:
        for event in event_ms[batch]:
            end = (int(event) // HOUR_MS + 1) * HOUR_MS
            count += watermark is not None and end <= watermark
        for event in event_ms[batch]:
            watermark = max(int(event) - delay_ms, watermark if watermark is not None else -(10**18))
    return count


def test_needed_lateness_drops_nothing_a_millisecond_less_drops_a_row_and_rows_in_order_need_none() -> None:
    random = np.random.default_rng(7)
    for _ in range(20):
        event_ms = random.integers(0, 40 * HOUR_MS, size=300)
        batches = np.split(random.permutation(300), [50, 90, 200])
        needed = round(needed_hours(event_ms, batches) * HOUR_MS)
        assert dropped(event_ms, batches, needed) == 0
        assert dropped(event_ms, batches, needed - 1) > 0
    assert needed_hours(np.arange(10) * HOUR_MS, in_order(10, 1)) == 0


def test_backlog_is_cut_as_spark_cuts_it() -> None:
    partitions = np.array([0] * 60 + [1] * 30 + [2] * 10)
    batches = list(backlog(partitions, 25))
    sizes = [[int((partitions[batch] == p).sum()) for p in range(3)] for batch in batches]
    # 25 * 60/100 = 15, 25 * 30/100 = 7.5, 25 * 10/100 = 2.5, floored; then the same of what remains.
    assert sizes[:2] == [[15, 7, 2], [14, 7, 2]]
    assert sorted(np.concatenate(batches).tolist()) == list(range(100))


@pytest.mark.parametrize("reading", ["backlog, 1,000", "backlog, 100,000", "backlog, 300,000", "the feeder's chunks"])
def test_declared_lateness_drops_nothing_of_a_backlog_or_while_the_feeder_runs(reading: str) -> None:
    event_ms = dataset.departures()["sched_dep"].to_numpy(dtype="datetime64[ms]").astype(np.int64)
    partitions, delay = dataset.partitions(PARTITIONS), FLIGHTS_BY_SCHEDULE.delay
    assert delay
    if reading.startswith("backlog"):
        readings = [backlog(partitions, int(reading.partition(", ")[2].replace(",", "")))]
    else:
        readings = [split_chunks(partitions, CHUNK, first) for first in range(PARTITIONS)]
    assert max(needed_hours(event_ms, batches) for batches in readings) * 1.5 < delay.total_seconds() / 3600
