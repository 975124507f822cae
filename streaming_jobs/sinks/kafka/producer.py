"""One producer, from its start to its first failure: afterwards it is thrown away, never repaired."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import timedelta
from itertools import chain, islice
from typing import Any, NamedTuple

from confluent_kafka import KafkaError, KafkaException, Message, Producer

from streaming_jobs.declare.names import kafka_name
from streaming_jobs.errors import PermanentError
from streaming_jobs.ledger.positions import WrittenRange
from streaming_jobs.sinks.kafka.clients import MARKER_BYTES, ClientLost, in_time, leave, of_kafka

_LOOK_EVERY = 2000
_WAIT = 0.1
_GRACE = timedelta(seconds=5)


class Outgoing(NamedTuple):
    """A record to be written; `timestamp` in ms since 1970, 0: the time of writing. `partition` -1: by the key."""

    topic: str
    key: bytes | None
    value: bytes | None
    headers: Sequence[Header] = ()
    timestamp: int = 0
    partition: int = -1


Header = tuple[str, bytes | None]

Record = tuple[str, bytes | None, bytes | None, Sequence[Header], int, int]
"""The parts of an `Outgoing`, in its order: plain tuples are made in a tenth of the time."""

Report = Callable[[KafkaError | None, Message], None]

Connect = Callable[[dict[str, Any]], Any]
"""Makes a client of properties, as `confluent_kafka.Producer` does."""


class Delivered:
    """The acknowledged records, from delivery reports: their number, and their ranges by partition.

    The ranges lack records whose offset the broker did not say, as after a repeated request: `without_offset`. Records
    of the topic `uncounted` are in neither; that one of them failed is noted.
    """

    def __init__(self, uncounted: str = "") -> None:
        self._uncounted = uncounted
        self._ranges: dict[str, dict[int, list[int]]] = {}
        self.without_offset = 0
        self.failure: KafkaError | None = None

    @property
    def count(self) -> int:
        """The number of acknowledged records."""
        ranges = (each for partitions in self._ranges.values() for each in partitions.values())
        return self.without_offset + sum(records for _, _, records in ranges)

    def of(self, topic: str) -> Report:
        """What takes the reports of a topic's records. The client's library calls it, so it must not raise."""
        counted = topic != self._uncounted
        ranges = self._ranges.setdefault(topic, {}) if counted else {}

        def report(error: KafkaError | None, message: Message) -> None:  # once per record: every name is a local one
            if error is not None:
                self.failure = self.failure or error
                return
            if not counted:
                return
            offset = message.offset()
            if offset is None or offset < 0:
                self.without_offset += 1
                return
            partition = message.partition() or 0
            known = ranges.get(partition)
            if known is None:
                ranges[partition] = [offset, offset + 1, 1]
                return
            known[2] += 1
            if offset >= known[1]:
                known[1] = offset + 1
            elif offset < known[0]:
                known[0] = offset

        return report

    def ranges(self, ids: Mapping[str, str]) -> tuple[WrittenRange, ...]:
        """Where the records lie; `ids` has the topics' ids by name."""
        return tuple(
            WrittenRange(topic, ids.get(topic, ""), partition, *numbers)
            for topic, partitions in sorted(self._ranges.items())
            for partition, numbers in sorted(partitions.items())
        )


