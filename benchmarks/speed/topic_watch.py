"""When an output topic became readable: what a consumer that reads only committed records sees, and when.

Progress through a backlog is what the contestant commits about its input: offsets, or the product's markers.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from io import BytesIO

import pyarrow as pa
import pyarrow.json
from confluent_kafka import OFFSET_BEGINNING, OFFSET_END, Consumer, KafkaError, KafkaException, TopicPartition

from benchmarks.feeds import SILENT
from benchmarks.processes import Follower
from benchmarks.run import wait_until
from benchmarks.speed.records import COLUMNS, KEYS, PARTITIONS, Work
from benchmarks.speed.watch import SEEN, Point
from streaming_jobs.ledger.entry import LedgerEntry
from streaming_jobs.settings_sections import TopicSinkSettings
from streaming_jobs.sinks.kafka.markers import marker_topic, transactional_id

WAIT = 30.0
"""Seconds for one answer of the broker."""
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
"""Errors of a new broker or a new topic, which pass."""
_SAME_CHECKPOINT = 0.25
_LOOK_FOR_TOPIC_EVERY = 0.25
_PROGRESS_EVERY, _READ_WAIT = 0.02, 0.05


def _consumer(bootstrap: str, group: str, isolation: str) -> Consumer:
    """A silent consumer that commits nothing and tells the end of a partition."""
    return Consumer(
        {
            "bootstrap.servers": bootstrap,
            "group.id": group,
            "isolation.level": isolation,
            "enable.auto.commit": False,
            "enable.partition.eof": True,
            "logger": SILENT,
        }
    )


def _reader(bootstrap: str, topic: str, partitions: int = PARTITIONS) -> Consumer:
    """A consumer of all committed records of a topic."""
    reader = _consumer(bootstrap, f"reader-{uuid.uuid4()}", "read_committed")
    reader.assign([TopicPartition(topic, partition, OFFSET_BEGINNING) for partition in range(partitions)])
    return reader


def committed_records(bootstrap: str, topic: str, partitions: int = PARTITIONS) -> Iterator[tuple[bytes, bytes]]:
    """Key and value of every committed record that is there now."""
    reader = _reader(bootstrap, topic, partitions)
    try:
        open_partitions = set(range(partitions))
        while open_partitions:
            message = reader.poll(WAIT)
            if message is None:
                raise TimeoutError(f"no answer from topic {topic} within {WAIT:.0f} s")
            error = message.error()
            if error is None:
                yield message.key() or b"", message.value() or b""
            elif error.code() == KafkaError._PARTITION_EOF:
                open_partitions.discard(message.partition())
            else:
                raise KafkaException(error)
    finally:
        reader.close()


class OffsetsWithRows:
    """For a contestant that commits offsets and rows in one transaction: each new offset is a point."""

    def __init__(self) -> None:
        self._records = 0

    def points(self, records: int) -> list[Point]:
        """The points that became known by this look, at which the committed offsets cover so many input records."""
        if records <= self._records:
            return []
        self._records = records
        return [Point(time.time(), records, None)]


class OffsetsBeforeRows:
    """For a contestant that commits its rows by transactions of their own, at about the time of the offsets.

    Flink writes all rows of a checkpoint to Kafka and completes it; then its source commits the offsets, partition by
    partition, and its sink the transactions, in no order. Offsets that follow others within `_SAME_CHECKPOINT` seconds
    are of the same checkpoint. They become a point when those of the next checkpoint are there, or as soon as the
    output is settled. The last offsets of a backlog come up to ten seconds late, because the source commits between two
    polls of its consumer, and the last poll waits that long: so a settled output that is complete is a point too.
    """

    def __init__(self, output: OutputTopic, records: int, clock: Callable[[], float] = time.time) -> None:
        """`records` is how many the input has in all."""
        self._output, self._all, self._clock = output, records, clock
        self._records = self._examined = 0
        self._waiting: Point | None = None

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


class CommittedOffsets:
    """Progress by the offsets that a consumer group committed in its inputs; `rule` says when these become points."""

    def __init__(
        self, bootstrap: str, *, group: str, sources: Sequence[str], rule: OffsetsWithRows | OffsetsBeforeRows
    ) -> None:
        # Uncommitted: of the group's offsets it is then told the last committed ones, without waiting for others.
        self._group = _consumer(bootstrap, group, "read_uncommitted")
        self._source = [TopicPartition(name, partition) for name in sources for partition in range(PARTITIONS)]
        self._rule = rule
        self.close = self._group.close

    def look(self) -> list[Point]:
        try:
            committed = self._group.committed(self._source, timeout=WAIT)
        except KafkaException as error:
            if error.args[0].code() in _PASSING:  # the coordinator of a new broker is not there at once
                return []
            raise
        return self._rule.points(sum(max(position.offset, 0) for position in committed))


class MarkedBatches:
    """The points of the product's markers. A marker is the ledger entry of a batch, in the transaction of its rows."""

    def __init__(self, output: str) -> None:
        self._output = output
        self._batch = -1
        self._rows = 0

    def points(self, marker: bytes, seen: float) -> list[Point]:
        """The point of a marker; none for a marker that only says who writes."""
        entry = LedgerEntry.decode(marker.decode())
        if entry is None or entry.batch <= self._batch:
            return []
        self._batch = entry.batch
        self._rows += sum(written.records for written in entry.written if written.topic == self._output)
        return [Point(seen, sum(end for offsets in entry.offsets for end in offsets.end.values()), self._rows)]


