"""What a session costs at a rate: cores, commits, files made, memory; the three shipped streams.

    python -m benchmarks.cost --rates 150,2000 --seconds 120 --warm-up 60 --out benchmarks/results/cost.json

Starts a broker and one session as Dagster would, sends the flights at a steady rate, and counts after the warm-up: CPU
seconds of the session's processes (Python and its JVM) by the second, versions of all tables, every path below state
and tables that was not there before (looked at each second, so that what lives shorter is not seen), and what lies
below `state/` at the end, by kind. Each rate begins in an empty home.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil

from benchmarks.measuring import Figures, quantile, save, table
from benchmarks.soak_samples import YearByYear, files_by_kind
from streaming_jobs.examples.flights.content import TOPIC
from streaming_jobs.platform.broker import Broker
from streaming_jobs.settings import DEMONSTRATION, Settings
from streaming_jobs.sources.topics import KEEP_FOREVER, Topics
from streaming_jobs.state.status import read_status
from streaming_jobs.verification.chaos.drivers import DriverProcess

STREAMS = ("flights_clean", "airport_hours", "carrier_totals")
PARTITIONS = 4
_START = 300.0


def main() -> int:
    """Measure each rate, print a table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.cost")
    parser.add_argument("--rates", default="150,2000", help="records a second, one run each")
    parser.add_argument("--seconds", type=float, default=120.0)
    parser.add_argument("--warm-up", type=float, default=60.0)
    parser.add_argument("--max-pause", help="setting stream.max_pause of the session, if not its default")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    rows = []
    for rate in options.rates.split(","):
        with tempfile.TemporaryDirectory(prefix="cost-") as folder:
            rows.append(run(float(rate), options.seconds, options.warm_up, options.max_pause, Path(folder)))
        sys.stdout.write(f"{rows[-1]}\n")
        sys.stdout.flush()
    sys.stdout.write(table(rows))
    save(options.out, seconds=options.seconds, warm_up=options.warm_up, rows=rows)
    return 0


def run(rate: float, seconds: float, warm_up: float, max_pause: str | None, folder: Path) -> Figures:
    """One rate."""
    home = folder / "home"
    with Broker(Settings.load({"home": folder / "broker"})) as broker:
        bootstrap = broker.start()
        settings = Settings.load({"home": home, "kafka.bootstrap_servers": bootstrap})
        Topics.of(settings.kafka, bootstrap).create(TOPIC, PARTITIONS, KEEP_FOREVER)
        home.mkdir()
        kept = {name: text for name, text in os.environ.items() if not name.startswith("RECOURSE_")}
        driver = DriverProcess.start(
            STREAMS,
            {
                **kept,
                "RECOURSE_HOME": str(home),
                "RECOURSE_FLOWS": json.dumps(DEMONSTRATION),
                "RECOURSE_KAFKA__BOOTSTRAP_SERVERS": bootstrap,
                **({"RECOURSE_STREAM__MAX_PAUSE": max_pause} if max_pause else {}),
            },
            folder / "driver" / "log",
        )
        feeder = YearByYear(bootstrap, 1.0)  # the first batch compiles the plan: meanwhile no backlog is to grow
        feeder.start()
        try:
            _until_running(settings, driver)
            feeder.stop()
            feeder = YearByYear(bootstrap, rate)
            feeder.start()
            _sleep(warm_up, feeder, driver)
            return _measured(rate, seconds, settings, feeder, driver)
        finally:
            feeder.stop()
            driver.stop(60)
            driver.end()


def _measured(rate: float, seconds: float, settings: Settings, feeder: YearByYear, driver: DriverProcess) -> Figures:
    process = psutil.Process(driver.pid)
    seen, versions = _paths(settings), _versions(settings)
    made: dict[str, int] = {}
    latencies: list[float] = []
    cpu, own, began = _cpu(process), psutil.cpu_times(), time.monotonic()
    sent = feeder.sent
    while time.monotonic() - began < seconds:
        _sleep(1.0, feeder, driver)
        for path in (fresh := _paths(settings) - seen):
            kind = path.parts[len(settings.home.parts)]
            made[kind] = made.get(kind, 0) + 1
        seen |= fresh
        found = (read_status(settings, name) for name in STREAMS)
        latencies += [status.batch_ms for status in found if status is not None and status.batch_ms]
    ended = time.monotonic() - began
    used, now = _cpu(process) - cpu, psutil.cpu_times()
    busy = sum(getattr(now, k) - getattr(own, k) for k in ("user", "system", "nice", "irq", "softirq"))
    kinds = files_by_kind(settings.home)
    statuses = [status for name in STREAMS if (status := read_status(settings, name)) is not None]
    return {
        "records/s": round((feeder.sent - sent) / ended),
        "asked": rate,
        "cores": used / ended,
        "other load, cores": (busy - used) / ended,
        "commits/min": (_versions(settings) - versions) / ended * 60,
        "files/min": sum(made.values()) / ended * 60,
        "of them tables": made.get("tables", 0) / ended * 60,
        "files in state": sum(1 for p in (settings.home / "state").rglob("*") if p.is_file()),
        "batch p50 ms": quantile(latencies, 0.5),
        "lag, records": sum(status.lag_records or 0 for status in statuses),
        "MB": sum(p.memory_info().rss for p in (process, *process.children(recursive=True))) / 2**20,
        **{f"files: {name}": one.number for name, one in kinds.items() if name in ("state", "Spark checkpoint")},
    }


def _until_running(settings: Settings, driver: DriverProcess) -> None:
    deadline = time.monotonic() + _START
    while True:
        found = [read_status(settings, name) for name in STREAMS]
        if all(status is not None and status.batch is not None for status in found):
            return
        if driver.exit_code is not None or time.monotonic() > deadline:
            raise RuntimeError(f"the session did not come to run: {driver.words()}")
        time.sleep(0.5)


def _sleep(seconds: float, feeder: YearByYear, driver: DriverProcess) -> None:
    deadline = time.monotonic() + seconds
    while (left := deadline - time.monotonic()) > 0:
        feeder.check()
        if driver.exit_code is not None:
            raise RuntimeError(f"the session ended: {driver.words()}")
        time.sleep(min(left, 1.0))


def _paths(settings: Settings) -> set[Path]:
    found = set()
    for part in ("state", "tables"):
        for folder, _, names in os.walk(settings.home / part):
            found |= {Path(folder) / name for name in names}
    return found


def _versions(settings: Settings) -> int:
    logs = settings.tables.glob("*/_delta_log")
    return sum(max(int(p.name[:20]) for p in log.glob("*.json") if p.name[:20].isdigit()) + 1 for log in logs)


def _cpu(process: psutil.Process) -> float:
    def seconds(each: Any) -> float:
        try:
            times = each.cpu_times()
        except psutil.NoSuchProcess:
            return 0.0
        return float(times.user + times.system)

    return sum(seconds(each) for each in (process, *process.children(recursive=True)))


if __name__ == "__main__":
    sys.exit(main())
