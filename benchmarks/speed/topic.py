"""When an output topic became readable: what a consumer that reads only committed records sees, and when."""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator, Sequence
from io import BytesIO

import pyarrow as pa
import pyarrow.json
from confluent_kafka import OFFSET_BEGINNING, OFFSET_END, Consumer, KafkaError, KafkaException, TopicPartition

from benchmarks.speed.consumers import PASSING, WAIT, consumer
from benchmarks.speed.progress import Progress
from benchmarks.speed.records import COLUMNS, KEYS, PARTITIONS, Work
from benchmarks.speed.watch import SEEN, Follower, Point

_PROGRESS_EVERY = 0.02
_READ_EVERY = 0.001


class OutputTopic:
    """The output topic of a run. `records` and `rows` are those of input and output; rows None: not known yet."""

    def __init__(self, bootstrap: str, topic: str, *, work: Work, records: int, rows: int | None) -> None:
        self._bootstrap = bootstrap
        self._topic = topic
        self._work = work
        self._records = records
        self._rows = rows
        self._committed = consumer(bootstrap, f"end-{uuid.uuid4()}", "read_committed")
        self._everything = consumer(bootstrap, f"end-{uuid.uuid4()}", "read_uncommitted")

    def settled(self) -> int | None:
        """Its end, the sum over its partitions; None while a transaction is open."""
        try:
            # In this order: where what is committed reached the end that is asked for afterwards, nothing was open.
            committed, everything = self._ends(self._committed), self._ends(self._everything)
        except KafkaException as error:
            if error.args[0].code() in PASSING:  # a new topic's partitions have no leader at once
                return None
            raise
        return sum(everything) if committed == everything else None

    def complete(self) -> bool:
        """Whether everything is there that the input makes: by the totals themselves, or by the number of rows."""
        if self._rows is None or (end := self.settled()) is None or end < self._rows:
            return False
        rows = _newest(_table([value for _, value in _all(self._bootstrap, self._topic)], self._work), self._work)
        if self._work == "running":
            return bool(sum(rows["count"].to_pylist()) >= self._records)
        return bool(rows.num_rows >= self._rows)

    def _ends(self, reader: Consumer) -> list[int]:
        each = [TopicPartition(self._topic, partition, OFFSET_END) for partition in range(PARTITIONS)]
        return [place.offset for place in reader.offsets_for_times(each, timeout=WAIT)]


class TopicWatch:
    """Follows a contestant's progress and, when live, every record of its output.

    From a backlog the output is read when the run is over, so that reading it costs the contestant nothing.
    """

    def __init__(self, bootstrap: str, *, output: str, work: Work, live: bool, progress: Progress) -> None:
        self.points: list[Point] = []
        self._bootstrap = bootstrap
        self._output = output
        self._work = work
        self._rows: pa.Table | None = None
        self._keys: list[bytes] = []
        self._seen: list[float] = []
        self._values: list[bytes] = []
        self._progress = progress
        self._reader: Consumer | None = None
        self._followers = [Follower(self._look, _PROGRESS_EVERY)]
        if live:
            self._reader = _reader(bootstrap, output)
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
        records = list(_all(self._bootstrap, self._output))
        self._rows = _table([value for _, value in records], self._work)
        self._keys = [key for key, _ in records]
        deadline = time.monotonic() + WAIT
        while len(self._followers) > 1 and len(self._values) < len(records) and time.monotonic() < deadline:
            time.sleep(_PROGRESS_EVERY)
        try:
            for follower in self._followers:
                follower.stop()
        finally:
            self._progress.close()
            if self._reader is not None:
                self._reader.close()

    def _look(self) -> None:
        self.points += self._progress.look()

    def _read(self) -> None:
        assert self._reader is not None
        while (message := self._reader.poll(0)) is not None:
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
        assert self._rows is not None
        check_keys(self._rows, self._keys)
        return _newest(self._rows, self._work)


def check_keys(rows: pa.Table, keys: Sequence[bytes]) -> None:
    """Raise LookupError unless the key of each record is its account."""
    wrong = sum(key != account.encode() for key, account in zip(keys, rows["account"].to_pylist(), strict=True))
    if wrong:
        raise LookupError(f"the key of {wrong} records is not their account")


def _newest(rows: pa.Table, work: Work) -> pa.Table:
    if work != "running":
        return rows
    place = pa.array(range(rows.num_rows))
    last = rows.append_column("place", place).group_by(list(KEYS[work])).aggregate([("place", "max")])
    return rows.take(last["place_max"])


def _all(bootstrap: str, topic: str) -> Iterator[tuple[bytes, bytes]]:
    """Key and value of every committed record that is there now."""
    reader = _reader(bootstrap, topic)
    try:
        open_partitions = set(range(PARTITIONS))
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


def _reader(bootstrap: str, topic: str) -> Consumer:
    reader = consumer(bootstrap, f"reader-{uuid.uuid4()}", "read_committed")
    reader.assign([TopicPartition(topic, partition, OFFSET_BEGINNING) for partition in range(PARTITIONS)])
    return reader


def _table(values: list[bytes], work: Work) -> pa.Table:
    kinds = COLUMNS[work]
    if not values:
        return pa.table({name: pa.array([], kind) for name, kind in kinds.items()})
    # In the topic a window's start is a number of ms, and other times are text, of ms or us.
    written = {"start": pa.int64(), "at": pa.timestamp("us", "UTC")}
    schema = pa.schema([(name, written.get(name, kind)) for name, kind in kinds.items()])
    options = pa.json.ParseOptions(explicit_schema=schema, unexpected_field_behavior="ignore")
    found = pa.json.read_json(BytesIO(b"\n".join(values)), parse_options=options)
    return pa.table({name: found[name].cast(kind) for name, kind in kinds.items()})
