"""The memory of `recourse up` by process: broker, feed, Dagster, one session with the three shipped streams.

    python -m benchmarks.up_memory --seconds 120

Starts `recourse up` with its own feed in a new home. From the first batch of every stream on, it sums PSS of all
processes every five seconds: a page that several processes share counts once. Prints the median and the peak by
process, and of the sum.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from contextlib import suppress
from pathlib import Path

import psutil

from benchmarks.measuring import Figures, save, table
from benchmarks.soak import STREAMS, Up
from benchmarks.soak_samples import role_of
from benchmarks.speed.process import family, proportional_mb
from streaming_jobs.settings import Settings
from streaming_jobs.state.status import read_status

_START, _EVERY, _FEED = 240.0, 5.0, 2_000.0


def look(pid: int) -> dict[str, float]:
    """MB by role of a process and its descendants."""
    megabytes: dict[str, float] = defaultdict(float)
    for process in family(pid):
        with suppress(psutil.NoSuchProcess):
            megabytes[role_of(" ".join(process.cmdline()))] += proportional_mb(process)
    return megabytes


def measure(home: Path, seconds: float) -> list[dict[str, float]]:
    """Run `recourse up` in that home; returns a sample for every five seconds in which its streams ran."""
    settings = Settings.load({"home": home})
    up = Up(home, retention=3600, rate=_FEED)
    try:
        deadline = time.monotonic() + _START
        while not all((status := read_status(settings, name)) and status.batch is not None for name in STREAMS):
            up.check()
            if time.monotonic() > deadline:
                raise RuntimeError(f"the streams did not run within {_START:.0f} s")
            time.sleep(0.5)
        samples = []
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            up.check()
            samples.append(look(up.child.pid))
            time.sleep(_EVERY)
        return samples
    finally:
        up.stop()


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.up_memory", description=__doc__)
    parser.add_argument("--seconds", type=float, default=120.0)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="benchmark-") as folder:
        samples = measure(Path(folder) / "home", options.seconds)
    roles = sorted({role for sample in samples for role in sample})
    rows: list[Figures] = [_row(role, [sample.get(role, 0.0) for sample in samples]) for role in roles]
    rows.append(_row("all", [sum(sample.values()) for sample in samples]))
    print(table(rows))
    save(options.out, megabytes=rows)
    return 0


def _row(name: str, megabytes: list[float]) -> Figures:
    return {"process": name, "median MB": round(statistics.median(megabytes)), "peak MB": round(max(megabytes))}


if __name__ == "__main__":
    sys.exit(main())
