"""The kill loop's streams that read topics and write topics (`number_streams.py`), their feed, and their checks.

A reader of committed records outside of all streams reads the topics all the while. Afterwards what is in the topics is
compared with what was fed and with arithmetic (`numbers.py`), and with what that reader saw.
"""

from __future__ import annotations

import random
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from confluent_kafka import Consumer, KafkaError, Message, Producer, TopicPartition

from streaming_jobs.platform.broker import bootstrap_servers
from streaming_jobs.runtime.crash_points import POINTS, TOPIC_POINTS
from streaming_jobs.sources.connection import client_config
from streaming_jobs.verification.chaos.background import Background
from streaming_jobs.verification.chaos.faults import Freeze, Lane, Phase, Steps, Then, schedule
from streaming_jobs.verification.chaos.home import Home
from streaming_jobs.verification.chaos.kill_loop import LoopPlan
from streaming_jobs.verification.chaos.numbers import (
    Fed,
    WrittenTopicCheck,
    check_copies,
    check_differences,
    check_figures,
    check_windows,
    record,
    waves,
)
from streaming_jobs.verification.chaos.sessions import ChaosFailed, Tell
from streaming_jobs.verification.chaos.version_reader import WatchedStream
from streaming_jobs.verification.topic import CommittedReader, RawRecord

FED = "chaos_numbers"
_FIRST_STAGE = {"numbers_copied": (FED, "chaos_copied"), "numbers_added_up": (FED, "chaos_figures")}
_SECOND_STAGE = {
    "numbers_copied_again": ("chaos_copied", "chaos_copied_again"),
    "numbers_in_windows": ("chaos_copied", "chaos_windows"),
    "number_differences": ("chaos_figures", "chaos_differences"),
}
_TOPICS: Mapping[str, tuple[str, str]] = {**_FIRST_STAGE, **_SECOND_STAGE}
"""By stream the topics that it reads and writes, the first stage first."""
_CHECKS: Mapping[str, Callable[[str, Fed, Iterable[RawRecord]], WrittenTopicCheck]] = {
    "chaos_copied": check_copies,
    "chaos_copied_again": check_copies,
    "chaos_figures": check_figures,
    "chaos_differences": check_differences,
    "chaos_windows": check_windows,
}
_KILLS_A_FREEZE = 6
_MOST_BATCHES = 3
_SEEN_WITHIN = 60.0
_LOOK_EVERY = 0.2
_WITHIN = 120.0
_ACKNOWLEDGED_EVERY = 0.02
_AT_ONCE = 5000


@dataclass(frozen=True)
class TopicFindings:
    """The records that were fed, the topics against arithmetic, and what the reader outside saw.

    `unlike` are topics of which the reader outside saw something else than is there now.
    """

    fed: int
    keys: int
    feed_faults: tuple[str, ...]
    checks: tuple[WrittenTopicCheck, ...]
    seen: int
    unlike: tuple[str, ...]

    @property
    def ok(self) -> bool:
        """True if all topics are as they should be, for the reader outside too."""
        right = all(check.ok for check in self.checks) and bool(self.checks) and self.fed > 0
        return right and not self.feed_faults and not self.unlike


