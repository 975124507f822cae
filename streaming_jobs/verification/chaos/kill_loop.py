"""The kill loop: real streams on a real broker, killed again and again, read and verified meanwhile and afterwards.

`run` does all of it: a broker and a feeder of its own, the phases of the schedule, a reader that reads every
version of the tables as it appears, then a last session that reads the topic to its end, and the verifier: by what is
known here of the streams, by their declarations as `recourse verify` does, and by the truths.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

from streaming_jobs.catalog.topology import Topology
from streaming_jobs.examples.flights import dataset
from streaming_jobs.examples.flights.content import TOPIC
from streaming_jobs.examples.flights.feeder import PARTITIONS
from streaming_jobs.examples.flights.streams import STREAMS as FLIGHT_STREAMS
from streaming_jobs.examples.flights.truth import KEYS, TruthCheck, compare
from streaming_jobs.platform.broker import Broker, bootstrap_servers
from streaming_jobs.runtime.crash_points import POINTS
from streaming_jobs.settings import Settings
from streaming_jobs.sources.topics import Topics
from streaming_jobs.verification.chaos.damages import Outcome, run_scenarios
from streaming_jobs.verification.chaos.faults import schedule
from streaming_jobs.verification.chaos.feeding import Feeding
from streaming_jobs.verification.chaos.home import STREAMS, SUBJECTS, Home
from streaming_jobs.verification.chaos.phases import BURST, Loop, read_to_the_end
from streaming_jobs.verification.chaos.rule_truth import EXPECTED, RuleCheck, compare_rules
from streaming_jobs.verification.chaos.session_runner import Tally, Tell
from streaming_jobs.verification.ledger_chain import Fault
from streaming_jobs.verification.offset_ranges import merged
from streaming_jobs.verification.subject import Subject
from streaming_jobs.verification.topic import TopicContent, read_topic
from streaming_jobs.verification.verdict import StreamVerdict, Verdict
from streaming_jobs.verification.verification import Options, verify_streams
from streaming_jobs.verification.verifier import verify
from streaming_jobs.verification.version_reader import ConcurrentReader

POINTS_OF: Mapping[str, tuple[str, ...]] = {
    # In a stream of one table nothing is committed before that point: it would repeat the point before it.
    subject.stream: tuple(p for p in POINTS if subject.secondary or p != "secondary_committed")
    for subject in SUBJECTS
}
"""The named points of each stream."""
_SECONDS_A_KILL = 60


@dataclass(frozen=True)
class Plan:
    """The parameters of a run: kills, seed, feed in records per second, records per batch, scenarios afterwards.

    The scenarios and the whole truth need all streams, which are the default.
    """

    kills: int
    seed: int
    rate: float = 60.0
    max_offsets: int = 200
    scenarios: bool = False
    streams: tuple[str, ...] = STREAMS

    @property
    def subjects(self) -> tuple[Subject, ...]:
        """The streams that are run and verified."""
        return tuple(subject for subject in SUBJECTS if subject.stream in self.streams)


@dataclass(frozen=True)
class Report:
    """The outcome of a run. `batches` are those in the tables, over all streams."""

    plan: Plan
    home: Path
    seconds: float
    tally: Tally
    batches: int
    versions_read: int
    versions_unseen: int
    faults: tuple[Fault, ...]
    verdict: Verdict
    truth: tuple[TruthCheck, ...]
    rules: tuple[RuleCheck, ...] = ()
    scenarios: tuple[Outcome, ...] = ()

    @property
    def equal(self) -> bool:
        """True if every table equals the truth, and rules took out the rows that they should."""
        return all(check.ok for check in self.truth) and all(check.ok for check in self.rules)

    @property
    def ok(self) -> bool:
        """True if nothing is lost or doubled, every version is whole, every table true, and every damage refused."""
        whole = self.verdict.whole and not self.faults and not self.versions_unseen
        return whole and self.equal and all(outcome.ok for outcome in self.scenarios)


def run(plan: Plan, folder: Path, base: Settings, tell: Tell) -> Report:
    """Run the schedule of the plan's seed in a home of its own; raises ChaosFailed when it cannot be carried out.

    `base` has the settings for fetching jars. However it ends, no process is left.
    """
    home = Home.of(folder, base, max_offsets=plan.max_offsets)
    faults = schedule(plan.seed, plan.kills, {stream: POINTS_OF[stream] for stream in plan.streams})
    begun, tally = time.monotonic(), Tally()
    with ExitStack() as at_end:
        broker = at_end.enter_context(Broker(home.settings))
        Topics.of(home.settings.kafka, bootstrap_servers(home.settings)).create(TOPIC, PARTITIONS)
        steady = int(plan.rate * _SECONDS_A_KILL * (plan.kills + 2))
        bursts = sum(phase.burst for phase in faults.phases) * BURST
        feeding = Feeding(home.settings, rate=plan.rate, records=steady + bursts)
        at_end.callback(feeding.stop)
        reader = ConcurrentReader(plan.subjects, home.settings.tables)
        at_end.callback(reader.stop)
        feeding.start()
        reader.start()
        Loop(home, faults.phases, faults.broker_after, broker, feeding, tally, tell).run()
        tell(f"{tally.kills} kills done; the streams read the topic to its end")
        records = feeding.finish()
        read_to_the_end(home, tally, plan.streams)
        reader.finish()
        tell(f"{records:,} records fed, {reader.seen:,} versions read; verifying")
        verdict = _verdict(home, plan)
        truth = _truth(home, plan, records)
        rules = [compare_rules(home.settings.tables, name, records) for name in plan.streams if name in EXPECTED]
        outcomes = run_scenarios(home, tell) if plan.scenarios else []
    return Report(
        plan=plan,
        home=folder,
        seconds=time.monotonic() - begun,
        tally=tally,
        batches=sum(stream.batches for stream in verdict.streams),
        versions_read=reader.seen,
        versions_unseen=reader.unseen,
        faults=tuple(reader.faults),
        verdict=verdict,
        truth=tuple(truth),
        rules=tuple(rules),
        scenarios=tuple(outcomes),
    )


def _verdict(home: Home, plan: Plan) -> Verdict:
    """The verdict by the subjects, and on each stream that by its declaration too."""
    verdict = verify(plan.subjects, home.settings.tables, _topic(home), finished=True)
    topology = Topology.load(home.settings.flows)
    streams = [topology[subject.stream] for subject in plan.subjects]
    bootstrap = bootstrap_servers(home.settings)
    declared, _ = verify_streams(home.settings, streams, (), bootstrap, Options(finished=True))
    return replace(verdict, streams=tuple(map(_both, verdict.streams, declared.streams)))


def _both(known: StreamVerdict, declared: StreamVerdict) -> StreamVerdict:
    """One verdict of two on the same stream; values without a truth are compared here by other means."""
    return replace(
        known,
        lost=tuple(merged((*known.lost, *declared.lost))),
        doubled=tuple(merged((*known.doubled, *declared.doubled))),
        unproved=max(known.unproved, declared.unproved),
        faults=tuple(dict.fromkeys((*known.faults, *declared.faults))),
        why=known.why or declared.why,
        comparisons=tuple(one for one in declared.comparisons if one.what != "values"),
    )


def _truth(home: Home, plan: Plan, records: int) -> list[TruthCheck]:
    """The comparison of every table of the plan that has a truth; computing the truths takes seconds."""
    tables = {subject.table for subject in plan.subjects} & KEYS.keys()
    return (
        [c for c in compare(home.settings, FLIGHT_STREAMS, records / dataset.TOTAL) if c.table in tables]
        if tables
        else []
    )


def _topic(home: Home) -> dict[str, TopicContent]:
    settings = home.settings
    return {TOPIC: read_topic(settings.kafka, bootstrap_servers(settings), TOPIC)}
