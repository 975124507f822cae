"""A contestant's process: started, watched for its word that it is ready, measured, ended."""

from __future__ import annotations

import os
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from streaming_jobs.platform.processes.child import ChildCommand, ProcessTree

REPOSITORY = Path(__file__).parents[2]
_SAMPLE_EVERY = 0.25
_WEIGH_EVERY = 1.0
_LOOK_EVERY = 0.01
_STOP_SECONDS = 20.0


class ContestantFailed(Exception):
    """A contestant ended, or did not do in time what it should; with the last lines that it printed."""


class Child:
    """A process whose output goes to a file, and whose end is ours: it is killed when this process is gone."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str], log: Path, ready: str) -> None:
        self.started = time.time()
        self._log = log
        self._ready_word = ready
        self._ready = threading.Event()
        self.ready_at = 0.0
        start = ChildCommand(command, environment, REPOSITORY, subprocess.PIPE)
        self._child = start.start_reaped(subprocess.PIPE)
        self.usage = Usage(self._child.pid)
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        self.usage.start()

    @property
    def pid(self) -> int:
        """Of the process itself."""
        return self._child.pid

    def wait_ready(self, seconds: float) -> None:
        """Until it says that it is ready; raises ContestantFailed."""
        deadline = time.monotonic() + seconds
        while not self._ready.wait(_LOOK_EVERY):
            self.check()
            if time.monotonic() > deadline:
                raise ContestantFailed(f"not ready within {seconds:.0f} s: {self._tail()}")

    def check(self) -> None:
        """Raise ContestantFailed if it has ended."""
        if (code := self._child.exit_code) is not None:
            self._reader.join(5)
            raise ContestantFailed(f"ended with {code}: {self._tail()}")

    def stop(self) -> None:
        """Ask it to end by closing its standard input; after some seconds end all its processes by force."""
        self.usage.stop()
        tree = ProcessTree.of(self._child)
        assert self._child.process.stdin is not None
        self._child.process.stdin.close()
        if self._child.wait(_STOP_SECONDS) is None:
            self._child.process.kill()
        tree.wait(_STOP_SECONDS).kill()
        self._child.kill()
        self._reader.join(5)

    def _read(self) -> None:
        assert self._child.process.stdout is not None
        word = self._ready_word.encode()
        with self._log.open("ab") as log:
            for line in self._child.process.stdout:
                if not self._ready.is_set() and word in line:
                    self.ready_at = time.time()
                    self._ready.set()
                log.write(line)
                log.flush()

    def _tail(self) -> str:
        return "\n    ".join(["", *self._log.read_text(errors="replace").splitlines()[-15:]])


@dataclass(frozen=True)
class Used:
    """CPU seconds of a process tree so far, and the peak of its memory, MB: resident, pages that are shared once."""

    cpu_seconds: float
    peak_mb: float


class Usage:
    """A thread that looks at a process and its descendants: at CPU time four times a second, at memory once."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._peak = 0.0
        self._cpu = 0.0
        self._weighed = 0.0
        self._ended = threading.Event()
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def start(self) -> None:
        """Begin to look."""
        self._thread.start()

    def stop(self) -> None:
        """Look no more."""
        self._ended.set()
        self._thread.join()

    def now(self) -> Used:
        """Look at once."""
        with self._lock:
            processes = family(self._pid)
            self._cpu = max(self._cpu, sum(cpu_seconds(process) for process in processes))
            if time.monotonic() - self._weighed >= _WEIGH_EVERY:  # the kernel walks all pages for it
                self._weighed = time.monotonic()
                self._peak = max(self._peak, sum(proportional_mb(process) for process in processes))
            return Used(self._cpu, self._peak)

    def _run(self) -> None:
        while not self._ended.wait(_SAMPLE_EVERY):
            self.now()


@dataclass(frozen=True)
class Moment:
    """A look at the whole machine: the time, and the CPU seconds of everybody and of this process and its children."""

    time: float
    all_cpu: float
    own_cpu: float

    @classmethod
    def now(cls) -> Moment:
        """Look at once."""
        times = psutil.cpu_times()
        idle = times.idle + times.iowait
        return cls(time.time(), sum(times[:8]) - idle, sum(cpu_seconds(process) for process in family(os.getpid())))

    def elsewhere(self, after: Moment) -> float:
        """Cores that others kept busy between two moments: what disturbed the measurement."""
        others = (after.all_cpu - self.all_cpu) - (after.own_cpu - self.own_cpu)
        return max(others / (after.time - self.time), 0.0)


def clean_environment(**own: str) -> dict[str, str]:
    """This environment without settings of the product, other than where jars come from."""
    kept = ("RECOURSE_JARS_DIR", "RECOURSE_MAVEN_REPOSITORY")
    variables = {k: v for k, v in os.environ.items() if not k.startswith("RECOURSE_") or k in kept}
    return {**variables, "PYTHONPATH": str(REPOSITORY), "PYTHONUNBUFFERED": "1", **own}


def cpu_seconds(process: psutil.Process) -> float:
    """CPU seconds of a process and of its children that have ended and were waited for."""
    try:
        return float(sum(process.cpu_times()[:4]))
    except psutil.NoSuchProcess:
        return 0.0


def proportional_mb(process: psutil.Process) -> float:
    """Resident memory of a process, MB; a page that others share counts in part (PSS)."""
    try:
        return float(process.memory_full_info().pss) / 2**20
    except (psutil.NoSuchProcess, psutil.AccessDenied):
        return 0.0


def family(pid: int) -> list[psutil.Process]:
    """A process and its descendants; none if it has ended."""
    try:
        first = psutil.Process(pid)
        return [first, *first.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []
