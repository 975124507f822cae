"""How late may a flight be, measured: the smallest watermark delay at which airport_hours drops nothing.

    python benchmarks/lateness.py

Plays the real records through the real partitions without Kafka or Spark. A row is dropped when the end of its
window is at or before the watermark, and the watermark of a batch is the greatest event time of all batches
before it, less the delay. (Spark filters with the watermark of one batch earlier still, unless a batch without
data lies between; so these figures err on the safe side by at most one batch.) Backlogs are cut as Spark cuts
them: a batch takes of each partition its part of what remains, floored.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from streaming_jobs.examples.flights import dataset
from streaming_jobs.examples.flights.feeder import CHUNK, PARTITIONS

WINDOW_MS = 3_600_000
Positions = NDArray[np.int64]


def needed_hours(event_ms: NDArray[np.int64], batches: Iterable[Positions]) -> float:
    """The smallest delay in hours at which no batch drops a row; 0 where order alone is enough."""
    window_end = event_ms // WINDOW_MS * WINDOW_MS + WINDOW_MS
    newest, needed = None, 0
    for batch in batches:
        if not len(batch):
            continue
        if newest is not None:
            # Dropped when end <= newest - delay, so the delay has to exceed newest - end, if only by 1 ms.
            needed = max(needed, int(newest - window_end[batch].min()) + 1)
        newest = max(int(event_ms[batch].max()), newest or 0)
    return needed / WINDOW_MS


def live(count: int, size: int) -> Iterator[Positions]:
    """Records as they are sent, `size` a batch."""
    for start in range(0, count, size):
        yield np.arange(start, min(start + size, count))


def backlog(partitions: Positions, limit: int) -> Iterator[Positions]:
    """A full topic read with maxOffsetsPerTrigger = `limit`, split as Spark's Kafka source splits it."""
    queues = [np.flatnonzero(partitions == p) for p in range(int(partitions.max()) + 1)]
    begun = [0] * len(queues)
    while remaining := sum(len(queue) - at for queue, at in zip(queues, begun, strict=True)):
        batch = []
        for index, queue in enumerate(queues):
            part = limit * ((len(queue) - begun[index]) / remaining)
            taken = queue[begun[index] : begun[index] + int(np.ceil(part) if part < 1 else np.floor(part))]
            begun[index] += len(taken)
            batch.append(taken)
        yield np.concatenate(batch)


def ahead(partitions: Positions, lead: int, size: int) -> Iterator[Positions]:
    """Live reading while partition 0 is always `lead` records of its own ahead of the others, `size` a batch."""
    first = np.flatnonzero(partitions == 0)
    order = np.arange(len(partitions), dtype=np.float64)
    order[first[lead:]] = first[:-lead]
    order[first[:lead]] = -1
    sent = np.argsort(order, kind="stable")
    for batch in live(len(sent), size):
        yield sent[batch]


def split_chunks(partitions: Positions, chunk: int, first: int) -> Iterator[Positions]:
    """The worst a reader can see of a feeder that flushes each `chunk`: partition `first` of it, then the rest."""
    for batch in live(len(partitions), chunk):
        mine = partitions[batch] == first
        yield batch[mine]
        yield batch[~mine]


def scenarios() -> Iterator[tuple[str, float]]:
    """Each way of reading with the delay it needs, in hours."""
    partitions = dataset.partitions(PARTITIONS)
    event_ms = dataset.departures()["sched_dep"].to_numpy(dtype="datetime64[ms]").astype(np.int64)
    one = np.zeros_like(partitions)
    total = len(partitions)
    yield "live, in order of departure, 1 record a batch", needed_hours(event_ms, live(total, 1))
    yield "live, in order of departure, 1,000 a batch", needed_hours(event_ms, live(total, 1_000))
    yield "backlog of one partition, 10,000 a batch", needed_hours(event_ms, backlog(one, 10_000))
    for limit in (100, 1_000, 10_000, 100_000, 300_000):
        found = needed_hours(event_ms, backlog(partitions, limit))
        yield f"backlog of {PARTITIONS} partitions, {limit:,} a batch", found
    splits = (needed_hours(event_ms, split_chunks(partitions, CHUNK, first)) for first in range(PARTITIONS))
    yield f"while fed at full speed, worst split of the feeder's {CHUNK:,}", max(splits)
    for lead in (100, 1_000, 10_000):
        yield f"live, one partition {lead:,} records ahead", needed_hours(event_ms, ahead(partitions, lead, 1_000))


def main() -> None:
    """Print the table as Markdown."""
    sys.stdout.write("| how the topic is read | smallest lateness, hours |\n|---|---:|\n")
    for name, hours in scenarios():
        sys.stdout.write(f"| {name} | {hours:.1f} |\n")
    event = dataset.departures()["sched_dep"]
    sys.stdout.write(
        f"\nmost out of order in the data itself: {(event.cummax() - event).max() / pd.Timedelta(hours=1):.1f} hours\n"
    )


if __name__ == "__main__":
    main()
