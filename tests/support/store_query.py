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
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from streaming_jobs.platform import spark as spark_session
from streaming_jobs.settings import Settings
from tests.support import ROOT
from tests.support.store_server import BUCKET, Fault, Request, StoreServer, store_server
from tests.support.waiting import wait_for

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

KEYS, ROWS = 5, 100
_MANAGER = "spark.sql.streaming.checkpointFileManagerClass"
_CHECKSUMS = "spark.sql.streaming.checkpoint.fileChecksum.enabled"
_ROOT = f"s3a://{BUCKET}/state"
SNAPSHOTS = {
    "spark.sql.streaming.stateStore.minDeltasForSnapshot": "2",
    "spark.sql.streaming.stateStore.maintenanceInterval": "300ms",
}
"""State is uploaded whole after each few batches, so that the next driver begins with such a copy."""
_QUICK = {
    "spark.driver.extraJavaOptions": "-XX:TieredStopAtLevel=1",
    # So that each batch also removes what is too old, as after 100 batches otherwise.
    "spark.sql.streaming.minBatchesToRetain": "2",
}


def settings(home: Path, endpoint: str, extra: Mapping[str, str] | None = None) -> Settings:
    """State on the S3 server at `endpoint`, and a local session with two cores."""
    return Settings.load(
        {
            "home": home,
            "state_dir": f"s3://{BUCKET}/state",
            "storage.endpoint": endpoint,
            "storage.allow_http": True,
            "spark.master": "local[2]",
            "spark.driver_memory_mb": 1024,
            "spark.extra": {**_QUICK, **(extra or {})},
        }
    )


def truth(batch: int) -> dict[str, list[int]]:
    """Count and sum of each key after a batch."""
    values = range((batch + 1) * ROWS)
    return {str(key): [len(values[key::KEYS]), sum(values[key::KEYS])] for key in range(KEYS)}


def driver(task: str, home: Path, endpoint: str, last: int) -> subprocess.CompletedProcess[str]:
    """A driver that runs up to the end of batch `last`, and tries the file manager ("run"), or is killed in it ("die").

    It prints what `_tried` returns.
    """
    command = [sys.executable, "-m", "tests.support.store_query", task, str(home), endpoint, str(last)]
    return subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, timeout=180, check=False)


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


def _run(task: str, home: Path, endpoint: str, last: int, extra: Mapping[str, str]) -> None:
    from pyspark.sql.functions import count
    from pyspark.sql.functions import sum as total

    session, jvm = _session(home, endpoint, extra)
    out, server = home / "out", StoreServer(endpoint)
    out.mkdir(exist_ok=True)

    def batch(frame: DataFrame, number: int) -> None:
        rows = {str(row.key): [row.n, row.total] for row in frame.collect()}
        if task == "die" and number == last:
            wait_for(lambda: any(each.key.endswith(".zip") for each in server.requests()), "a snapshot of state")
            os.kill(jvm, signal.SIGKILL)
            os.kill(os.getpid(), signal.SIGKILL)
        (out / f"{number}.json").write_text(json.dumps(rows))

    source = session.readStream.format("rate-micro-batch").option("rowsPerBatch", ROWS).load()
    counted = source.selectExpr(f"value % {KEYS} AS key", "value").groupBy("key")
    frame = counted.agg(count("*").alias("n"), total("value").alias("total"))
    writer = frame.writeStream.outputMode("update").foreachBatch(batch)
    query = writer.option("checkpointLocation", f"{_ROOT}/g0001").start()
    wait_for(lambda: (query.lastProgress or {"batchId": -1})["batchId"] >= last or query.exception(), "the last batch")
    query.stop()
    if query.exception() is not None:
        raise query.exception()  # type: ignore[misc]
    if task == "run":
        print(json.dumps(_tried(session, server)))
    session.stop()


