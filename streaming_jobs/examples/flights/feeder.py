"""Sends the flights to their topic, each once, in order of departure.

The topic itself is the record of what was fed (`content.py`): an interrupted feed continues where it stopped, and a
topic that holds the flights already is not fed again without `again`. The topic is read again when the connection is
lost while records are in flight: a broker forgets an idempotent producer whose newest record timestamp is a day old
(`producer.id.expiration.ms`), so a restarted broker would take our retry of records of 2013 for new ones.

Partitions do not drift apart: records are sent in one order, and each `CHUNK` of them has to be acknowledged before
the next is sent. A reader of the topic sees every flight except some of the newest `CHUNK`.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Any

import numpy as np
import structlog
from confluent_kafka import KafkaError, Message, Producer
from numpy.typing import NDArray

from streaming_jobs.errors import BrokerUnreachable, LeaseBusy, PermanentError, UsageError
from streaming_jobs.examples.flights import dataset
from streaming_jobs.examples.flights.content import TOPIC, FlightsInTopic, content
from streaming_jobs.platform.broker import bootstrap_servers
from streaming_jobs.settings import KafkaSettings, Settings
from streaming_jobs.sources.connection import Failures, client_config
from streaming_jobs.sources.topics import KEEP_FOREVER, Topics
from streaming_jobs.storage.locks import locked
from streaming_jobs.text import commands
from streaming_jobs.text.durations import format_duration

if TYPE_CHECKING:
    import pandas as pd

PARTITIONS = 4
"""Number of partitions of the topic when the feeder creates it; an existing topic is used as it is."""
CHUNK = 5_000
"""Records sent before all of them have to be acknowledged, which bounds how far partitions drift apart."""
_TICK = 0.1

Progress = Callable[[int, int], None]
_Record = tuple[bytes, bytes, int]
"""Key, value, timestamp in ms."""
_log = structlog.get_logger("recourse.feeder")


@dataclass(frozen=True)
class FeedReport:
    """The result of one feed: records sent, and seconds; `held` of `total` flights are in the topic after it."""

    records: int
    seconds: float
    held: int
    total: int
    stopped: bool

    @property
    def rate(self) -> float:
        """Records per second."""
        return self.records / self.seconds if self.seconds else 0.0


def feed(
    settings: Settings,
    *,
    rate: float | None,
    share: float = 1.0,
    again: bool = False,
    progress: Progress | None = None,
    stop: threading.Event | None = None,
    chunk: int = CHUNK,
) -> FeedReport:
    """Bring the first `share` of the flights (in order of departure) into the topic; send what is missing.

    `rate` is in records per second, None for full speed. A topic that holds them all is refused (UsageError)
    unless `again`, which sends every one of them once more. `stop`, or Ctrl-C, ends the feed between chunks
    with a report; the same call later continues from there. `progress` is called with (held, total) after each
    chunk. Raises BrokerUnreachable when the broker stays away, LeaseBusy when another feeder runs in this home,
    PermanentError if another producer wrote to the topic meanwhile.
    """
    if rate is not None and rate <= 0:
        raise UsageError(f"a rate of {rate} records per second makes no sense", "give a number above 0, or none")
    total = dataset.flights_in(share)
    topics = Topics.of(settings.kafka, bootstrap_servers(settings))
    with _only_feeder(settings):
        before = _prepared(settings.kafka, topics, total, again)
        wanted = np.arange(total) if again else before.missing
        held = 0 if again else before.held
        flights = dataset.departures(share)
        sending = _Sending(settings.kafka, topics, flights, stop or threading.Event(), min(chunk, CHUNK))
        started = time.monotonic()
        sent = sending.send(wanted, rate, lambda n: progress(held + n, total) if progress else None, repeat=again)
        seconds = time.monotonic() - started
        grown = topics.offsets(TOPIC).total - before.records
    if grown != sent and not sending.interrupted:
        raise PermanentError(
            f"topic {TOPIC} grew by {grown:,} records while {sent:,} were sent: somebody else writes to it",
            f"delete the topic {TOPIC} and feed it anew",
        )
    _log.info("fed", topic=TOPIC, records=grown, seconds=round(seconds, 2), stopped=grown < len(wanted))
    return FeedReport(grown, seconds, held + grown, total, stopped=grown < len(wanted))


def survey(settings: Settings, share: float = 1.0) -> FlightsInTopic:
    """The part of the first `share` of the flights that the topic holds; sends nothing and creates nothing."""
    topics = Topics.of(settings.kafka, bootstrap_servers(settings))
    return content(settings.kafka, topics, dataset.flights_in(share))


def _prepared(kafka: KafkaSettings, topics: Topics, total: int, again: bool) -> FlightsInTopic:
    info = topics.describe(TOPIC)
    if info is None:
        info = topics.create(TOPIC, PARTITIONS, KEEP_FOREVER)
    if info.retention_ms != KEEP_FOREVER or "compact" in info.cleanup_policy:
        raise UsageError(
            f"topic {TOPIC} would lose records that are stamped 2013: "
            f"retention.ms={info.retention_ms}, cleanup.policy={info.cleanup_policy}",
            f"set retention.ms=-1 and cleanup.policy=delete, or delete topic {TOPIC}: the feeder creates it anew",
        )
    present = content(kafka, topics, total)
    if again:
        return present
    if not len(present.missing):
        raise UsageError(
            f"topic {TOPIC} already holds the {present.total:,} flights asked for ({present.records:,} records): "
            "feeding twice doubles them",
            "nothing is left to do; to send all of them once more, use --again",
        )
    if present.foreign:
        raise UsageError(
            f"topic {TOPIC} is not a feed that can be continued: {present.foreign}",
            f"delete topic {TOPIC} and feed it anew, or send all flights on top with --again",
        )
    return present


@contextmanager
def _only_feeder(settings: Settings) -> Iterator[None]:
    folder = settings.home / "feed"
    folder.mkdir(parents=True, exist_ok=True)
    busy = LeaseBusy(f"another feeder of topic {TOPIC} runs in {folder}", "wait for it, or stop it")
    with locked(folder / f"{TOPIC}.lock", 0, lambda: busy):
        yield


class _Lost(Exception):
    """The connection was lost while records were in flight: only the topic shows which of them arrived."""


class _Sending:
    """Sends records with one producer after the other: a lost connection ends one, and the topic is read again."""

    def __init__(
        self, kafka: KafkaSettings, topics: Topics, flights: pd.DataFrame, stop: threading.Event, chunk: int
    ) -> None:
        self.interrupted = False
        self._kafka, self._topics, self._flights = kafka, topics, flights
        self._stop, self._chunk = stop, chunk

    def send(
        self, wanted: NDArray[np.int64], rate: float | None, progressed: Callable[[int], None], *, repeat: bool
    ) -> int:
        """Send these records in order; the number sent is exact unless Ctrl-C cut into a chunk.

        With `repeat` the topic has them already and cannot show which arrived: the producer's retries are trusted.
        """
        before, left = 0, wanted
        while True:
            sender = _Sender(self._kafka, self._topics.bootstrap, self._flights, self._stop, self._chunk, repeat)
            try:
                sent = sender.send(left, rate, partial(_onward, progressed, before))
                self.interrupted = sender.interrupted
                return before + sent
            except _Lost:
                _log.info("connection lost, reading the topic again", topic=TOPIC)
                left = self._missing()
                before = len(wanted) - len(left)

    def _missing(self) -> NDArray[np.int64]:
        began = time.monotonic()
        while True:
            try:
                present = content(self._kafka, self._topics, len(self._flights))
                break
            except BrokerUnreachable:
                if time.monotonic() - began > self._kafka.timeout.total_seconds():
                    raise
        if present.foreign:
            raise PermanentError(
                f"topic {TOPIC} is no longer one feed: {present.foreign}", f"delete topic {TOPIC} and feed it anew"
            )
        return present.missing


def _onward(progressed: Callable[[int], None], before: int, sent: int) -> None:
    progressed(before + sent)


def _records(flights: pd.DataFrame, positions: NDArray[np.int64]) -> Iterator[_Record]:
    """The records at these positions, made when they are needed: all of them take 150 MB."""
    for begin in range(0, len(positions), CHUNK):
        made = dataset.records_of(flights.iloc[positions[begin : begin + CHUNK]])
        yield from zip(made.keys, made.values, made.timestamps, strict=True)


class _Sender:
    """One producer and the loop around it: send a chunk, wait for its acknowledgement, pause, stop."""

    def __init__(
        self,
        kafka: KafkaSettings,
        bootstrap: str,
        flights: pd.DataFrame,
        stop: threading.Event,
        chunk: int,
        retry: bool,
    ) -> None:
        """With `retry` a lost connection is left to the producer, otherwise it raises _Lost."""
        self.interrupted = False
        self._flights = flights
        self._stop = stop
        self._chunk = chunk
        self._retry = retry
        self._patience: timedelta = 2 * kafka.timeout
        self._failures = Failures(bootstrap)
        self._undelivered: KafkaError | None = None
        settings: dict[str, Any] = client_config(kafka, bootstrap) | {
            "enable.idempotence": True,
            "acks": "all",
            # As Kafka's Java clients do; librdkafka's own default places most keys elsewhere.
            "partitioner": "murmur2_random",
            "linger.ms": 5,
            "compression.type": "lz4",
            # No deadline per record: a dropped one would leave a gap in the order. The feed ends without progress.
            "message.timeout.ms": 0,
            "delivery.report.only.error": True,
            "on_delivery": self._delivered,
            "error_cb": self._failures,
        }
        self._producer = Producer(settings)

    def send(self, positions: NDArray[np.int64], rate: float | None, progressed: Callable[[int], None]) -> int:
        """Send these records in order; raises _Lost, or BrokerUnreachable when the broker takes none for long."""
        sent, started, records = 0, time.monotonic(), _records(self._flights, positions)
        try:
            while sent < len(positions) and not self._stop.is_set():
                due = len(positions) if rate is None else int((time.monotonic() - started) * rate) + 1
                if size := min(due - sent, self._chunk, len(positions) - sent):
                    self._send_chunk(islice(records, size))
                    sent += size
                    progressed(sent)
                if rate is not None and sent < len(positions):
                    self._stop.wait(_TICK)
        except KeyboardInterrupt:
            self.interrupted = True
            self._acknowledged()
        return sent

    def _send_chunk(self, records: Iterable[_Record]) -> None:
        self._failures.succeeded()  # a connection lost while nothing was in flight does not matter
        for key, value, timestamp in records:
            self._producer.produce(TOPIC, value=value, key=key, timestamp=timestamp)
        self._acknowledged()

    def _acknowledged(self) -> None:
        self._failures.begin()
        left, moved = len(self._producer), time.monotonic()
        while still := self._producer.flush(_TICK):
            if self._failures.disconnected and not self._retry:
                self._producer.purge()
                raise _Lost
            if still < left:
                left, moved = still, time.monotonic()
                self._failures.succeeded()
            self._failures.check()
            if time.monotonic() - moved > self._patience.total_seconds():
                self._producer.purge()
                raise BrokerUnreachable(
                    f"the broker at {self._failures.bootstrap} took no record for {format_duration(self._patience)}",
                    f"bring it back (`{commands.doctor()}`) and feed again: it continues where it stopped",
                )
        if self._undelivered is not None:
            raise BrokerUnreachable(
                f"a record was not delivered: {self._undelivered.str()}", "feed again: it continues where it stopped"
            )

    def _delivered(self, error: KafkaError | None, _: Message) -> None:
        # librdkafka calls it for failures only (delivery.report.only.error).
        self._undelivered = error