class Markers:
    """Progress by the topic of the product's markers, which the contestant makes."""

    def __init__(self, bootstrap: str, *, stream: str, output: str) -> None:
        prefix = TopicSinkSettings().prefix
        self._topic = marker_topic(prefix, stream, output)
        self._key = transactional_id(prefix, stream, output).encode()
        self._batches = MarkedBatches(output)
        self._reader = _consumer(bootstrap, f"markers-{output}", "read_committed")
        self._assigned = False
        self._next_search = 0.0
        self.close = self._reader.close

    def look(self) -> list[Point]:
        if not self._assigned and time.monotonic() >= self._next_search:
            self._next_search = time.monotonic() + _LOOK_FOR_TOPIC_EVERY
            if self._topic in self._reader.list_topics(timeout=WAIT).topics:
                self._reader.assign([TopicPartition(self._topic, 0, OFFSET_BEGINNING)])
                self._assigned = True
        points: list[Point] = []
        while self._assigned and (message := self._reader.poll(0)) is not None:
            if message.error() is None and message.key() == self._key:
                points += self._batches.points(message.value() or b"", time.time())
        return points


class OutputTopic:
    """The output topic of a run. `records` and `rows` are those of input and output; rows None: not known yet."""

    def __init__(self, bootstrap: str, topic: str, *, work: Work, records: int, rows: int | None) -> None:
        self._bootstrap, self._topic, self._work = bootstrap, topic, work
        self._records, self._rows = records, rows
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
        values = [value for _, value in committed_records(self._bootstrap, self._topic)]
        rows = _newest(_table(values, self._work), self._work)
        if self._work == "running":
            return bool(sum(rows["count"].to_pylist()) >= self._records)
        return bool(rows.num_rows >= self._rows)

    def _ends(self, reader: Consumer) -> list[int]:
        partitions = [TopicPartition(self._topic, partition, OFFSET_END) for partition in range(PARTITIONS)]
        return [position.offset for position in reader.offsets_for_times(partitions, timeout=WAIT)]


class TopicWatch:
    """Follows a contestant's progress and, when live, every record of its output.

    From a backlog the output is read when the run is over, so that reading it costs the contestant nothing.
    """

    def __init__(
        self, bootstrap: str, *, output: str, work: Work, live: bool, progress: CommittedOffsets | Markers
    ) -> None:
        self.points: list[Point] = []
        self._bootstrap, self._output, self._work, self._progress = bootstrap, output, work, progress
        self._records: list[tuple[bytes, bytes]] = []
        self._seen: list[float] = []
        self._values: list[bytes] = []
        self._live_reader = _reader(bootstrap, output) if live else None
        self._followers = [Follower(self._look, _PROGRESS_EVERY)]
        if live:
            self._followers.append(Follower(self._read, 0))

    def start(self) -> None:
        for follower in self._followers:
            follower.start()

    def check(self) -> None:
        for follower in self._followers:
            follower.check()

    def stop(self) -> None:
        """Look no more, when live not before all of the output was seen; raises what went wrong while looking."""
        with ExitStack() as end:
            end.callback(self._progress.close)
            if self._live_reader is not None:
                end.callback(self._live_reader.close)
            for follower in self._followers:
                end.callback(follower.stop)
            self._records = list(committed_records(self._bootstrap, self._output))
            if self._live_reader is not None:
                wait_until(lambda: len(self._values) >= len(self._records), WAIT, "the output seen", every=0.02)

    def _look(self) -> None:
        self.points += self._progress.look()

    def _read(self) -> None:
        assert self._live_reader is not None
        wait = _READ_WAIT  # librdkafka waits, where a look every millisecond would take the interpreter
        while (message := self._live_reader.poll(wait)) is not None:
            wait = 0
            if message.error() is None:
                self._seen.append(time.time())
                self._values.append(message.value() or b"")

    def arrivals(self) -> pa.Table:
        """Every row that was written, with the time at which it was readable, in this order."""
        return _table(self._values, self._work).append_column(SEEN, pa.array(self._seen, pa.float64()))

    def output(self) -> pa.Table:
        """What the topic held when the watch was stopped; of the running total, the newest row of each account.

        Raises LookupError for a record whose key is not its account.
        """
        rows = _table([value for _, value in self._records], self._work)
        check_keys(rows, [key for key, _ in self._records])
        return _newest(rows, self._work)


def check_keys(rows: pa.Table, keys: Sequence[bytes]) -> None:
    """Raise LookupError unless the key of each record is its account."""
    wrong = sum(key != account.encode() for key, account in zip(keys, rows["account"].to_pylist(), strict=True))
    if wrong:
        raise LookupError(f"the key of {wrong} records is not their account")


def _newest(rows: pa.Table, work: Work) -> pa.Table:
    if work != "running":
        return rows
    numbered = rows.append_column("number", pa.array(range(rows.num_rows)))
    return rows.take(numbered.group_by(list(KEYS[work])).aggregate([("number", "max")])["number_max"])


def _table(values: list[bytes], work: Work) -> pa.Table:
    columns = COLUMNS[work]
    if not values:
        return columns.empty_table()
    # In the topic a window's start is a number of ms, and other times are text, of ms or us.
    written = {"start": pa.int64(), "at": pa.timestamp("us", "UTC")}
    schema = pa.schema([(each.name, written.get(each.name, each.type)) for each in columns])
    options = pa.json.ParseOptions(explicit_schema=schema, unexpected_field_behavior="ignore")
    rows = pa.json.read_json(BytesIO(b"\n".join(values)), parse_options=options)
    return rows.select(columns.names).cast(columns)
