"""The shipped streams for an hour, as `recourse up` runs them: does anything grow that should not?

    python -m benchmarks.soak --minutes 60 --rate 1500 --out benchmarks/results/soak.json --plot docs/images/soak.svg
    python -m benchmarks.soak --minutes 10

Starts `recourse up` (broker, Dagster, one session with three streams) in a folder of its own and sends the flights at
a steady rate, year after year: after 2013 the same flights of 2014. Every ten seconds: memory of each process, number
and bytes of files by kind, batch times. Files that no version lists are kept for a sixth of the run instead of an hour,
and as many versions of a table's log as that has seconds (500 at most), so that a run shows where they stop.
At the end it judges, leaving the first third out:

- memory of a process is flat: the median of the last third is at most 10 % and 16 MB above that of the middle third;
- a kind of file that is bounded within minutes: its greatest number in the last third is at most a fifth and 100 files
  above that in the middle third, and of bytes a fifth and 8 MB;
- batch time is flat: the median of the last third is at most 1.3 times that of the middle third;
- no stream failed, started again, or is more than ten seconds of records behind.

Exit code 1 when one of these is not so. With less than six minutes nothing is judged but the last one.
"""

from __future__ import annotations

import argparse
import os
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.measuring import save, table
from benchmarks.soak_samples import BOUNDED, Census, YearByYear, files_by_kind, memory_by_role
from benchmarks.speed.process import REPOSITORY, clean_environment
from streaming_jobs.platform.broker import bootstrap_servers
from streaming_jobs.platform.processes.child import ChildCommand
from streaming_jobs.settings import Settings
from streaming_jobs.state.status import Status, read_status

STREAMS = ("flights_clean", "airport_hours", "carrier_totals")
EVERY = 10.0
MOST_MEMORY, SPARE_MB = 1.1, 16.0
MOST_FILES, SPARE_FILES, SPARE_FILE_MB = 1.2, 100, 8.0
MOST_TIME = 1.3
BEHIND_S = 10.0
SHORTEST = 6.0
_START, _END = 240.0, 120.0


@dataclass
class Sample:
    """One look; MB and ms, `at` in seconds since the streams ran."""

    at: float
    memory: dict[str, float]
    files: dict[str, Census]
    batch_ms: dict[str, float]
    lag: dict[str, int]

    def plain(self) -> dict[str, Any]:
        """As JSON."""
        kinds = {kind: [one.number, round(one.megabytes, 2)] for kind, one in self.files.items()}
        memory = {role: round(mb) for role, mb in self.memory.items()}
        return {"at": round(self.at), "memory": memory, "files": kinds, "batch_ms": self.batch_ms, "lag": self.lag}


class Up:
    """`recourse up` as a child that ends with us."""

    def __init__(self, home: Path, retention: float, rate: float = 0.0) -> None:
        environment = clean_environment(
            RECOURSE_HOME=str(home),
            RECOURSE_TABLE__DELETED_FILE_RETENTION=f"{round(retention)} seconds",
            RECOURSE_TABLE__LOG_VERSIONS=str(min(500, max(60, round(retention)))),
        )
        self.output = home.parent / "up.log"
        up = [sys.executable, "-m", "orchestration.cli", "up", "--rate", str(rate), "--port", "0"]
        with self.output.open("wb") as output:
            self.child = ChildCommand(up, environment, REPOSITORY).start_reaped(output)

    def check(self) -> None:
        """Raise RuntimeError if it has ended."""
        if (code := self.child.exit_code) is not None:
            raise RuntimeError(f"recourse up ended with {code}:\n{self.output.read_text()[-3000:]}")

    def stop(self) -> int:
        """End it as Ctrl-C does; its exit code."""
        return self.child.end(_END)


@dataclass
class Soak:
    """One run: what was seen, and what it means."""

    home: Path
    rate: float
    samples: list[Sample] = field(default_factory=list)
    statuses: dict[str, Status] = field(default_factory=dict)

    def look(self, settings: Settings, seconds: float, began: float, up: Up) -> None:
        """Look at the statuses for some seconds, then at processes and files."""
        times: dict[str, list[float]] = {name: [] for name in STREAMS}
        batches: dict[str, int | None] = {}
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            up.check()
            for name in STREAMS:
                status = read_status(settings, name)
                if status is not None:
                    self.statuses[name] = status
                    if status.batch_ms is not None and status.batch != batches.get(name):
                        batches[name] = status.batch
                        times[name].append(status.batch_ms)
            time.sleep(0.2)
        self.samples.append(
            Sample(
                at=time.monotonic() - began,
                memory=memory_by_role(self.home),
                files=files_by_kind(self.home),
                batch_ms={name: statistics.median(ms) for name, ms in times.items() if ms},
                lag={name: self.statuses[name].lag_records or 0 for name in STREAMS if name in self.statuses},
            )
        )

    def thirds(self) -> tuple[list[Sample], list[Sample]]:
        """The middle and the last third of the samples."""
        third = len(self.samples) // 3
        return self.samples[third : 2 * third], self.samples[2 * third :]

    def verdicts(self, minutes: float) -> list[dict[str, Any]]:
        """A row for each thing that is judged."""
        rows = []
        for name in STREAMS:
            status = self.statuses[name]
            behind = statistics.median(sample.lag.get(name, 0) for sample in self.samples[-3:])
            good = status.state in ("running", "idle") and not status.restarts and behind <= self.rate * BEHIND_S
            found = f"{status.state}, batch {status.batch}, {behind:,.0f} records behind, {status.restarts} restarts"
            rows.append(_row(f"stream {name}", "", found, good))
        if minutes < SHORTEST:
            return rows
        middle, last = self.thirds()
        for role in sorted({role for sample in last for role in sample.memory}):
            before, after = (_median([s.memory.get(role, 0.0) for s in part]) for part in (middle, last))
            rows.append(_row(f"memory, {role}, MB", before, after, after <= before * MOST_MEMORY + SPARE_MB))
        for kind in BOUNDED:
            before, after = (max(s.files[kind].number for s in part) for part in (middle, last))
            rows.append(_row(f"{kind}, files", before, after, after <= before * MOST_FILES + SPARE_FILES))
            before, after = (max(s.files[kind].megabytes for s in part) for part in (middle, last))
            rows.append(_row(f"{kind}, MB", before, after, after <= before * MOST_FILES + SPARE_FILE_MB))
        for name in STREAMS:
            before, after = (_median([s.batch_ms[name] for s in part if name in s.batch_ms]) for part in (middle, last))
            rows.append(_row(f"batch of {name}, ms", before, after, 0 < after <= before * MOST_TIME))
        return rows

    def growth(self) -> list[dict[str, Any]]:
        """What each kind of file came to, and how it grew in the last two thirds."""
        middle, _ = self.thirds()
        first, last = (middle or self.samples)[0], self.samples[-1]
        hours = max(last.at - first.at, 1.0) / 3600
        return [
            {
                "kind": kind,
                "files": census.number,
                "MB": census.megabytes,
                "files an hour": (census.number - first.files[kind].number) / hours,
                "MB an hour": (census.megabytes - first.files[kind].megabytes) / hours,
                "judged": kind in BOUNDED,
            }
            for kind, census in last.files.items()
        ]


