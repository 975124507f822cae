"""The records of one batch, read and decoded once, so that the stream's function can be run on any part of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from streaming_jobs.ledger.positions import OffsetRange
from streaming_jobs.runtime.planned_once import PlannedOnce, RowsCounted, size
from streaming_jobs.sources.base import Span
from streaming_jobs.state.set_aside import RaisingRecord

if TYPE_CHECKING:
    import pyarrow as pa
    from numpy.typing import NDArray
    from pyspark.sql import DataFrame, SparkSession

    from streaming_jobs.sources.base import SourceCounts
    from streaming_jobs.sources.kafka import KafkaSource


Range = tuple[str, int, int, int]
"""Topic, partition, first offset, offset after the last."""


@dataclass(frozen=True)
class Places:
    """The offsets of a batch as the numbers from 0 on, one range after the other."""

    ranges: tuple[Range, ...]

    @classmethod
    def of(cls, offsets: Sequence[OffsetRange]) -> Places:
        each = ((r.topic, p, r.start.get(p, 0), end) for r in offsets for p, end in sorted(r.end.items()))
        return cls(tuple(span for span in each if span[2] < span[3]))

    def __len__(self) -> int:
        return sum(end - begin for _, _, begin, end in self.ranges)

    def within(self, spans: Sequence[Span]) -> list[Range]:
        """The offsets of some spans of numbers."""
        found, first = [], 0
        for topic, partition, begin, end in self.ranges:
            for low, high in spans:
                start, stop = max(begin + low - first, begin), min(begin + high - first, end)
                if start < stop:
                    found.append((topic, partition, start, stop))
            first += end - begin
        return found

    def numbers(self, topic: str, partitions: NDArray[Any], offsets: NDArray[Any]) -> NDArray[Any]:
        """The number of each record of a topic, by its partition and offset."""
        import numpy as np  # a session imports it while Spark starts

        found, first = np.zeros(len(offsets), dtype=np.int64), 0
        for name, partition, begin, end in self.ranges:
            if name == topic:
                here = partitions == partition
                found[here] = offsets[here] - begin + first
            first += end - begin
        return found

    def at(self, number: int) -> tuple[str, int, int]:
        ((topic, partition, offset, _),) = self.within([(number, number + 1)])
        return topic, partition, offset


_SMALL = 20_000
"""Offsets of a run whose records come from the driver's memory, if the batch takes the driver path."""


