"""Throughput and memory of one session with 1, 2, 4 and 8 streams.

    python -m benchmarks.streams_per_session --records 300000 --out benchmarks/results/streams-per-session.json

Every stream is the same small stateless one and reads the whole topic into a table of its own, 50,000 records a batch;
each count of streams gets a driver process of its own. Records a second are of all streams together, from the start
of the first one to the last commit (`all`), and from the moment at which every stream has committed once to the last
commit (`steady`).
Memory is the resident memory of the driver and its JVM; tables are counted at the end. Exit code 1 when rows miss.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from deltalake import DeltaTable

from benchmarks.copies import MOST
from benchmarks.measuring import save, table
from benchmarks.speed.feed import create_topic, feed_backlog
from benchmarks.speed.process import Child, clean_environment
from benchmarks.speed.records import Records, generate
from streaming_jobs.ledger.entry import LedgerEntry
from streaming_jobs.platform.broker import Broker
from streaming_jobs.runtime.session_options import supervised_command
from streaming_jobs.settings import Settings
from streaming_jobs.sinks.delta.log import walk
from streaming_jobs.sinks.stored import Commit

BATCH = 50_000
_PATIENCE = 300.0


def committed(table: Path) -> list[tuple[Commit, LedgerEntry]]:
    """The commits of batches, newest first."""
    return [(commit, commit.entry) for commit in walk(table) if commit.entry and commit.entry.kind == "batch"]


def read(commits: list[tuple[Commit, LedgerEntry]]) -> int:
    """How many records the commits' batches have read."""
    return sum(offsets.records for _, entry in commits for offsets in entry.offsets)


def session(count: int, bootstrap: str, folder: Path, records: Records) -> dict[str, Any]:
    """One session with so many streams; its figures."""
    names = [f"copy_{number}" for number in range(count)]
    settings = Settings.load({"home": folder})
    environment = clean_environment(
        RECOURSE_HOME=str(folder),
        RECOURSE_KAFKA__BOOTSTRAP_SERVERS=bootstrap,
        RECOURSE_FLOWS=json.dumps(["benchmarks.copies"]),
        BENCHMARK_TOPIC="payments",
    )
    command = supervised_command(names, "--set", f"stream.max_offsets_per_trigger={BATCH}")
    folder.mkdir(parents=True)
    child = Child(command, environment, folder / "output.log", 'event="stream started"')
    try:
        child.wait_ready(_PATIENCE)
        began = child.ready_at
        paths = [settings.tables / name for name in names]
        deadline = time.monotonic() + _PATIENCE
        while any(read(committed(path)) < len(records) for path in paths):
            child.check()
            if time.monotonic() > deadline:
                raise RuntimeError(f"{count} streams were not done within {_PATIENCE:.0f} s")
            time.sleep(0.2)
        used = child.usage.now()
    finally:
        child.stop()
    commits = [committed(path) for path in paths]
    first, last = max(each[-1][0].at for each in commits) / 1000, max(each[0][0].at for each in commits) / 1000
    later = sum(read([(c, e) for c, e in each if c.at / 1000 > first]) for each in commits)
    kept = int((~records.dropped).sum())
    return {
        "streams": count,
        "all, rec/s": round(count * len(records) / (last - began)),
        "steady, rec/s": round(later / (last - first)) if last > first else 0,
        "peak MB": round(used.peak_mb),
        "MB a further stream": 0.0,
        "CPU s": round(used.cpu_seconds, 1),
        "rows right": all(DeltaTable(path).to_pyarrow_table(columns=["id"]).num_rows == kept for path in paths),
    }


def main() -> int:
    """Measure each count."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.streams_per_session")
    parser.add_argument("--records", type=int, default=300_000)
    parser.add_argument("--counts", default="1,2,4,8")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    counts = [min(int(count), MOST) for count in options.counts.split(",")]
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="benchmark-") as folder:
        home = Path(folder)
        with Broker(Settings.load({"home": home / "broker", "broker.heap_mb": 512})) as broker:
            bootstrap = broker.start()
            records = generate(options.records, seed=1)
            create_topic(bootstrap, "payments")
            feed_backlog(bootstrap, "payments", records)
            for count in counts:
                rows.append(session(count, bootstrap, home / f"of-{count}", records))
                before = rows[0]
                if count > before["streams"]:
                    more = rows[-1]["peak MB"] - before["peak MB"]
                    rows[-1]["MB a further stream"] = more / (count - before["streams"])
                sys.stderr.write(f"{rows[-1]}\n")
    sys.stdout.write(table(rows))
    save(options.out, records=options.records, rows=rows)
    return int(not all(row["rows right"] for row in rows))


if __name__ == "__main__":
    sys.exit(main())
