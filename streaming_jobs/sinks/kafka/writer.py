"""The writer of one topic sink: decides for each batch whether it is in the topic, and writes it once.

`TransactionWriter` is exactly-once. On opening, its producer fences every older one, and only then reads the marker. A
failure of a producer, in whatever step, is answered in one way: a new producer, the marker again, and the batch only if
the marker does not have it. A marker names its driver: once a driver's own marker is in, that of another one ends it,
and this other one continues. `PlainWriter` is at-least-once: after a failure it writes the batch again.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Protocol, TypeVar

import structlog
from confluent_kafka import Consumer, Producer

from streaming_jobs.errors import BrokerUnreachable, Fenced, LedgerConflict, PermanentError
from streaming_jobs.ledger.entry import LedgerEntry, Txn
from streaming_jobs.ledger.positions import WrittenRange
from streaming_jobs.settings import TopicSinkSettings
from streaming_jobs.sinks.kafka import markers
from streaming_jobs.sinks.kafka.clients import ClientLost, producer_config
from streaming_jobs.sinks.kafka.producer import BatchProducer, Connect, Outgoing
from streaming_jobs.sinks.kafka.staged import StagedWriter
from streaming_jobs.text import commands

log = structlog.get_logger()

T = TypeVar("T")
_ATTEMPTS = 3
_CLAIM = 3.0
_TOO_LONG = "; if batches take longer than topic_sink.transaction_timeout, raise it or lower max_offsets_per_trigger"
DEFAULT_MOST_BYTES = 1_048_588
"""Kafka's default of max.message.bytes of a topic."""


class TopicRecords(Protocol):
    """The records of one batch, which can be gone through again."""

    @property
    def count(self) -> int:
        """Their number."""

    @property
    def topic_ids(self) -> Mapping[str, str]:
        """The ids of the topics that they go to, by name."""

    @property
    def most_bytes(self) -> int:
        """The bytes that each of these topics takes in one request for a partition."""

    def __iter__(self) -> Any:
        """Yields them in order."""


@dataclass(frozen=True)
class Clients:
    """Makes the clients: `config` are the properties of any client of the cluster, and hold secrets."""

    config: Mapping[str, Any] = field(repr=False)
    producer: Connect = Producer
    consumer: Connect = Consumer


@dataclass
class _ProducerOfBatches:
    """A topic sink and its producer. Not for two threads at once."""

    stream: str
    name: str
    topic: str
    settings: TopicSinkSettings
    clients: Clients
    newest: LedgerEntry | None = field(default=None, init=False)
    """The entry of the newest batch, as of the last `open` or `write`."""
    _producer: BatchProducer | None = field(default=None, init=False)
    _most_bytes: int = field(default=DEFAULT_MOST_BYTES, init=False)

    def close(self) -> None:
        if self._producer is not None:
            self._producer.leave()
            self._producer = None

    def _made(self, transactional_id: str) -> BatchProducer:
        config = producer_config(self.clients.config, self.settings, transactional_id, self._most_bytes)
        self._producer = BatchProducer(config, self.settings.transaction_timeout, self.clients.producer)
        return self._producer

    def _fit_requests(self, most_bytes: int) -> None:
        """Let go of a producer whose requests would be too large for a topic."""
        if most_bytes < self._most_bytes:
            self._most_bytes = most_bytes
            self.close()

    def _unwritten(self, lost: ClientLost | None, advice: str = "") -> BrokerUnreachable:
        return BrokerUnreachable(
            f"topic {self.topic} could not be written, with {_ATTEMPTS} producers one after the other: {lost}",
            f"check the broker (`{commands.doctor()}`){advice}",
        )