@dataclass
class KeptRecords:
    """All records of a batch by source, read and decoded once, with the verdicts of their formats.

    Spark keeps them. With `in_driver`, those of a part that is small enough are in the driver's memory: a run of theirs
    needs no task that reads them, and mostly no task at all. A batch that is small enough is read by the driver itself.
    """

    spark: SparkSession
    sources: Sequence[KafkaSource]
    offsets: Mapping[str, OffsetRange]
    judged: Mapping[str, DataFrame]
    places: Places
    in_driver: bool
    _held: dict[str, tuple[Sequence[Range], pa.Table]] = field(default_factory=dict)
    _good: dict[str, NDArray[Any]] = field(default_factory=dict)
    """By parameter, which of the records of `planned` are good, in the order of their numbers."""

    @classmethod
    def of(
        cls,
        spark: SparkSession,
        sources: Sequence[KafkaSource],
        offsets: Sequence[OffsetRange],
        held: ExitStack,
        *,
        in_driver: bool,
    ) -> KeptRecords:
        ranges, places = {each.topic: each for each in offsets}, Places.of(offsets)
        judged = {}
        if not in_driver or len(places) > _SMALL:
            for source in sources:
                judged[source.name] = source.judged(spark, ranges[source.name].start, ranges[source.name].end).persist()
                held.callback(judged[source.name].unpersist)
        return cls(spark, sources, ranges, judged, places, in_driver)

    def within(self, spans: Sequence[Span]) -> dict[str, DataFrame]:
        """The good records of some spans of numbers, by the parameter of the stream's function."""
        ranges, small = self.places.within(spans), self.is_small(spans)
        frames = {}
        for source in self.sources:
            mine = [each for each in ranges if each[0] == source.name]
            frame = self._from_driver(source, mine) if small else self._from_spark(source, mine)
            frames[source.parameter] = source.good(frame)
        return frames

    def planned(
        self, frames: Callable[[Mapping[str, DataFrame]], Sequence[DataFrame]], before: PlannedOnce | None
    ) -> PlannedOnce | None:
        """The `frames` of the good records, planned once: for the batch `before`, if that holds for this one.

        None if the records are not in the driver's memory, or the plans cannot be run on parts of them.
        """
        import numpy as np  # a session imports it while Spark starts

        if not self.is_small([(0, len(self.places))]):
            return None
        held, numbers = {}, {}
        for source in self.sources:
            rows = self._rows(source, [each for each in self.places.ranges if each[0] == source.name])
            number = self.places.numbers(source.name, np.asarray(rows["partition"]), np.asarray(rows["offset"]))
            order = np.argsort(number)
            good = ~np.asarray(rows["_bad"])[order]  # a row of the plan is a row for the function
            held[source.parameter] = source.held(self.spark, rows.take(order[good]))
            numbers[source.parameter] = number[order[good]]
            self._good[source.parameter] = good

        def good_frames(records: Mapping[str, DataFrame]) -> Sequence[DataFrame]:
            return frames({source.parameter: source.good(records[source.parameter]) for source in self.sources})

        again = None if before is None else before.on(held, numbers)
        return PlannedOnce.of(self.spark, held, good_frames, numbers) if again is None else again

    def counted(self, batch: RowsCounted) -> RowsCounted:
        """The rows that the batch has counted by topic, refused records among them, as runs of `planned` count them."""
        by_topic = {source.name: source.parameter for source in self.sources}
        known = [(by_topic[name], count) for name, count in batch.handed_out if name in by_topic]
        return replace(batch, handed_out=[(name, int(self._good[name][:count].sum())) for name, count in known])

    def refusing(self, aside: Sequence[RaisingRecord]) -> dict[str, DataFrame]:
        """The records by topic, those that are set aside as refused ones; of a batch in the driver's memory."""
        from streaming_jobs.sources.record_blocks import with_refused  # a session imports it while Spark starts

        frames = {}
        for source in self.sources:
            rows = self._rows(source, [each for each in self.places.ranges if each[0] == source.name])
            places = {(record.partition, record.offset) for record in aside if record.topic == source.name}
            frames[source.name] = source.held(self.spark, with_refused(rows, places))
        return frames

    def is_small(self, spans: Sequence[Span]) -> bool:
        return self.in_driver and size(spans) <= _SMALL

    def counts(self, aside: Sequence[RaisingRecord]) -> dict[str, SourceCounts]:
        """The counts of each source, by the name of its observation, with the records that are set aside as bad."""
        found, small = {}, self.is_small([(0, len(self.places))])
        for source in self.sources:
            counts = (
                source.counts_held(self._held[source.name][1]) if small else source.counts(self.judged[source.name])
            )
            more = sum(1 for record in aside if record.topic == source.name)
            found[source.observation] = replace(counts, bad=counts.bad + more)
        return found

    def _from_spark(self, source: KafkaSource, ranges: Sequence[Range]) -> DataFrame:
        mine = [f"(`partition` = {p} AND `offset` >= {begin} AND `offset` < {end})" for _, p, begin, end in ranges]
        return self.judged[source.name].where(" OR ".join(mine) or "false")

    def _from_driver(self, source: KafkaSource, ranges: Sequence[Range]) -> DataFrame:
        return source.held(self.spark, self._rows(source, ranges))

    def _rows(self, source: KafkaSource, ranges: Sequence[Range]) -> pa.Table:
        """The records of these ranges of one source, in the driver's memory."""
        import numpy as np  # a session imports it while Spark starts
        import pyarrow as pa

        known, rows = self._held.get(source.name, ((), None))
        if rows is None or not all(any(_contains(each, one) for each in known) for one in ranges):
            if len(self.places) <= _SMALL:
                known, rows = self.places.ranges, source.read("all", self.offsets[source.name])
            else:
                known, rows = ranges, self._from_spark(source, ranges).toArrow()
            self._held[source.name] = known, rows
        partitions, offsets = np.asarray(rows["partition"]), np.asarray(rows["offset"])
        wanted = np.zeros(rows.num_rows, dtype=bool)
        for _, partition, begin, end in ranges:
            wanted |= (partitions == partition) & (offsets >= begin) & (offsets < end)
        return rows.filter(pa.array(wanted))


def _contains(outer: Range, inner: Range) -> bool:
    return outer[:2] == inner[:2] and outer[2] <= inner[2] and inner[3] <= outer[3]
