"""Does a batch take longer after many commits? The sink alone, without Spark.

    python -m benchmarks steadiness --commits 20000 --out benchmarks/results/steadiness-sink.json
    python -m benchmarks steadiness --upsert --commits 3000

The sink makes appends of 100 rows (with --upsert: merges of 100 keys into 10,000) by the very classes that a stream's
batches use: look, commit, line in the ledger file, upkeep. At the end it takes turns between the old table and a new
one of 200 commits, so that a machine that is busier then than at the beginning does not decide. The memory of the
process is beside each step. Exit code 1: a batch takes more than 1.3 times as long.
"""

from __future__ import annotations

import ctypes
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Annotated, NamedTuple

import pyarrow as pa

from benchmarks.place import megabytes
from benchmarks.processes import family, resident_mb
from benchmarks.run import Report, Row, median, progress, quantile
from streaming_jobs.declare.schemas import schema_of
from streaming_jobs.ledger.entry import LedgerEntry
from streaming_jobs.ledger.positions import OffsetRange
from streaming_jobs.settings import Settings
from streaming_jobs.sinks.delta.maintenance import TableMaintenance
from streaming_jobs.sinks.delta.pending_writes import ArrowAppend, ArrowMerge
from streaming_jobs.sinks.delta.sink import DeltaSink
from streaming_jobs.sinks.delta.store import ensure_sink
from streaming_jobs.state.ledger_file import LedgerFile
from streaming_jobs.stream import DeltaTable

GOAL = 1.3
ROWS, KEYS = 100, 10_000
WARM_UP, STEP, TURN, TURNS = 100, 100, 25, 8
SCHEMA = schema_of({"k": "bigint", "name": "string", "amount": "double"})


def run(report: Report, *, commits: Annotated[int, "200 at least"] = 20_000, upsert: bool = False) -> None:
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="benchmark-") as folder:
        old = Bench.make(Path(folder), "old", upsert=upsert)
        old.run(WARM_UP)
        first = old.run(STEP)
        rows = [_figures(f"{WARM_UP + 1} to {WARM_UP + STEP}", first) | old.state()]
        step = max((commits - WARM_UP - STEP) // 10, STEP)
        while (before := len(old.done)) < commits:
            part = old.run(min(step, commits - before))
            rows.append(_figures(f"{before + 1} to {len(old.done)}", part) | old.state())
            progress(
                f"{len(old.done)} commits, {time.monotonic() - began:.0f} s: median {rows[-1]['median ms']:.1f} ms"
            )
        last = old.done[-STEP:]
        new = Bench.make(Path(folder), "new", upsert=upsert)
        new.run(WARM_UP)
        turns = [(old.run(TURN), new.run(TURN)) for _ in range(TURNS)]
        for bench, name, mine in ((old, "the old table in turn", 0), (new, "a new table in turn", 1)):
            rows.append(_figures(name, [*chain.from_iterable(turn[mine] for turn in turns)]) | bench.state())
    ratio, means = (rows[-2][figure] / rows[-1][figure] for figure in ("median ms", "mean ms"))
    drift = median([commit.whole for commit in last]) / rows[0]["median ms"]
    report.table("rows", rows)
    report.say(
        f"after {commits:,} commits a batch takes {ratio:.2f} times as long as in a new table, in turns "
        f"(mean with all upkeep: {means:.2f}; the last hundred to the first, minutes apart: {drift:.2f})",
        ratio=ratio, ratio_of_means=means, last_to_first=drift,
    )  # fmt: skip
    report.judge(ratio <= GOAL)


class Commit(NamedTuple):
    """Times of one batch in ms: all of it, and the upkeep after its rows are readable."""

    whole: float
    upkeep: float


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
        staged = ArrowMerge(self.sink, rows) if self.upsert else ArrowAppend(self.sink, rows)
        version = staged.commit(entry)
        assert version is not None
        self.ledger.append(entry, {self.sink.name: version})
        committed = time.perf_counter()
        self.upkeep.after_commit()
        ended = time.perf_counter()
        self.done.append(Commit((ended - began) * 1000, (ended - committed) * 1000))

    def state(self) -> Row:
        """How many files there are of each kind, and their size; and the memory of this process."""
        log = list((self.sink.path / "_delta_log").iterdir())
        data = set(Path(str(self.sink.path)).rglob("*.parquet")).difference(log)
        files = {"log files": len(log), "data files": len(data), "of them live": len(self.sink.handle.file_uris())}
        return {**files, "MB": megabytes(Path(str(self.sink.path))), **_memory()}


class _Mallinfo2(ctypes.Structure):
    """As malloc.h has it: ten numbers of bytes, of which the eighth is what is in use."""

    _fields_ = (("of", ctypes.c_size_t * 10),)


def _memory() -> Row:
    """MB of the process, and of what is in use in it: the C heap (glibc's), Arrow's buffers; Python's blocks."""
    heap, used = getattr(ctypes.CDLL(None), "mallinfo2", None), {}
    if heap is not None:
        heap.restype = _Mallinfo2
        used["C heap MB"] = round(heap().of[7] / 2**20, 1)
    whole, arrow = sum(map(resident_mb, family(os.getpid()))), pa.total_allocated_bytes() / 2**20
    return {"memory MB": round(whole), **used, "Arrow MB": arrow, "Python blocks": sys.getallocatedblocks()}


def _rows(first: int, count: int) -> pa.Table:
    numbers = range(first, first + count)
    keys = [(first + number * (KEYS // count)) % KEYS for number in range(count)]
    columns = {"name": [f"name-{number}" for number in numbers], "amount": [number * 0.25 for number in numbers]}
    return pa.table({"k": pa.array(keys, pa.int64()), **columns})


def _figures(label: str, commits: Sequence[Commit]) -> Row:
    whole, upkeep = zip(*commits, strict=True)
    return {
        "batches": label,
        "median ms": median(whole),
        "mean ms": statistics.mean(whole),
        "p99 ms": quantile(whole, 0.99),
        "upkeep, mean ms": statistics.mean(upkeep),
        "longest upkeep ms": max(upkeep),
    }