@dataclass
class TransactionWriter(_ProducerOfBatches):
    """Exactly once, for readers of committed records."""

    before_commit: Callable[[int], None] = lambda _: None
    _owner: str = field(default_factory=lambda: uuid.uuid4().hex, init=False)
    _owners: frozenset[str] = field(default=frozenset(), init=False)
    """Whose marker may be there: this driver's, and until it is in, also the one found first; empty: none read yet."""

    @property
    def position(self) -> Txn | None:
        """The newest batch in the topic."""
        return None if self.newest is None else self.newest.txn

    @property
    def key(self) -> str:
        """The transactional id."""
        return markers.transactional_id(self.settings.prefix, self.stream, self.topic)

    @property
    def _markers(self) -> str:
        """The topic of its markers."""
        return markers.marker_topic(self.settings.prefix, self.stream, self.topic)

    @property
    def _partition(self) -> int:
        """The partition of its markers."""
        return 0

    def open(self, generation: int) -> None:
        """Fence every older producer, and open the generation if the topic is not in it yet.

        Raises Fenced if it is in a newer one. A transaction of a marker alone says who writes from now on.
        """
        opened = LedgerEntry("batch", self.stream, self.name, generation, -1)

        def entry(at: LedgerEntry | None) -> LedgerEntry:
            self._refuse_older(opened)
            return opened if at is None or at.generation < generation else at

        self.mark(entry)

    def mark(self, entry: Callable[[LedgerEntry | None], LedgerEntry]) -> None:
        """Fence every older producer, and write a marker without records, made of the newest one."""

        def attempt(producer: BatchProducer) -> None:
            now = entry(self.newest)
            producer.transact([], 0, {}, lambda _: self._marker(now))
            self.newest, self._owners = now, frozenset({self._owner})

        self._repeated(attempt)

    def write(self, entry: LedgerEntry, records: TopicRecords) -> bool:
        """Write the batch; False if it is there already.

        Raises Fenced for an older generation or another driver, LedgerConflict if the topic has other batches.
        """

        def attempt(producer: BatchProducer) -> bool:
            self._fit_requests(records.most_bytes)
            producer = self._producer or self._connected()
            self._refuse_older(entry)
            if self._has(entry):
                return False

            def marker(ranges: tuple[WrittenRange, ...]) -> Outgoing:
                return self._marker(replace(entry, written=ranges))

            before = partial(self.before_commit, entry.batch)
            enrolling = markers.enrolling_record(self._markers, self._partition)
            ranges = producer.transact(records, records.count, records.topic_ids, marker, before, enrolling)
            self.newest = replace(entry, written=ranges)
            return True

        return self._repeated(attempt)

    def _repeated(self, attempt: Callable[[BatchProducer], T]) -> T:
        lost: ClientLost | None = None
        for _ in range(_ATTEMPTS):
            try:
                return attempt(self._producer or self._connected())
            except ClientLost as error:
                lost = error
                log.warning(
                    "producer replaced", stream=self.stream, topic=self.topic, reason=str(error), fenced=error.fenced
                )
                self.close()
                if error.fenced:
                    self._refuse_if_replaced()
            except BaseException:
                self._abandon()
                raise
        raise self._unwritten(lost, _TOO_LONG) from lost

    def _abandon(self) -> None:
        """Let go of the producer and its open transaction: no other producer follows that would end it."""
        if self._producer is not None:
            self._producer.leave(abort=True)
            self._producer = None

    def _connected(self) -> BatchProducer:
        producer = self._made(self.key)
        producer.begin(self.topic)
        marker = self._read()
        self._refuse_other_driver(marker)
        self._refuse_lost(marker)
        self.newest = None if marker is None else marker.entry
        return producer

    def _read(self) -> markers.Marker | None:
        client, timeout = self.clients, self.settings.transaction_timeout
        return markers.read_marker(
            client.config, self._markers, self.key, timeout, client.consumer, partition=self._partition
        )

    def _marker(self, entry: LedgerEntry) -> Outgoing:
        return markers.marker_record(self._markers, self.key, entry, self._owner, partition=self._partition)

    def _has(self, entry: LedgerEntry) -> bool:
        """True if the newest batch is this one; raises LedgerConflict if it is a later one or has other offsets."""
        at = self.newest
        if at is None or at.txn < entry.txn:
            return False
        if at.txn != entry.txn or not at.same_offsets(entry):
            how = f"is at {at.txn}" if at.txn != entry.txn else "has it with other offsets"
            raise LedgerConflict(
                f"{entry.txn} is to be written to topic {self.topic}, which {how}",
                "put the checkpoint back that belongs to the topic; look for a second driver with another state folder",
            )
        return True

    def _refuse_older(self, entry: LedgerEntry) -> None:
        at = self.position
        if at is not None and at.generation > entry.generation:
            raise Fenced(
                f"topic {self.topic} is in generation {at.generation}, this driver belongs to {entry.generation}",
                "let this driver end; the newer generation continues without it",
            )

    def _refuse_if_replaced(self) -> None:
        """Raise Fenced if another driver has opened the topic; a transaction that merely timed out is not one.

        The other driver has fenced this one before it writes its marker: it gets a moment for that.
        """
        until = time.monotonic() + _CLAIM
        while True:
            try:
                self._refuse_other_driver(self._read())
            except ClientLost:
                return  # the next attempt says what is wrong
            if time.monotonic() >= until:
                return
            time.sleep(_CLAIM / 10)

    def _refuse_lost(self, marker: markers.Marker | None) -> None:
        """Raise PermanentError if the marker is gone or older than the newest that this driver has read or written."""
        known = self.position
        if known is not None and (marker is None or marker.entry.txn < known):
            raise PermanentError(
                f"topic {self._markers} had the marker of {known}, and now "
                f"{'has none' if marker is None else f'that of {marker.entry.txn}'}: nobody knows which batches of "
                f"stream {self.stream} topic {self.topic} has",
                "find out who deleted it or its records; then start the stream: preflight says what to put back",
            )

    def _refuse_other_driver(self, marker: markers.Marker | None) -> None:
        """Raise Fenced if another driver has opened the topic since this one looked first.

        The marker of the driver before may stay until this one's is in: the first transaction may fail too.
        """
        owner = "" if marker is None else marker.owner
        if not self._owners:
            self._owners = frozenset({self._owner, owner})
        elif owner == self._owner:
            self._owners = frozenset({owner})
        elif marker is not None and owner not in self._owners:
            raise Fenced(
                f"another driver writes topic {self.topic} for stream {self.stream} now",
                "let this driver end; the other one continues without it",
            )


