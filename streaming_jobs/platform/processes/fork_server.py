"""The server's process: imports, then forks for each request of a client.

A process with threads must not fork. PyArrow and NumPy start threads when they are imported, unless they are told not
to; if there is one nevertheless, the server ends, and clients do without it.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import re
import runpy
import select
import signal
import socket
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from io import TextIOWrapper
from pathlib import Path
from typing import Any

from setproctitle import getproctitle, setproctitle

from streaming_jobs.platform.processes.acknowledgements import acknowledge_tasks
from streaming_jobs.platform.processes.failing_row import name_rows
from streaming_jobs.platform.processes.fork_client import NUMBER, exactly
from streaming_jobs.platform.processes.pandas_on_demand import pandas_after_a_failure, pandas_on_demand

_ONE_THREAD = {"JE_ARROW_MALLOC_CONF": "background_thread:false", "OPENBLAS_NUM_THREADS": "1"}
_IMPORTED = (
    "pyspark.worker",
    "pyspark.sql.worker.create_data_source",
    "pyspark.sql.worker.plan_data_source_read",
    "pyspark.sql.streaming.python_streaming_source_runner",
    "streaming_jobs.formats",
    "streaming_jobs.sources.kafka",
    "streaming_jobs.sources.range_reader",
    "streaming_jobs.sources.topics",
)
_PROCESSOR_ROWS = "streaming_jobs.platform.processes.processor_rows"
_APPLIED = ("PYTHONPATH", "PYTHONUNBUFFERED")
_WITHOUT_PYTHON = re.compile(r"(^|/)spark-core_[^/]*\.jar$")
"""Spark has its own jar in the path of Python; each new worker would read the jar's table of contents (40 ms)."""
_WORKERS = "pyspark.daemon"
_REQUEST = 2.0
"""Seconds for a client to say what it wants."""
_END = 3.0
"""Seconds for the forked processes to end, before they are killed."""


def _of_a_start(environment: Mapping[str, str]) -> dict[str, str]:
    """The variables that count when an interpreter starts and cannot be applied later; PYTHON_... are Spark's."""
    names = (name for name in environment if name.startswith("LD_") or re.fullmatch(r"PYTHON[A-Z0-9]+", name))
    return {name: environment[name] for name in names if name not in _APPLIED}


_OURS = _of_a_start(os.environ)


def main() -> None:
    """Import, and serve at the listening socket that was inherited, until the standard input ends."""
    listening = socket.socket(fileno=os.dup(int(sys.argv[-1])))  # a small number, for select
    os.close(int(sys.argv[-1]))
    if sys.stdout is None or sys.stderr is None:
        sys.exit(1)  # descriptors 0 to 2 may be others than the standard streams
    os.close(os.pidfd_open(os.getpid()))  # raises OSError where it cannot be done
    getproctitle()  # it finds the command line beside the environment, as long as that is the one we began with
    _import()
    if (threads := sum(1 for _ in Path("/proc/self/task").iterdir())) > 1:
        print(f"{threads} threads after the imports: no fork server", file=sys.stderr)
        sys.exit(1)
    server = Server(listening)
    if (request := server.serve()) is None:
        server.end_forked()
    else:
        become(request)


def _import() -> None:
    """Import what the processes need, and keep its pages as they are."""
    before = {name: os.environ.get(name) for name in _ONE_THREAD}
    os.environ.update(_ONE_THREAD)
    for module in _IMPORTED:
        importlib.import_module(module)
    importlib.import_module(_PROCESSOR_ROWS).rows_by_columns()
    name_rows()
    acknowledge_tasks()
    for name, value in before.items():  # a user's functions get what the user has set
        if value is None:
            del os.environ[name]
        else:
            os.environ[name] = value
    pandas_on_demand()
    gc.collect()
    gc.freeze()  # pages of objects that the collector leaves alone stay shared


@dataclass(frozen=True)
class Request:
    """The process that a client requests; `streams` are descriptors of its standard input, output and errors."""

    streams: list[int]
    arguments: list[str]
    environment: dict[str, str]
    folder: str

    @classmethod
    def read(cls, client: socket.socket) -> Request:
        """Raises OSError or ValueError for a client that does not say it, or not in time."""
        client.settimeout(_REQUEST)
        length, streams, _, _ = socket.recv_fds(client, NUMBER, 3)
        try:
            request = cls(streams, **json.loads(exactly(client, int.from_bytes(length))))
            if (theirs := _of_a_start(request.environment)) != _OURS:
                raise ValueError(f"the interpreter has other variables: {sorted(theirs.items() ^ _OURS.items())}")
        except BaseException:
            _close(*streams)
            raise
        return request


