"""When an output topic became readable: what a consumer that reads only committed records sees, and when."""

from __future__ import annotations

import logging
import time
import uuid
from collections.abc import Callable, Iterator
from io import BytesIO
from typing import Protocol

import pyarrow as pa
import pyarrow.json
from confluent_kafka import OFFSET_BEGINNING, OFFSET_END, Consumer, KafkaError, KafkaException, TopicPartition

from benchmarks.speed.records import COLUMNS, KEYS, PARTITIONS, Work
from benchmarks.speed.watch import SEEN, Follower, Point

_PROGRESS_EVERY = 0.02
_READ_EVERY = 0.001
_SAME_CHECKPOINT = 0.25
_WAIT = 30.0
_PASSING = {
    KafkaError.COORDINATOR_LOAD_IN_PROGRESS,
    KafkaError.COORDINATOR_NOT_AVAILABLE,
    KafkaError.NOT_COORDINATOR,
    KafkaError.NOT_LEADER_FOR_PARTITION,
    KafkaError.LEADER_NOT_AVAILABLE,
    KafkaError.UNKNOWN_TOPIC_OR_PART,
    KafkaError._WAIT_COORD,
    KafkaError._TRANSPORT,
    KafkaError._TIMED_OUT,
}
_silent = logging.getLogger("benchmark.librdkafka")
_silent.addHandler(logging.NullHandler())


class Progress(Protocol):
    """When the offsets that a contestant committed become points."""

    def points(self, records: int) -> list[Point]:
        """The points that became known by this look, at which the committed offsets cover so many input records."""


class OffsetsWithRows:
    """For a contestant that commits offsets and rows in one transaction: each new offset is a point."""

    def __init__(self) -> None:
        self._records = 0

    def points(self, records: int) -> list[Point]:
        """A point if there are more records than before."""
        if records <= self._records:
            return []
        self._records = records
        return [Point(time.time(), records, None)]


class Output(Protocol):
    """A topic that a contestant writes by transactions, as a reader of committed records finds it."""

    def settled(self) -> int | None:
        """Its end, the sum over its partitions; None while a transaction is open."""

    def complete(self) -> bool:
        """Whether everything is there that the input makes; False where that is not known."""


class OffsetsBeforeRows:
    """For a contestant that commits its rows by transactions of their own, at about the time of the offsets.

    Flink writes all rows of a checkpoint to Kafka and completes it; then its source commits the offsets, partition by
    partition, and its sink the transactions, in no order. Offsets that follow others within `_SAME_CHECKPOINT` seconds
    are of the same checkpoint. They become a point when those of the next checkpoint are there, or as soon as the
    output is settled. The last offsets of a backlog come up to ten seconds late, because the source commits between two
    polls of its consumer, and the last poll waits that long: so a settled output that is complete is a point too.
    """

    def __init__(self, output: Output, records: int, clock: Callable[[], float] = time.time) -> None:
        """`records` is how many the input has in all."""
        self._output = output
        self._all = records
        self._clock = clock
        self._records = 0
        self._waiting: Point | None = None
        self._examined = 0

    def points(self, records: int) -> list[Point]:
        """The points whose rows are known to be readable by now."""
        found = []
        if records > self._records:
            now = self._clock()
            if self._waiting and now - self._waiting.seen > _SAME_CHECKPOINT:
                found.append(self._waiting)
            self._records, self._waiting = records, Point(now, records, None)
        end = self._output.settled()
        if end is None:
            return found
        now = self._clock()
        if self._waiting:
            found.append(Point(now, self._waiting.records, None))
            self._waiting = None
        if self._records < self._all and end > self._examined:
            self._examined = end
            if self._output.complete():
                self._records = self._all
                found.append(Point(now, self._all, None))
        return found


class OutputTopic:
    """The output topic of a run. `records` and `rows` are those of input and output; rows None: not known yet."""

    def __init__(self, bootstrap: str, topic: str, *, work: Work, records: int, rows: int | None) -> None:
        self._bootstrap = bootstrap
        self._topic = topic
        self._work = work
        self._records = records
        self._rows = rows
        self._committed = _consumer(bootstrap, f"end-{uuid.uuid4()}", "read_committed")
        self._everything = _consumer(bootstrap, f"end-{uuid.uuid4()}", "read_uncommitted")

    def settled(self) -> int | None:
        """Its end, the sum over its partitions; None while a transaction is open."""
        try:
            # In this order: where what is committed reached the end that is asked for afterwards, nothing was open.
            committed, everything = self._ends(self._committed), self._ends(self._everything)
        except KafkaException as error:
            if error.args[0].code() in _PASSING:  # a new topic's partitions have no leader at once
                return None
            raise
        return sum(everything) if committed == everything else None

    def complete(self) -> bool:
        """Whether everything is there that the input makes: by the totals themselves, or by the number of rows."""
        if self._rows is None or (end := self.settled()) is None or end < self._rows:
            return False
        rows = _newest(_table(list(_all(self._bootstrap, self._topic)), self._work), self._work)
        if self._work == "running":
            return bool(sum(rows["count"].to_pylist()) >= self._records)
        return bool(rows.num_rows >= self._rows)

    def _ends(self, consumer: Consumer) -> list[int]:
        each = [TopicPartition(self._topic, partition, OFFSET_END) for partition in range(PARTITIONS)]
        return [place.offset for place in consumer.offsets_for_times(each, timeout=_WAIT)]


class TopicWatch:
    """Follows the offsets that a consumer group committed in its input, and, when live, every record of its output.

    From a backlog the output is read when the run is over, so that reading it costs the contestant nothing.
    """

    def __init__(
        self, bootstrap: str, *, group: str, source: str, output: str, work: Work, live: bool, progress: Progress
    ) -> None:
        self.points: list[Point] = []
        self._bootstrap = bootstrap
        self._output = output
        self._work = work
        self._rows: pa.Table | None = None
        self._seen: list[float] = []
        self._values: list[bytes] = []
        self._progress = progress
        # Uncommitted: of the group's offsets it is then told the last committed ones, without waiting for others.
        self._group = _consumer(bootstrap, group, "read_uncommitted")
        self._source = [TopicPartition(source, partition) for partition in range(PARTITIONS)]
        self._consumers = [self._group]
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
            committed = self._group.committed(self._source, timeout=_WAIT)
        except KafkaException as error:
            if error.args[0].code() in _PASSING:  # the coordinator of a new broker is not there at once
                return
            raise
        records = sum(max(place.offset, 0) for place in committed)
        self.points += self._progress.points(records)

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
        return _newest(self._rows, self._work)


def _newest(rows: pa.Table, work: Work) -> pa.Table:
    if work != "running":
        return rows
    place = pa.array(range(rows.num_rows))
    last = rows.append_column("place", place).group_by(list(KEYS[work])).aggregate([("place", "max")])
    return rows.take(last["place_max"])


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
