"""One session of the kill loop: started, watched, killed as its faults say, and started again."""

from __future__ import annotations

import signal
import time
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field

from streaming_jobs.errors import LeaseBusy, PermanentError, RecourseError
from streaming_jobs.verification.chaos.drivers import DriverProcess
from streaming_jobs.verification.chaos.faults import Fault, Lane, PointKill, RandomKill
from streaming_jobs.verification.chaos.home import SUBJECTS, Home
from streaming_jobs.verification.subject import Subject

Tell = Callable[[str], None]
"""Called with one line of progress, for people."""

_FAULT_WITHIN = 240.0
_GONE_WITHIN = 60.0
_MOST_UNPLANNED = 5
_LOOK_EVERY = 0.2


class ChaosFailed(RecourseError):
    """A run of chaos cannot go on: a driver refused to start, or did not do what it was started for.

    The logs lie in the home that the message names. The seed makes the same run again.
    """

    code = "REC-031"


@dataclass
class Tally:
    """Counts of a run so far. The last three are the batches (stream, generation, batch) that a kill interrupted.

    A `replayed` batch was planned and not in its table, so the next start repeats it; a `skipped` one was in the table
    and not yet committed by Spark, so the next start skips it. A `half` one was in a secondary table and not in the
    primary: it is replayed too, and the secondary table must not take it twice.
    """

    kills: int = 0
    points: Counter[str] = field(default_factory=Counter)
    victims: Counter[str] = field(default_factory=Counter)
    broker_kills: int = 0
    sessions: int = 0
    unplanned: list[str] = field(default_factory=list)
    replayed: set[tuple[str, int, int]] = field(default_factory=set)
    skipped: set[tuple[str, int, int]] = field(default_factory=set)
    half: set[tuple[str, int, int]] = field(default_factory=set)


@dataclass
class LaneRunner:
    """Takes one lane through its faults; call `step` often, from one thread."""

    home: Home
    lane: Lane
    tally: Tally
    tell: Tell
    driver: DriverProcess | None = None
    dying: DriverProcess | None = None
    _queue: deque[Fault] = field(init=False)
    _commits: int = 0
    _due: float | None = None
    _killed: float | None = None
    _planned: str = ""
    _look_at: float = 0.0

    def __post_init__(self) -> None:
        self._queue = deque(self.lane.faults)

    @property
    def done(self) -> bool:
        """True if all faults have happened and nothing is left of the drivers."""
        return not self._queue and self.driver is None and self.dying is None

    def step(self) -> None:
        """Advance the session: start it, kill it when its fault is due, or account for its end."""
        if self.dying is not None and time.monotonic() >= self._look_at:
            self._look_at = time.monotonic() + _LOOK_EVERY
            if self.dying.gone:
                self._account()
                self.dying.end()
                self.dying = None
        if self.driver is None:
            if self._queue:
                self._start(self._queue[0])
            return
        fault = self._queue[0]
        if (code := self.driver.exit_code) is not None:
            self._ended(fault, code)
        elif self._killed is not None:
            self._expect(
                time.monotonic() - self._killed < _GONE_WITHIN, f"did not end {_GONE_WITHIN:.0f} s after {fault}"
            )
        elif isinstance(fault, RandomKill) and self._time_has_come(fault, self.driver):
            if self.driver.kill(fault.victim):
                self._killed = time.monotonic()
        else:
            late = time.monotonic() - self.driver.started > _FAULT_WITHIN
            self._expect(not late, f"did not come to '{fault}' within {_FAULT_WITHIN:.0f} s")

    def end(self) -> None:
        """End all drivers."""
        for driver in (self.driver, self.dying):
            if driver is not None:
                driver.end()
        self.driver = self.dying = None

    def _start(self, fault: Fault) -> None:
        changes = {}
        self._planned = str(fault)
        if isinstance(fault, PointKill):
            newest = self.home.newest_batch(_subject(fault.stream).table)
            batch = (newest.batch if newest is not None else -1) + 1 + fault.batches
            changes["RECOURSE_CRASH"] = f"{fault.stream}:{fault.point}:{batch}"
            self._planned = f"{fault} of batch {batch}"
        self.tally.sessions += 1
        log = self.home.settings.logs / f"driver-{self.tally.sessions:03d}.log"
        self._commits, self._due, self._killed = self.home.commits(self.lane.streams), None, None
        self.driver = DriverProcess.start(self.lane.streams, self.home.environment(**changes), log)

    def _time_has_come(self, fault: RandomKill, driver: DriverProcess) -> bool:
        if self._due is None and self.home.commits(self.lane.streams) - self._commits >= fault.versions:
            begun = time.monotonic() if fault.versions else driver.started
            self._due = begun + fault.seconds
        return self._due is not None and time.monotonic() >= self._due

    def _ended(self, fault: Fault, code: int) -> None:
        """Account for a driver that has ended, as planned or not."""
        assert self.driver is not None
        planned = self._killed is not None or (isinstance(fault, PointKill) and code == -signal.SIGKILL)
        if not planned:
            self._unplanned(code)
            return
        self._queue.popleft()
        self.tally.kills += 1
        if isinstance(fault, PointKill):
            self.tally.points[f"{fault.stream}:{fault.point}"] += 1
        else:
            self.tally.victims[fault.victim] += 1
        together = "one session" if len(self.lane.streams) > 1 else f"session of {self.lane.streams[0]}"
        self.tell(f"kill {self.tally.kills}: {self._planned} ({together})")
        self._let_go()

    def _unplanned(self, code: int) -> None:
        assert self.driver is not None
        words = self.driver.words()
        if code == PermanentError.exit_code:
            raise ChaosFailed(
                f"a driver refused to go on (exit code {code}):\n{words}", f"its log is {self.driver.log}"
            )
        kind = "its lease was busy" if code == LeaseBusy.exit_code else f"exit code {code}"
        self.tally.unplanned.append(f"{kind}: {words}")
        self.tell(f"a driver ended without a kill ({kind}) and is started again: {words.splitlines()[-1][:300]}")
        self._expect(
            len(self.tally.unplanned) <= _MOST_UNPLANNED, f"ended without a kill more than {_MOST_UNPLANNED} times"
        )
        self._let_go()

    def _let_go(self) -> None:
        if self.dying is not None:  # two short-lived drivers in a row
            self._account()
            self.dying.end()
        self.dying, self.driver = self.driver, None

    def _expect(self, fine: bool, otherwise: str) -> None:
        if not fine:
            assert self.driver is not None
            raise ChaosFailed(
                f"the driver of {', '.join(self.lane.streams)} {otherwise}:\n{self.driver.words()}",
                f"its log is {self.driver.log}",
            )

    def _account(self) -> None:
        """Count the batches that the kill interrupted after Spark's plan, by whether they were in the table."""
        for stream in self.lane.streams:
            subject = _subject(stream)
            newest = self.home.newest_batch(subject.table)
            generation = newest.generation if newest is not None else 1
            checkpoint = self.home.checkpoint(stream, generation)
            planned, committed = checkpoint.last_planned, checkpoint.last_committed
            if planned is not None and planned != committed:
                inside = newest is not None and newest.batch >= planned
                (self.tally.skipped if inside else self.tally.replayed).add((stream, generation, planned))
                others = [self.home.newest_batch(other.table) for other in subject.secondary]
                if not inside and any(entry is not None and entry.batch == planned for entry in others):
                    self.tally.half.add((stream, generation, planned))


def _subject(stream: str) -> Subject:
    return next(subject for subject in SUBJECTS if subject.stream == stream)
