"""When an output topic became readable: what a consumer that reads only committed records sees, and when."""

from __future__ import annotations

import logging
import time
import uuid
from collections.abc import Iterator
from io import BytesIO

import pyarrow as pa
import pyarrow.json
from confluent_kafka import OFFSET_BEGINNING, Consumer, KafkaError, KafkaException, TopicPartition

from benchmarks.speed.records import COLUMNS, KEYS, PARTITIONS, Work
from benchmarks.speed.watch import SEEN, Follower, Point

_PROGRESS_EVERY = 0.02
_READ_EVERY = 0.001
_WAIT = 30.0
_PASSING = {
    KafkaError.COORDINATOR_LOAD_IN_PROGRESS,
    KafkaError.COORDINATOR_NOT_AVAILABLE,
    KafkaError.NOT_COORDINATOR,
    KafkaError._WAIT_COORD,
    KafkaError._TRANSPORT,
    KafkaError._TIMED_OUT,
}
_silent = logging.getLogger("benchmark.librdkafka")
_silent.addHandler(logging.NullHandler())


class TopicWatch:
    """Follows the offsets that a consumer group committed in its input, and, when live, every record of its output.

    From a backlog the output is read when the run is over, so that reading it costs the contestant nothing.
    """

    def __init__(self, bootstrap: str, *, group: str, source: str, output: str, work: Work, live: bool) -> None:
        self.points: list[Point] = []
        self._bootstrap = bootstrap
        self._output = output
        self._work = work
        self._rows: pa.Table | None = None
        self._seen: list[float] = []
        self._values: list[bytes] = []
        # Uncommitted: of the group's offsets it is then told the last committed ones, without waiting for others.
        self._progress = _consumer(bootstrap, group, "read_uncommitted")
        self._source = [TopicPartition(source, partition) for partition in range(PARTITIONS)]
        self._consumers = [self._progress]
        self._followers = [Follower(self._look, _PROGRESS_EVERY)]
        if live:
            self._reader = _reader(bootstrap, output)
            self._consumers.append(self._reader)
            self._followers.append(Follower(self._read, _READ_EVERY))

    def start(self) -> None:
        """Begin to look."""
        for follower in self._followers:
            follower.start()

    def check(self) -> None:
        """Raise what went wrong while looking."""
        for follower in self._followers:
            follower.check()

    def stop(self) -> None:
        """Look no more, when live not before all of the output was seen; raises what went wrong while looking."""
        values = list(_all(self._bootstrap, self._output))
        self._rows = _table(values, self._work)
        deadline = time.monotonic() + _WAIT
        while len(self._followers) > 1 and len(self._values) < len(values) and time.monotonic() < deadline:
            time.sleep(_PROGRESS_EVERY)
        try:
            for follower in self._followers:
                follower.stop()
        finally:
            for consumer in self._consumers:
                consumer.close()

    def _look(self) -> None:
        try:
            committed = self._progress.committed(self._source, timeout=_WAIT)
        except KafkaException as error:
            if error.args[0].code() in _PASSING:  # the coordinator of a new broker is not there at once
                return
            raise
        records = sum(max(place.offset, 0) for place in committed)
        if records > (self.points[-1].records if self.points else 0):
            self.points.append(Point(time.time(), records, None))

    def _read(self) -> None:
        while (message := self._reader.poll(0)) is not None:
            if message.error() is None:
                self._seen.append(time.time())
                self._values.append(message.value() or b"")

    def arrivals(self) -> pa.Table:
        """Every row that was written, with the time at which it was readable, in this order."""
        return _table(self._values, self._work).append_column(SEEN, pa.array(self._seen, pa.float64()))

    def output(self) -> pa.Table:
        """What the topic held when the watch was stopped; of the running total, the newest row of each account."""
        assert self._rows is not None
        if self._work != "running":
            return self._rows
        place = pa.array(range(self._rows.num_rows))
        last = self._rows.append_column("place", place).group_by(list(KEYS[self._work])).aggregate([("place", "max")])
        return self._rows.take(last["place_max"])


def _all(bootstrap: str, topic: str) -> Iterator[bytes]:
    """The value of every committed record that is there now."""
    reader = _reader(bootstrap, topic)
    try:
        open_partitions = set(range(PARTITIONS))
        while open_partitions:
            message = reader.poll(_WAIT)
            if message is None:
                raise TimeoutError(f"no answer from topic {topic} within {_WAIT:.0f} s")
            error = message.error()
            if error is None:
                yield message.value() or b""
            elif error.code() == KafkaError._PARTITION_EOF:
                open_partitions.discard(message.partition())
            else:
                raise KafkaException(error)
    finally:
        reader.close()


def _reader(bootstrap: str, topic: str) -> Consumer:
    reader = _consumer(bootstrap, f"reader-{uuid.uuid4()}", "read_committed")
    reader.assign([TopicPartition(topic, partition, OFFSET_BEGINNING) for partition in range(PARTITIONS)])
    return reader


def _consumer(bootstrap: str, group: str, isolation: str) -> Consumer:
    return Consumer(
        {
            "bootstrap.servers": bootstrap,
            "group.id": group,
            "isolation.level": isolation,
            "enable.auto.commit": False,
            "enable.partition.eof": True,
            "logger": _silent,
        }
    )


def _table(values: list[bytes], work: Work) -> pa.Table:
    kinds = COLUMNS[work]
    if not values:
        return pa.table({name: pa.array([], kind) for name, kind in kinds.items()})
    # A window's start is a number of ms in the topic.
    schema = pa.schema([(n, pa.int64() if n == "start" else k) for n, k in kinds.items()])
    options = pa.json.ParseOptions(explicit_schema=schema, unexpected_field_behavior="ignore")
    found = pa.json.read_json(BytesIO(b"\n".join(values)), parse_options=options)
    return pa.table({name: found[name].cast(kind) for name, kind in kinds.items()})
