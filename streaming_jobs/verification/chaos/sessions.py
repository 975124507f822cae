"""The sessions of the kill loop: started, watched, killed or frozen as their faults say, and started again.

A `LaneRunner` takes one session through kills. After the kill of a process that is not the driver, the same session
must continue: two more versions of each of its tables, after the kill of a worker the whole backlog. Then the next
fault may hit it too, unless that fault needs a session of its own; in that case the session is stopped at a batch
border.

A `FreezeRunner` stops a driver (SIGSTOP) in an open transaction, and wakes it (SIGCONT) after a change:

`broker`: the broker is killed with -9 and started again. The same session then has to continue unaided.

`zombie`: the stream's lease is taken away, as on another machine, or where a file system forgets its locks, and another
driver takes over. The stopped driver, once woken, has to end, refused by the topic, while the other one continues. The
new driver runs that one stream, so that nothing else is on its way; if the stream reads what others write, these run
beside it.
"""

from __future__ import annotations

import signal
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field

import psutil

from streaming_jobs.errors import LeaseBusy, PermanentError, RecourseError
from streaming_jobs.platform.broker import Broker, bootstrap_servers
from streaming_jobs.state.stream_folder import StreamFolder
from streaming_jobs.verification.chaos.drivers import DriverProcess, Machine
from streaming_jobs.verification.chaos.faults import Fault, Freeze, Lane, PointKill, ProcessKill, RandomKill
from streaming_jobs.verification.chaos.home import Home

Tell = Callable[[str], None]
"""Called with one line of progress, for people."""

_FAULT_WITHIN = 240.0
_GONE_WITHIN = 60.0
_MOST_UNPLANNED = 5
_LOOK_EVERY = 0.2
_ASKED_TO_END = (0, -signal.SIGTERM, -signal.SIGINT)  # the last two while its modules are loaded
_PROCESS_WITHIN = 120.0
"""Seconds in which a process to be killed has to appear, else its kill is not made."""
_MORE_VERSIONS = 2
_REFUSAL = "another driver writes topic"
_BACKLOG = {"RECOURSE_STREAM__MAX_OFFSETS_PER_TRIGGER": "300000", "RECOURSE_STREAM__TRIGGER": "every 1 second"}
"""Settings of a session whose first batch is the whole backlog."""


class ChaosFailed(RecourseError):
    """A run of the kill loop cannot continue: a driver refused to start, or did not do its task.

    The logs are in the home that the message names. The same seed repeats the run.
    """

    code = "REC-031"


@dataclass
class Tally:
    """Counts of a run so far. The last three are the batches (stream, generation, batch) that a kill interrupted.

    `processes` are the kills that the session survives, by kind, `not_made` those for which no process was found;
    `restarts` counts the streams that their session restarted after such a kill.

    A `replayed` batch was planned and not in its table, so the next start repeats it; a `skipped` one was in the table
    and not yet committed by Spark, so the next start skips it. A `half` one was in a secondary table and not in the
    primary: it is replayed too, and the secondary table must not take it twice.

    `broker_kills` include those in an open transaction (`transactions_cut`). `zombies` are drivers that were stopped in
    an open transaction, replaced, and woken.
    """

    kills: int = 0
    points: Counter[str] = field(default_factory=Counter)
    victims: Counter[str] = field(default_factory=Counter)
    processes: Counter[str] = field(default_factory=Counter)
    not_made: Counter[str] = field(default_factory=Counter)
    restarts: int = 0
    broker_kills: int = 0
    transactions_cut: int = 0
    zombies: int = 0
    sessions: int = 0
    unplanned: list[str] = field(default_factory=list)
    replayed: set[tuple[str, int, int]] = field(default_factory=set)
    skipped: set[tuple[str, int, int]] = field(default_factory=set)
    half: set[tuple[str, int, int]] = field(default_factory=set)