class PlainWriter(_ProducerOfBatches):
    """At least once: a batch that is repeated after a failure is in the topic twice."""

    @property
    def position(self) -> Txn | None:
        """None: the topic does not say which batches it has."""
        return None

    def open(self, generation: int) -> None:
        """Nothing: there is no fencing."""

    def write(self, entry: LedgerEntry, records: TopicRecords) -> bool:
        """Write the batch until all of its records are acknowledged."""
        lost: ClientLost | None = None
        for _ in range(_ATTEMPTS):
            self._fit_requests(records.most_bytes)
            try:
                ranges = (self._producer or self._made("")).deliver(records, records.count, records.topic_ids)
            except ClientLost as error:
                lost = error
                log.warning("producer replaced", stream=self.stream, topic=self.topic, reason=str(error))
                self.close()
                continue
            self.newest = replace(entry, written=ranges)
            return True
        raise self._unwritten(lost) from lost


class Discarded:
    """Writes nothing: the rows of a preview, and of a redrive."""

    position: Txn | None = None
    newest: LedgerEntry | None = None

    def open(self, generation: int) -> None:
        """Nothing."""

    def write(self, entry: LedgerEntry, records: TopicRecords) -> bool:
        del entry, records
        return True

    def close(self) -> None:
        """Nothing is held."""


Writer = TransactionWriter | PlainWriter | StagedWriter | Discarded
