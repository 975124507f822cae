"""Streams on a Spark cluster whose machines have nothing of the project: executors read, judge and write; some die."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from streaming_jobs.platform.broker import Broker
from streaming_jobs.settings import Settings
from streaming_jobs.sources.topics import Topics
from streaming_jobs.state.status import read_status
from tests.conftest import SettingsFactory
from tests.support.driver import assert_chained, driver, finished, ledger, produce, rows, until
from tests.support.standalone import StandaloneCluster, standalone
from tests.support.things import expected_totals, thing

COUNT = 4_000
pytestmark = pytest.mark.timeout(400)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StandaloneCluster]:
    with standalone(tmp_path_factory.mktemp("cluster")) as cluster:
        yield cluster


@pytest.fixture
def things(settings: SettingsFactory, broker: Broker, cluster: StandaloneCluster) -> tuple[Settings, str]:
    """The topic `things`, and settings of a driver on that cluster."""
    bootstrap = broker.start()
    made = settings({"kafka.bootstrap_servers": bootstrap, "spark.master": cluster.url})
    topics = Topics.of(made.kafka, bootstrap)
    if topics.describe("things"):
        topics.delete("things")
    topics.create("things", 2)
    produce(bootstrap, "things", map(thing, range(COUNT)))
    return made, bootstrap


def on(cluster: StandaloneCluster) -> dict[str, str]:
    return {
        "RECOURSE_SPARK__MASTER": cluster.url,
        "RECOURSE_SPARK__DRIVER_HOST": "127.0.0.1",
        "RECOURSE_SPARK__EXTRA": '{"spark.executor.memory": "512m"}',
        "RECOURSE_STREAM__PATH": "executor",
        "RECOURSE_STREAM__MAX_OFFSETS_PER_TRIGGER": "1000",
    }


@pytest.mark.parametrize("streams", ["plain", pytest.param("plain,totals", marks=pytest.mark.long)])
def test_executors_write_every_record_once_although_one_machine_is_lost(
    things: tuple[Settings, str], cluster: StandaloneCluster, streams: str
) -> None:
    made, bootstrap = things
    arguments = ("--streams", streams, "--trigger", "available-now")
    process = driver(made, bootstrap, *arguments, environment=on(cluster))
    until(lambda: ledger(made, "plain") if (made.tables / "plain").exists() else None, 120, "a first batch")
    cluster.kill_worker(0)
    code, output = finished(process)
    assert code == 0, output
    assert all((seen := read_status(made, name)) and seen.restarts == 0 for name in streams.split(","))
    assert_chained(ledger(made, "plain"))
    if "totals" in streams:
        totals = {row["k"]: (row["c"], row["s"]) for row in rows(made, "totals")}
        assert totals == expected_totals(range(COUNT))
    assert sorted((row["part"], row["off"]) for row in rows(made, "plain")) == sorted(
        (part, offset)
        for part, last in Topics.of(made.kafka, bootstrap).offsets("things").latest.items()
        for offset in range(last)
    )
    cluster.add_worker()