@dataclass
class Forked:
    """A forked process with its descriptor, and the connection to its client while that runs."""

    pid: int
    process: int
    client: socket.socket | None

    def tell(self, number: int) -> None:
        if self.client is not None:
            with suppress(OSError):  # it has ended
                self.client.sendall(number.to_bytes(NUMBER, signed=True))

    def close(self) -> None:
        """Close this process's ends."""
        _close(self.process)
        if self.client is not None:
            self.client.close()


class Server:
    """Forks, tells clients how their processes ended, and ends the processes of clients that have ended."""

    def __init__(self, listening: socket.socket) -> None:
        self._listening = listening
        self._forked: list[Forked] = []

    def serve(self) -> Request | None:
        """In the server: None, once the standard input has ended. In a forked process: what it is to be."""
        while True:
            clients = [forked.client for forked in self._forked if forked.client is not None]
            processes = [forked.process for forked in self._forked]
            waited_for: list[Any] = [0, self._listening, *clients, *processes]
            ready, _, _ = select.select(waited_for, [], [])
            if 0 in ready:
                return None
            for forked in list(self._forked):
                if forked.process in ready:
                    self._collect(forked)
                elif forked.client is not None and forked.client in ready:  # it says nothing more, so it has ended
                    forked.client.close()
                    forked.client = None
                    os.kill(forked.pid, signal.SIGTERM)
            if self._listening in ready and (request := self._answer()) is not None:
                return request

    def end_forked(self) -> None:
        """End what was forked; kill what has not ended in time."""
        self._listening.close()
        for number in (signal.SIGTERM, signal.SIGKILL):
            for forked in self._forked:
                os.kill(forked.pid, number)
            deadline = time.monotonic() + _END
            while self._forked and (left := deadline - time.monotonic()) > 0:
                ready, _, _ = select.select([forked.process for forked in self._forked], [], [], left)
                for forked in [forked for forked in self._forked if forked.process in ready]:
                    self._collect(forked)

    def _collect(self, forked: Forked) -> None:
        """Tell the client of a process that has ended its exit code, negative for a signal."""
        _, status = os.waitpid(forked.pid, 0)
        forked.tell(os.waitstatus_to_exitcode(status))
        self._forked.remove(forked)
        forked.close()

    def _answer(self) -> Request | None:
        """Fork for the next client; returns its request in the forked process. Without an answer it helps itself."""
        client, request = None, None
        try:
            client, _ = self._listening.accept()
            request = Request.read(client)
            if select.select([client], [], [], 0)[0]:
                raise OSError("the client has not waited")
            pid = os.fork()
        except (OSError, ValueError, TypeError) as error:
            print(f"the fork server has not answered: {error}", file=sys.stderr)
            if client is not None:
                client.close()
            if request is not None:
                _close(*request.streams)
            return None
        if pid == 0:
            self._listening.close()
            client.close()
            for forked in self._forked:
                forked.close()
            return request
        _close(*request.streams)
        self._forked.append(Forked(pid, os.pidfd_open(pid), client))
        self._forked[-1].tell(pid)
        return None


def become(request: Request) -> None:
    """Be the process: Python with these arguments, `-m MODULE ARGUMENT...`."""
    for number, descriptor in enumerate(request.streams):
        os.dup2(descriptor, number)
    _close(*request.streams)
    for stream in (sys.stdout, sys.stderr):
        assert isinstance(stream, TextIOWrapper)
        stream.reconfigure(line_buffering=True, write_through=True)
    os.environ.clear()
    os.environ.update(request.environment)
    time.tzset()
    os.chdir(request.folder)
    path = [entry for entry in request.environment.get("PYTHONPATH", "").split(os.pathsep) if entry]
    path = [entry for entry in path if not _WITHOUT_PYTHON.search(entry)]
    sys.path[1:1] = [entry for entry in path if entry not in sys.path]
    setproctitle(" ".join(["python", *request.arguments]))
    _, module, *sys.argv[1:] = request.arguments
    if module == _WORKERS:
        pandas_after_a_failure()
    sys.modules.pop(module, None)  # it is to be the main module
    runpy.run_module(module, run_name="__main__", alter_sys=True)


def _close(*descriptors: int) -> None:
    for descriptor in descriptors:
        os.close(descriptor)


if __name__ == "__main__":
    main()
