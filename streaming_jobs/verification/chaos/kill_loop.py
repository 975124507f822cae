"""The kill loop: real streams on a real broker, killed again and again, observed meanwhile and verified afterwards.

A `LoopSubject` says what is run, fed and checked: `flight_subject.py` has streams that write tables,
`number_subject.py` streams that read topics and write topics. `run` does the same for both: a broker and a feeder of
its own, the phases of the schedule (`faults.py`, `sessions.py`), sessions that read the topics to their ends, the
verifier, by declarations and truths as `recourse verify` does, and the checks of the subject.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

from streaming_jobs.catalog.topology import Topology, truths_in
from streaming_jobs.platform.broker import Broker, bootstrap_servers
from streaming_jobs.settings import Settings
from streaming_jobs.sources.topics import Topics
from streaming_jobs.verification.chaos.faults import Freeze, Phase, Steps
from streaming_jobs.verification.chaos.home import Home, on_cluster, on_store
from streaming_jobs.verification.chaos.sessions import (
    ChaosFailed,
    FreezeRunner,
    LaneRunner,
    Tally,
    Tell,
    expect,
    start_session,
)
from streaming_jobs.verification.chaos.version_reader import WatchedStream
from streaming_jobs.verification.verification import Options, verify_streams
from streaming_jobs.verification.verifier import OverallVerdict

BURST = 40_000
"""Records that a session has to read with workers; four of them are more than half of the year's flights."""
_STEP = 0.05
_LAST_SESSION = 600.0
_BURST_WITHIN = 120.0


@dataclass(frozen=True)
class LoopPlan:
    """The parameters of a run: kills, seed, feed in records per second, records per batch, streams.

    `scenarios`: damage the home afterwards. `master`: a Spark cluster on this machine, instead of the driver's JVM.
    `store`: the URL below which the tables are, instead of the home, and with `state` the state too.
    """

    kills: int
    seed: int
    rate: float
    max_offsets: int
    streams: tuple[str, ...]
    scenarios: bool = False
    master: str = ""
    store: str = ""
    state: bool = False


class Feed(Protocol):
    """Feeds a topic in a thread while sessions are killed."""

    @property
    def dry(self) -> bool:
        """True if it has no more records."""

    def start(self) -> None: ...

    def check(self) -> None:
        """Raise its error, if it has failed."""

    def burst(self, records: int, seconds: float) -> int:
        """Feed this many records at once; returns the number of records in the topic then."""

    def stop(self) -> None: ...

    def finish(self) -> int:
        """Stop, and complete what was begun; returns the number of records in the topic."""


class Findings(Protocol):
    """What the checks of a subject found, beside the verdict."""

    @property
    def ok(self) -> bool: ...


F_co = TypeVar("F_co", bound=Findings, covariant=True)


class Observer(Protocol[F_co]):
    """Reads in a thread what the streams write while they are killed, and checks it afterwards."""

    def start(self) -> None: ...

    def stop(self) -> None: ...

    def compare(self, fed: int, tell: Tell) -> F_co:
        """Compare tables and topics with what was `fed`, once the streams have read all of it and do not run."""


class LoopSubject(Protocol[F_co]):
    """What a kill loop runs, feeds and checks."""

    @property
    def streams(self) -> tuple[WatchedStream, ...]:
        """In an order in which no stream reads what a later one writes."""

    @property
    def stages(self) -> Sequence[Sequence[str]]:
        """The streams whose topics end, then the streams that read the topics of the former."""

    @property
    def fed(self) -> str:
        """The topic that the feeder writes."""

    @property
    def settings(self) -> Mapping[str, Any]:
        """Settings of the home besides the settings of every run."""

    @property
    def rate(self) -> float:
        """Records per second, unless the user says another rate."""

    @property
    def max_offsets(self) -> int:
        """Records per batch, unless the user says another number."""

    def steps(self, plan: LoopPlan, /) -> tuple[Steps, Sequence[int]]:
        """The phases of a run, and the numbers of kills after which the broker is killed too."""

    def topics(self, plan: LoopPlan, /) -> Mapping[str, int]:
        """The topics that exist before the streams start, with their partitions."""

    def feed(self, home: Home, plan: LoopPlan, steps: Steps, /) -> Feed: ...

    def observer(self, home: Home, plan: LoopPlan, /) -> Observer[F_co]: ...


@dataclass(frozen=True)
class LoopReport(Generic[F_co]):
    plan: LoopPlan
    home: Path
    seconds: float
    tally: Tally
    verdict: OverallVerdict
    findings: F_co

    @property
    def batches(self) -> int:
        """Batches in the tables, over all streams."""
        return sum(stream.batches for stream in self.verdict.streams)

    @property
    def ok(self) -> bool:
        """True if every offset is proved, and every check of the subject found what it should."""
        return self.verdict.whole and self.findings.ok


def plan_of(
    subject: LoopSubject[Findings],
    kills: int,
    seed: int,
    *,
    rate: float | None = None,
    max_offsets: int | None = None,
    streams: tuple[str, ...] | None = None,
    scenarios: bool = False,
    master: str = "",
    store: str = "",
    state: bool = False,
) -> LoopPlan:
    """The plan of a run; what is left out is the subject's own.

    `streams`: a subset; a stream that reads the topic of another stream needs that stream in it too.
    """
    names = streams or tuple(watched.stream for watched in subject.streams)
    return LoopPlan(
        kills, seed, rate or subject.rate, max_offsets or subject.max_offsets, names, scenarios, master, store, state
    )


