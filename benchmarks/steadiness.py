"""Does a batch take longer after many commits? The sink alone, and whole batches through Spark.

    python -m benchmarks.steadiness sink --commits 20000 --out benchmarks/results/steadiness-sink.json
    python -m benchmarks.steadiness sink --upsert --commits 3000
    python -m benchmarks.steadiness stream --commits 600

`sink` makes appends of 100 rows (with --upsert: merges of 100 keys into 10,000) by the very classes that a stream's
batches use: look, commit, line in the ledger file, upkeep. At the end it takes turns between the old table and a new
one of 200 commits, so that a machine that is busier then than at the beginning does not decide. `stream` runs a
stateless stream over a topic, 100 records a batch. The memory of the process is beside each step. Exit code 1 when a
batch takes more than 1.3 times as long.
"""

from __future__ import annotations

import argparse
import ctypes
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa
from pyspark.sql.types import DoubleType, LongType, StringType, StructField, StructType

from benchmarks.measuring import megabytes, named, on_topic, quantile, quiet, save, table, tree_rss_mb, workshop
from streaming_jobs.ledger.entry import LedgerEntry
from streaming_jobs.ledger.positions import OffsetRange
from streaming_jobs.settings import Settings
from streaming_jobs.sinks.delta.direct_writers import ArrowAppend, ArrowMerge
from streaming_jobs.sinks.delta.maintenance import TableMaintenance
from streaming_jobs.sinks.delta.sink import DeltaSink
from streaming_jobs.sinks.delta.table_setup import ensure_sink
from streaming_jobs.state.ledger_file import LedgerFile
from streaming_jobs.stream import DeltaTable

GOAL = 1.3
ROWS = 100
KEYS = 10_000
WARM_UP = 100
TURN = 25
SCHEMA = StructType(
    [StructField("k", LongType()), StructField("name", StringType()), StructField("amount", DoubleType())]
)


@dataclass(frozen=True)
class Commit:
    """Times of one batch in ms: until its rows are readable, and the upkeep after it."""

    commit: float
    upkeep: float

    @property
    def whole(self) -> float:
        """All of it."""
        return self.commit + self.upkeep


