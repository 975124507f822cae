"""Driver processes that are started to be killed: Python, its JVM, both, or a process that works for the JVM."""

from __future__ import annotations

import signal
import subprocess
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

import psutil

from streaming_jobs.platform.processes.child import ChildCommand, ChildProcess
from streaming_jobs.runtime.session_options import supervised_command
from streaming_jobs.verification.chaos.faults import Victim

_OF_ERRORS = ("level=error", "level=warning", "Error", "REC-")


@dataclass
class DriverProcess:
    """One session's process. Its standard input is a pipe of ours: it stops when we are gone.

    Looking for its JVM, or for its remains, scans all processes of the machine: do it rarely.
    """

    streams: tuple[str, ...]
    child: ChildProcess
    log: Path
    started: float
    _jvm: psutil.Process | None = None
    _reading: ReadingWorkers | None = None

    @classmethod
    def start(cls, streams: Sequence[str], environment: Mapping[str, str], log: Path, *arguments: str) -> DriverProcess:
        """Start a session of these streams in the home that the environment names."""
        log.parent.mkdir(parents=True, exist_ok=True)
        folder = log.parent  # no configuration file lies there
        command = ChildCommand(supervised_command(streams, *arguments), environment, folder, subprocess.PIPE)
        with log.open("wb") as output:
            child = command.start(output)
        return cls(tuple(streams), child, log, time.monotonic())

    @property
    def pid(self) -> int:
        """Of the Python process."""
        return self.child.pid

    @property
    def exit_code(self) -> int | None:
        """Of the Python process, negative for a signal; None while it runs."""
        return self.child.exit_code

    @property
    def jvm(self) -> psutil.Process | None:
        """The session's JVM, once there is one."""
        if self._jvm is None and self.exit_code is None:
            with suppress(psutil.Error):
                below = psutil.Process(self.pid).children(recursive=True)
                self._jvm = next((process for process in below if process.name() == "java"), None)
        return self._jvm

    @property
    def gone(self) -> bool:
        """True if Python, JVM and whatever they started have ended."""
        return self.child.gone

    def kill(self, victim: Victim) -> bool:
        """kill -9; False while there is no JVM to kill yet."""
        jvm = self.jvm
        if victim != "python" and jvm is None:
            return False
        if victim != "python" and jvm is not None:
            with suppress(psutil.NoSuchProcess):
                jvm.kill()
        if victim != "jvm":
            self.child.process.kill()
        return True

    @property
    def stopped(self) -> bool:
        """True if its Python is stopped by a signal."""
        if self.exit_code is None:
            with suppress(psutil.Error):
                return bool(psutil.Process(self.pid).status() == psutil.STATUS_STOPPED)
        return False

    def freeze(self) -> None:
        """Stop its Python and its JVM, as a machine does that hangs."""
        self.child.process.send_signal(signal.SIGSTOP)
        if (jvm := self.jvm) is not None:
            with suppress(psutil.NoSuchProcess):
                jvm.suspend()

    def wake(self) -> None:
        """Let Python and JVM continue."""
        if (jvm := self.jvm) is not None:
            with suppress(psutil.NoSuchProcess):
                jvm.resume()
        self.child.process.send_signal(signal.SIGCONT)

    def planners(self) -> list[psutil.Process]:
        return planners(self._children())

    def reading_workers(self, port: int) -> list[psutil.Process]:
        """The workers that read from the broker at `port` now, seen by two looks: the first returns none."""
        if self._reading is None:
            self._reading = ReadingWorkers(port)
        return self._reading.among(self._children())

    def executors(self) -> list[psutil.Process]:
        """The executors of the session on a cluster of this machine."""
        return executors(listening(self.jvm))

    def wait(self, seconds: float) -> int | None:
        """The exit code once Python and JVM are gone; None if that takes longer than `seconds`."""
        return self.child.wait_until_gone(seconds)

    def stop(self, seconds: float) -> int | None:
        """Ask for a stop at the next batch border and wait; the exit code, None if it did not end."""
        self.child.ask_to_end()
        return self.wait(seconds)

    def end(self) -> None:
        """Make sure that no process of the driver is left."""
        self.child.kill()

    def _children(self) -> list[psutil.Process]:
        if self.exit_code is None:
            with suppress(psutil.Error):
                return psutil.Process(self.pid).children(recursive=True)
        return []

    def words(self, lines: int = 6) -> str:
        """The last lines that it wrote on errors, or the last of all if there are none."""
        text = self.log.read_text(encoding="utf-8", errors="replace").splitlines()
        errors = [line for line in text if any(mark in line for mark in _OF_ERRORS)] or text
        return "\n".join(line[:1000] for line in errors[-lines:])


