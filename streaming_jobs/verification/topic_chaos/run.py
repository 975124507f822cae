"""The kill loop over streams that read topics and write topics (`streams.py`), and what it proves.

`run` does all of it: a broker, a feeder of numbers and a reader of committed records outside of all streams; the phases
of faults, drivers that are stopped in open transactions among them; a last session that reads the topics to their ends.
Then what is in the topics is compared with what was fed and with arithmetic (`checks.py`), with what the reader saw all
the while, and offset by offset with the ledgers, as `recourse verify` does.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from streaming_jobs.catalog.topology import Topology
from streaming_jobs.platform.broker import Broker, bootstrap_servers
from streaming_jobs.runtime.crash_points import POINTS, TOPIC_POINTS
from streaming_jobs.settings import Settings
from streaming_jobs.sources.connection import client_config
from streaming_jobs.sources.topics import Topics
from streaming_jobs.verification.chaos.drivers import DriverProcess
from streaming_jobs.verification.chaos.faults import Lane, Phase, schedule
from streaming_jobs.verification.chaos.freezes import Freeze, Then
from streaming_jobs.verification.chaos.home import Home
from streaming_jobs.verification.chaos.phases import Loop
from streaming_jobs.verification.chaos.session_runner import ChaosFailed, Tally, Tell
from streaming_jobs.verification.subject import Subject
from streaming_jobs.verification.topic import RawRecord, TopicReader
from streaming_jobs.verification.topic_chaos import checks
from streaming_jobs.verification.topic_chaos.checks import Fed, TopicCheck
from streaming_jobs.verification.topic_chaos.feeding import NumberFeeding
from streaming_jobs.verification.topic_chaos.outside import Outside
from streaming_jobs.verification.verdict import Verdict
from streaming_jobs.verification.verification import Options, verify_streams

FED = "chaos_numbers"
_STAGES: Mapping[str, tuple[str, str]] = {
    "numbers_copied": (FED, "chaos_copied"),
    "numbers_added_up": (FED, "chaos_figures"),
    "numbers_copied_again": ("chaos_copied", "chaos_copied_again"),
    "numbers_in_windows": ("chaos_copied", "chaos_windows"),
    "number_differences": ("chaos_figures", "chaos_differences"),
}
"""By stream the topics that it reads and writes, those of the first stage first."""
_CHECKS: Mapping[str, Callable[[str, Fed, Iterable[RawRecord]], TopicCheck]] = {
    "chaos_copied": checks.check_copies,
    "chaos_copied_again": checks.check_copies,
    "chaos_figures": checks.check_figures,
    "chaos_differences": checks.check_differences,
    "chaos_windows": checks.check_windows,
}
STREAMS = tuple(_STAGES)
POINTS_OF: Mapping[str, tuple[str, ...]] = dict.fromkeys(STREAMS, (*POINTS, *TOPIC_POINTS))
"""The named points of each stream; `secondary_committed`: the topic has the batch, the table does not."""
Steps = Sequence[Phase | Freeze]

_KILLS_A_FREEZE = 6
_MOST_BATCHES = 3
_CAUGHT_UP_WITHIN = 600.0
_SEEN_WITHIN = 60.0
_GONE_WITHIN = 60.0
_LOOK_EVERY = 0.2
_LARGE_BATCHES = {"RECOURSE_STREAM__MAX_OFFSETS_PER_TRIGGER": "20000"}


@dataclass(frozen=True)
class Plan:
    """The parameters of a run: kills, seed, feed in records per second, records per batch.

    `streams` must have, with a stream of the second stage, the one whose topic it reads.
    """

    kills: int
    seed: int
    rate: float = 150.0
    max_offsets: int = 1000
    streams: tuple[str, ...] = STREAMS


@dataclass(frozen=True)
class Report:
    """The outcome of a run. `unlike` are topics of which the reader outside saw something else than is there now."""

    plan: Plan
    home: Path
    seconds: float
    tally: Tally
    fed: int
    keys: int
    feed_faults: tuple[str, ...]
    checks: tuple[TopicCheck, ...]
    seen: int
    unlike: tuple[str, ...]
    verdict: Verdict

    @property
    def batches(self) -> int:
        """Batches in the tables, over all streams."""
        return sum(stream.batches for stream in self.verdict.streams)

    @property
    def ok(self) -> bool:
        """True if all topics are as they should be, for the reader outside too, and every offset is proved."""
        right = all(check.ok for check in self.checks) and bool(self.checks) and self.fed > 0
        return right and not self.feed_faults and not self.unlike and self.verdict.whole


def steps(plan: Plan) -> tuple[Steps, tuple[int, ...]]:
    """The phases of a run, and the numbers of kills after which the broker is killed too.

    Freezes come among them, one for every six kills and two at least, of both kinds in turn.
    """
    made = schedule(plan.seed, plan.kills, {stream: POINTS_OF[stream] for stream in plan.streams})
    chance = random.Random(plan.seed)  # noqa: S311 - to be repeated, not to be secret
    phases: list[Phase | Freeze] = [_with_their_writers(phase) for phase in made.phases]
    kinds: tuple[Then, ...] = ("broker", "zombie")
    for number in range(max(2, plan.kills // _KILLS_A_FREEZE)):
        stream, batches = chance.choice(plan.streams), chance.randint(0, _MOST_BATCHES)
        freeze = Freeze(plan.streams, stream, batches, kinds[number % len(kinds)])
        phases.insert(chance.randint(1, len(phases)), freeze)
    return phases, made.broker_after


def _with_their_writers(phase: Phase) -> Phase:
    """Sessions of one stream run on until all faults have happened, and so do those that write what they read."""
    if len(phase.lanes) == 1 and len(phase.lanes[0].streams) > 1:
        return phase
    there = {stream for lane in phase.lanes for stream in lane.streams}
    read = {_STAGES[stream][0] for stream in there}
    writers = [stream for stream, (_, written) in _STAGES.items() if written in read and stream not in there]
    lanes = [replace(lane, runs_on=True) for lane in phase.lanes]
    return Phase((*lanes, *(Lane((stream,), (), runs_on=True) for stream in writers)))


def run(plan: Plan, folder: Path, base: Settings, tell: Tell, chosen: Steps | None = None) -> Report:
    """Run the plan in a home of its own, with its faults or with the `chosen` ones; raises ChaosFailed.

    `base` has the settings for fetching jars. However it ends, no process is left.
    """
    home = home_of(folder, base, plan)
    phases, broker_after = steps(plan) if chosen is None else (chosen, ())
    begun, tally = time.monotonic(), Tally()
    with ExitStack() as at_end:
        broker = at_end.enter_context(Broker(home.settings))
        bootstrap = bootstrap_servers(home.settings)
        partitions = _make_topics(home, plan)
        config = client_config(home.settings.kafka, bootstrap)
        feeding = NumberFeeding(config, FED, seed=plan.seed, rate=plan.rate)
        at_end.callback(feeding.stop)
        outside = Outside(config, partitions)
        at_end.callback(outside.stop)
        feeding.start()
        outside.start()
        Loop(home, phases, broker_after, broker, feeding, tally, tell).run()
        tell("all faults have happened; the streams read their topics to the ends")
        held = feeding.finish()
        _read_to_the_ends(home, plan, tally)
        tell(f"{held:,} records fed; verifying")
        found = {topic: _content(home, topic) for topic in partitions}
        _wait_for(outside, found)
        outside.stop()
        fed = Fed(found[FED])
        made = [_CHECKS[topic](topic, fed, records) for topic, records in found.items() if topic != FED]
        verdict = _verdict(home, plan)
    return Report(
        plan=plan,
        home=folder,
        seconds=time.monotonic() - begun,
        tally=tally,
        fed=len(fed.records),
        keys=len(fed.numbers),
        feed_faults=(*fed.faults(), *_miscounted(held, fed)),
        checks=tuple(made),
        seen=sum(map(len, outside.records.values())),
        unlike=tuple(topic for topic, records in found.items() if _by_place(outside.records[topic]) != records),
        verdict=verdict,
    )


def home_of(folder: Path, base: Settings, plan: Plan) -> Home:
    subjects = tuple(Subject(stream, f"{stream}_batches", _STAGES[stream][0]) for stream in STREAMS)
    changes: dict[str, Any] = {"flows": ["streaming_jobs.verification.topic_chaos.streams"], "stream.pace": "live"}
    return Home.of(folder, base, max_offsets=plan.max_offsets, subjects=subjects, fed=FED, changes=changes)


def _make_topics(home: Home, plan: Plan) -> dict[str, int]:
    """Make the topics that the streams of the plan read and write; their partitions."""
    from streaming_jobs.verification.topic_chaos.streams import PARTITIONS

    topics = Topics.of(home.settings.kafka, bootstrap_servers(home.settings))
    names = dict.fromkeys(topic for stream in plan.streams for topic in _STAGES[stream])
    partitions = {name: PARTITIONS[name] for name in names}
    for name, number in partitions.items():
        topics.create(name, number)
    return partitions


def _read_to_the_ends(home: Home, plan: Plan, tally: Tally) -> None:
    """Run one session until each stream, those of the first stage first, has read its topic to the end."""
    topics = Topics.of(home.settings.kafka, bootstrap_servers(home.settings))
    tally.sessions += 1
    log = home.settings.logs / f"driver-{tally.sessions:03d}.log"
    driver = DriverProcess.start(plan.streams, home.environment(**_LARGE_BATCHES), log)
    deadline = time.monotonic() + _CAUGHT_UP_WITHIN
    try:
        for stream in (stream for stream in STREAMS if stream in plan.streams):
            table, topic = home.subject(stream).table, _STAGES[stream][0]
            while home.position(table) < sum(topics.latest(topic).values()):
                if driver.exit_code is not None or time.monotonic() > deadline:
                    raise ChaosFailed(
                        f"stream {stream} did not read {topic} to its end (exit code {driver.exit_code}):\n"
                        f"{driver.words()}",
                        f"its log is {driver.log}",
                    )
                time.sleep(_LOOK_EVERY)
        code = driver.stop(_GONE_WITHIN)
        if code != 0:
            raise ChaosFailed(f"the last session ended with {code}:\n{driver.words()}", f"its log is {driver.log}")
    finally:
        driver.end()


def _content(home: Home, topic: str) -> list[RawRecord]:
    """All committed records of the topic, partition by partition."""
    reader = TopicReader.at(home.settings.kafka, bootstrap_servers(home.settings), topic)
    return list(reader.records(reader.whole))


def _wait_for(outside: Outside, found: Mapping[str, Sequence[RawRecord]]) -> None:
    deadline = time.monotonic() + _SEEN_WITHIN
    while any(len(outside.records[topic]) < len(records) for topic, records in found.items()):
        outside.check()
        if time.monotonic() > deadline:
            return  # what it has not seen is reported
        time.sleep(_LOOK_EVERY)


def _by_place(records: Iterable[RawRecord]) -> list[RawRecord]:
    """The records by partition, each partition's in the order in which they came."""
    return sorted(records, key=lambda record: record.partition)


def _miscounted(held: int, fed: Fed) -> list[str]:
    there = len(fed.records)
    return [] if held == there else [f"{held:,} records were acknowledged, {there:,} are in the topic"]


def _verdict(home: Home, plan: Plan) -> Verdict:
    topology = Topology.load(home.settings.flows)
    streams = [topology[stream] for stream in plan.streams]
    verdict, _ = verify_streams(home.settings, streams, (), bootstrap_servers(home.settings), Options(finished=True))
    return verdict
