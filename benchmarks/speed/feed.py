"""Topics, and the records in them: a backlog as fast as it goes, live records each at its time."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Mapping, Sequence

from confluent_kafka import KafkaException, Producer
from confluent_kafka.admin import AdminClient
from confluent_kafka.cimpl import NewTopic

from benchmarks.speed.records import PARTITIONS, Records

_CHUNK = 10_000
_TICK = 0.002
_WAIT = 30.0
_silent = logging.getLogger("benchmark.librdkafka")
_silent.addHandler(logging.NullHandler())


def create_topic(bootstrap: str, name: str) -> None:
    """A new topic that keeps everything; event times of any age stay."""
    configuration = {"retention.ms": "-1", "cleanup.policy": "delete"}
    topic = NewTopic(name, PARTITIONS, 1, config=configuration)
    admin = AdminClient({"bootstrap.servers": bootstrap})  # held by a name: the request ends with its client
    admin.create_topics([topic])[name].result(_WAIT)


def end_offsets(records: Records) -> dict[int, int]:
    """The offset after the last record, by partition."""
    return {partition: int((records.partition == partition).sum()) for partition in range(PARTITIONS)}


def feed_backlog(bootstrap: str, topic: str, records: Records) -> float:
    """Put all records into the topic; the seconds that it took. Raises KafkaException when not all arrived."""
    began = time.monotonic()
    producer = _producer(bootstrap, linger_ms=50)
    messages = _messages(records)
    for start in range(0, len(messages), _CHUNK):
        _send(producer, topic, messages[start : start + _CHUNK])
    _flush(producer)
    return time.monotonic() - began


class LiveFeed:
    """A thread that sends each record at its time, `sent_ms`, and then says how late it was at worst."""

    def __init__(self, bootstrap: str, topic: str, records: Records) -> None:
        self._topic = topic
        self._records = records
        self._messages = _messages(records)
        self._producer = _producer(bootstrap, linger_ms=0)
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._ended = threading.Event()
        self._failure: Exception | None = None
        self.worst_ms = 0.0

    def start(self) -> None:
        """Begin; the first record's time must not have come yet."""
        self._thread.start()

    def stop(self) -> None:
        """Send no more."""
        self._ended.set()
        self._thread.join()

    def wait(self, seconds: float) -> None:
        """Until all is sent and acknowledged; raises what went wrong."""
        self._thread.join(seconds)
        if self._thread.is_alive():
            raise TimeoutError(f"the live records were not sent within {seconds:.0f} s")
        if self._failure is not None:
            raise self._failure

    def _run(self) -> None:
        try:
            self._send_all()
        except Exception as error:  # noqa: BLE001 - raised in `wait`, in the thread that wants the records
            self._failure = error

    def _send_all(self) -> None:
        due = self._records.sent_ms
        sent = 0
        while sent < len(due) and not self._ended.is_set():
            now = time.time() * 1000
            until = int(due.searchsorted(now, side="right"))
            if until > sent:
                self.worst_ms = max(self.worst_ms, now - float(due[sent]))
                _send(self._producer, self._topic, self._messages[sent:until])
                sent = until
            self._producer.poll(0)
            time.sleep(_TICK)
        _flush(self._producer)


def _messages(records: Records) -> list[dict[str, object]]:
    each = zip(
        records.keys(), records.encoded(), records.partition.tolist(), records.sent_ms.astype(int).tolist(), strict=True
    )
    return [{"key": key, "value": value, "partition": p, "timestamp": t} for key, value, p, t in each]


def _producer(bootstrap: str, *, linger_ms: int) -> Producer:
    # Idempotent: the order of a partition is the order of sending, whatever is sent again.
    return Producer(
        {
            "bootstrap.servers": bootstrap,
            "enable.idempotence": True,
            "linger.ms": linger_ms,
            "logger": _silent,
            "queue.buffering.max.messages": 10_000_000,
            "queue.buffering.max.kbytes": 2_097_151,
        }
    )


def _send(producer: Producer, topic: str, messages: Sequence[Mapping[str, object]]) -> None:
    for message in messages:
        producer.produce(topic, **message)  # type: ignore[arg-type]


def _flush(producer: Producer) -> None:
    left = producer.flush(_WAIT)
    if left:
        raise KafkaException(f"{left} records were not acknowledged within {_WAIT:.0f} s")
