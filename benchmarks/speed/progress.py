"""Progress of a contestant that writes a topic: what it commits about its input, as points."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Protocol

from confluent_kafka import OFFSET_BEGINNING, KafkaException, TopicPartition

from benchmarks.speed.consumers import PASSING, WAIT, consumer
from benchmarks.speed.records import PARTITIONS
from benchmarks.speed.watch import Point
from streaming_jobs.ledger.entry import LedgerEntry
from streaming_jobs.settings_sections import TopicSinkSettings
from streaming_jobs.sinks.kafka.markers import marker_topic, transactional_id

_SAME_CHECKPOINT = 0.25
_LOOK_FOR_TOPIC_EVERY = 0.25


class Progress(Protocol):
    """Looks at what a contestant has committed."""

    def look(self) -> list[Point]:
        """The points that became known since the last look."""

    def close(self) -> None:
        """Let go of the consumer."""


class PointRule(Protocol):
    """When the offsets that a contestant committed become points."""

    def points(self, records: int) -> list[Point]:
        """The points that became known by this look, at which the committed offsets cover so many input records."""


class OffsetsWithRows:
    """For a contestant that commits offsets and rows in one transaction: each new offset is a point."""

    def __init__(self) -> None:
        self._records = 0

    def points(self, records: int) -> list[Point]:
        """A point if there are more records than before."""
        if records <= self._records:
            return []
        self._records = records
        return [Point(time.time(), records, None)]


class Output(Protocol):
    """A topic that a contestant writes by transactions, as a reader of committed records finds it."""

    def settled(self) -> int | None:
        """Its end, the sum over its partitions; None while a transaction is open."""

    def complete(self) -> bool:
        """Whether everything is there that the input makes; False where that is not known."""


class OffsetsBeforeRows:
    """For a contestant that commits its rows by transactions of their own, at about the time of the offsets.

    Flink writes all rows of a checkpoint to Kafka and completes it; then its source commits the offsets, partition by
    partition, and its sink the transactions, in no order. Offsets that follow others within `_SAME_CHECKPOINT` seconds
    are of the same checkpoint. They become a point when those of the next checkpoint are there, or as soon as the
    output is settled. The last offsets of a backlog come up to ten seconds late, because the source commits between two
    polls of its consumer, and the last poll waits that long: so a settled output that is complete is a point too.
    """

    def __init__(self, output: Output, records: int, clock: Callable[[], float] = time.time) -> None:
        """`records` is how many the input has in all."""
        self._output = output
        self._all = records
        self._clock = clock
        self._records = 0
        self._waiting: Point | None = None
        self._examined = 0

    def points(self, records: int) -> list[Point]:
        """The points whose rows are known to be readable by now."""
        found = []
        if records > self._records:
            now = self._clock()
            if self._waiting and now - self._waiting.seen > _SAME_CHECKPOINT:
                found.append(self._waiting)
            self._records, self._waiting = records, Point(now, records, None)
        end = self._output.settled()
        if end is None:
            return found
        now = self._clock()
        if self._waiting:
            found.append(Point(now, self._waiting.records, None))
            self._waiting = None
        if self._records < self._all and end > self._examined:
            self._examined = end
            if self._output.complete():
                self._records = self._all
                found.append(Point(now, self._all, None))
        return found


class CommittedOffsets:
    """Progress by the offsets that a consumer group committed in its input."""

    def __init__(self, bootstrap: str, *, group: str, source: str, rule: PointRule) -> None:
        # Uncommitted: of the group's offsets it is then told the last committed ones, without waiting for others.
        self._group = consumer(bootstrap, group, "read_uncommitted")
        self._source = [TopicPartition(source, partition) for partition in range(PARTITIONS)]
        self._rule = rule

    def look(self) -> list[Point]:
        """The points that became known since the last look."""
        try:
            committed = self._group.committed(self._source, timeout=WAIT)
        except KafkaException as error:
            if error.args[0].code() in PASSING:  # the coordinator of a new broker is not there at once
                return []
            raise
        return self._rule.points(sum(max(place.offset, 0) for place in committed))

    def close(self) -> None:
        """Let go of the consumer."""
        self._group.close()


class MarkedBatches:
    """The points of the product's markers. A marker is the ledger entry of a batch, in the transaction of its rows."""

    def __init__(self, output: str) -> None:
        self._output = output
        self._batch = -1
        self._rows = 0

    def points(self, marker: bytes, seen: float) -> list[Point]:
        """The point of a marker; none for a marker that only says who writes."""
        entry = LedgerEntry.decode(marker.decode())
        if entry is None or entry.batch <= self._batch:
            return []
        self._batch = entry.batch
        self._rows += sum(each.records for each in entry.written if each.topic == self._output)
        return [Point(seen, sum(end for each in entry.offsets for end in each.end.values()), self._rows)]


class Markers:
    """Progress by the topic of the product's markers."""

    def __init__(self, bootstrap: str, *, stream: str, output: str) -> None:
        prefix = TopicSinkSettings().prefix
        self._topic = marker_topic(prefix, stream, output)
        self._key = transactional_id(prefix, stream, output).encode()
        self._batches = MarkedBatches(output)
        self._reader = consumer(bootstrap, f"markers-{output}", "read_committed")
        self._assigned = False
        self._next_search = 0.0

    def look(self) -> list[Point]:
        """The points that became known since the last look."""
        if not self._assigned and not self._found():
            return []
        points = []
        while (message := self._reader.poll(0)) is not None:
            if message.error() is None and message.key() == self._key:
                points += self._batches.points(message.value() or b"", time.time())
        return points

    def close(self) -> None:
        """Let go of the consumer."""
        self._reader.close()

    def _found(self) -> bool:
        """Whether the topic of markers is there: the contestant makes it."""
        if time.monotonic() < self._next_search:
            return False
        self._next_search = time.monotonic() + _LOOK_FOR_TOPIC_EVERY
        if self._topic in self._reader.list_topics(timeout=WAIT).topics:
            self._reader.assign([TopicPartition(self._topic, 0, OFFSET_BEGINNING)])
            self._assigned = True
        return self._assigned