class BatchProducer:
    """Writes batches, each within `timeout`; raises ClientLost when it can be used no more.

    With a transactional id in its properties, `begin` and `transact` belong to it, else `deliver`.
    """

    def __init__(self, config: dict[str, Any], timeout: timedelta, connect: Connect = Producer) -> None:
        self._timeout = timeout
        self._client = connect(config)

    def begin(self, topic: str) -> None:
        """Fence every older producer of the transactional id, and end what it has left open.

        A client that knows no broker yet finds its coordinator only after 500 ms, so it requests a topic first.
        """

        def run() -> None:
            until = time.monotonic() + self._timeout.total_seconds()
            self._client.list_topics(kafka_name(topic), self._timeout.total_seconds())
            self._client.init_transactions(max(until - time.monotonic(), 0.1))

        in_time("init_transactions", self._timeout + _GRACE, run)

    def transact(
        self,
        records: Iterable[Record],
        expected: int,
        ids: Mapping[str, str],
        marker: Callable[[tuple[WrittenRange, ...]], Outgoing],
        before_commit: Callable[[], None] = lambda: None,
        enrolling: Outgoing | None = None,
    ) -> tuple[WrittenRange, ...]:
        """One transaction of these records and a marker, which is made when their offsets are known.

        The client asks the broker to add a partition to the transaction once it has a record for it, and waits. The
        record `enrolling`, which nobody reads, has the marker's partition asked for with those of the records.

        Raises PermanentError, and commits nothing, unless their number is `expected`.
        """

        def run() -> tuple[WrittenRange, ...]:
            until = time.monotonic() + self._timeout.total_seconds()
            self._client.begin_transaction()
            delivered = self._send(records, expected, until, enrolling)
            if delivered.without_offset:  # after a range that begins too late, a recovery leaves wrong records
                raise ClientLost(f"the broker did not say the offsets of {delivered.without_offset:,} records")
            ranges = delivered.ranges(ids)
            self._send_marker(marker(ranges), until)
            before_commit()
            self._commit(until)
            return ranges

        return in_time("transaction", self._timeout + _GRACE, run)

    def deliver(self, records: Iterable[Record], expected: int, ids: Mapping[str, str]) -> tuple[WrittenRange, ...]:
        """Write the records outside of a transaction, until all are acknowledged; raises as `transact`."""

        def run() -> tuple[WrittenRange, ...]:
            return self._send(records, expected, time.monotonic() + self._timeout.total_seconds()).ranges(ids)

        return in_time("delivery", self._timeout + _GRACE, run)

    def leave(self, *, abort: bool = False) -> None:
        """Let go of the client; `abort` tries to end its transaction, which needs no waiting if a new client does."""
        client, self._client = self._client, None
        if client is not None:
            leave(client, self._timeout.total_seconds() if abort else None)

    def _send(
        self, records: Iterable[Record], expected: int, until: float, enrolling: Outgoing | None = None
    ) -> Delivered:
        delivered, client = Delivered("" if enrolling is None else enrolling.topic), self._client
        produce = client.produce
        at, name, report = "", "", delivered.of("")
        look = _LOOK_EVERY
        for topic, key, value, headers, timestamp, partition in _enrolled(records, enrolling):
            if topic != at:
                at, name, report = topic, kafka_name(topic), delivered.of(topic)
            while True:
                try:  # by position: keywords take as long as all the rest of the call
                    produce(name, value, key, partition, report, None, timestamp, headers or None)
                    break
                except KafkaException as error:
                    raise of_kafka("write records", error.args[0]) from error
                except BufferError:  # the client's buffer is full
                    client.poll(_WAIT)
                    _check(until)
            look -= 1
            if not look:
                look = _LOOK_EVERY
                client.poll(0)
                _check(until)
        if client.flush(max(until - time.monotonic(), 0.0)):
            raise ClientLost("records were not acknowledged in time")
        if delivered.failure is not None:
            raise of_kafka("write records", delivered.failure)
        if delivered.count != expected:
            raise PermanentError(
                f"{delivered.count} records of a batch of {expected} were sent: the batch is not committed",
                "start the stream again, which repeats the batch; please report it if it comes back",
            )
        return delivered

    def _send_marker(self, marker: Outgoing, until: float) -> None:
        try:
            self._send([marker], 1, until)
        except PermanentError as error:
            raise PermanentError(
                f"the marker of the batch, {len(marker.value or b''):,} bytes, in topic {marker.topic}: {error.found}",
                f"set max.message.bytes={MARKER_BYTES} on topic {marker.topic}, which earlier versions made without it",
            ) from error

    def _commit(self, until: float) -> None:
        while True:
            try:
                self._client.commit_transaction(max(until - time.monotonic(), 0.1))
            except KafkaException as error:
                if not error.args[0].retriable() or time.monotonic() >= until:
                    raise
                continue
            return


def _enrolled(records: Iterable[Record], enrolling: Outgoing | None) -> Iterable[Record]:
    """The records, with the enrolling one after the first: before it, its partition would take a request of its own."""
    if enrolling is None:
        return records
    rest = iter(records)
    return chain(islice(rest, 1), (enrolling,), rest)


def _check(until: float) -> None:
    if time.monotonic() >= until:
        raise ClientLost("the transaction took too long: its records were not all queued in time")
