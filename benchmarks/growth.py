"""A session for half an hour: do its Python processes, threads, file descriptors or memory grow?

    python -m benchmarks.growth --out benchmarks/results/growth.json
    python -m benchmarks.growth --minutes 2 --streams flights_clean

Starts a broker and one session as Dagster would, and sends the flights at a steady rate. A burst of records every
half minute makes the planner hand batches over to the Python workers of Spark. Every second: Python processes, threads,
descriptors and memory of the session's processes (driver, JVM, planners, workers). Memory is PSS: a page that
several processes share counts once. Threads of three pools with a bound of their own are left out (`_POOLS`).
`benchmarks.soak` is for files and batch times, and includes Dagster.

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

import argparse
import json
import os
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import combinations
from pathlib import Path
from typing import Any

import psutil

from benchmarks.measuring import Figures, save, table
from benchmarks.soak_samples import YearByYear
from benchmarks.speed.process import clean_environment
from streaming_jobs.examples.flights.content import TOPIC
from streaming_jobs.examples.flights.feeder import PARTITIONS
from streaming_jobs.platform.broker import Broker
from streaming_jobs.settings import DEMONSTRATION, Settings
from streaming_jobs.sources.planner import SMALL
from streaming_jobs.sources.topics import KEEP_FOREVER, Topics
from streaming_jobs.state.status import Status, read_status
from streaming_jobs.verification.chaos.drivers import DriverProcess
from streaming_jobs.verification.chaos.python_processes import planners, workers

STREAMS = ("flights_clean", "airport_hours", "carrier_totals")
BURST = 2 * SMALL + 10_000
EVERY = 1.0
WARM_UP_SHARE, WARM_UP = 1 / 6, 40.0
BURST_EVERY = 30.0
PARTS = 6
BEHIND_S = 10.0
MEMORY_FROM = 10.0
_START, _END = 240.0, 60.0
_POOLS = ("block-manager-", "tokio-rt-worker")
"""Of the names of threads in pools with a bound of their own, which they reach within minutes or never: two of Spark's
block manager, 100 each, and that of deltalake, at most 512, which has as many as ever worked at the same time."""


@dataclass(frozen=True)
class Sample:
    """One look at a session's processes; `at` in seconds since its streams ran, dictionaries by kind, memory in MB."""

    at: float
    processes: dict[str, int]
    threads: dict[str, int]
    descriptors: dict[str, int]
    memory: dict[str, float]


@dataclass(frozen=True)
class Bound:
    """The growth of a figure in one run that is too much: a number, or a share of the first part if that is more."""

    name: str
    figure: Callable[[Sample], float]
    most: float
    share: float = 0.0

    def limit(self, first: float) -> float:
        """The bound for a figure that began with `first`."""
        return max(self.most, first * self.share)


def _of(figure: str, kind: str) -> Callable[[Sample], float]:
    return lambda sample: float(getattr(sample, figure).get(kind, 0))


KINDS = ("driver", "JVM", "planners", "workers", "other Python")
"""Other Python processes are the fork server and its clients, the parent of the workers, and those that take data
sources apart. Spark ends them when they are idle, so they are judged apart."""
BOUNDS = (
    *(Bound(f"processes, {kind}", _of("processes", kind), 1) for kind in KINDS[2:]),
    *(Bound(f"{what}, {kind}", _of(what, kind), 12) for what in ("threads", "descriptors") for kind in KINDS),
)
MEMORY = Bound("memory (PSS), MB", lambda sample: sum(sample.memory.values()), 24, 0.06)


@dataclass(frozen=True)
class Times:
    """The times of a run, in seconds."""

    whole: float
    warm_up: float
    burst_every: float

    @classmethod
    def of(cls, minutes: float) -> Times:
        """Each part of the judged time has a burst at least; raises ValueError for a run that is all warm-up."""
        whole = minutes * 60
        warm_up = max(WARM_UP, whole * WARM_UP_SHARE)
        if whole < 1.5 * warm_up:
            raise ValueError(f"{minutes:g} minutes are too few: the warm-up takes {warm_up:.0f} s of them")
        return cls(whole, warm_up, min(BURST_EVERY, (whole - warm_up) / PARTS))

    @property
    def judged(self) -> float:
        """Seconds after the warm-up."""
        return self.whole - self.warm_up


