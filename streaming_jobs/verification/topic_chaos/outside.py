"""A reader outside of all streams: only committed records, all the while, as any other program would read them."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Mapping
from typing import Any

from confluent_kafka import Consumer, TopicPartition

from streaming_jobs.verification.topic import RawRecord

_AT_ONCE = 5000


class Outside:
    """Reads the topics in a thread until it is stopped. `records` are those of each topic so far, as they came."""

    def __init__(self, config: Mapping[str, Any], partitions: Mapping[str, int]) -> None:
        """`config` are the properties of any client of the cluster; `partitions` has their number for each topic."""
        self.records: dict[str, list[RawRecord]] = defaultdict(list)
        options = {
            "group.id": "recourse-outside",
            "isolation.level": "read_committed",
            "enable.auto.commit": False,
            "auto.offset.reset": "error",
        }
        self._consumer = Consumer({**config, **options})
        self._consumer.assign([TopicPartition(t, p, 0) for t, count in partitions.items() for p in range(count)])
        self._ended = threading.Event()
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._run, name="outside", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def check(self) -> None:
        """Raise the reader's error, if it has failed."""
        if self._error is not None:
            raise self._error

    def stop(self) -> None:
        """End, and let go of the consumer."""
        self._ended.set()
        if self._thread.is_alive():
            self._thread.join()

    def _run(self) -> None:
        try:
            while not self._ended.is_set():
                for message in self._consumer.consume(_AT_ONCE, timeout=0.1):
                    error = message.error()
                    if error is None:
                        topic = str(message.topic())
                        place = (topic, int(message.partition() or 0), int(message.offset() or 0))
                        record = RawRecord(*place, message.timestamp()[1], message.key(), message.value())
                        self.records[topic].append(record)
                    elif error.fatal() or error.name() == "_AUTO_OFFSET_RESET":
                        raise RuntimeError(f"the reader outside cannot go on: {error}")
        except Exception as error:  # noqa: BLE001 - raised by `check` in the caller's thread
            self._error = error
        finally:
            self._consumer.close()
