"""What a batch asks of an object store, and what it takes where each request takes so many milliseconds.

    python -m benchmarks object_store --batches 20 --ms 20
    python -m benchmarks object_store --sessions           also of whole sessions: checkpoint, ledger, lease, status
    python -m benchmarks object_store --files 8,32,128     also of the driver's part where executors write many files

Tables are on an S3 server in memory, which counts requests and waits before it answers. `append, files` is a batch of
which executors have written the files: the driver reads their footers. Times are those of the wait: the server is on
loopback. Of a session, whose state is on the server too, all requests between the ends of its first and its last batch
count, divided by the batches between them.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow as pa
from pyspark.sql.types import LongType, StringType, StructField, StructType

from benchmarks.feeds import create_topic, feed_backlog
from benchmarks.place import place
from benchmarks.processes import REPOSITORY
from benchmarks.run import Report, Row, median, seconds_of, verdict
from benchmarks.speed.records import Work, generate
from streaming_jobs.ledger.entry import LedgerEntry
from streaming_jobs.settings import Settings
from streaming_jobs.sinks.delta.parquet import add_actions
from streaming_jobs.sinks.delta.pending_writes import ArrowAppend, ArrowMerge, ParquetAppend
from streaming_jobs.sinks.delta.row_engine import Files
from streaming_jobs.sinks.delta.sink import DeltaSink
from streaming_jobs.sinks.delta.store import ensure_sink
from streaming_jobs.stream import DeltaTable

if TYPE_CHECKING:
    from tests.support.store_server import Request, StoreServer

COLUMNS = StructType([StructField("k", LongType()), StructField("text", StringType())])
_METHODS = ("PUT", "GET", "HEAD", "LIST", "DELETE")
GOAL = 12
"""Requests of a batch that only appends."""
SESSIONS: dict[Work, int] = {"stateless": 12, "windowed": 17}
"""The works of sessions, and the most requests per batch: one that appends, one with state in two partitions."""
_PER_BATCH = 1_000

Write = Callable[[DeltaSink, int], object]


def run(
    report: Report, *, batches: int = 20, ms: int = 20, sessions: bool = False, files: tuple[int, ...] = ()
) -> None:
    from tests.support.store_server import Fault, store_server

    os.environ |= {"AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test"}
    rows = []
    with store_server() as server, tempfile.TemporaryDirectory(prefix="benchmark-") as home:
        for name, declared, write in (
            ("append", DeltaTable("appended"), _append),
            ("append, files", DeltaTable("files"), _append_files),
            ("upsert", DeltaTable("upserted", keys=["k"]), _upsert),
        ):
            sink = _sink(server, home, declared)
            write(sink, 0)
            counted = []
            for batch in range(1, batches + 1):
                server.clear()
                write(sink, batch)
                counted.append(_by_method(server.requests()))
            server.clear()
            for method in ("PUT", "GET", "HEAD", "DELETE"):
                server.inject(Fault("slow", method, times=1_000_000, seconds=ms / 1000))
            took = [1000 * seconds_of(partial(write, sink, n)) for n in range(batches + 1, batches + 6)]
            rows.append(_row(name, counted, f"ms at {ms} ms a request", median(took)))
        report.table("requests", rows)
        if files:
            report.table(
                "files", [_many_files(_sink(server, home, DeltaTable(f"of_{n}")), server, n, ms) for n in files]
            )
        if sessions:
            server.clear()
            report.table("sessions", [_session(server, work, batches) for work in SESSIONS])


def _sink(server: StoreServer, home: str, declared: DeltaTable) -> DeltaSink:
    settings = Settings.load(
        {
            "home": Path(home),
            "tables_dir": f"{server.url}/tables",
            "storage.endpoint": server.endpoint,
            "storage.region": "us-east-1",
            "storage.allow_http": True,
        }
    )
    return ensure_sink(settings, declared, "s", COLUMNS, generation=1)


def _many_files(sink: DeltaSink, server: StoreServer, files: int, ms: int) -> Row:
    """What the driver does once executors have written so many files: footers, then the commit."""
    from tests.support.store_server import Fault

    _append_files(sink, 0)
    written = [_written(sink, 1, number) for number in range(files)]
    server.clear()
    for method in ("PUT", "GET", "HEAD"):
        server.inject(Fault("slow", method, times=1_000_000, seconds=ms / 1000))
    cpu = time.process_time()
    began = time.perf_counter()
    actions, count = add_actions(sink.path, written, [], sink.bounded)
    footers, spent = time.perf_counter() - began, time.process_time() - cpu
    took = seconds_of(partial(ParquetAppend(sink, actions, count).commit, _entry(sink, 1)))
    requests = len(server.requests())
    server.clear()
    return {
        "files": files,
        "requests": requests,
        f"footers, ms at {ms} ms a request": round(1000 * footers),
        "CPU of the footers, ms": round(1000 * spent),
        "commit, ms": round(1000 * took),
    }


def _session(server: StoreServer, work: Work, batches: int) -> Row:
    """A session of one stream that reads a backlog, with tables and state on the server."""
    with place() as here:
        create_topic(here.bootstrap, "payments")
        feed_backlog(here.bootstrap, "payments", generate(batches * _PER_BATCH, seed=1))
        environment = here.environment(
            ["benchmarks.speed.flows"],
            RECOURSE_TABLES_DIR=f"{server.url}/{work}/tables",
            RECOURSE_STATE_DIR=f"{server.url}/{work}/state",
            RECOURSE_STORAGE__ENDPOINT=server.endpoint,
            RECOURSE_STORAGE__REGION="us-east-1",
            RECOURSE_STORAGE__ALLOW_HTTP="true",
            RECOURSE_STREAM__MAX_OFFSETS_PER_TRIGGER=str(_PER_BATCH),
        )
        command = [sys.executable, "-m", "streaming_jobs.session", "--streams", work, "--trigger", "available-now"]
        subprocess.run(command, env=environment, cwd=REPOSITORY, timeout=600, check=True, stdout=subprocess.DEVNULL)
    requests = server.requests()
    server.clear()
    ends = [at for at, each in enumerate(requests) if each.method == "PUT" and re.search(r"/commits/\d+$", each.key)]
    between = len(ends) - 1
    by_method = {method: count / between for method, count in _by_method(requests[ends[0] + 1 : ends[-1] + 1]).items()}
    all_of = round(sum(by_method.values()), 1)
    per_method = {method: round(by_method.get(method, 0.0), 1) for method in _METHODS}
    figures = {"session": work, "batches": between, "requests per batch": all_of, **per_method}
    return {**figures, "bound": SESSIONS[work], "verdict": verdict(all_of <= SESSIONS[work])}


def _by_method(requests: list[Request]) -> Counter[str]:
    return Counter("LIST" if "list-type" in each.query else each.method for each in requests)


def _row(name: str, counted: list[Counter[str]], figure: str, took: float) -> Row:
    all_of = median([sum(each.values()) for each in counted])
    by_method = {method: median([each[method] for each in counted]) for method in _METHODS}
    bound = GOAL if "append" in name else None
    figures = {"batch": name, "requests": all_of, **by_method, figure: round(took), "bound": bound or "none"}
    return {**figures, "verdict": verdict(bound is None or all_of <= bound)}


def _rows(batch: int) -> pa.Table:
    return pa.table({"k": pa.array(range(batch * 100, batch * 100 + 100), pa.int64()), "text": ["a text"] * 100})


def _entry(sink: DeltaSink, batch: int) -> LedgerEntry:
    return LedgerEntry("batch", "s", sink.name, 1, batch)


def _append(sink: DeltaSink, batch: int) -> object:
    return ArrowAppend(sink, _rows(batch)).commit(_entry(sink, batch))


def _written(sink: DeltaSink, batch: int, task: int) -> str:
    """The file of a task, as an executor writes it."""
    files = Files(sink.path, sink.path / "g0001" / f"b{batch:09d}-{task:08x}")
    files.add("", _rows(batch))
    [path] = files.close()
    return path


def _append_files(sink: DeltaSink, batch: int) -> object:
    actions, count = add_actions(sink.path, [_written(sink, batch, 0)], [], sink.bounded)
    return ParquetAppend(sink, actions, count).commit(_entry(sink, batch))


def _upsert(sink: DeltaSink, batch: int) -> object:
    """Of the rows, one half is new: a batch rewrites the file of the one before it."""
    rows = pa.table({"k": pa.array(range(batch * 50, batch * 50 + 100), pa.int64()), "text": ["a text"] * 100})
    return ArrowMerge(sink, rows).commit(_entry(sink, batch))
