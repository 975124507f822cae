"""A driver of its own with one aggregation whose checkpoint is on S3, and a table of its requests for each batch.

`python -m tests.support.store_query` starts an S3 server, runs some batches and prints the table; with a name of a
Spark class it uses that checkpoint file manager in place of ours.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from streaming_jobs.platform import spark as spark_session
from streaming_jobs.platform.locations import StorePath
from streaming_jobs.platform.spark_on_store import hadoop_path
from streaming_jobs.settings import Settings
from tests.support import ROOT
from tests.support.driver import until
from tests.support.store_server import BUCKET, Request, StoreServer, store_server

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

KEYS, ROWS = 5, 100
_MANAGER = "spark.sql.streaming.checkpointFileManagerClass"
_CHECKSUMS = "spark.sql.streaming.checkpoint.fileChecksum.enabled"
_QUICK = {
    "spark.driver.extraJavaOptions": "-XX:TieredStopAtLevel=1",
    # So that each batch also removes what is too old, as after 100 batches otherwise.
    "spark.sql.streaming.minBatchesToRetain": "2",
}


class _OnStore(Settings):
    """Settings whose state is at a URL."""

    @property
    def state(self) -> StorePath:  # type: ignore[override]
        return StorePath(f"s3://{BUCKET}/state")


def settings(home: Path, endpoint: str, extra: Mapping[str, str] | None = None) -> Settings:
    """State on the S3 server at `endpoint`, and a local session with two cores."""
    base = Settings.load(
        {
            "home": home,
            "storage.endpoint": endpoint,
            "storage.allow_http": True,
            "storage.timeout": "5s",
            "spark.master": "local[2]",
            "spark.driver_memory_mb": 1024,
            "spark.extra": {**_QUICK, **(extra or {})},
        }
    )
    return _OnStore(**{name: getattr(base, name) for name in type(base).model_fields})


def truth(batch: int) -> dict[str, list[int]]:
    """Count and sum of each key after a batch."""
    values = range((batch + 1) * ROWS)
    return {str(key): [len(values[key::KEYS]), sum(values[key::KEYS])] for key in range(KEYS)}


def driver(home: Path, endpoint: str, task: str, *arguments: object) -> subprocess.Popen[str]:
    """A process that does `task`: "run" to the end of a batch, or to be killed in it ("die")."""
    command = [sys.executable, "-m", "tests.support.store_query", task, str(home), endpoint, *map(str, arguments)]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, env={**os.environ})


def results(home: Path) -> dict[int, Any]:
    """By batch, what the query has put out."""
    return {int(file.stem): json.loads(file.read_text()) for file in sorted((home / "out").glob("*.json"))}


def by_batch(requests: Sequence[Request]) -> list[list[Request]]:
    """The requests up to each write of `commits/N`, without those before the first one."""
    parts: list[list[Request]] = [[]]
    for each in requests:
        parts[-1].append(each)
        name = each.key.rpartition("/")[0]
        copied = each.method == "PUT" and name.endswith("/commits") and each.status < 300 and ".tmp" not in each.key
        if copied:
            parts.append([])
    return parts[1:-1]


def kind(request: Request) -> str:
    """What a request is, as S3 bills and answers it."""
    if request.method == "GET" and ("list-type" in request.query or "prefix=" in request.query):
        return "LIST"
    return request.method


def _session(home: Path, endpoint: str, extra: Mapping[str, str]) -> tuple[SparkSession, int]:
    launched = spark_session.launch(settings(home, endpoint, extra))
    assert launched.process is not None
    return launched.session(), launched.process.pid


def _run(home: Path, endpoint: str, last: int, extra: Mapping[str, str], *, die: bool) -> None:
    session, jvm = _session(home, endpoint, extra)
    out = home / "out"
    out.mkdir(exist_ok=True)

    def batch(frame: DataFrame, number: int) -> None:
        rows = {str(row.key): [row.n, row.total] for row in frame.collect()}
        if die and number == last:
            os.kill(jvm, signal.SIGKILL)
            os.kill(os.getpid(), signal.SIGKILL)
        (out / f"{number}.json").write_text(json.dumps(rows))

    source = session.readStream.format("rate-micro-batch").option("rowsPerBatch", ROWS).load()
    counted = source.selectExpr(f"value % {KEYS} AS key", "value").groupBy("key")
    frame = counted.agg({"value": "sum", "*": "count"}).toDF("key", "total", "n")
    writer = frame.writeStream.outputMode("update").foreachBatch(batch)
    query = writer.option("checkpointLocation", f"{hadoop_path(settings(home, endpoint).state)}/g0001").start()
    until(
        lambda: (query.lastProgress or {"batchId": -1})["batchId"] >= last or query.exception(), 120, "the last batch"
    )
    query.stop()
    if query.exception() is not None:
        raise query.exception()  # type: ignore[misc]
    session.stop()


def _table(server: StoreServer, home: Path, extra: Mapping[str, str]) -> None:
    _run(home, server.endpoint, 8, extra, die=False)
    batches = by_batch(server.requests())[3:]
    for number, requests in enumerate(batches):
        print(number, len(requests), dict(sorted(Counter(map(kind, requests)).items())))
    for each in batches[-1]:
        print(kind(each), each.status, each.key.removeprefix(f"{BUCKET}/state/g0001/"), each.query[:60], each.condition)


def main(arguments: list[str]) -> None:
    match arguments:
        case ["run" | "die" as task, home, endpoint, last]:
            _run(Path(home), endpoint, int(last), {}, die=task == "die")
        case _:
            extra = {_MANAGER: arguments[0], _CHECKSUMS: "true"} if arguments else {}
            with store_server() as server, tempfile.TemporaryDirectory() as home:
                os.environ |= {"AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test"}
                _table(server, Path(home), extra)


if __name__ == "__main__":
    main(sys.argv[1:])
