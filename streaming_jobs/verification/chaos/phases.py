"""The phases of a run of the kill loop, one after the other, and the last session, which reads all that is left."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from streaming_jobs.platform.broker import Broker
from streaming_jobs.verification.chaos.drivers import DriverProcess
from streaming_jobs.verification.chaos.faults import Phase
from streaming_jobs.verification.chaos.freezes import Freeze, FreezeRunner
from streaming_jobs.verification.chaos.home import Home
from streaming_jobs.verification.chaos.session_runner import ChaosFailed, LaneRunner, Tally, Tell

BURST = 40_000
"""Records that a session has to read with workers; four of them are more than half of the year's flights."""
_STEP = 0.05
_LAST_SESSION = 600.0
_BURST_WITHIN = 120.0


class Feeder(Protocol):
    """Feeds a topic while sessions are killed."""

    @property
    def dry(self) -> bool:
        """True if it has no more records."""

    def check(self) -> None:
        """Raise its error, if it has failed."""

    def burst(self, records: int, seconds: float) -> int:
        """Feed this many records at once; returns the number of records in the topic then."""


def read_to_the_end(home: Home, tally: Tally, streams: Sequence[str]) -> None:
    """Run one session over all unread records, in large batches; raises ChaosFailed if it does not end with 0."""
    tally.sessions += 1
    log = home.settings.logs / f"driver-{tally.sessions:03d}.log"
    environment = home.environment(RECOURSE_STREAM__MAX_OFFSETS_PER_TRIGGER="20000")
    driver = DriverProcess.start(streams, environment, log, "--trigger", "available-now")
    try:
        code = driver.wait(_LAST_SESSION)
        if code != 0:
            raise ChaosFailed(
                f"the last session {'did not end' if code is None else f'ended with {code}'}:\n{driver.words()}",
                f"its log is {log}",
            )
    finally:
        driver.end()


@dataclass
class Loop:
    """Takes all sessions of a home through the phases; the broker is killed at the numbers of `broker_after` kills."""

    home: Home
    phases: Sequence[Phase | Freeze]
    broker_after: Sequence[int]
    broker: Broker
    feeding: Feeder
    tally: Tally
    tell: Tell

    def run(self) -> None:
        """Run phase after phase, until every fault has happened."""
        due = list(self.broker_after)
        for phase in self.phases:
            if isinstance(phase, Freeze):
                FreezeRunner(self.home, self.broker, self.tally, self.tell, self.feeding.check).run(phase)
            else:
                self._phase(phase, due)

    def _phase(self, phase: Phase, due: list[int]) -> None:
        end = self.feeding.burst(BURST, _BURST_WITHIN) if phase.burst else 0
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
                self.feeding.check()
                if self.feeding.dry:
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
