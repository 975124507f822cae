"""Ranges of offsets, read with one consumer; it fetches ahead what follows, for the next range.

While a topic is followed whose partitions have some new records for each batch, they are fetched when they are asked
for. To fetch ahead then means a request for each few records that arrive, which keeps the broker busy: a third of a
core with 2,000 records per second (docs/speed.md).

Offsets have gaps: transaction markers, records of aborted transactions, compacted records. So a range is complete when
a record at or behind its end was seen, or when the broker reports that the partition ends there
(`enable.partition.eof`), and never by counting records. A partition whose end is not reached within the deadline is an
error, never a gap.

The consumer belongs to no group that commits: the checkpoint holds the position of a stream.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from operator import lt
from typing import Any, Protocol, cast

from confluent_kafka import Consumer, KafkaError, KafkaException, Message, TopicPartition

from streaming_jobs.declare.names import kafka_name
from streaming_jobs.errors import OffsetsLost, PermanentError, RecourseError, TransientError
from streaming_jobs.sources.base import Span
from streaming_jobs.sources.connection import Failures
from streaming_jobs.text import commands

_SLICE = 0.1
_FIRST = 1.0
_AHEAD = 20_000
_PROMPT = 0.1
"""Seconds within which records come to a consumer that begins to fetch; if they do not, it fetches ahead."""
_FEW, _FEW_BYTES = 1_000, 256 << 10
"""Records of a partition, and bytes of their values, that one answer surely holds; behind more, others may wait."""
_FETCHED_AHEAD = 100
"""Calls of `follow` after which a broker that was not prompt is tried again."""
MOST_BYTES = 64 << 20
"""Bytes of values that are held at a time, about: of one part of a range, or of the records that were fetched ahead."""

_GONE = {KafkaError._AUTO_OFFSET_RESET, KafkaError.OFFSET_OUT_OF_RANGE}


class KafkaConsumer(Protocol):
    """The part of `confluent_kafka.Consumer` that is used here."""

    def consume(self, num_messages: int, timeout: float) -> list[Message]:
        """Up to `num_messages` messages and errors; fewer after `timeout` seconds."""

    def incremental_assign(self, partitions: list[TopicPartition]) -> None:
        """Read these partitions too."""

    def incremental_unassign(self, partitions: list[TopicPartition]) -> None:
        """Read these partitions no longer."""

    def close(self) -> None:
        """Leave the cluster."""


@dataclass
class _Partition:
    """An assigned partition: all records below `next` were received; `ahead` are records that no range took yet.

    `end` is the partition's end by the broker, unless more arrived since, or another range began; `heard` is
    true once the partition has answered. `size`: bytes of the values ahead.
    """

    first: int
    next: int
    ahead: list[Message] = field(default_factory=list)
    size: int = 0
    end: int | None = None
    heard: bool = False

    def skip_to(self, start: int) -> bool:
        """Drop what is before `start`; False if the records from there on were not received in order."""
        if not self.first <= start <= self.next:
            return False
        self.keep(self.ahead[bisect_left(self.ahead, start, key=_offset) :])
        self.first, self.end = start, None
        return True

    def add(self, messages: list[Message]) -> bool:
        """Add the records, one at least, that were not received yet; False if all were."""
        self.heard = True
        offsets: list[Any] = [message.offset() for message in messages]
        if offsets[0] < self.next or not all(map(lt, offsets, offsets[1:])):
            messages = _rising(messages, self.next)  # a consumer that went back gives records twice
        if not messages:
            return False
        self.ahead += messages
        self.size += sum(map(len, messages))
        self.next, self.end = _offset(messages[-1]) + 1, None
        return True

    def keep(self, ahead: list[Message]) -> None:
        if len(ahead) < len(self.ahead):
            self.ahead, self.size = ahead, sum(map(len, ahead))


@dataclass
class RangeReader:
    """Reads ranges of one topic, one after the other. Not safe for several threads.

    Raises OffsetsLost for offsets that the topic does not hold, BrokerUnreachable if nothing arrives for `timeout`,
    ConfigurationError if the log-in is refused, PermanentError if reading is forbidden. `fetch_ahead`: records that
    librdkafka holds ready, about. `fetch_wait_ms`: how long the broker holds back an answer at a partition's end; a
    range that begins elsewhere waits for it.
    """

    topic: str
    config: Mapping[str, Any]
    timeout: timedelta
    fetch_ahead: int = 100_000
    fetch_wait_ms: int = 500
    connect: Callable[[Mapping[str, Any]], KafkaConsumer] = lambda config: Consumer(dict(config))
    monotonic: Callable[[], float] = time.monotonic
    _consumer: KafkaConsumer | None = field(default=None, init=False)
    _partitions: dict[int, _Partition] = field(default_factory=dict, init=False)
    _failures: Failures = field(init=False)
    _refusal: str = field(default="", init=False)
    _resting: bool = field(default=False, init=False)
    """The consumer fetches nothing until it has to receive."""
    _fetch_ahead_for: int = field(default=0, init=False)
    _wanted: Collection[int] = field(default=(), init=False)

    def __post_init__(self) -> None:
        self._failures = Failures(str(self.config["bootstrap.servers"]), self.topic)

    def read(self, spans: Mapping[int, Span], most: int) -> Iterator[list[Message]]:
        """Yields the records of the ranges, about `most` at a time, in order within each partition."""
        self._position({p: start for p, (start, _) in spans.items()})
        waiting = {p: span for p, span in spans.items() if span[1] > span[0]}
        taken: list[Message] = []
        heard = dict.fromkeys(waiting, self.monotonic())
        self._failures.begin()
        while True:
            for partition, (_, end) in list(waiting.items()):
                taken += self._take(partition, end)
                if self._partitions[partition].next >= end:
                    del waiting[partition]
                    self._partitions[partition].first = max(end, self._partitions[partition].first)
            if len(taken) >= most or (taken and (not waiting or sum(map(len, taken)) >= MOST_BYTES)):
                yield taken
                taken = []
                heard = dict.fromkeys(waiting, self.monotonic())
            if not waiting:
                return
            before = {partition: self._partitions[partition].next for partition in waiting}
            if not self._receive(most, _SLICE):
                self._failures.check()
            now = self.monotonic()
            for partition, at in before.items():
                if self._partitions[partition].next > at:
                    heard[partition] = now
                elif now - heard[partition] >= self.timeout.total_seconds():
                    raise self._stuck(partition, waiting[partition][1])
            self._release_idle(waiting)

    def follow(self, positions: Mapping[int, int], wait: float, most: int) -> dict[int, int]:
        """The offsets up to which records were received from `positions` on; waits up to `wait` seconds for the first.

        Partitions that are read for the first time are waited for a little longer, so that the first records of all are
        together. Stops receiving at about `most` records, or MOST_BYTES; they stay for `read`. An idle topic and a
        broker that is away look the same from here.
        """
        rested, began = self._resting, self.monotonic()
        self._position(positions)
        before = {partition: there.next for partition, there in self._partitions.items()}
        for partition in [p for p in self._partitions if p not in positions]:
            self._drop(partition)
        until = self.monotonic() + _FIRST
        while not self._full(most) and not self._all_heard() and self.monotonic() < until:
            self._receive(most, _SLICE / 10)
        if not self.buffered:
            self._receive(1, wait)
        while not self._full(most) and self._receive(most, 0):
            pass
        if rested:
            self._await_others(before, most, began)
        self._rest(before, most)
        return {partition: self._partitions[partition].next for partition in positions}

    def _await_others(self, before: Mapping[int, int], most: int, began: float) -> None:
        """Receive from the partitions that have not answered since they were `before`, for a moment."""

        def answered(partition: int) -> bool:
            there = self._partitions[partition]
            return there.next > before[partition] or there.end is not None

        while self.buffered and not self._full(most) and not all(map(answered, self._partitions)):
            left = began + _PROMPT - self.monotonic()
            if left <= 0:
                break
            self._receive(1, left)
            self._receive(most, 0)
        if self.monotonic() - began > _PROMPT:
            self._fetch_ahead_for = _FETCHED_AHEAD

    def _rest(self, before: Mapping[int, int], most: int) -> None:
        """Stop fetching until it has to receive, if each partition had some new records, and none has more of them."""

        def had_some(partition: int) -> bool:
            there = self._partitions[partition]
            return there.next > before[partition] and len(there.ahead) < _FEW and there.size < _FEW_BYTES

        self._fetch_ahead_for = max(self._fetch_ahead_for - 1, 0)
        if self._fetch_ahead_for or self._full(most) or not all(map(had_some, self._partitions)):
            return
        places = [TopicPartition(kafka_name(self.topic), partition) for partition in self._partitions]
        with self._translated():
            self._open().incremental_unassign(places)
        self._resting = True

    def _fetch_on(self) -> None:
        """Fetch all partitions from where they are."""
        starts = [TopicPartition(kafka_name(self.topic), p, there.next) for p, there in self._partitions.items()]
        with self._translated():
            self._open().incremental_assign(starts)
        self._resting = False

    @property
    def buffered(self) -> int:
        return sum(len(there.ahead) for there in self._partitions.values())

    @property
    def buffered_bytes(self) -> int:
        """Bytes of their values."""
        return sum(there.size for there in self._partitions.values())

    def release(self) -> None:
        """Stop fetching; the connection stays."""
        for partition in list(self._partitions):
            self._drop(partition)
        self._resting = False

    def close(self) -> None:
        consumer, self._consumer = self._consumer, None
        self._partitions.clear()
        self._resting = False
        if consumer is not None:
            consumer.close()

    def _position(self, starts: Mapping[int, int]) -> None:
        """Make every partition ready to be read from its start; what was fetched already is not fetched again."""
        consumer = self._open()
        self._wanted = starts.keys()
        new = []
        for partition, start in starts.items():
            there = self._partitions.get(partition)
            if there is not None and there.skip_to(start):
                continue
            if there is not None:
                self._drop(partition)
            self._partitions[partition] = _Partition(start, start)
            new.append(TopicPartition(kafka_name(self.topic), partition, start))
        if new and self._resting:
            self._fetch_on()
        elif new:
            with self._translated():
                consumer.incremental_assign(new)

    def _take(self, partition: int, end: int) -> list[Message]:
        """Take the received records before `end`."""
        there = self._partitions[partition]
        ahead = there.ahead
        if not ahead:
            return []
        count = len(ahead)
        if _offset(ahead[-1]) >= end:
            count = bisect_left(ahead, end, key=_offset)
        there.keep(ahead[count:])
        return ahead[:count]

    def _receive(self, most: int, wait: float) -> bool:
        """Receive messages; True if a partition got any further."""
        if self._resting:
            self._fetch_on()
        consumer = self._open()
        with self._translated():
            messages = consumer.consume(most, wait)
        progress, begin = False, 0
        for at in [at for at, message in enumerate(messages) if message.error() is not None]:
            progress |= self._add(messages[begin:at])
            progress |= self._note(cast("KafkaError", messages[at].error()), messages[at])
            begin = at + 1
        progress |= self._add(messages[begin:] if begin else messages)
        if progress:
            self._failures.succeeded()
            self._refusal = ""
        return progress

    def _add(self, messages: list[Message]) -> bool:
        """Take over the records of assigned partitions; True if a partition got any further."""
        places: list[Any] = [message.partition() for message in messages]
        by_partition: dict[int, list[Message]] = {}
        if places and places.count(places[0]) == len(places):  # as in a task of one partition
            by_partition[places[0]] = messages
        else:
            for message, place in zip(messages, places, strict=True):
                by_partition.setdefault(place, []).append(message)
        progress = False
        for partition, some in by_partition.items():
            if (there := self._partitions.get(partition)) is not None:
                progress |= there.add(some)
        return progress

    def _note(self, error: KafkaError, message: Message) -> bool:
        """Take note of an error or of the end of a partition; True for an end that was not known."""
        partition: Any = message.partition()
        there = self._partitions.get(partition)
        if error.code() == KafkaError._PARTITION_EOF:
            self._failures.succeeded()
            if there is None:
                return False
            there.end, there.heard = _offset(message), True
            moved = there.end > there.next
            there.next = max(there.next, there.end)
            return moved
        if error.code() in _GONE:
            if there is None or partition not in self._wanted:  # of an earlier range
                if there is not None:
                    self._drop(partition)
                return False
            raise OffsetsLost(
                f"offset {there.next} of {self.topic} partition {partition} is no longer in the topic: {error.str()}",
                f"see `{commands.status()}`",
            )
        if error.code() == KafkaError.GROUP_AUTHORIZATION_FAILED:  # no group is needed to read assigned partitions
            return False
        if error.code() == KafkaError.TOPIC_AUTHORIZATION_FAILED or error.fatal():
            raise self._failed(error)
        self._refusal = error.str()
        self._failures(error)
        return False

    def _failed(self, error: KafkaError) -> RecourseError:
        if error.code() == KafkaError.TOPIC_AUTHORIZATION_FAILED:
            return PermanentError(
                f"topic {self.topic} may not be read: {error.str()}",
                "give the user of the settings `kafka` the right to read it",
            )
        return TransientError(f"topic {self.topic} cannot be read: {error.str()}", "check the brokers")

    def _stuck(self, partition: int, end: int) -> RecourseError:
        """The error for a partition that did not answer in time, although its range is not complete."""
        there = self._partitions[partition]
        at = there.next
        if there.end is not None and there.end <= at:
            return OffsetsLost(
                f"{self.topic} partition {partition} ends at offset {there.end}, and the batch at {end}: records that "
                "were there are gone",
                f"see `{commands.status()}`",
            )
        reason = f" ({self._refusal})" if self._refusal else ""
        return self._failures.unreachable(
            f"read {self.topic} partition {partition} from offset {at} to {end}{reason}", self.timeout
        )

    def _release_idle(self, waiting: Mapping[int, Span]) -> None:
        """Give back partitions that run far ahead while others are read; they are fetched again when they are due."""
        others = {p: there for p, there in self._partitions.items() if p not in waiting}
        records, size = sum(len(there.ahead) for there in others.values()), sum(there.size for there in others.values())
        if records > _AHEAD or size > MOST_BYTES:
            for partition, there in others.items():
                if there.ahead:
                    self._drop(partition)

    def _drop(self, partition: int) -> None:
        del self._partitions[partition]
        if self._consumer is not None and not self._resting:
            with self._translated():
                self._consumer.incremental_unassign([TopicPartition(kafka_name(self.topic), partition)])

    def _full(self, most: int) -> bool:
        return self.buffered >= most or self.buffered_bytes >= MOST_BYTES

    def _all_heard(self) -> bool:
        return all(there.heard for there in self._partitions.values())

    def _open(self) -> KafkaConsumer:
        if self._consumer is None:
            with self._translated():
                config = consumer_config(self.config, self._failures, self.fetch_ahead)
                self._consumer = self.connect({**config, "fetch.wait.max.ms": self.fetch_wait_ms})
        return self._consumer

    @contextmanager
    def _translated(self) -> Iterator[None]:
        try:
            yield
        except KafkaException as error:
            raise self._failed(error.args[0]) from error


def consumer_config(config: Mapping[str, Any], failures: Failures, fetch_ahead: int) -> dict[str, Any]:
    """The properties of a consumer that reads committed records only, and reports an offset that is gone."""
    return {
        **config,
        "error_cb": failures,
        "group.id": "recourse",
        "enable.auto.commit": False,
        "enable.auto.offset.store": False,
        "auto.offset.reset": "error",
        "enable.partition.eof": True,
        "isolation.level": "read_committed",
        "check.crcs": True,
        "fetch.message.max.bytes": 1 << 20,
        "queued.max.messages.kbytes": 16 << 10,
        "queued.min.messages": fetch_ahead,
        # By default, librdkafka fetches nothing for a second after its queue was full.
        "fetch.queue.backoff.ms": 2,
    }


def _rising(messages: list[Message], start: int) -> list[Message]:
    """The records from `start` on, without those whose offset is no greater than one before it."""
    kept = []
    for message in messages:
        if (offset := _offset(message)) >= start:
            kept.append(message)
            start = offset + 1
    return kept


def _offset(message: Message) -> int:
    offset = message.offset()
    assert offset is not None
    return offset
