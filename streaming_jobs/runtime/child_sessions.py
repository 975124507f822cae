"""A session that restarts in its own process, with the newest code and settings.

The process replaces itself (`execv`) when its JVM has ended and its leases are free. Its pid, its standard input and
its log stay, so that Dagster, or the service manager that started it, sees one session that continues. Streams that
were stopped meanwhile stay stopped, and a stream that another session runs by now is left to that session.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass

import structlog

from streaming_jobs.errors import LeaseBusy, PermanentError, UsageError
from streaming_jobs.platform.back_off import OF_SESSIONS
from streaming_jobs.platform.processes.child import ChildCommand, ChildProcess
from streaming_jobs.settings import Settings
from streaming_jobs.state.lease import holder
from streaming_jobs.stream import Stream
from streaming_jobs.text import commands

log = structlog.get_logger()

AGAIN = "--again"
"""Option of a session that follows on another in its process."""

STANDBY = "--standby"
"""Option of a session that starts Spark, and its streams when a recovery that will stop them is over."""

_SIGNALS = "_SIGNALS_OF_THE_SESSION_BEFORE"
"""Names the descriptor of a pipe with the signals that arrived after the session before had last checked for them."""

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)


def start(stop: threading.Event) -> None:
    """Replace this process by its next session; returns only if a stop was requested meanwhile."""
    # A signal between here and the next session's handlers must neither end the process in the middle of its start nor
    # get lost. This thread blocks it. The kernel then gives it to another thread (Kafka's, Arrow's, the one that reads
    # standard input), whose mask cannot be set from here; but the thread that takes it writes it to the pipe.
    left, written = os.pipe()
    os.set_blocking(written, False)
    before = signal.set_wakeup_fd(written, warn_on_full_buffer=False)
    signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)  # runs the handlers of the signals so far
    if stop.is_set():
        signal.set_wakeup_fd(before)
        os.close(written)
        os.close(left)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
        return
    sys.stdout.flush()
    sys.stderr.flush()
    os.set_inheritable(left, True)
    os.environ[_SIGNALS] = str(left)
    os.execv(sys.executable, next_command(sys.orig_argv))  # noqa: S606 - the command of this very process


def next_command(arguments: Sequence[str]) -> list[str]:
    """The command line of the next session, from that of this one."""
    kept = [each for each in arguments if each != STANDBY]
    return [*kept, *([] if AGAIN in arguments else [AGAIN])]


def take_signals(stop: threading.Event) -> None:
    """Unblock the signals that waited since the previous session, and take the signals that it saw too late."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
    left = os.environ.pop(_SIGNALS, None)
    if left is not None:
        with suppress(OSError), os.fdopen(int(left), "rb") as file:  # its other end was closed by the start
            if set(STOP_SIGNALS).intersection(file.read()):
                stop.set()


def free(settings: Settings, streams: Sequence[Stream]) -> list[Stream]:
    """The streams that no other session runs; raises LeaseBusy if there is none."""
    holders = {stream.name: holder(settings, stream.name) for stream in streams}
    # A recovery or a command releases the lease within moments, and is waited for.
    held = {name: owner for name, owner in holders.items() if owner is not None and owner.purpose == "session"}
    for name, owner in held.items():
        log.info("the stream runs elsewhere by now and is left there", stream=name, holder=owner.pid)
    if len(held) == len(streams):
        raise LeaseBusy("every stream of this session runs elsewhere by now", f"see: {commands.status()}")
    return [stream for stream in streams if stream.name not in held]


# Child sessions: streams that have left their session because they run newer code than the others.
#
# Python code is loaded once per process. When some streams of a supervised session are to run other code, they stop
# at a batch border and continue in a child session, while the others run on. The child is an ordinary supervised
# session: it stops when this process ends, writes into the same log, and belongs to the same Dagster run. The next
# start of the whole session brings all streams together again.
#
# A child that fails is started again (`OF_SESSIONS`); after a permanent failure only once its code has
# changed, or a start is requested.

_FOR_GOOD = (PermanentError.exit_code, UsageError.exit_code)
_JVM_GONE_WITHIN = 10.0
_STDERR = 2


@dataclass
class _Child:
    """A group of streams with its process; after a failure `again_at` is the time of the next start."""

    streams: tuple[str, ...]
    process: ChildProcess | None
    started: float
    options: tuple[str, ...] = ()
    failures: int = 0
    again_at: float | None = None
    failed_for_good: int | None = None
    """The exit code of a permanent failure."""

    @property
    def waits(self) -> bool:
        """True if it has failed, and is started again after a time."""
        return self.again_at is not None


