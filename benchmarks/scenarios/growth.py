"""A session for half an hour: do its Python processes, threads, file descriptors or memory grow?

    python -m benchmarks growth --out benchmarks/results/growth.json
    python -m benchmarks growth --minutes 2 --streams flights_clean

Starts a broker and one session as Dagster would, and sends the flights at a steady rate. A burst of records every
half minute makes the planner hand batches over to the Python workers of Spark. Every second: Python processes, threads,
descriptors and memory of the session's processes (driver, JVM, planners, workers). Memory is PSS: a page that
several processes share counts once. Threads of three pools with a bound of their own are left out (`_POOLS`).
`benchmarks soak` is for files and batch times, and includes Dagster.

The first sixth, and at least 40 seconds, is the warm-up. The rest is divided into parts, each with at least one burst.
The lowest value of a part is judged, so that a burst is no growth; the growth is the slope over the parts (Theil and
Sen), times the time of all of them:

    processes           below 1, of each kind: planners, workers, other Python processes
    threads             below 12, of each kind, driver and JVM too
    descriptors         below 12, of each kind
    memory              below 6 % of the first part, or 24 MB if that is more; judged from ten minutes on

A run in which no worker was there, a stream was started again, or more than ten seconds of records and a burst wait at
the end proves nothing. Exit code 1 for this, and for growth.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Annotated

import psutil

from benchmarks.feeds import YearByYear, create_topic
from benchmarks.long_run import BEHIND_S, PARTS, STREAMS, Bound, Figures, LongRun, Times, judged_row
from benchmarks.place import Place, place, wait_for_batches
from benchmarks.processes import Child, family, proportional_mb
from benchmarks.run import Report, Row
from streaming_jobs.examples.flights.content import TOPIC
from streaming_jobs.examples.flights.feeder import PARTITIONS
from streaming_jobs.runtime.session_options import supervised_command
from streaming_jobs.settings import DEMONSTRATION
from streaming_jobs.sources.planner import SMALL
from streaming_jobs.verification.chaos.drivers import planners, workers

BURST = 2 * SMALL + 10_000
EVERY, BURST_EVERY = 1.0, 30.0
WARM_UP_SHARE = 1 / 6
BOUNDS = (
    Bound("processes, ", 1),
    Bound("threads, ", 12),
    Bound("descriptors, ", 12),
    Bound("memory, all", 24, share=0.06, minutes=10),
)
_END = 60.0
_POOLS = ("block-manager-", "tokio-rt-worker")
"""Of the names of threads in pools with a bound of their own, which they reach within minutes or never: two of Spark's
block manager, 100 each, and that of deltalake, at most 512, which has as many as ever worked at the same time."""


def run(
    report: Report,
    *,
    minutes: float = 30.0,
    rate: Annotated[float, "records per second between the bursts"] = 500.0,
    streams: tuple[str, ...] = STREAMS,
    plot: Annotated[Path | None, "draw the samples (.svg or .png); needs matplotlib"] = None,
) -> None:
    with place() as here:
        growth = watch(here, minutes, rate, streams)
    growth.report(report, verdicts(growth), plot)


def verdicts(growth: LongRun) -> list[Row]:
    """What is judged: also whether there was a worker."""
    most = max((sample.figures.get("processes, workers", 0) for sample in growth.samples), default=0)
    return [
        *growth.verdicts(BOUNDS),
        judged_row("workers at the same time", "", most, "", "at least 1", good=most >= 1),
    ]


def burst_every(times: Times) -> float:
    """Seconds between two bursts: each part has one at least."""
    return min(BURST_EVERY, times.judged / PARTS)


def watch(here: Place, minutes: float, rate: float, streams: Sequence[str] = STREAMS) -> LongRun:
    """A session from its start to its end; raises ChildFailed if the session ends unasked."""
    times = Times.of(minutes, WARM_UP_SHARE)
    growth, settings, next_burst = LongRun(times, rate * BEHIND_S + BURST), here.settings(), 0.0
    create_topic(here.bootstrap, TOPIC, PARTITIONS)
    # One batch takes as long as it likes, so that a burst is one batch, also on a slow machine.
    environment = here.environment(DEMONSTRATION, RECOURSE_STREAM__BATCH_SECONDS="60 seconds")
    session = Child(supervised_command(streams), environment, here.folder / "driver.log")
    feeder = YearByYear(here.bootstrap, rate)

    def burst_and_look(at: float) -> Figures:
        nonlocal next_burst
        # The last part ends without one, so that the streams are up to date then.
        if next_burst <= at < times.whole - burst_every(times) / 2:
            feeder.burst(BURST)
            next_burst += burst_every(times)
        return look(session.pid)

    feeder.start()
    try:
        wait_for_batches(settings, streams, session)
        growth.watch(session, feeder, burst_and_look, EVERY)
        growth.read_statuses(settings, streams)
    finally:
        feeder.stop()
        session.stop(_END)
    return growth


def look(pid: int) -> Figures:
    """Figures of a session's processes, without those that end meanwhile, and programs that the JVM calls.

    Other Python processes are the fork server and its clients, the parent of the workers, and those that take data
    sources apart. Spark ends them when they are idle, so they are counted apart.
    """
    driver, *below = family(pid)
    read = {"planners": planners(below), "workers": workers(below)}
    known = {process.pid for processes in read.values() for process in processes}
    others = [process for process in below if process.pid not in known and _name(process).startswith("python")]
    jvm = [process for process in below if _name(process) == "java"][:1]
    kinds = {"driver": [driver], "JVM": jvm, **read, "other Python": others}
    counts = {f"{what}, {kind}": 0.0 for what in ("processes", "threads", "descriptors", "memory") for kind in kinds}
    for kind, processes in kinds.items():
        counts[f"processes, {kind}"] = len(processes)
        for process in processes:
            with suppress(psutil.Error, FileNotFoundError):
                threads, descriptors, memory = _threads(process.pid), process.num_fds(), proportional_mb(process)
                counts[f"threads, {kind}"] += threads
                counts[f"descriptors, {kind}"] += descriptors
                counts[f"memory, {kind}"] += memory
    return {**counts, "memory, all": sum(counts[f"memory, {kind}"] for kind in kinds)}


def _threads(pid: int) -> int:
    """Threads of a process, without those of the bounded pools."""
    names = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        with suppress(FileNotFoundError, ProcessLookupError):
            names.append((task / "comm").read_text())
    return sum(not name.startswith(_POOLS) for name in names)


def _name(process: psutil.Process) -> str:
    with suppress(psutil.Error):
        return process.name()
    return ""
