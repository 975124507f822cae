"""Planners and workers are told apart from the other Python processes of a JVM, and reading workers from idle ones."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections import namedtuple
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil

from streaming_jobs.verification.chaos.drivers import Machine, ReadingWorkers, executors, planners, workers
from tests.support.waiting import wait_for

PORT = 9092
CLIENT = "/usr/bin/python -IS processes/fork_client.py /scratch"
Address = namedtuple("Address", "ip port")


@dataclass
class Process:
    """As much of a process as is looked at; `port` is that of its connection."""

    pid: int
    module: str
    parent: int = 1
    used: float = 1.0
    port: int | None = PORT
    gone: bool = False
    titled: bool = True
    python: str = "python"

    def cmdline(self) -> list[str]:
        words = [*self.python.split(), "-m", *self.module.split()]
        return [" ".join(words), "", ""] if self.titled else words

    def ppid(self) -> int:
        return self.parent

    def cpu_times(self) -> Any:
        if self.gone:
            raise psutil.NoSuchProcess(self.pid)
        return SimpleNamespace(user=self.used, system=0.0)

    def net_connections(self, kind: str) -> list[Any]:
        assert kind == "tcp"
        listening = SimpleNamespace(raddr=())
        return [listening, *([SimpleNamespace(raddr=Address("127.0.0.1", self.port))] if self.port else [])]


def tree() -> list[Any]:
    return [
        Process(30, "pyspark.sql.streaming.python_streaming_source_runner"),
        Process(5, "pyspark.sql.streaming.python_streaming_source_runner", titled=False, python=CLIENT),
        Process(6, "pyspark.daemon pyspark.worker", titled=False, python=CLIENT),
        Process(11, "pyspark.daemon pyspark.worker", parent=10),
        Process(12, "pyspark.daemon pyspark.worker", parent=10),
        Process(10, "pyspark.daemon pyspark.worker"),
        Process(20, "pyspark.daemon pyspark.sql.worker.plan_data_source_read"),
        Process(21, "pyspark.daemon pyspark.sql.worker.plan_data_source_read", parent=20),
        Process(29, "pyspark.sql.streaming.python_streaming_source_runner", titled=False, python="/usr/bin/python"),
    ]


def test_planners_and_workers_are_found_and_neither_daemons_nor_what_takes_sources_apart() -> None:
    assert [process.pid for process in planners(tree())] == [29, 30]
    assert [process.pid for process in workers(tree())] == [11, 12]


def test_a_worker_reads_if_it_is_connected_to_the_broker_and_uses_its_time() -> None:
    processes, looking = tree(), ReadingWorkers(PORT)
    first, second = workers(processes)
    assert looking.among(processes) == [], "one look shows no use of time"
    assert looking.among(processes) == [], "both are idle"
    first.used += 0.01  # type: ignore[attr-defined]
    assert [process.pid for process in looking.among(processes)] == [11]
    assert looking.among(processes) == []
    second.used, second.port = 2.0, 5005  # type: ignore[attr-defined]
    assert looking.among(processes) == [], "it starts, and has no connection to the broker yet"
    first.used, first.gone = 3.0, True  # type: ignore[attr-defined]
    assert looking.among(processes) == []


WORKER = """
import subprocess, sys, time

asked = ["CoarseGrainedExecutorBackend", "--driver-url", "spark://CoarseGrainedScheduler@127.0.0.1:1234"]
subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)", f"org.apache.{asked[0]}", *asked[1:]])
time.sleep(60)
"""


def test_a_machine_is_killed_with_its_executors_and_started_as_before(tmp_path: Path) -> None:
    command = [sys.executable, "-c", WORKER, "org.apache.spark.deploy.worker.Worker", "spark://there:7077"]
    environment, machines = {**os.environ, "CORES": "1"}, list[subprocess.Popen[bytes]]()
    try:
        machines.append(subprocess.Popen(command, env=environment, cwd=tmp_path))
        [executor] = wait_for(lambda: executors({1234}), "an executor")
        assert not executors({4321})
        machine = Machine.of(executor)
        assert machine is not None and machine.worker.pid == machines[0].pid
        machine.kill()
        assert machines[0].wait(10) == -signal.SIGKILL
        wait_for(lambda: not executors({1234}), "the executor's end")
        assert Machine.of(executor) is None
        with (tmp_path / "log").open("wb") as output:
            machines.append(machine.start(output))
        [again] = wait_for(lambda: executors({1234}), "an executor")
        worker = psutil.Process(machines[1].pid)
        assert again.ppid() == worker.pid and worker.cmdline() == command
        assert worker.environ()["CORES"] == "1" and worker.cwd() == str(tmp_path)
    finally:
        for process in machines:
            for child in psutil.Process(process.pid).children() if process.poll() is None else []:
                child.kill()
            process.kill()
            process.wait(10)