class ChildSessions:
    """The child sessions of one session. Not safe for threads: the session's main thread calls it."""

    def __init__(
        self,
        command: Sequence[str],
        patience: float,
        *,
        start: Callable[[ChildCommand], ChildProcess] = lambda command: command.start(_STDERR),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`command` is the command line of this process; a child that was asked to stop has `patience` seconds."""
        self._command = list(command)
        self._patience = patience
        self._start = start
        self._clock = clock
        self._children: list[_Child] = []
        self._kill_at: float | None = None

    @property
    def alive(self) -> bool:
        """True while a child runs, or waits for its next start."""
        return any(child.process or child.waits for child in self._children)

    @property
    def streams(self) -> frozenset[str]:
        """The streams of children that run or will be started again."""
        return frozenset(name for child in self._children if child.process or child.waits for name in child.streams)

    @property
    def waiting(self) -> frozenset[str]:
        """The streams of children that have failed, and will be started again after a time."""
        return frozenset(name for child in self._children if child.waits for name in child.streams)

    @property
    def failed(self) -> dict[str, int]:
        """The streams of children that have failed for good: name -> exit code of the child."""
        return {name: code for child in self._children if (code := child.failed_for_good) for name in child.streams}

    def start(self, streams: Sequence[str], *options: str) -> None:
        """Start a child with these streams; they have stopped here, and their leases are free, or it stands by."""
        self._children = [child for child in self._children if not set(child.streams).intersection(streams)]
        child = _Child(tuple(streams), None, 0.0, options)
        self._children.append(child)
        self._begin(child)

    def hurry(self, streams: Collection[str]) -> None:
        """Let the next look start the children of these streams that wait."""
        for child in self._children:
            if child.again_at is not None and set(child.streams).intersection(streams):
                child.again_at, child.failures = self._clock(), 0

    def look(self) -> None:
        """Register ended children, start children whose pause is over, kill children that do not stop."""
        now = self._clock()
        for child in self._children:
            if child.process is not None and self._kill_at is not None and now > self._kill_at:
                child.process.kill()
            if child.process is not None and (code := child.process.exit_code) is not None:
                child.process.end(0, _JVM_GONE_WITHIN)
                child.process = None
                self._ended(child, code, now)
            elif child.again_at is not None and now >= child.again_at:
                self._begin(child)
        self._children = [child for child in self._children if child.process or child.waits or child.failed_for_good]

    def ask_to_stop(self) -> None:
        """Ask every child to stop at a batch border; none is started again. Further calls change nothing."""
        if self._kill_at is not None:
            return
        self._kill_at = self._clock() + self._patience
        for child in self._children:
            child.again_at = None
            if child.process is not None:
                child.process.ask_to_end()

    def close(self) -> None:
        """End all children; the caller has waited for them, so only children of a failed session still run."""
        self.ask_to_stop()
        for child in self._children:
            if child.process is not None:
                left = max(0.0, (self._kill_at or 0.0) - self._clock())  # one deadline for all of them
                child.process.end(left, _JVM_GONE_WITHIN)
                child.process = None

    def _begin(self, child: _Child) -> None:
        arguments = [*command_for(self._command, child.streams), *child.options]
        command = ChildCommand(arguments, dict(os.environ), stdin=subprocess.PIPE)
        child.started, child.again_at = self._clock(), None
        try:
            child.process = self._start(command)
        except OSError as error:  # no memory, or too many processes: no reason to end streams that run
            log.warning("a second session could not be started yet", streams=child.streams, reason=str(error))
            self._wait(child, self._clock())
            return
        log.info("streams run in a process of their own", streams=",".join(child.streams), pid=child.process.pid)

    def _ended(self, child: _Child, code: int, now: float) -> None:
        if code == 0 or self._kill_at is not None:
            log.info("the process of these streams has ended", streams=",".join(child.streams), code=code)
        elif code in _FOR_GOOD:
            log.error("streams failed in a process of their own", streams=",".join(child.streams), code=code)
            child.failed_for_good = code
        else:
            if now - child.started >= OF_SESSIONS.healthy_after:
                child.failures = 0
            delay = self._wait(child, now)
            log.warning("streams will start again", streams=",".join(child.streams), code=code, seconds=delay)

    def _wait(self, child: _Child, now: float) -> float:
        child.failures += 1
        delay = OF_SESSIONS.delay(child.failures)
        child.again_at = now + delay
        return delay


def command_for(command: Sequence[str], streams: Sequence[str]) -> list[str]:
    """The command line of a session with these streams, from that of a session with others."""
    kept = list(_without(command, "--streams"))
    return next_command([*kept, "--streams", ",".join(streams)])


def _without(command: Sequence[str], option: str) -> Iterator[str]:
    """Yields the arguments except this option and its value."""
    value = False
    for argument in command:
        if value:
            value = False
        elif argument == option:
            value = True
        elif not argument.startswith(f"{option}="):
            yield argument