@dataclass
class Growth:
    """The samples of a run, and the last status of each stream."""

    times: Times
    rate: float
    samples: list[Sample] = field(default_factory=list)
    statuses: dict[str, Status] = field(default_factory=dict)

    def verdicts(self) -> list[dict[str, Any]]:
        """A row for everything that is judged."""
        bounds = (*BOUNDS, MEMORY) if self.times.whole >= MEMORY_FROM * 60 else BOUNDS
        rows = [self._judged(bound) for bound in bounds]
        rows += [self._stream(name, status) for name, status in self.statuses.items()]
        most = max((sample.processes["workers"] for sample in self.samples), default=0)
        return [*rows, _row("workers at the same time", "", most, "", "at least 1", most >= 1)]

    def floors(self, figure: Callable[[Sample], float]) -> list[tuple[float, float]]:
        """The middle of each part of the judged time, in seconds, and the lowest value in it."""
        length = self.times.judged / PARTS
        floors = []
        for part in range(PARTS):
            begun = self.times.warm_up + part * length
            values = [figure(sample) for sample in self.samples if begun <= sample.at < begun + length]
            if values:
                floors.append((begun + length / 2, min(values)))
        return floors

    def _judged(self, bound: Bound) -> dict[str, Any]:
        floors = self.floors(bound.figure)
        if len(floors) < PARTS:
            return _row(bound.name, "", "", "no samples in some part", "", False)
        first, last = floors[0][1], floors[-1][1]
        grown, limit = slope(floors) * self.times.judged, bound.limit(first)
        return _row(bound.name, first, last, grown, limit, grown < limit)

    def _stream(self, name: str, status: Status) -> dict[str, Any]:
        good = status.state in ("running", "idle") and not status.restarts
        good &= (status.lag_records or 0) <= self.rate * BEHIND_S + BURST
        found = f"{status.state}, batch {status.batch}, {status.lag_records} behind, {status.restarts} restarts"
        return _row(f"stream {name}", "", found, "", "no restart", good)


def slope(points: Sequence[tuple[float, float]]) -> float:
    """The median slope of all pairs of points (Theil and Sen): one part that differs does not decide."""
    return statistics.median((y2 - y1) / (x2 - x1) for (x1, y1), (x2, y2) in combinations(points, 2))


def look(driver: DriverProcess, at: float) -> Sample:
    """A sample of a session's processes; those that end meanwhile are left out, and programs that the JVM calls."""
    jvm = driver.jvm
    below = psutil.Process(driver.pid).children(recursive=True)
    plan, read = planners(below), workers(below)
    known = {process.pid for process in (*plan, *read)}
    others = [process for process in below if process.pid not in known and _is_python(process)]
    groups = ([psutil.Process(driver.pid)], [jvm] if jvm is not None else [], plan, read, others)
    kinds = dict(zip(KINDS, groups, strict=True))
    threads, descriptors, memory = dict.fromkeys(kinds, 0), dict.fromkeys(kinds, 0), dict.fromkeys(kinds, 0.0)
    for kind, processes in kinds.items():
        for process in processes:
            with suppress(psutil.Error, FileNotFoundError):
                counted = _threads(process.pid), process.num_fds(), process.memory_full_info().pss / 2**20
                threads[kind] += counted[0]
                descriptors[kind] += counted[1]
                memory[kind] += counted[2]
    return Sample(at, {kind: len(group) for kind, group in kinds.items()}, threads, descriptors, memory)


def _threads(pid: int) -> int:
    """Threads of a process, without those of the bounded pools."""
    names = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        with suppress(FileNotFoundError, ProcessLookupError):
            names.append((task / "comm").read_text())
    return sum(not name.startswith(_POOLS) for name in names)


def _is_python(process: psutil.Process) -> bool:
    with suppress(psutil.Error):
        return process.name().startswith("python")
    return False


