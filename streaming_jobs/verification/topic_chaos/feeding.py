"""The feeder of numbers: at a steady rate in a thread, through every restart of the broker, each number once.

The producer is idempotent and lives as long as the feeder, so a request that is repeated to a killed broker is in the
topic once. The check of what was fed does not rest on that: it reads the topic.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Mapping
from typing import Any

from confluent_kafka import KafkaError, Message, Producer

from streaming_jobs.verification.chaos.session_runner import ChaosFailed
from streaming_jobs.verification.topic_chaos.numbers import record, waves

_LOOK_EVERY = 0.02
_WITHIN = 120.0


class NumberFeeding:
    """Feeds until it is stopped. `held` records are acknowledged."""

    dry = False
    """Numbers do not come to an end."""

    def __init__(self, config: Mapping[str, Any], topic: str, *, seed: int, rate: float) -> None:
        """`config` are the properties of any client of the cluster; `rate` is in records per second."""
        self.held = 0
        self._topic, self._rate = topic, rate
        self._waves = waves(seed)
        self._wave: Iterator[tuple[str, int]] = iter(())
        self._sent = self._burst_to = 0
        self._failure: str | None = None
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="feeder", daemon=True)
        options = {
            "enable.idempotence": True,
            "partitioner": "murmur2_random",
            "linger.ms": 5,
            "delivery.timeout.ms": 1000 * int(_WITHIN),
            "retry.backoff.max.ms": 200,
        }
        self._producer = Producer({**config, **options})

    def start(self) -> None:
        self._thread.start()

    def check(self) -> None:
        """Raise ChaosFailed if a record could not be delivered."""
        if self._failure is not None:
            raise ChaosFailed(f"a record could not be sent to {self._topic}: {self._failure}", "run it again")

    def burst(self, records: int, seconds: float) -> int:
        """Feed this many records at once; returns the number of records in the topic then, after `seconds` at most."""
        self._burst_to = target = self._sent + records
        deadline = time.monotonic() + seconds
        while self.held < target:
            self.check()
            if time.monotonic() > deadline:
                raise ChaosFailed(f"{self.held:,} of {target:,} records are fed after {seconds:.0f} s", "run it again")
            time.sleep(_LOOK_EVERY)
        return self.held

    def stop(self) -> None:
        """End between two records."""
        self._ended.set()
        if self._thread.is_alive():
            self._thread.join()

    def finish(self) -> int:
        """Stop, and send what the keys of the last wave still lack; returns the number of records in the topic."""
        self.stop()
        for key, number in self._wave:
            self._send(key, number)
        left = self._producer.flush(_WITHIN)
        self.check()
        if left:
            raise ChaosFailed(f"{left:,} records are not acknowledged after {_WITHIN:.0f} s", "run it again")
        return self.held

    def _run(self) -> None:
        due = time.monotonic()
        while not self._ended.is_set() and self._failure is None:
            following = next(self._wave, None)
            if following is None:
                self._wave = iter(next(self._waves))
                continue
            self._send(*following)
            if self._sent < self._burst_to:
                due = time.monotonic()
                continue
            due += 1 / self._rate
            if (pause := due - time.monotonic()) > 0:
                self._producer.poll(0)
                self._ended.wait(pause)

    def _send(self, key: str, number: int) -> None:
        name, value = record(key, number)
        while True:
            try:
                self._producer.produce(self._topic, key=name, value=value, on_delivery=self._delivered)
                break
            except BufferError:
                self._producer.poll(0.1)
        self._sent += 1
        self._producer.poll(0)

    def _delivered(self, error: KafkaError | None, _: Message) -> None:
        if error is not None:
            self._failure = self._failure or str(error)
        else:
            self.held += 1
