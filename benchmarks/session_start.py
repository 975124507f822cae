"""The time from the start of a session's process to its running stream, and the CPU time until then by process.

    python -m benchmarks.session_start --rounds 10 [--set stream.pace=live]

The stream is the stateless one of benchmarks/speed/flows.py on a topic of 1,000 records; each round has a home of its
own. CPU seconds are those that the driver, its JVM and the other Python processes have used when the stream runs; a
child that has ended by then counts with its parent.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from contextlib import suppress
from pathlib import Path

import psutil

from benchmarks.measuring import Figures, quiet, save, table
from benchmarks.speed.contestants import Assignment, Recourse
from benchmarks.speed.feed import create_topic, feed_backlog
from benchmarks.speed.process import Moment, cpu_seconds, family
from benchmarks.speed.records import generate
from streaming_jobs.platform.broker import Broker
from streaming_jobs.settings import Settings

_RECORDS, _READY = 1_000, 120.0


def one_start(contestant: Recourse, assignment: Assignment) -> dict[str, float]:
    """Start a session, and end it when its stream runs: seconds, CPU seconds by process, cores of other load."""
    before = Moment.now()
    child = contestant.start(assignment)
    try:
        child.wait_ready(_READY)
        used = cpu_by_kind(child.pid)
        elsewhere = before.elsewhere(Moment.now())
    finally:
        child.stop()
    return {"seconds": child.ready_at - child.started, **used, "other load": elsewhere}


def cpu_by_kind(driver: int) -> dict[str, float]:
    """CPU seconds so far of a session's processes, by kind."""
    used = {"driver": 0.0, "JVM": 0.0, "other Python": 0.0}
    for process in family(driver):
        with suppress(psutil.NoSuchProcess):
            kind = "driver" if process.pid == driver else "JVM" if process.name() == "java" else "other Python"
            used[kind] += cpu_seconds(process)
    return used


def main() -> int:
    """Run the rounds and print them with their medians."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.session_start", description=__doc__)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="a setting; repeatable")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    quiet()
    contestant = Recourse(settings=dict(each.split("=", 1) for each in options.set))
    rows: list[Figures] = []
    with tempfile.TemporaryDirectory(prefix="benchmark-") as name:
        folder = Path(name)
        with Broker(Settings.load({"home": folder / "broker", "broker.heap_mb": 256})) as broker:
            bootstrap = broker.start()
            create_topic(bootstrap, "start")
            feed_backlog(bootstrap, "start", generate(_RECORDS, seed=1))
            for number in range(options.rounds):
                home = folder / f"home-{number}"
                home.mkdir()
                assignment = Assignment("stateless", "start", bootstrap, home, _RECORDS, live=False)
                rows.append({"round": number + 1, **one_start(contestant, assignment)})
    kinds = [key for key in rows[0] if key != "round"]
    rows.append({"round": "median", **{key: statistics.median(row[key] for row in rows) for key in kinds}})
    print(table(rows))
    save(options.out, rounds=rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