def start_session(home: Home, tally: Tally, streams: Sequence[str], *arguments: str, **changes: str) -> DriverProcess:
    """Start a session of these streams with its own log; `changes` are variables of its environment."""
    tally.sessions += 1
    log = home.settings.logs / f"driver-{tally.sessions:03d}.log"
    return DriverProcess.start(streams, home.environment(**changes), log, *arguments)


def expect(driver: DriverProcess, fine: bool, otherwise: str) -> None:
    """Raise ChaosFailed with the driver's last words unless all is fine."""
    if not fine:
        words = f"the driver of {', '.join(driver.streams)} {otherwise}:\n{driver.words()}"
        raise ChaosFailed(words, f"its log is {driver.log}")


def _batch_after(home: Home, stream: str, batches: int) -> int:
    """The number of the batch that is so many batches after the stream's next one."""
    newest = home.newest_batch(home.subject(stream).table)
    return (newest.batch if newest is not None else -1) + 1 + batches


@dataclass(frozen=True)
class _Before:
    """A session at the moment of a kill that it has to survive; `at` is of `time.monotonic`."""

    at: float
    versions: Mapping[str, int]
    restarts: int


@dataclass
class LaneRunner:
    """Takes one lane through its faults; call `step` often, from one thread.

    `backlog_end` is the number of records in the topic after the burst of the lane's phase.
    """

    home: Home
    lane: Lane
    tally: Tally
    tell: Tell
    backlog_end: int = 0
    driver: DriverProcess | None = None
    dying: DriverProcess | None = None
    _queue: deque[Fault] = field(init=False)
    _commits: int = 0
    _begun: float = 0.0
    _due: float | None = None
    _killed: float | None = None
    _planned: str = ""
    _look_at: float = 0.0
    _reading_since: float | None = None
    _before: _Before | None = None
    _stopping: float | None = None
    _over: bool = False
    _was_killed: bool = True
    """Of the driver that is dying; a stop at a batch border interrupts no batch."""

    def __post_init__(self) -> None:
        self._queue = deque(self.lane.faults)

    @property
    def done(self) -> bool:
        """True if all faults have happened and nothing is left of the drivers."""
        idle = self.driver is None and self.dying is None
        return idle and not self._queue and (self._over or not self.lane.runs_on)

    @property
    def faults_left(self) -> bool:
        """True while the lane has faults left."""
        return bool(self._queue)

    def finish(self) -> None:
        """Stop the session and start no other: the faults of all lanes have happened."""
        self._over = True
        if self.driver is not None and not self._queue and self._stopping is None and self.driver.exit_code is None:
            self._stopping = time.monotonic()
            self.driver.child.ask_to_end()

    def step(self) -> None:
        """Advance the session: start it, kill it when its fault is due, or account for its end."""
        if self.dying is not None and time.monotonic() >= self._look_at:
            self._look_at = time.monotonic() + _LOOK_EVERY
            if self.dying.gone:
                self._account()
                self.dying.end()
                self.dying = None
        if self.driver is None:
            if self._queue or (self.lane.runs_on and not self._over):
                self._start(self._queue[0] if self._queue else None)
            return
        if (code := self.driver.exit_code) is not None:
            self._ended(code)
        elif self._stopping is not None:
            late = time.monotonic() - self._stopping > _GONE_WITHIN
            self._expect(not late, f"did not stop within {_GONE_WITHIN:.0f} s")
        elif self._queue:
            self._advance(self._queue[0], self.driver)

    def _advance(self, fault: Fault, driver: DriverProcess) -> None:
        """Bring a running session to its fault, or past it."""
        if isinstance(fault, ProcessKill):
            self._kill_process(fault, driver)
        elif self._killed is not None:
            self._expect(
                time.monotonic() - self._killed < _GONE_WITHIN, f"did not end {_GONE_WITHIN:.0f} s after {fault}"
            )
        elif isinstance(fault, RandomKill) and self._time_has_come(fault, driver):
            if driver.kill(fault.victim):
                self._killed = time.monotonic()
        else:
            late = time.monotonic() - self._begun > _FAULT_WITHIN
            self._expect(not late, f"did not come to '{fault}' within {_FAULT_WITHIN:.0f} s")

    def end(self) -> None:
        for driver in (self.driver, self.dying):
            if driver is not None:
                driver.end()
        self.driver = self.dying = None

    def _start(self, fault: Fault | None) -> None:
        changes = {}
        self._planned = str(fault or "none")
        if isinstance(fault, PointKill):
            batch = _batch_after(self.home, fault.stream, fault.batches)
            changes["RECOURSE_CRASH"] = f"{fault.stream}:{fault.point}:{batch}+"
            self._planned = f"{fault} of batch {batch} or later"
        elif isinstance(fault, ProcessKill) and fault.process == "worker":
            changes.update(_BACKLOG)
        self._wait()
        self.driver = start_session(self.home, self.tally, self.lane.streams, **changes)
        self._begun = self.driver.started

    def _wait(self) -> None:
        """Count commits and seconds up to the next fault from now on."""
        self._commits, self._begun = self.home.commits(self.lane.streams), time.monotonic()
        self._due = self._killed = self._reading_since = self._before = self._stopping = None

    def _kill_process(self, fault: ProcessKill, driver: DriverProcess) -> None:
        if self._before is not None:
            if self._gone_on(fault, self._before):
                self.tally.restarts += max(0, self.home.restarts(self.lane.streams) - self._before.restarts)
                self._process_kill_over(driver)
            else:
                late = time.monotonic() - self._before.at > _FAULT_WITHIN
                self._expect(not late, f"did not continue within {_FAULT_WITHIN:.0f} s after {fault}")
        elif (process := self._to_kill(fault, driver)) is not None:
            before = _Before(time.monotonic(), self._versions(), self.home.restarts(self.lane.streams))
            try:
                if fault.process != "machine":
                    process.kill()
                elif not self._restart_machine(process):
                    return
            except psutil.NoSuchProcess:
                return
            self._before = before
            self.tally.kills += 1
            self.tally.processes[fault.process] += 1
            self.tell(f"kill {self.tally.kills}: {fault}, pid {process.pid} ({self._session})")
        elif self._too_late(fault):
            self.tally.not_made[fault.process] += 1
            self.tell(f"a kill was not made: {fault}: there was no such process")
            self._process_kill_over(driver)

    def _restart_machine(self, executor: psutil.Process) -> bool:
        """Kill the executor's machine and start it again; False if it is gone already."""
        if (machine := Machine.of(executor)) is None:
            return False
        machine.kill()
        with (self.home.settings.logs / f"worker-{self.tally.kills + 1:03d}.log").open("wb") as output:
            machine.start(output)
        return True

    def _to_kill(self, fault: ProcessKill, driver: DriverProcess) -> psutil.Process | None:
        """The process to kill now; None before its time, and while there is none."""
        if fault.process != "worker":
            come = self._time_has_come(fault, driver)
            found = (driver.planners() if fault.process == "planner" else driver.executors()) if come else []
        else:
            _, port = bootstrap_servers(self.home.settings).rsplit(":", 1)
            found = driver.reading_workers(int(port))
            if found and self._reading_since is None:
                self._reading_since = time.monotonic()
            if self._reading_since is None or time.monotonic() < self._reading_since + fault.seconds:
                return None
        return found[fault.choice % len(found)] if found else None

    def _too_late(self, fault: ProcessKill) -> bool:
        """True if the wait for a process is over; raises ChaosFailed if the streams do not commit."""
        if fault.process == "worker" and self._backlog_read():
            return True
        now, since = time.monotonic(), self._begun if fault.process == "worker" else self._due
        if since is None:
            self._expect(now - self._begun <= _FAULT_WITHIN, f"did not come to '{fault}' within {_FAULT_WITHIN:.0f} s")
        return since is not None and now - since > _PROCESS_WITHIN

    def _gone_on(self, fault: ProcessKill, before: _Before) -> bool:
        if fault.process == "worker":
            return self._backlog_read()
        return all(now >= before.versions[table] + _MORE_VERSIONS for table, now in self._versions().items())

    def _backlog_read(self) -> bool:
        """True if the streams that read the topic of the feeder have read the burst."""
        subjects = [self.home.subject(stream) for stream in self.lane.streams]
        fed = [subject.table for subject in subjects if subject.topic == self.home.fed]
        return all(self.home.position(table) >= self.backlog_end for table in fed)

    def _versions(self) -> dict[str, int]:
        tables = [self.home.subject(stream).table for stream in self.lane.streams]
        return {table: self.home.newest_version(table) for table in tables}

    def _process_kill_over(self, driver: DriverProcess) -> None:
        """Continue with the next fault in the same session, or stop it for a fault that needs one of its own."""
        self._queue.popleft()
        if self._queue and not isinstance(self._queue[0], PointKill) and self._queue[0].versions:
            self._planned = str(self._queue[0])
            self._wait()
        else:
            self._stopping = time.monotonic()
            driver.child.ask_to_end()

    def _time_has_come(self, fault: RandomKill | ProcessKill, driver: DriverProcess) -> bool:
        if self._due is None and self.home.commits(self.lane.streams) - self._commits >= fault.versions:
            begun = time.monotonic() if fault.versions else driver.started
            self._due = begun + fault.seconds
        return self._due is not None and time.monotonic() >= self._due

    def _ended(self, code: int) -> None:
        """Account for a driver that has ended, as planned or not."""
        assert self.driver is not None
        if self._stopping is not None and code in _ASKED_TO_END:
            self._let_go()
            self._was_killed = False
            return
        if self._before is not None:  # the kill was made, and the session did not survive it
            self._queue.popleft()
        if self._stopping is not None or self._before is not None or not self._queue:
            self._unplanned(code)
            return
        fault = self._queue[0]
        planned = self._killed is not None or (isinstance(fault, PointKill) and code == -signal.SIGKILL)
        if not planned:
            self._unplanned(code)
            return
        self._queue.popleft()
        self.tally.kills += 1
        if isinstance(fault, PointKill):
            self.tally.points[f"{fault.stream}:{fault.point}"] += 1
        elif isinstance(fault, RandomKill):
            self.tally.victims[fault.victim] += 1
        self.tell(f"kill {self.tally.kills}: {self._planned} ({self._session})")
        self._let_go()

    @property
    def _session(self) -> str:
        return "one session" if len(self.lane.streams) > 1 else f"session of {self.lane.streams[0]}"

    def _unplanned(self, code: int) -> None:
        assert self.driver is not None
        words = self.driver.words()
        if code == PermanentError.exit_code:
            raise ChaosFailed(
                f"a driver refused to continue (exit code {code}):\n{words}", f"its log is {self.driver.log}"
            )
        kind = "its lease was busy" if code == LeaseBusy.exit_code else f"exit code {code}"
        self.tally.unplanned.append(f"{kind}: {words}")
        last = words.rpartition("\n")[2]
        self.tell(f"a driver ended without a kill ({kind}) and is started again: {last[:300]}")
        self._expect(
            len(self.tally.unplanned) <= _MOST_UNPLANNED, f"ended without a kill more than {_MOST_UNPLANNED} times"
        )
        self._let_go()

    def _let_go(self) -> None:
        if self.dying is not None:  # two short-lived drivers in a row
            self._account()
            self.dying.end()
        self.dying, self.driver, self._stopping, self._before = self.driver, None, None, None
        self._was_killed = True

    def _expect(self, fine: bool, otherwise: str) -> None:
        assert self.driver is not None
        expect(self.driver, fine, otherwise)

    def _account(self) -> None:
        """Count the batches that the kill interrupted after Spark's plan, by whether they were in the table."""
        for stream in self.lane.streams if self._was_killed else ():
            subject = self.home.subject(stream)
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