def _row(what: str, before: object, after: object, good: bool) -> dict[str, Any]:
    return {"what": what, "middle third": before, "last third": after, "verdict": "good" if good else "NOT GOOD"}


def _median(values: Sequence[float]) -> float:
    return float(statistics.median(values)) if values else 0.0


def run(minutes: float, rate: float, folder: Path) -> Soak:
    """Everything from the start of `recourse up` to its end."""
    soak = Soak(folder / "home", rate)
    settings = Settings.load({"home": soak.home})
    up = Up(soak.home, minutes * 60 / 6)
    try:
        _wait_for_streams(settings, up)
        began = time.monotonic()
        feeder = YearByYear(bootstrap_servers(settings), rate)
        feeder.start()
        try:
            while time.monotonic() - began < minutes * 60:
                feeder.check()
                soak.look(settings, EVERY, began, up)
                _tell(soak.samples[-1], feeder.sent)
        finally:
            feeder.stop()
    finally:
        code = up.stop()
    if code != 0:
        raise RuntimeError(f"recourse up ended with {code}:\n{up.output.read_text()[-3000:]}")
    return soak


def _wait_for_streams(settings: Settings, up: Up) -> None:
    deadline = time.monotonic() + _START
    while True:
        up.check()
        found = [read_status(settings, name) for name in STREAMS]
        if all(status is not None and status.state in ("running", "idle") for status in found):
            return
        if time.monotonic() > deadline:
            raise RuntimeError(f"the streams did not start:\n{up.output.read_text()[-3000:]}")
        time.sleep(0.5)


def _tell(sample: Sample, sent: int) -> None:
    memory = ", ".join(f"{role} {mb:.0f}" for role, mb in sample.memory.items())
    batches = ", ".join(f"{ms:.0f}" for ms in sample.batch_ms.values())
    sys.stderr.write(f"{sample.at:.0f} s: {sent:,} records, batches {batches} ms, MB: {memory}, lag {sample.lag}\n")
    sys.stderr.flush()


def draw(samples: Sequence[Sample], path: Path) -> None:
    """Memory, files and batch times over time; the file's ending says the format."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(2, 2, figsize=(12, 8), sharex=True)
    minutes = [sample.at / 60 for sample in samples]
    panels: list[tuple[Any, str, list[Mapping[str, float]]]] = [
        (axes[0][0], "memory, MB", [sample.memory for sample in samples]),
        (axes[0][1], "batch time, ms (median of ten seconds)", [sample.batch_ms for sample in samples]),
        (axes[1][0], "files", [{k: float(c.number) for k, c in s.files.items()} for s in samples]),
        (axes[1][1], "files, MB", [{k: c.megabytes for k, c in s.files.items()} for s in samples]),
    ]
    for panel, title, values in panels:
        for name in dict.fromkeys(name for each in values for name in each):
            panel.plot(minutes, [each.get(name, float("nan")) for each in values], label=name, linewidth=1.2)
        panel.set_title(title)
        panel.set_ylim(bottom=0)
        panel.grid(alpha=0.3)
        panel.spines[["top", "right"]].set_visible(False)
        panel.legend(fontsize=7, frameon=False)
    for panel in axes[1]:
        panel.set_yscale("symlog")
        panel.set_xlabel("minutes")
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
    plt.close(figure)


def main() -> int:
    """Run, judge, print."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.soak")
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--rate", type=float, default=1500.0)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--plot", type=Path)
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    with tempfile.TemporaryDirectory(prefix="soak-") as folder:
        soak = run(options.minutes, options.rate, Path(folder))
    verdicts, growth = soak.verdicts(options.minutes), soak.growth()
    sys.stdout.write(f"{table(verdicts)}\n{table(growth)}")
    samples = [sample.plain() for sample in soak.samples]
    figures = {"minutes": options.minutes, "rate": options.rate, "cores": os.cpu_count()}
    save(options.out, **figures, verdicts=verdicts, growth=growth, samples=samples)
    if options.plot:
        draw(soak.samples, options.plot)
    return int(any(row["verdict"] != "good" for row in verdicts))


if __name__ == "__main__":
    sys.exit(main())
