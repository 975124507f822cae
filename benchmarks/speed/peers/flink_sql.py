"""The three works with Flink SQL, exactly once, in a local cluster inside one JVM.

    python -m benchmarks.speed.peers.flink_sql WORK BOOTSTRAP INPUT OUTPUT FOLDER CONNECTOR REST_PORT

Runs in an environment of its own (`benchmarks/flink/requirements.txt`). Prints READY when every task of the job is
RUNNING, and ends when standard input does. A failure ends it too: it does not restart.

Python only submits the SQL; no record passes through it. Settings differ from Flink's defaults where its documentation
names them for such a job: object reuse, a checkpoint per second in a folder, mini-batches with aggregation in two
phases for the running total, POOLING for the names of transactions (which saves the broker a new producer for every
checkpoint). State is in the default backend, on the heap.

Transactions are committed at checkpoints, so output is readable about a second after its record. Their timeout is the
longest that a broker accepts by default; the connector's own default of one hour would be refused.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Mapping
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

from benchmarks.speed.peers import at_end_of_input, say_ready

PARALLELISM = 2
_TRANSACTION_TIMEOUT_MS = 15 * 60 * 1000
_LOOK_EVERY = 0.05
_ANSWER_SECONDS = 5.0

# Strict: a record that is not JSON, or without one of the columns, fails the job.
_JSON = {
    "format": "json",
    "json.ignore-parse-errors": "false",
    "json.fail-on-missing-field": "true",
    "json.timestamp-format.standard": "ISO-8601",
}
_PAYMENT = (
    "id BIGINT, account STRING, amount BIGINT, `at` TIMESTAMP_LTZ(3), kind STRING, currency STRING, country STRING"
)
_EVENT_TIME = "WATERMARK FOR `at` AS `at` - INTERVAL '5' SECOND"
_TOTALS = "account STRING, `count` BIGINT, total BIGINT"
_OUTPUT = {
    "stateless": "id BIGINT, account STRING, amount BIGINT, `at` TIMESTAMP_LTZ(3), kind STRING, net BIGINT",
    "windowed": f"`start` BIGINT, {_TOTALS}",
    "running": f"{_TOTALS}, PRIMARY KEY (account) NOT ENFORCED",
}
_QUERY = {
    # Every payment but the tests, with what is left of it after a fee of one percent.
    "stateless": """
        SELECT id, account, amount, `at`, kind, amount - amount / 100
        FROM payments WHERE kind <> 'test'""",
    # Count and sum by account and ten seconds, once they are over; `start` in ms since 1970.
    "windowed": """
        SELECT 1000 * CAST(TIMESTAMPDIFF(SECOND, TIMESTAMP '1970-01-01 00:00:00', window_start) AS BIGINT),
               account, COUNT(*), SUM(amount)
        FROM TUMBLE(TABLE payments, DESCRIPTOR(`at`), INTERVAL '10' SECOND)
        GROUP BY window_start, window_end, account""",
    # Count and sum by account so far.
    "running": "SELECT account, COUNT(*), SUM(amount) FROM payments GROUP BY account",
}


def statements(work: str, bootstrap: str, source: str, output: str) -> list[str]:
    """The tables of input and output, and the INSERT that is the job; `output` names the group and transactions too."""
    reading = {
        "connector": "kafka",
        "topic": source,
        "properties.bootstrap.servers": bootstrap,
        "properties.group.id": output,
        "properties.isolation.level": "read_committed",
        "scan.startup.mode": "earliest-offset",
        **_JSON,
    }
    columns = f"{_PAYMENT}, {_EVENT_TIME}" if work == "windowed" else _PAYMENT
    return [
        f"CREATE TABLE payments ({columns}) WITH ({_options(reading)})",
        f"CREATE TABLE results ({_OUTPUT[work]}) WITH ({_options(_writing(work, bootstrap, output))})",
        f"INSERT INTO results {_QUERY[work]}",
    ]


def _writing(work: str, bootstrap: str, output: str) -> dict[str, str]:
    common = {
        "topic": output,
        "properties.bootstrap.servers": bootstrap,
        "properties.transaction.timeout.ms": str(_TRANSACTION_TIMEOUT_MS),
        "sink.delivery-guarantee": "exactly-once",
        "sink.transactional-id-prefix": output,
        "sink.transaction-naming-strategy": "POOLING",
        "key.format": "raw",
    }
    if work == "running":  # totals change: the connector for tables with a primary key
        return {**common, "connector": "upsert-kafka", "value.format": "json"}
    return {**common, "connector": "kafka", "key.fields": "account", **_JSON}


def _options(options: Mapping[str, str]) -> str:
    return ", ".join(f"'{key}' = '{value}'" for key, value in options.items())


def settings(work: str, folder: Path, connector: Path, rest_port: int) -> dict[str, str]:
    """Flink's configuration for a job whose files are in `folder`."""
    common = {
        "pipeline.jars": connector.as_uri(),
        "pipeline.object-reuse": "true",
        "parallelism.default": str(PARALLELISM),
        "taskmanager.numberOfTaskSlots": str(PARALLELISM),
        "execution.checkpointing.interval": "1 s",
        "execution.checkpointing.mode": "EXACTLY_ONCE",
        "execution.checkpointing.dir": (folder / "checkpoints").as_uri(),
        "restart-strategy.type": "none",
        "table.local-time-zone": "UTC",
        "io.tmp.dirs": str(folder),
        "web.tmpdir": str(folder),
        "rest.address": "127.0.0.1",
        "rest.bind-address": "127.0.0.1",
        "rest.port": str(rest_port),
        "web.refresh-interval": "50 ms",  # else the answer of REST may be three seconds old
    }
    if work == "running":  # a mini-batch also ends with a checkpoint, so that it adds nothing to latency
        common["table.exec.mini-batch.enabled"] = "true"
        common["table.exec.mini-batch.allow-latency"] = "1 s"
        common["table.exec.mini-batch.size"] = "5000"
    return common


