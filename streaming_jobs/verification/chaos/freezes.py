"""Drivers that are stopped (SIGSTOP) in an open transaction, and woken (SIGCONT) when the world has changed meanwhile.

`broker`: the broker is killed with -9 and started again. The same session then has to continue unaided.

`zombie`: the stream's lease is taken away, as on another machine, or where a file system forgets its locks, and another
driver takes over. The stopped one, once woken, has to end by itself, refused by the topic, and the other one goes on.
It runs that one stream, so that nothing else is on its way; if the stream reads what others write, these run beside it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Literal

from streaming_jobs.errors import PermanentError
from streaming_jobs.platform.broker import Broker
from streaming_jobs.state.stream_folder import StreamFolder
from streaming_jobs.verification.chaos.drivers import DriverProcess
from streaming_jobs.verification.chaos.home import Home
from streaming_jobs.verification.chaos.session_runner import ChaosFailed, Tally, Tell

Then = Literal["broker", "zombie"]

_WITHIN = 240.0
_GONE_WITHIN = 60.0
_MORE_VERSIONS = 2
_LOOK_EVERY = 0.1
_REFUSAL = "another driver writes topic"


@dataclass(frozen=True)
class Freeze:
    """The driver stops itself in the transaction of `stream`, `batches` batches after the next one."""

    streams: tuple[str, ...]
    stream: str
    batches: int
    then: Then

    def __str__(self) -> str:
        what = "the broker is killed" if self.then == "broker" else "another driver takes over"
        return f"{what} while {self.stream} has a transaction open"


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
        newest = self.home.newest_batch(self.home.subject(freeze.stream).table)
        batch = (newest.batch if newest is not None else -1) + 1 + freeze.batches
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
            self._expect(refused, f"was not refused by its topic when it was woken (exit code {code})", zombie)
            self.tally.zombies += 1
            self._goes_on(other)
            self._stop(other)

    @contextmanager
    def _driver(self, streams: tuple[str, ...], **changes: str) -> Iterator[DriverProcess]:
        self.tally.sessions += 1
        log = self.home.settings.logs / f"driver-{self.tally.sessions:03d}.log"
        driver = DriverProcess.start(streams, self.home.environment(**changes), log)
        try:
            yield driver
        finally:
            driver.end()

    def _goes_on(self, driver: DriverProcess) -> None:
        """Wait until each of the session's streams has written more versions of its table."""
        tables = [self.home.subject(stream).table for stream in driver.streams]
        wanted = {table: self.home.newest_version(table) + _MORE_VERSIONS for table in tables}
        self._until(lambda: all(self.home.newest_version(t) >= v for t, v in wanted.items()), "go on", driver)

    def _stop(self, driver: DriverProcess) -> None:
        code = driver.stop(_GONE_WITHIN)
        self._expect(code == 0, f"did not stop at a batch border (exit code {code})", driver)

    def _until(self, condition: Callable[[], bool], what: str, driver: DriverProcess) -> None:
        deadline = time.monotonic() + _WITHIN
        while not condition():
            self.check()
            code = driver.exit_code
            self._expect(code is None, f"ended with exit code {code} and did not {what}", driver)
            self._expect(time.monotonic() < deadline, f"did not {what} within {_WITHIN:.0f} s", driver)
            time.sleep(_LOOK_EVERY)

    def _expect(self, fine: bool, otherwise: str, driver: DriverProcess) -> None:
        if not fine:
            words = f"the driver of {', '.join(driver.streams)} {otherwise}:\n{driver.words()}"
            raise ChaosFailed(words, f"its log is {driver.log}")