@dataclass
class Bench:
    """One table and what a stream's batches do to it."""

    sink: DeltaSink
    upkeep: TableMaintenance
    ledger: LedgerFile
    upsert: bool
    done: list[Commit] = field(default_factory=list)

    @classmethod
    def make(cls, folder: Path, name: str, *, upsert: bool) -> Bench:
        """A new table with the settings a user gets."""
        settings = Settings.load({"home": folder})
        declared = DeltaTable(name, keys=["k"]) if upsert else DeltaTable(name)
        sink = ensure_sink(settings, declared, name, SCHEMA, generation=1)
        bench = cls(sink, TableMaintenance(sink, settings.table, 1), LedgerFile(folder / name), upsert)
        if upsert:
            bench.commit(_rows(0, KEYS))
            bench.done.clear()
        return bench

    def run(self, count: int) -> list[Commit]:
        """So many batches; what each took."""
        for _ in range(count):
            batch = len(self.done) + 1
            self.commit(_rows(batch * 37 if self.upsert else batch * ROWS, ROWS))
        return self.done[-count:]

    def commit(self, rows: pa.Table) -> None:
        """One batch, from the look whether it is there already to the upkeep."""
        began = time.perf_counter()
        self.sink.refresh()
        at = self.sink.position
        batch, name = (0 if at is None else at.batch + 1), self.sink.stream
        start, end = (dict.fromkeys((0, 1), number * ROWS // 2) for number in (batch, batch + 1))
        offsets = OffsetRange("payments", "mZJtAxW7QdKxMCj3Uk2oGw", start, end)
        entry = LedgerEntry("batch", name, self.sink.name, 1, batch, (offsets,), rows={"written": rows.num_rows})
        staged = ArrowMerge(self.sink, rows, None) if self.upsert else ArrowAppend(self.sink, rows)
        version = staged.commit(entry)
        assert version is not None
        self.ledger.append(entry, {self.sink.name: version})
        committed = time.perf_counter()
        self.upkeep.after_commit()
        ended = time.perf_counter()
        self.done.append(Commit((committed - began) * 1000, (ended - committed) * 1000))

    def state(self) -> dict[str, int | float]:
        """How many files there are of each kind, and their size; and the memory of this process."""
        log = sum(1 for _ in (self.sink.path / "_delta_log").iterdir())
        data = sum(1 for _ in self.sink.path.rglob("*.parquet")) - sum(
            1 for _ in (self.sink.path / "_delta_log").glob("*.parquet")
        )
        live = len(self.sink.handle.file_uris())
        files = {"log files": log, "data files": data, "of them live": live, "MB": megabytes(self.sink.path)}
        return {**files, **_memory()}


class _Mallinfo2(ctypes.Structure):
    """As malloc.h has it: ten numbers of bytes, of which the eighth is what is in use."""

    _fields_ = (("of", ctypes.c_size_t * 10),)


def _memory() -> dict[str, int | float]:
    """MB of the process, and of what is in use in it: the C heap (glibc's), Arrow's buffers; Python's blocks."""
    heap = getattr(ctypes.CDLL(None), "mallinfo2", None)
    used = {}
    if heap is not None:
        heap.restype = _Mallinfo2
        used["C heap MB"] = round(heap().of[7] / 2**20, 1)
    arrow = round(pa.total_allocated_bytes() / 2**20, 1)
    return {"memory MB": round(tree_rss_mb()), **used, "Arrow MB": arrow, "Python blocks": sys.getallocatedblocks()}


def _rows(first: int, count: int) -> pa.Table:
    keys = [(first + number * (KEYS // count)) % KEYS for number in range(count)]
    return pa.table(
        {
            "k": pa.array(keys, pa.int64()),
            "name": [f"name-{first + number}" for number in range(count)],
            "amount": [(first + number) * 0.25 for number in range(count)],
        }
    )


def _figures(label: str, commits: Sequence[Commit]) -> dict[str, Any]:
    whole = [one.whole for one in commits]
    return {
        "batches": label,
        "median ms": statistics.median(whole),
        "mean ms": statistics.mean(whole),
        "p99 ms": quantile(whole, 0.99),
        "upkeep, mean ms": statistics.mean(one.upkeep for one in commits),
        "longest upkeep ms": max(one.upkeep for one in commits),
    }


def _say(text: str) -> None:
    sys.stderr.write(f"{text}\n")
    sys.stderr.flush()


def sink(commits: int, *, upsert: bool, out: Path | None) -> float:
    """The sink alone; the ratio of the old table's batch to the new one's."""
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="benchmark-") as folder:
        old = Bench.make(Path(folder), "old", upsert=upsert)
        old.run(WARM_UP)
        rows = [{**_figures(f"{WARM_UP + 1} to {WARM_UP + 100}", old.run(100)), **old.state()}]
        step = max((commits - 200) // 10, 100)
        while len(old.done) < commits:
            before = len(old.done)
            part = old.run(min(step, commits - before))
            rows.append({**_figures(f"{before + 1} to {len(old.done)}", part), **old.state()})
            _say(f"{len(old.done)} commits, {time.monotonic() - began:.0f} s: median {rows[-1]['median ms']:.1f} ms")
        new = Bench.make(Path(folder), "new", upsert=upsert)
        new.run(WARM_UP)
        turns = [(old.run(TURN), new.run(TURN)) for _ in range(100 // TURN * 2)]
        rows += [
            {**_figures("the old table in turn", [c for mine, _ in turns for c in mine]), **old.state()},
            {**_figures("a new table in turn", [c for _, mine in turns for c in mine]), **new.state()},
        ]
    ratio = float(rows[-2]["median ms"] / rows[-1]["median ms"])
    means = rows[-2]["mean ms"] / rows[-1]["mean ms"]
    first = statistics.median(c.whole for c in old.done[commits - 100 : commits]) / rows[0]["median ms"]
    sys.stdout.write(table(rows))
    sys.stdout.write(
        f"\nafter {commits:,} commits a batch takes {ratio:.2f} times as long as in a new table, in turns "
        f"(mean with all upkeep: {means:.2f}; the last hundred to the first, minutes apart: {first:.2f})\n"
    )
    save(
        out, kind="upserts" if upsert else "appends", rows=rows, ratio=ratio, ratio_of_means=means, last_to_first=first
    )
    return ratio


def stream(commits: int, out: Path | None) -> float:
    """Whole batches through Spark; the ratio of the last hundred to the first hundred after the warm-up."""
    from benchmarks.speed import flows
    from benchmarks.speed.feed import create_topic, feed_backlog
    from benchmarks.speed.records import generate

    with workshop({"stream.max_offsets_per_trigger": ROWS}) as shop:
        create_topic(shop.bootstrap, "payments")
        feed_backlog(shop.bootstrap, "payments", generate(commits * ROWS, seed=1))
        started = shop.start(named(on_topic(flows.stateless, "payments"), "payments"))
        shop.finish(started, seconds=commits * 1.0 + 120)
    times = [started.progress[batch]["triggerExecution"] for batch in sorted(started.progress)]
    parts = [(low, times[low : low + 100]) for low in range(WARM_UP, len(times) - 99, 100)]
    rows = [
        {
            "batches": f"{low + 1} to {low + 100}",
            "median ms": float(statistics.median(part)),
            "mean ms": statistics.mean(part),
            "p99 ms": float(quantile(part, 0.99)),
        }
        for low, part in parts
    ]
    ratio = float(rows[-1]["median ms"]) / float(rows[0]["median ms"])
    sys.stdout.write(table(rows))
    sys.stdout.write(f"\nthe last hundred batches of {len(times)} take {ratio:.2f} times as long as the first\n")
    save(out, kind="stream", rows=rows, ratio=ratio)
    return ratio


def main() -> int:
    """Measure what was asked for."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.steadiness")
    parser.add_argument("layer", choices=["sink", "stream"])
    parser.add_argument("--commits", type=int, default=20_000)
    parser.add_argument("--upsert", action="store_true")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    quiet()
    if options.layer == "sink":
        ratio = sink(options.commits, upsert=options.upsert, out=options.out)
    else:
        ratio = stream(options.commits, options.out)
    return int(ratio > GOAL)


if __name__ == "__main__":
    sys.exit(main())