def all_running(job: Mapping[str, Any]) -> bool:
    """Whether every task runs, by Flink's own description of a job (REST: `/jobs/ID`)."""
    vertices = job.get("vertices", [])
    return bool(vertices) and all(vertex["tasks"]["RUNNING"] == vertex["parallelism"] for vertex in vertices)


def _job(rest_port: int, job_id: str) -> dict[str, Any]:
    connection = HTTPConnection("127.0.0.1", rest_port, timeout=_ANSWER_SECONDS)
    try:
        connection.request("GET", f"/jobs/{job_id}")
        return dict(json.loads(connection.getresponse().read()))
    finally:
        connection.close()


def main() -> None:
    """Run one work until standard input ends."""
    from pyflink.common import Configuration
    from pyflink.table import EnvironmentSettings, TableEnvironment

    work, bootstrap, source, output, folder, connector, port = sys.argv[1:]
    configuration = Configuration()
    for key, value in settings(work, Path(folder), Path(connector), int(port)).items():
        configuration.set_string(key, value)
    environment = TableEnvironment.create(
        EnvironmentSettings.new_instance().in_streaming_mode().with_configuration(configuration).build()
    )
    *tables, insert = statements(work, bootstrap, source, output)
    for table in tables:
        environment.execute_sql(table)
    job = environment.execute_sql(insert).get_job_client()
    ended = threading.Event()

    def cancel() -> None:
        ended.set()
        job.cancel().result()

    at_end_of_input(cancel)
    while not ended.is_set() and not all_running(_job(int(port), str(job.get_job_id()))):
        time.sleep(_LOOK_EVERY)
    say_ready()
    try:
        job.get_job_execution_result().result()
    except Exception:
        if not ended.is_set():
            raise


if __name__ == "__main__":
    main()
