"""Dagster's processes as `recourse up` runs them, over the fake streams, until SIGTERM. Prints the UI's address."""

from __future__ import annotations

import signal
import sys
import threading

from orchestration.local_dagster.processes import DagsterProcesses
from streaming_jobs.settings import Settings


def main() -> int:
    ended = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: ended.set())
    with DagsterProcesses(Settings.load(), module="tests.dagster.fakes.definitions") as processes:
        print(processes.url, flush=True)
        while not ended.wait(0.5):
            processes.supervise()
    return 0


if __name__ == "__main__":
    sys.exit(main())