def run(minutes: float, rate: float, folder: Path, streams: Sequence[str] = STREAMS) -> Growth:
    """Everything from the start of the broker to the end of the session; raises RuntimeError if the session ends."""
    growth = Growth(Times.of(minutes), rate)
    home = folder / "home"
    with Broker(Settings.load({"home": folder / "broker"})) as broker:
        bootstrap = broker.start()
        settings = Settings.load({"home": home, "kafka.bootstrap_servers": bootstrap})
        Topics.of(settings.kafka, bootstrap).create(TOPIC, PARTITIONS, KEEP_FOREVER)
        environment = clean_environment(
            RECOURSE_HOME=str(home),
            RECOURSE_FLOWS=json.dumps(DEMONSTRATION),
            RECOURSE_KAFKA__BOOTSTRAP_SERVERS=bootstrap,
            RECOURSE_STREAM__BATCH_SECONDS="60 seconds",  # so that a burst is one batch, also on a slow machine
        )
        driver = DriverProcess.start(streams, environment, folder / "driver" / "log")
        feeder = YearByYear(bootstrap, rate)
        feeder.start()
        try:
            _wait_for_streams(settings, streams, driver)
            _sample(growth, driver, feeder)
            growth.statuses = {name: s for name in streams if (s := read_status(settings, name)) is not None}
        finally:
            feeder.stop()
            driver.stop(_END)
            driver.end()
    return growth


def _sample(growth: Growth, driver: DriverProcess, feeder: YearByYear) -> None:
    began, times = time.monotonic(), growth.times
    burst_at = 0.0
    while (at := time.monotonic() - began) < times.whole:
        feeder.check()
        if driver.exit_code is not None:
            raise RuntimeError(f"the session ended: {driver.words()}")
        # The last part ends without one, so that the streams are up to date then.
        if burst_at <= at < times.whole - times.burst_every / 2:
            feeder.burst(BURST)
            burst_at += times.burst_every
        growth.samples.append(look(driver, at))
        if len(growth.samples) % 10 == 1:
            _tell(growth.samples[-1], feeder.sent)
        time.sleep(max(0.0, EVERY - (time.monotonic() - began - at)))


def _wait_for_streams(settings: Settings, streams: Sequence[str], driver: DriverProcess) -> None:
    deadline = time.monotonic() + _START
    while True:
        found = [read_status(settings, name) for name in streams]
        if all(status is not None and status.batch is not None for status in found):
            return
        if driver.exit_code is not None or time.monotonic() > deadline:
            raise RuntimeError(f"the streams did not start: {driver.words()}")
        time.sleep(0.5)


def _tell(sample: Sample, sent: int) -> None:
    memory = ", ".join(f"{kind} {mb:.0f}" for kind, mb in sample.memory.items())
    sys.stderr.write(
        f"{sample.at:.0f} s: {sent:,} records, processes {sample.processes}, "
        f"threads {sample.threads}, descriptors {sample.descriptors}, MB: {memory}\n"
    )
    sys.stderr.flush()


def _row(what: str, first: object, last: object, grown: object, bound: object, good: bool) -> dict[str, Any]:
    return {
        "what": what,
        "first part": first,
        "last part": last,
        "growth": grown,
        "bound": bound,
        "verdict": "good" if good else "NOT GOOD",
    }


def bad(verdicts: Sequence[Figures]) -> list[Figures]:
    """The rows that are not good."""
    return [row for row in verdicts if row["verdict"] != "good"]


def main() -> int:
    """Run, judge, print."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.growth")
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--rate", type=float, default=500.0, help="records per second between the bursts")
    parser.add_argument("--streams", default=",".join(STREAMS))
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    with tempfile.TemporaryDirectory(prefix="growth-") as folder:
        growth = run(options.minutes, options.rate, Path(folder), options.streams.split(","))
    verdicts = growth.verdicts()
    sys.stdout.write(table(verdicts))
    samples = [
        {**vars(sample), "memory": {kind: round(mb, 1) for kind, mb in sample.memory.items()}}
        for sample in growth.samples
    ]
    figures = {"minutes": options.minutes, "rate": options.rate, "cores": os.cpu_count()}
    save(options.out, **figures, verdicts=verdicts, samples=samples)
    return int(bool(bad(verdicts)))


if __name__ == "__main__":
    sys.exit(main())
