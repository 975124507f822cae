"""A cluster in memory, as far as writers of topics see it: transactions, fencing, and committed records."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from threading import Event
from typing import Any

from confluent_kafka import KafkaError, KafkaException, TopicPartition


@dataclass
class Record:
    """A committed record, or the end of a partition; methods as those of `confluent_kafka.Message`."""

    fields: dict[str, Any]
    end: bool = False

    def __getattr__(self, name: str) -> Callable[[], Any]:
        return lambda: self.fields[name]

    def error(self) -> KafkaError | None:
        return KafkaError(KafkaError._PARTITION_EOF) if self.end else None


@dataclass
class Cluster:
    """`faults` are used up in order: before a commit, each is called once, and may raise; None: no fault.

    The offsets of the next `unsaid` records are not told, as after a request that was repeated. The next record of the
    topic `refuses` is not written.
    """

    committed: list[Record] = field(default_factory=list)
    epochs: Counter[str] = field(default_factory=Counter)
    faults: list[Callable[[], None] | None] = field(default_factory=list)
    producers: list[Producer] = field(default_factory=list)
    unsaid: int = 0
    refuses: str = ""

    def producer(self, config: dict[str, Any]) -> Producer:
        self.producers.append(Producer(self, config))
        return self.producers[-1]

    def consumer(self, config: dict[str, Any]) -> Consumer:
        del config
        return Consumer(self)

    def of(self, topic: str) -> list[Record]:
        return [record for record in self.committed if record.topic() == topic]

    def values(self, topic: str) -> list[bytes]:
        return [record.value() for record in self.of(topic)]


@dataclass
class Producer:
    """A producer of a transactional id."""

    cluster: Cluster
    config: dict[str, Any]
    epoch: int = -1
    waiting: list[tuple[Record, Any]] = field(default_factory=list)
    sent: list[Record] = field(default_factory=list)
    aborted: Event = field(default_factory=Event)

    def list_topics(self, topic: str, timeout: float) -> None:
        del topic, timeout

    def init_transactions(self, timeout: float) -> None:
        del timeout
        self.cluster.epochs[self._id] += 1
        self.epoch = self.cluster.epochs[self._id]

    def begin_transaction(self) -> None:
        self.sent = []

    def produce(self, topic: str, value: Any, key: Any, partition: int, report: Any, _: None, *further: Any) -> None:
        timestamp, headers = further
        fields = {"value": value, "key": key, "timestamp": timestamp, "headers": headers}
        self.waiting.append((Record({"topic": topic, "partition": partition, **fields}), report))

    def poll(self, timeout: float) -> None:
        del timeout

    def flush(self, timeout: float) -> int:
        del timeout
        for record, on_delivery in self.waiting:
            sent = sum(each.topic() == record.topic() for each in self.sent)
            record.fields["offset"] = len(self.cluster.of(record.topic())) + sent
            self.sent.append(record)
            said = dict(record.fields)
            if self.cluster.unsaid:
                self.cluster.unsaid -= 1
                said["offset"] = -1001
            refused = record.topic() == self.cluster.refuses
            if refused:
                self.cluster.refuses = ""
            on_delivery(KafkaError(KafkaError._MSG_TIMED_OUT) if refused else None, Record(said))
        self.waiting.clear()
        return 0

    def abort_transaction(self, timeout: float) -> None:
        del timeout
        self.aborted.set()

    def commit_transaction(self, timeout: float) -> None:
        del timeout
        fault = self.cluster.faults.pop(0) if self.cluster.faults else None
        if fault is not None:
            fault()
        if self.epoch != self.cluster.epochs[self._id]:
            raise failure(KafkaError._FENCED)
        self.cluster.committed += self.sent
        self.sent = []

    @property
    def _id(self) -> str:
        return str(self.config.get("transactional.id", ""))


@dataclass
class Consumer:
    """Reads what is committed."""

    cluster: Cluster
    topic: str = ""
    at: int = 0

    def get_watermark_offsets(self, place: TopicPartition, timeout: float) -> tuple[int, int]:
        del timeout
        return 0, len(self.cluster.of(place.topic))

    def assign(self, places: list[TopicPartition]) -> None:
        self.topic, self.at = places[0].topic, places[0].offset

    def poll(self, timeout: float) -> Record:
        del timeout
        records = self.cluster.of(self.topic)
        if self.at >= len(records):
            return Record({}, end=True)
        self.at += 1
        return records[self.at - 1]

    def close(self) -> None:
        """Nothing is held."""


def failure(code: int) -> KafkaException:
    """What the client raises for an error of this code."""
    return KafkaException(KafkaError(code))
