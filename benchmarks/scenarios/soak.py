"""The shipped streams for an hour, as `recourse up` runs them: does anything grow that should not?

    python -m benchmarks soak --minutes 60 --rate 1500 --out benchmarks/results/soak.json --plot docs/images/soak.svg
    python -m benchmarks soak --minutes 10

Starts `recourse up` (broker, Dagster, one session with three streams) in a folder of its own and sends the flights at
a steady rate, year after year: after 2013 the same flights of 2014. Every ten seconds: memory of each process, number
and bytes of files by kind, batch times. Files that no version lists are kept for a sixth of the run instead of an hour,
and as many versions of a table's log as that has seconds (500 at most), so that a run shows where they stop.
At the end it judges the growth over the last two thirds (`benchmarks/long_run.py` says how it is taken):

- memory of a process, the lowest of each part: below 10 %, or 16 MB if that is more;
- a kind of file that is bounded within minutes, the greatest number: below a fifth, or 100 files if that is more, and
  of bytes a fifth, or 8 MB;
- batch time, the median: below 30 %, or 50 ms if that is more;
- no stream failed, started again, or is more than ten seconds of records behind.

Exit code 1 when one of these is not so. With less than six minutes nothing is judged but the last one.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import psutil
from deltalake import DeltaTable

from benchmarks.feeds import YearByYear
from benchmarks.long_run import BEHIND_S, STREAMS, Bound, Figures, LongRun, Times
from benchmarks.place import wait_for_batches
from benchmarks.processes import Child, ChildFailed, clean_environment, resident_mb
from benchmarks.run import Report, median
from streaming_jobs.platform.broker import bootstrap_servers
from streaming_jobs.settings import Settings

EVERY, STATUS_EVERY = 10.0, 0.2
WARM_UP_SHARE, SHORTEST = 1 / 3, 6.0
_END = 120.0
_ROLES = {
    "kafka.Kafka": "broker",
    "org.apache.spark.deploy": "Spark's JVM",
    "streaming_jobs.session": "driver",
    "dagster._daemon": "Dagster daemon",
    "dagster_webserver": "Dagster webserver",
    "execute_run": "Dagster run",
    "code-server": "Dagster code server",
    "dagster api": "Dagster code server",
    "orchestration.cli": "recourse up",
    "pyspark": "Spark's Python workers",
}
"""What a process of `recourse up` is, by a part of its command line; the first part that fits."""
UNLISTED = "data files no version lists"
BOUNDED = (UNLISTED, "table logs", "Spark checkpoint", "state", "Spark scratch", "logs")
"""Kinds whose bound is reached within minutes; the others grow with the records or are bounded by days."""
Parts = tuple[str, ...]
"""The folders of a file below the home."""


def _in_generation(parts: Parts, *names: str) -> bool:
    inside = parts[3] if len(parts) > 3 else ""
    return parts[:1] == ("state",) and len(parts) > 2 and parts[2].startswith("g") and inside in names


_KINDS: dict[str, Callable[[Parts], bool]] = {
    "data files": lambda _: False,
    "table logs": lambda parts: parts[:1] == ("tables",) and "_delta_log" in parts,
    UNLISTED: lambda parts: parts[:1] == ("tables",),
    "state": lambda parts: _in_generation(parts, "state"),
    "Spark checkpoint": lambda parts: _in_generation(parts, "", "offsets", "commits", "sources"),
    "ledger files": lambda parts: parts[:1] == ("state",) and parts[2:3] == ("ledger",),
    "status, lease, record": lambda parts: parts[:1] == ("state",),
    "Spark scratch": lambda parts: parts[:1] == ("scratch",),
    "logs": lambda parts: parts[:1] == ("logs",),
    "Dagster's storage": lambda parts: parts[:1] == ("dagster",),
    "broker": lambda parts: parts[:1] == ("broker",),
    "others": lambda _: True,
}


BOUNDS = (
    Bound("memory, ", 16, share=0.1, minutes=SHORTEST),
    *(Bound(f"files, {kind}", 100, share=0.2, of=max, minutes=SHORTEST) for kind in BOUNDED),
    *(Bound(f"MB, {kind}", 8, share=0.2, of=max, minutes=SHORTEST) for kind in BOUNDED),
    Bound("batch ms, ", 50, share=0.3, of=median, minutes=SHORTEST),
)


def run(
    report: Report,
    *,
    minutes: float = 60.0,
    rate: Annotated[float, "records per second"] = 1500.0,
    plot: Annotated[Path | None, "draw the samples (.svg or .png); needs matplotlib"] = None,
) -> None:
    with tempfile.TemporaryDirectory(prefix="soak-") as folder:
        soak = watch(Path(folder), minutes, rate)
    soak.report(report, soak.verdicts(BOUNDS), plot)


def watch(folder: Path, minutes: float, rate: float) -> LongRun:
    """Everything from the start of `recourse up` to its end."""
    soak, home, retention = LongRun(Times.of(minutes, WARM_UP_SHARE), rate * BEHIND_S), folder / "home", minutes * 10
    settings = Settings.load({"home": home})
    environment = clean_environment(
        RECOURSE_HOME=str(home),
        RECOURSE_TABLE__DELETED_FILE_RETENTION=f"{retention:.0f} seconds",
        RECOURSE_TABLE__LOG_VERSIONS=f"{min(500, max(60, retention)):.0f}",
    )
    command = [sys.executable, "-m", "orchestration.cli", "up", "--rate", "0", "--port", "0"]
    up = Child(command, environment, folder / "up.log", by_signal=True)
    batch_ms: dict[str, dict[int | None, float]] = {name: {} for name in STREAMS}
    next_sample = EVERY

    def look(at: float) -> Figures | None:
        """Look at the statuses, every ten seconds at processes and files."""
        nonlocal next_sample
        soak.read_statuses(settings, STREAMS)
        for name, status in soak.statuses.items():
            if status.batch_ms is not None:
                batch_ms[name].setdefault(status.batch, status.batch_ms)
        if at < next_sample:
            return None
        next_sample += EVERY
        times = {f"batch ms, {name}": median(list(ms.values())) for name, ms in batch_ms.items() if ms}
        for ms in batch_ms.values():
            ms.clear()
        return {**memory_by_role(home), **files_by_kind(home), **times}

    try:
        wait_for_batches(settings, STREAMS, up, lambda status: status.state in ("running", "idle"))
        feeder = YearByYear(bootstrap_servers(settings), rate)
        feeder.start()
        try:
            soak.watch(up, feeder, look, STATUS_EVERY)
        finally:
            feeder.stop()
    finally:
        code = up.stop(_END)
    if code != 0:
        raise ChildFailed(f"recourse up ended with {code}")
    return soak


def memory_by_role(home: Path) -> Figures:
    """Resident memory, MB, of every process that belongs to this home, by what it is."""
    memory: Figures = {}
    for process in psutil.process_iter():
        try:
            if process.environ().get("RECOURSE_HOME") != str(home):
                continue
            command = " ".join(process.cmdline())
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
        role = next((role for part, role in _ROLES.items() if part in command), "others")
        memory[f"memory, {role}"] = memory.get(f"memory, {role}", 0.0) + resident_mb(process)
    return dict(sorted(memory.items()))


def files_by_kind(home: Path) -> Figures:
    """Number and MB of all files below the home; data files that tables list now are apart: they grow with the rows."""
    sizes: dict[str, list[int]] = {kind: [] for kind in _KINDS}
    for folder, _, names in os.walk(home):
        parts = Path(folder).relative_to(home).parts
        kind = next(kind for kind, holds in _KINDS.items() if holds(parts))
        for name in names:
            try:
                sizes[kind].append((Path(folder) / name).stat().st_size)
            except FileNotFoundError:
                continue
    for log in home.glob("tables/*/_delta_log"):
        sizes["data files"] += DeltaTable(log.parent).get_add_actions(flatten=True)["size_bytes"].to_pylist()
    files = {kind: float(len(of_kind)) for kind, of_kind in sizes.items()}
    megabytes = {kind: sum(of_kind) / 2**20 for kind, of_kind in sizes.items()}
    for figures in (files, megabytes):
        figures[UNLISTED] = max(figures[UNLISTED] - figures["data files"], 0.0)
    return {f"files, {kind}": n for kind, n in files.items()} | {f"MB, {kind}": mb for kind, mb in megabytes.items()}
