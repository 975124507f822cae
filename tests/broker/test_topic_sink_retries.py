"""Tasks that Spark repeats: rows of an attempt that failed, or came second, are in no topic."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from streaming_jobs.platform.broker import Broker
from streaming_jobs.platform.jars import spark_jars
from streaming_jobs.settings import Settings
from streaming_jobs.sources.topics import Topics
from tests.conftest import QUICK_START, SettingsFactory
from tests.support import retried_flows
from tests.support.driver import driver, finished, ledger, produce
from tests.support.spark_cluster import spark_cluster
from tests.support.things import thing
from tests.support.topic_reader import committed

FLOWS = "tests.support.retried_flows"
PARTITIONS = 3
COUNT = 6000
RETRIED = {
    "retried_by_driver": retried_flows.BY_DRIVER.name,
    "retried_by_executors": retried_flows.BY_EXECUTORS.name,
}
HURRIED = {
    "hurried_by_driver": retried_flows.HURRIED_BY_DRIVER.name,
    "hurried_by_executors": retried_flows.HURRIED_BY_EXECUTORS.name,
}
_WITHIN = 480.0
Run = Callable[[Mapping[str, str], Mapping[str, str]], None]


@pytest.fixture
def attempts(tmp_path: Path) -> Path:
    """The folder in which attempts that fail, or are slow, leave a file; its name begins with their rows."""
    folder = tmp_path / "attempts"
    folder.mkdir()
    return folder


@pytest.fixture
def home(settings: SettingsFactory, broker: Broker) -> Settings:
    return settings({"kafka.bootstrap_servers": broker.start()})


@pytest.fixture
def run(home: Settings, attempts: Path) -> Run:
    def ran(streams: Mapping[str, str], environment: Mapping[str, str]) -> None:
        """Run the streams, by name with their topics, over 6,000 records in three batches."""
        bootstrap = home.kafka.bootstrap_servers
        topics = Topics.of(home.kafka, bootstrap)
        markers = (f"__recourse.{stream}.{topic}" for stream, topic in streams.items())
        for name in ("things", *streams.values(), *markers):
            if topics.describe(name):
                topics.delete(name)
        topics.create("things", 2)
        for name in streams.values():
            topics.create(name, PARTITIONS)
        produce(bootstrap, "things", (thing(i) for i in range(COUNT)))
        paths = {f"RECOURSE_STREAMS__{s.upper()}__PATH": s.rpartition("_")[2].removesuffix("s") for s in streams}
        variables = {
            retried_flows.FAILURES: str(attempts),
            "RECOURSE_STREAM__MAX_OFFSETS_PER_TRIGGER": "2000",
            **paths,
            **environment,
        }
        arguments = ("--trigger", "available-now", "--streams", ",".join(streams))
        code, output = finished(driver(home, bootstrap, *arguments, flows=FLOWS, environment=variables), _WITHIN)
        assert code == 0, output[-3000:]
        for stream, topic in streams.items():
            records = committed(bootstrap, topic, PARTITIONS)
            assert sorted(json.loads(m.value() or b"")["n"] for m in records) == [*range(COUNT)]
            assert len(ledger(home, f"{stream}_batches")) >= 3

    return ran


def test_tasks_that_fail_after_their_last_row_and_are_repeated_write_each_record_once(
    home: Settings, run: Run, attempts: Path
) -> None:
    run(
        RETRIED,
        {
            "RECOURSE_SPARK__MASTER": "local[2,3]",  # three attempts for each task
            "RECOURSE_SPARK__EXTRA": json.dumps(QUICK_START | {"spark.speculation": "true"}),
        },
    )
    for topic in RETRIED.values():
        last: dict[bytes | None, int] = {}
        for m in committed(home.kafka.bootstrap_servers, topic, PARTITIONS):
            offset = json.loads(m.value() or b"")["off"]
            assert offset > last.get(m.key(), -1), f"key {m.key()!r} is out of order"
            last[m.key()] = offset
    lost = sum(int(file.name.partition("-")[0]) for file in attempts.iterdir())
    assert lost == 2 * COUNT, "each row of both streams was made by an attempt that failed afterwards"


@pytest.mark.long
def test_two_attempts_of_a_task_at_the_same_time_write_each_record_once(
    home: Settings, run: Run, attempts: Path, tmp_path: Path
) -> None:
    """Spark speculates on a cluster only, and only on another host."""
    extra = {
        "spark.speculation": "true",
        "spark.speculation.interval": "100ms",
        "spark.speculation.minTaskRuntime": "100ms",
        "spark.speculation.multiplier": "1.1",
        "spark.speculation.quantile": "0.5",
        "spark.executor.memory": "512m",
        "spark.executor.extraClassPath": os.pathsep.join(map(str, spark_jars(home))),
    }
    with spark_cluster(home, tmp_path / "cluster", {retried_flows.FAILURES: str(attempts)}) as master:
        run(
            HURRIED,
            {"RECOURSE_SPARK__MASTER": master, "RECOURSE_SPARK__EXTRA": json.dumps(QUICK_START | extra)},
        )
    made = [file.name.partition("-")[0] for file in attempts.iterdir()]
    assert made.count("slow") >= 6, "one task of each batch of both streams"
    assert made.count("second") >= 1, "Spark started a second attempt beside a slow one"
