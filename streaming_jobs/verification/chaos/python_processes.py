"""The Python processes that Spark uses: the planners, and the workers while they read.

    fork server
    |- python -m pyspark.sql.streaming.python_streaming_source_runner    a planner, one per running query
    |- python -m pyspark.daemon pyspark.worker                           forks workers, reads nothing itself
    |    |- the same command line                                        a worker; Spark reuses it
    `- python -m pyspark.daemon pyspark.sql.worker.*                     take data sources apart; read no records

Below the JVM there is a client of the fork server for each; its command line has the same words after its own. Without
a fork server the processes themselves are below the JVM. The kill of one of them ends no session: its stream fails, or
Spark repeats the task, and the stream continues.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

import psutil

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
