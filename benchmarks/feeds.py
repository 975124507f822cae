"""Topics, and the records in them: a backlog as fast as it goes, payments each at its time, flights at a rate."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Mapping, Sequence

import pyarrow as pa
from confluent_kafka import KafkaException, Producer

from benchmarks.processes import Follower
from benchmarks.run import wait_until
from benchmarks.speed.records import FORMATS, PARTITIONS, Records, Work, inputs
from streaming_jobs.declare.schemas import arrow_struct
from streaming_jobs.examples.flights import dataset
from streaming_jobs.examples.flights.content import TOPIC as FLIGHTS
from streaming_jobs.settings import Settings
from streaming_jobs.sources.topics import Topics

_CHUNK = 10_000
_TICK, _FLIGHTS_TICK = 0.002, 0.05
_WAIT = 30.0
SILENT = logging.getLogger("benchmark.librdkafka")
SILENT.addHandler(logging.NullHandler())


def create_topic(bootstrap: str, name: str, partitions: int = PARTITIONS) -> None:
    """A new topic that keeps everything: event times of any age stay."""
    Topics.of(Settings.load().kafka, bootstrap).create(name, partitions)


def feed_backlog(bootstrap: str, topic: str, records: Records, work: Work = "stateless") -> float:
    """Put all records into the input of a work; the seconds that it took. Raises KafkaException if not all arrived."""
    began = time.monotonic()
    producer = _producer(bootstrap, linger_ms=50)
    topics, messages = inputs(topic, work), _messages(records, work)
    for number, name in enumerate(topics):
        share = messages[number :: len(topics)]
        for start in range(0, len(share), _CHUNK):
            _send(producer, name, share[start : start + _CHUNK])
    _flush(producer)
    return time.monotonic() - began


def feed_values(bootstrap: str, topic: str, values: Iterable[bytes]) -> None:
    """Make a topic of one partition with records of these values; raises KafkaException if not all arrived."""
    create_topic(bootstrap, topic, 1)
    producer = _producer(bootstrap, linger_ms=50)
    _send(producer, topic, [{"value": value} for value in values])
    _flush(producer)


class LiveFeed:
    """A thread that sends each record at its time, `sent_ms`, and then says how late it was at worst."""

    def __init__(self, bootstrap: str, topic: str, records: Records, work: Work = "stateless") -> None:
        self.worst_ms = 0.0
        self._topic, self._due, self._messages, self._sent = topic, records.sent_ms, _messages(records, work), 0
        self._producer = _producer(bootstrap, linger_ms=0)
        self._sender = Follower(self._send_due, _TICK)
        self.start, self.stop = self._sender.start, self._sender.stop

    def wait(self, seconds: float) -> None:
        """Until all is sent and acknowledged; raises what went wrong."""
        wait_until(lambda: self._sent == len(self._due), seconds, "all live records sent", check=self._sender.check)
        self.stop()
        _flush(self._producer)

    def _send_due(self) -> None:
        now = time.time() * 1000
        until = int(self._due.searchsorted(now, side="right"))
        if until > self._sent:
            self.worst_ms = max(self.worst_ms, now - float(self._due[self._sent]))
            _send(self._producer, self._topic, self._messages[self._sent : until])
            self._sent = until
        self._producer.poll(0)


class YearByYear:
    """A thread that sends the flights of 2013, then the same of 2014 and so on, at a steady rate."""

    def __init__(self, bootstrap: str, rate: float) -> None:
        self.sent = 0
        self._rate, self._more, self._began = rate, 0, 0.0
        self._producer = _producer(bootstrap, linger_ms=5, partitioner="murmur2_random")
        self._records = dataset.records()
        self._sender = Follower(self._send_due, _FLIGHTS_TICK)
        self.check = self._sender.check

    def start(self) -> None:
        self._began = time.monotonic()
        self._sender.start()

    def burst(self, records: int) -> None:
        self._more += records

    def stop(self) -> None:
        """Send no more; returns when all is acknowledged. Raises what went wrong."""
        self._sender.stop()
        _flush(self._producer)

    def _send_due(self) -> None:
        due = int((time.monotonic() - self._began) * self._rate) + self._more
        while self.sent < due:
            _send(self._producer, FLIGHTS, [self._message(*divmod(self.sent, len(self._records)))])
            self.sent += 1
        self._producer.poll(0)

    def _message(self, year: int, position: int) -> dict[str, object]:
        value = self._records.values[position]
        if year:  # the last departures of 2013 are in 2014 already
            for old, new in ((b'"2014-', b'"%d-'), (b'"2013-', b'"%d-'), (b'"year":2013', b'"year":%d')):
                value = value.replace(old, new % (year + (2014 if b"2014" in old else 2013)))
        return {"key": self._records.keys[position], "value": value}


def _messages(records: Records, work: Work) -> list[dict[str, object]]:
    each = zip(
        records.keys(), _values(records, work), records.partition.tolist(), records.sent_ms.astype(int).tolist(),
        strict=True,
    )  # fmt: skip
    return [{"key": key, "value": value, "partition": p, "timestamp": t} for key, value, p, t in each]


def _values(records: Records, work: Work) -> Sequence[bytes]:
    if work not in FORMATS:
        return records.encoded()
    from benchmarks.speed import format_flows

    declared = format_flows.FORMATS[work]
    fields = pa.schema(arrow_struct(declared.schema))
    (rows,) = records.payments().cast(fields).combine_chunks().to_batches()
    return [value or b"" for value in declared.writer().write(rows).values]


def _producer(bootstrap: str, *, linger_ms: int, **more: str) -> Producer:
    # Idempotent: the order of a partition is the order of sending, whatever is sent again.
    return Producer(
        {
            "bootstrap.servers": bootstrap,
            "enable.idempotence": True,
            "linger.ms": linger_ms,
            "logger": SILENT,
            "queue.buffering.max.messages": 10_000_000,
            "queue.buffering.max.kbytes": 2_097_151,
            **more,
        }
    )


def _send(producer: Producer, topic: str, messages: Sequence[Mapping[str, object]]) -> None:
    for message in messages:
        while True:
            try:
                producer.produce(topic, **message)  # type: ignore[arg-type]
                break
            except BufferError:  # the queue is full: it empties by acknowledgement, or by the deadline of its records
                producer.poll(0.1)


def _flush(producer: Producer) -> None:
    left = producer.flush(_WAIT)
    if left:
        raise KafkaException(f"{left} records were not acknowledged within {_WAIT:.0f} s")