def _tried(session: SparkSession, server: StoreServer) -> dict[str, str]:
    """By what was tried with the file manager, its outcome: a value, or the name of an exception's class."""
    from py4j.protocol import Py4JJavaError

    jvm: Any = session._jvm
    root, hadoop = f"{_ROOT}/tried", session._jsparkSession.sessionState().newHadoopConf()
    package = jvm.org.apache.spark.sql.execution.streaming.checkpointing
    files, rival = (package.CheckpointFileManager.create(jvm.org.apache.hadoop.fs.Path(root), hadoop) for _ in "12")
    outcomes = {}

    def path(name: str) -> Any:
        return jvm.org.apache.hadoop.fs.Path(f"{root}/{name}")

    def opened(name: str, content: str, *, overwrite: bool = False, by: Any = files) -> Any:
        stream = by.createAtomic(path(name), overwrite)
        stream.write(content.encode())
        return stream

    def read(name: str) -> str:
        stream = files.open(path(name))
        try:
            return bytes(stream.readAllBytes()).decode()
        finally:
            stream.close()

    def tried(what: str, action: Callable[[], object]) -> None:
        try:
            outcomes[what] = str(action())
        except Py4JJavaError as error:
            outcomes[what] = error.java_exception.getClass().getSimpleName()

    ours, others = opened("offsets/7", "ours"), opened("offsets/7", "another driver's")
    tried("first", ours.close)
    tried("second", others.close)
    tried("third", opened("offsets/7", "late").close)
    tried("content", lambda: read("offsets/7"))
    server.inject(Fault("answer lost", key="tried/offsets/8", times=2))
    tried("answer lost", opened("offsets/8", "ours").close)
    server.inject(Fault("unavailable", key="tried/offsets/9", times=2))
    tried("unavailable", opened("offsets/9", "ours").close)
    server.inject(Fault("denied", key="tried/offsets/10", times=9))
    tried("denied", opened("offsets/10", "ours").close)
    cancelled = opened("offsets/11", "half")
    cancelled.cancel()
    tried("cancelled", cancelled.close)
    tried("cancelled exists", lambda: files.exists(path("offsets/11")))
    opened("state/1.zip", "old", overwrite=True).close()
    opened("state/1.zip", "new", overwrite=True).close()
    tried("replaced", lambda: read("state/1.zip"))
    tried("names", lambda: sorted(each.getPath().getName() for each in files.list(path("offsets"))))
    tried("folder exists", lambda: files.exists(path("state")))
    files.delete(path("offsets/7"))
    files.delete(path("offsets/7"))
    tried("deleted exists", lambda: files.exists(path("offsets/7")))
    tried("deleted", lambda: read("offsets/7"))
    files.mkdirs(path("none"))
    tried("names in no folder", lambda: len(files.list(path("none"))))
    opened("commits/1", "ours").close()
    opened("commits/2", "a rival's", by=rival).close()
    before = len(server.requests())
    tried("next exists", lambda: files.exists(path("commits/2")))
    tried("asked for it", lambda: len(server.requests()) - before)
    tried("next of a rival", opened("commits/2", "ours").close)
    tried("rival looks back", lambda: rival.exists(path("commits/1")))
    return outcomes


def _table(server: StoreServer, home: Path, extra: Mapping[str, str]) -> None:
    _run("measure", home, server.endpoint, 8, extra)
    batches = by_batch(server.requests())[3:]
    for number, requests in enumerate(batches):
        print(number, len(requests), dict(sorted(Counter(map(kind, requests)).items())))
    for each in batches[-1]:
        print(kind(each), each.status, each.key.removeprefix(f"{BUCKET}/state/g0001/"), each.query[:60], each.condition)


def main(arguments: list[str]) -> None:
    match arguments:
        case ["run" | "die" as task, home, endpoint, last]:
            _run(task, Path(home), endpoint, int(last), SNAPSHOTS if task == "die" else {})
        case _:
            extra = {_MANAGER: arguments[0], _CHECKSUMS: "true"} if arguments else {}
            with store_server() as server, tempfile.TemporaryDirectory() as home:
                os.environ |= {"AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test"}
                _table(server, Path(home), extra)


if __name__ == "__main__":
    main(sys.argv[1:])