class NumberSubject:
    """Streams in two stages, whose topics are known by arithmetic."""

    streams = tuple(WatchedStream(stream, f"{stream}_batches", read) for stream, (read, _) in _TOPICS.items())
    stages = (tuple(_FIRST_STAGE), tuple(_SECOND_STAGE))
    fed = FED
    rate, max_offsets = 150.0, 1000
    settings: Mapping[str, Any] = {
        "flows": ["streaming_jobs.verification.chaos.number_streams"],
        "stream.pace": "live",
    }
    points: Mapping[str, tuple[str, ...]] = dict.fromkeys(_TOPICS, (*POINTS, *TOPIC_POINTS))
    """The named points of each stream; `secondary_committed`: the topic has the batch, the table does not."""

    def steps(self, plan: LoopPlan) -> tuple[Steps, Sequence[int]]:
        """Freezes among the phases, one for every six kills and at least two, of both kinds in turn."""
        faults = schedule(plan.seed, plan.kills, {stream: self.points[stream] for stream in plan.streams})
        chance = random.Random(plan.seed)  # noqa: S311 - to be repeated, not to be secret
        steps: list[Phase | Freeze] = [_with_their_writers(phase) for phase in faults.phases]
        kinds: tuple[Then, ...] = ("broker", "zombie")
        for number in range(max(2, plan.kills // _KILLS_A_FREEZE)):
            stream, batches = chance.choice(plan.streams), chance.randint(0, _MOST_BATCHES)
            freeze = Freeze(plan.streams, stream, batches, kinds[number % len(kinds)])
            steps.insert(chance.randint(1, len(steps)), freeze)
        return steps, faults.broker_after

    def topics(self, plan: LoopPlan) -> Mapping[str, int]:
        from streaming_jobs.verification.chaos.number_streams import PARTITIONS

        names = dict.fromkeys(topic for stream in plan.streams for topic in _TOPICS[stream])
        return {name: PARTITIONS[name] for name in names}

    def feed(self, home: Home, plan: LoopPlan, _: Steps) -> NumberFeed:
        return NumberFeed(_client(home), FED, seed=plan.seed, rate=plan.rate)

    def observer(self, home: Home, plan: LoopPlan) -> OutsideReader:
        return OutsideReader(home, self.topics(plan))


NUMBERS = NumberSubject()


def _client(home: Home) -> dict[str, Any]:
    """The properties of any client of the home's broker."""
    return dict(client_config(home.settings.kafka, bootstrap_servers(home.settings)))


def _with_their_writers(phase: Phase) -> Phase:
    """Sessions of one stream run on until all faults have happened, and so do the writers of their topics."""
    if len(phase.lanes) == 1 and len(phase.lanes[0].streams) > 1:
        return phase
    there = {stream for lane in phase.lanes for stream in lane.streams}
    read = {_TOPICS[stream][0] for stream in there}
    writers = [stream for stream, (_, written) in _TOPICS.items() if written in read and stream not in there]
    lanes = [replace(lane, runs_on=True) for lane in phase.lanes]
    return Phase((*lanes, *(Lane((stream,), (), runs_on=True) for stream in writers)))


class NumberFeed(Background):
    """Feeds numbers at a steady rate in a thread, through every restart of the broker, each number once.

    `held` records are acknowledged. The producer is idempotent and lives as long as the feeder, so a request that is
    repeated to a killed broker is in the topic once. The check of what was fed reads the topic all the same.
    """

    dry = False
    """Numbers never end."""

    def __init__(self, config: Mapping[str, Any], topic: str, *, seed: int, rate: float) -> None:
        """`config` are the properties of any client of the cluster; `rate` is in records per second."""
        super().__init__("feeder")
        self.held = 0
        self._topic, self._rate = topic, rate
        self._waves = waves(seed)
        self._wave: Iterator[tuple[str, int]] = iter(())
        self._sent = self._burst_to = 0
        options = {
            "enable.idempotence": True,
            "partitioner": "murmur2_random",
            "linger.ms": 5,
            "delivery.timeout.ms": 1000 * int(_WITHIN),
            "retry.backoff.max.ms": 200,
        }
        self._producer = Producer({**config, **options})

    def burst(self, records: int, seconds: float) -> int:
        """Feed this many records at once; returns the number of records in the topic then, after `seconds` at most."""
        self._burst_to = target = self._sent + records
        deadline = time.monotonic() + seconds
        while self.held < target:
            self.check()
            if time.monotonic() > deadline:
                raise ChaosFailed(f"{self.held:,} of {target:,} records are fed after {seconds:.0f} s", "run it again")
            time.sleep(_ACKNOWLEDGED_EVERY)
        return self.held

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

    def work(self) -> None:
        due = time.monotonic()
        while not self.ended.is_set() and self.error is None:
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
                self.ended.wait(pause)

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
            failed = ChaosFailed(f"a record could not be sent to {self._topic}: {error}", "run it again")
            self.error = self.error or failed
        else:
            self.held += 1


class OutsideReader(Background):
    """Reads the topics in a thread until it is stopped: committed records only, as any other program would read them.

    `records` are the records of each topic so far, in order of arrival.
    """

    def __init__(self, home: Home, partitions: Mapping[str, int]) -> None:
        """`partitions` has the number of each topic."""
        super().__init__("outside")
        self.records: dict[str, list[RawRecord]] = defaultdict(list)
        self._home, self._topics = home, list(partitions)
        options = {
            "group.id": "recourse-outside",
            "isolation.level": "read_committed",
            "enable.auto.commit": False,
            "auto.offset.reset": "error",
        }
        self._consumer = Consumer({**_client(home), **options})
        self._consumer.assign([TopicPartition(t, p, 0) for t, count in partitions.items() for p in range(count)])

    def compare(self, fed: int, tell: Tell) -> TopicFindings:
        there = {topic: self._content(topic) for topic in self._topics}
        self._wait_for(there)
        self.stop()
        tell(f"{sum(map(len, self.records.values())):,} records read outside of the streams")
        numbers = Fed(there[FED])
        in_topic = len(numbers.records)
        miscounted = [f"{fed:,} records were acknowledged, {in_topic:,} are in the topic"] if fed != in_topic else []
        return TopicFindings(
            in_topic,
            len(numbers.numbers),
            (*numbers.faults(), *miscounted),
            tuple(_CHECKS[topic](topic, numbers, records) for topic, records in there.items() if topic != FED),
            sum(map(len, self.records.values())),
            tuple(topic for topic, records in there.items() if self._by_partition(topic) != records),
        )

    def _content(self, topic: str) -> list[RawRecord]:
        """All committed records of the topic, partition by partition."""
        settings = self._home.settings
        reader = CommittedReader.at(settings.kafka, bootstrap_servers(settings), topic)
        return list(reader.records(reader.whole))

    def _wait_for(self, there: Mapping[str, Sequence[RawRecord]]) -> None:
        """Wait until all that is there was seen, and not for ever: what was not seen is reported."""
        deadline = time.monotonic() + _SEEN_WITHIN
        while any(len(self.records[topic]) < len(records) for topic, records in there.items()):
            self.check()
            if time.monotonic() > deadline:
                return
            time.sleep(_LOOK_EVERY)

    def _by_partition(self, topic: str) -> list[RawRecord]:
        """The records by partition, each partition's in the order of arrival."""
        return sorted(self.records[topic], key=lambda record: record.partition)

    def work(self) -> None:
        try:
            while not self.ended.is_set():
                for message in self._consumer.consume(_AT_ONCE, timeout=0.1):
                    error = message.error()
                    if error is None:
                        topic = str(message.topic())
                        self.records[topic].append(RawRecord.of(topic, int(message.partition() or 0), message))
                    elif error.fatal() or error.name() == "_AUTO_OFFSET_RESET":
                        raise RuntimeError(f"the outside reader cannot continue: {error}")
        finally:
            self._consumer.close()