def home_of(
    subject: LoopSubject[Findings],
    folder: Path,
    base: Settings,
    max_offsets: int,
    master: str = "",
    store: str = "",
    *,
    state: bool = False,
) -> Home:
    changes = {
        **subject.settings,
        **(on_cluster(base, master) if master else {}),
        **(on_store(base, f"{store.rstrip('/')}/{folder.name}", state=state) if store else {}),
    }
    return Home.of(folder, base, max_offsets=max_offsets, subjects=subject.streams, fed=subject.fed, changes=changes)


def run(
    subject: LoopSubject[F_co],
    plan: LoopPlan,
    folder: Path,
    base: Settings,
    tell: Tell,
    chosen: Steps | None = None,
) -> LoopReport[F_co]:
    """Run the plan in a home of its own, with its faults or the `chosen` ones; raises ChaosFailed if it cannot.

    `base` has the settings for fetching jars, and for reaching executors. However it ends, no process is left but the
    workers of a cluster.
    """
    home = home_of(subject, folder, base, plan.max_offsets, plan.master, plan.store, state=plan.state)
    steps, broker_after = subject.steps(plan) if chosen is None else (chosen, ())
    begun, tally = time.monotonic(), Tally()
    with ExitStack() as at_end:
        broker = at_end.enter_context(Broker(home.settings))
        topics = Topics.of(home.settings.kafka, bootstrap_servers(home.settings))
        for name, partitions in subject.topics(plan).items():
            topics.create(name, partitions)
        feed = subject.feed(home, plan, steps)
        at_end.callback(feed.stop)
        observer = subject.observer(home, plan)
        at_end.callback(observer.stop)
        feed.start()
        observer.start()
        Loop(home, steps, broker_after, broker, feed, tally, tell).run()
        tell(f"{tally.kills} kills done; the streams read their topics to the ends")
        fed = feed.finish()
        for stage in subject.stages:
            read_to_the_end(home, tally, [stream for stream in stage if stream in plan.streams])
        tell(f"{fed:,} records fed; verifying")
        verdict = _verdict(home, plan)
        findings = observer.compare(fed, tell)
    return LoopReport(plan, folder, time.monotonic() - begun, tally, verdict, findings)


def read_to_the_end(home: Home, tally: Tally, streams: Sequence[str]) -> None:
    """Run one session over all unread records, in large batches; raises ChaosFailed if it does not end with 0."""
    if not streams:
        return
    large = {"RECOURSE_STREAM__MAX_OFFSETS_PER_TRIGGER": "20000"}
    driver = start_session(home, tally, streams, "--trigger", "available-now", **large)
    try:
        code = driver.wait(_LAST_SESSION)
        expect(driver, code == 0, f"did not read all records in the last session (exit code {code})")
    finally:
        driver.end()


def _verdict(home: Home, plan: LoopPlan) -> OverallVerdict:
    topology = Topology.load(home.settings.flows)
    tables = [sink.name for stream in topology.streams.values() for sink in stream.sinks.values()]
    verdict, _ = verify_streams(
        home.settings,
        [topology[stream] for stream in plan.streams],
        truths_in(home.settings.flows, tables),
        bootstrap_servers(home.settings),
        Options(finished=True),
    )
    # Tables without a truth are checked by their subject.
    known = [replace(s, comparisons=tuple(c for c in s.comparisons if c.what != "values")) for s in verdict.streams]
    return replace(verdict, streams=tuple(known))


@dataclass
class Loop:
    """Takes all sessions of a home through the steps; the broker is killed at the numbers of `broker_after` kills."""

    home: Home
    steps: Steps
    broker_after: Sequence[int]
    broker: Broker
    feed: Feed
    tally: Tally
    tell: Tell

    def run(self) -> None:
        """Run step after step, until every fault has happened."""
        due = list(self.broker_after)
        for step in self.steps:
            if isinstance(step, Freeze):
                FreezeRunner(self.home, self.broker, self.tally, self.tell, self.feed.check).run(step)
            else:
                self._phase(step, due)

    def _phase(self, phase: Phase, due: list[int]) -> None:
        end = self.feed.burst(BURST, _BURST_WITHIN) if phase.burst else 0
        runners = [LaneRunner(self.home, lane, self.tally, self.tell, end) for lane in phase.lanes]
        try:
            while not all(runner.done for runner in runners):
                for runner in runners:
                    runner.step()
                if not any(runner.faults_left for runner in runners):
                    for runner in runners:
                        runner.finish()
                if due and self.tally.kills >= due[0]:
                    due.pop(0)
                    self._kill_broker()
                self.feed.check()
                if self.feed.dry:
                    raise ChaosFailed("the topic has got all its records before the last kill", "use a lower --rate")
                time.sleep(_STEP)
        finally:
            for runner in runners:
                runner.end()

    def _kill_broker(self) -> None:
        self.broker.kill()
        self.broker.start()
        self.tally.broker_kills += 1
        self.tell("the broker was killed and started again")