@dataclass
class FreezeRunner:
    """Takes a session through one freeze; raises ChaosFailed if it does not end as it should. `check` may raise."""

    home: Home
    broker: Broker
    tally: Tally
    tell: Tell
    check: Callable[[], None] = lambda: None

    def run(self, freeze: Freeze) -> None:
        """Run the freeze to its end; no driver is left."""
        batch = _batch_after(self.home, freeze.stream, freeze.batches)
        crash = f"{freeze.stream}:transaction_open:{batch}+:stop"
        if freeze.then == "broker":
            self._kill_broker(freeze, crash)
        elif self.home.subject(freeze.stream).topic == self.home.fed:
            self._replace(freeze, crash, freeze.streams)
        else:
            others = tuple(stream for stream in freeze.streams if stream != freeze.stream)
            with self._driver(others) as beside:
                self._replace(freeze, crash, (freeze.stream,))
                self._stop(beside)
        self.tell(f"{freeze} (batch {batch} or later)")

    def _kill_broker(self, freeze: Freeze, crash: str) -> None:
        with self._driver(freeze.streams, RECOURSE_CRASH=crash) as driver:
            self._until(lambda: driver.stopped, f"come to '{freeze}'", driver)
            self._restart_broker(driver)

    def _restart_broker(self, driver: DriverProcess) -> None:
        self.broker.kill()
        self.broker.start()
        self.tally.broker_kills += 1
        self.tally.transactions_cut += 1
        before = self.home.restarts(driver.streams)
        driver.wake()
        self._goes_on(driver)
        self.tally.restarts += max(0, self.home.restarts(driver.streams) - before)
        self._stop(driver)

    def _replace(self, freeze: Freeze, crash: str, streams: tuple[str, ...]) -> None:
        """Stop a driver of the one stream, and replace it by one of these streams."""
        with self._driver((freeze.stream,), RECOURSE_CRASH=crash) as zombie, ExitStack() as at_end:
            self._until(lambda: zombie.stopped, f"come to '{freeze}'", zombie)
            zombie.freeze()
            StreamFolder.of(self.home.settings, freeze.stream).lease.unlink()
            other = at_end.enter_context(self._driver(streams))
            self._goes_on(other)
            zombie.wake()
            code = zombie.wait(_GONE_WITHIN)
            refused = code == PermanentError.exit_code and _REFUSAL in zombie.words()
            expect(zombie, refused, f"was not refused by its topic when it was woken (exit code {code})")
            self.tally.zombies += 1
            self._goes_on(other)
            self._stop(other)

    @contextmanager
    def _driver(self, streams: tuple[str, ...], **changes: str) -> Iterator[DriverProcess]:
        driver = start_session(self.home, self.tally, streams, **changes)
        try:
            yield driver
        finally:
            driver.end()

    def _goes_on(self, driver: DriverProcess) -> None:
        """Wait until each of the session's streams has written more versions of its table."""
        tables = [self.home.subject(stream).table for stream in driver.streams]
        wanted = {table: self.home.newest_version(table) + _MORE_VERSIONS for table in tables}
        self._until(lambda: all(self.home.newest_version(t) >= v for t, v in wanted.items()), "continue", driver)

    def _stop(self, driver: DriverProcess) -> None:
        code = driver.stop(_GONE_WITHIN)
        expect(driver, code == 0, f"did not stop at a batch border (exit code {code})")

    def _until(self, condition: Callable[[], bool], what: str, driver: DriverProcess) -> None:
        deadline = time.monotonic() + _FAULT_WITHIN
        while not condition():
            self.check()
            code = driver.exit_code
            expect(driver, code is None, f"ended with exit code {code} and did not {what}")
            expect(driver, time.monotonic() < deadline, f"did not {what} within {_FAULT_WITHIN:.0f} s")
            time.sleep(_LOOK_EVERY)