# A Spark cluster on this machine: executors, which name the port of their driver, and the workers that started them.

_EXECUTOR, _SPARK_WORKER = "CoarseGrainedExecutorBackend", "org.apache.spark.deploy.worker.Worker"
_DRIVER_URL = "--driver-url"


def listening(process: psutil.Process | None) -> set[int]:
    """The ports at which a process listens."""
    with suppress(psutil.Error):
        if process is not None:
            return {c.laddr.port for c in process.net_connections("tcp") if c.status == psutil.CONN_LISTEN}
    return set()


def executors(ports: Collection[int]) -> list[psutil.Process]:
    """The executors whose driver listens at one of these ports, the oldest first."""
    found = []
    for process in psutil.process_iter():
        words = list(_command(process))
        if any(word.endswith(_EXECUTOR) for word in words) and _DRIVER_URL in words:
            _, _, port = words[words.index(_DRIVER_URL) + 1].rpartition(":")
            if port.isdigit() and int(port) in ports:
                found.append(process)
    return sorted(found, key=lambda process: process.pid)


@dataclass(frozen=True)
class Machine:
    """A Spark worker with its executors and their Python, which are killed together and started again."""

    worker: psutil.Process
    command: Sequence[str]
    environment: Mapping[str, str]
    folder: str

    @classmethod
    def of(cls, executor: psutil.Process) -> Machine | None:
        """The machine of an executor; None if its worker is gone."""
        with suppress(psutil.Error):
            for process in executor.parents():
                if _SPARK_WORKER in (command := process.cmdline()):
                    return cls(process, command, process.environ(), process.cwd())
        return None

    def kill(self) -> None:
        """kill -9 of all of it."""
        for process in [self.worker, *self.worker.children(recursive=True)]:
            with suppress(psutil.NoSuchProcess):
                process.kill()

    def start(self, output: IO[bytes]) -> subprocess.Popen[bytes]:
        """Start the worker as it was started before; it outlives the kill loop, as it would have without a kill."""
        return subprocess.Popen(
            self.command,
            env=dict(self.environment),
            cwd=self.folder,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )


# The Python processes that Spark uses: the planners, and the workers while they read.
#
#     fork server
#     |- python -m pyspark.sql.streaming.python_streaming_source_runner    a planner, one per running query
#     |- python -m pyspark.daemon pyspark.worker                           forks workers, reads nothing itself
#     |    |- the same command line                                        a worker; Spark reuses it
#     `- python -m pyspark.daemon pyspark.sql.worker.*                     take data sources apart; read no records
#
# Below the JVM there is a client of the fork server for each; its command line has the same words after its own.
# Without a fork server the processes themselves are below the JVM. The kill of one of them ends no session: its
# stream fails, or Spark repeats the task, and the stream continues.

PLANNER = "pyspark.sql.streaming.python_streaming_source_runner"
_WORKERS = ["-m", "pyspark.daemon", "pyspark.worker"]


def planners(processes: Iterable[psutil.Process]) -> list[psutil.Process]:
    """The planners among these processes, the oldest pid first."""
    return sorted((p for p in processes if _command(p)[1:] == ["-m", PLANNER]), key=lambda p: p.pid)


def workers(processes: Iterable[psutil.Process]) -> list[psutil.Process]:
    """The workers among these processes, without the daemons that fork them; the oldest pid first."""
    forked = {p.pid: p for p in processes if _command(p)[1:] == _WORKERS}
    return sorted((p for p in forked.values() if _parent(p) in forked), key=lambda p: p.pid)


@dataclass
class ReadingWorkers:
    """Finds the workers that read: connected to the broker's `port`, with CPU time used since the last look.

    A worker that is idle is connected too, since Spark and the readers keep what is open.
    """

    port: int
    _used: dict[int, float] = field(default_factory=dict)

    def among(self, processes: Iterable[psutil.Process]) -> list[psutil.Process]:
        """The reading workers among these processes; none at the first look."""
        before, self._used = self._used, {}
        found = []
        for process in workers(processes):
            with suppress(psutil.Error):
                times = process.cpu_times()
                self._used[process.pid] = used = times.user + times.system
                if used > before.get(process.pid, used) and self._connected(process):
                    found.append(process)
        return found

    def _connected(self, process: psutil.Process) -> bool:
        return any(getattr(c.raddr, "port", None) == self.port for c in process.net_connections("tcp"))


def _command(process: psutil.Process) -> Sequence[str]:
    """The words of a command line: a process that has set its title has one word, filled up with blanks."""
    with suppress(psutil.Error):
        return " ".join(process.cmdline()).split()
    return ()


def _parent(process: psutil.Process) -> int | None:
    with suppress(psutil.Error):
        return int(process.ppid())
    return None
