"""Child processes of a benchmark: started, measured, ended. None outlives the benchmark, even a killed one."""

from __future__ import annotations

import os
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from benchmarks.run import wait_until
from streaming_jobs.platform.processes.child import ChildCommand, ProcessTree

REPOSITORY = Path(__file__).parents[1]
_KEPT = ("RECOURSE_JARS_DIR", "RECOURSE_MAVEN_REPOSITORY")
_SAMPLE_EVERY, _WEIGH_EVERY = 0.25, 1.0
_STOP_SECONDS = 20.0


class ChildFailed(Exception):
    """A child ended, or did not do in time what it should; with the last lines that it printed."""


class Follower:
    """A thread that calls a function again and again; what it raises comes out of `check` and `stop`."""

    def __init__(self, look: Callable[[], object], every: float) -> None:
        self._look = look
        self._every = every
        self._ended = threading.Event()
        self._failure: Exception | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """End, and raise what the function raised; may be called again."""
        self._ended.set()
        if self._thread.ident is not None:
            self._thread.join()
        self.check()

    def check(self) -> None:
        """Raise what the function raised."""
        if self._failure is not None:
            raise self._failure

    def _run(self) -> None:
        try:
            while not self._ended.is_set():
                self._look()
                time.sleep(self._every)
        except Exception as error:  # noqa: BLE001 - raised in `check`, in the thread that waits for this one
            self._failure = error


class Child:
    """A process whose output goes to a file.

    `ready` is the word by which it says that it is ready. It is asked to end by the end of its standard input, with
    `by_signal` by SIGTERM.
    """

    def __init__(
        self,
        command: Sequence[str],
        environment: Mapping[str, str],
        log: Path,
        ready: str = "",
        *,
        by_signal: bool = False,
    ) -> None:
        self.started, self.ready_at = time.time(), 0.0
        self._log, self._word, self._by_signal = log, ready, by_signal
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("wb") as output:
            self._child = ChildCommand(command, environment, REPOSITORY, subprocess.PIPE).start_reaped(output)
        self.pid = self._child.pid
        self.usage = Usage(self.pid)

    @property
    def exit_code(self) -> int | None:
        return self._child.exit_code

    def wait_ready(self, seconds: float) -> None:
        """Wait for its word; raises ChildFailed."""
        try:
            wait_until(lambda: self._word in self._output(), seconds, "ready", every=0.01, check=self.check)
        except TimeoutError as error:
            raise ChildFailed(f"{error}: {self._tail()}") from None
        self.ready_at = time.time()

    def check(self) -> None:
        """Raise ChildFailed if it has ended."""
        if (code := self.exit_code) is not None:
            raise ChildFailed(f"ended with {code}: {self._tail()}")

    def stop(self, seconds: float = _STOP_SECONDS) -> int:
        """Ask it to end, and after some seconds end all its processes by force; its exit code."""
        self.usage.stop()
        tree = ProcessTree.of(self._child)
        if self._by_signal:
            self._child.ask_to_end()
        elif self._child.process.stdin is not None:
            self._child.process.stdin.close()
        if self._child.wait(seconds) is None:
            self._child.process.kill()
        tree.wait(_STOP_SECONDS).kill()
        return self._child.kill()

    def _output(self) -> str:
        return self._log.read_text(errors="replace")

    def _tail(self) -> str:
        return "\n    ".join(["", *self._output().splitlines()[-15:]])


@dataclass(frozen=True)
class Reading:
    """A look at a process tree and at the whole machine.

    CPU seconds so far of the tree, of this process and all below it, and of everybody; the tree's peak of memory so
    far, MB: resident, pages that processes share counted once.
    """

    time: float
    cpu_seconds: float
    peak_mb: float
    our_cpu: float
    all_cpu: float

    def elsewhere(self, after: Reading) -> float:
        """Cores that others kept busy between two readings: what disturbed the measurement."""
        others = (after.all_cpu - self.all_cpu) - (after.our_cpu - self.our_cpu)
        return max(others / (after.time - self.time), 0.0)


class Usage:
    """Looks at a process and its descendants, once started: at CPU time four times a second, at memory once."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._peak = self._cpu = self._weighed = 0.0
        self._lock = threading.Lock()
        self._follower = Follower(self._look, _SAMPLE_EVERY)
        self.start, self.stop = self._follower.start, self._follower.stop

    def now(self) -> Reading:
        self._look()
        times = psutil.cpu_times()
        busy = sum(times[:8]) - times.idle - times.iowait
        return Reading(time.time(), self._cpu, self._peak, sum(map(cpu_seconds, family(os.getpid()))), busy)

    def _look(self) -> None:
        with self._lock:
            processes = family(self._pid)
            self._cpu = max(self._cpu, sum(map(cpu_seconds, processes)))
            if time.monotonic() - self._weighed >= _WEIGH_EVERY:  # the kernel walks all pages for it
                self._weighed = time.monotonic()
                self._peak = max(self._peak, sum(map(proportional_mb, processes)))


def clean_environment(**variables: str) -> dict[str, str]:
    """This environment without settings of the product, other than where jars come from; with these variables."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith("RECOURSE_") or k in _KEPT}
    return {**kept, "PYTHONPATH": str(REPOSITORY), "PYTHONUNBUFFERED": "1", **variables}


def cpu_seconds(process: psutil.Process) -> float:
    """CPU seconds of a process and of its children that have ended and were waited for."""
    return _of_living(lambda: sum(process.cpu_times()[:4]))


def proportional_mb(process: psutil.Process) -> float:
    """Resident memory of a process, MB; a page that others share counts in part (PSS)."""
    return _of_living(lambda: process.memory_full_info().pss / 2**20)


def resident_mb(process: psutil.Process) -> float:
    """Resident memory of a process, MB; a page that others share counts in full."""
    return _of_living(lambda: process.memory_info().rss / 2**20)


def _of_living(figure: Callable[[], float]) -> float:
    """A figure of a process; 0 if the process is gone."""
    try:
        return float(figure())
    except (psutil.NoSuchProcess, psutil.AccessDenied):
        return 0.0


def family(pid: int) -> list[psutil.Process]:
    """A process and its descendants; none if it has ended."""
    try:
        first = psutil.Process(pid)
        return [first, *first.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []
