"""Streams on a Spark cluster whose machines have nothing of the project: executors read, judge and write; some die."""

from __future__ import annotations

import signal
from collections.abc import Iterator, Mapping
from typing import Any

import psutil
import pytest
from deltalake import DeltaTable

from streaming_jobs.errors import PermanentError
from streaming_jobs.platform.broker import Broker
from streaming_jobs.settings import Settings
from streaming_jobs.sources.topics import Topics
from streaming_jobs.state.status import read_status
from streaming_jobs.state.stream_folder import StreamFolder
from streaming_jobs.storage.locations import files_below
from tests.conftest import SettingsFactory
from tests.support.driver import CRASH, assert_chained, driver, finished, ledger, produce, rows
from tests.support.standalone import StandaloneCluster, standalone
from tests.support.things import expected_totals, thing
from tests.support.waiting import wait_for

COUNT = 4_000


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StandaloneCluster]:
    with standalone(tmp_path_factory.mktemp("cluster")) as cluster:
        yield cluster


@pytest.fixture
def places(request: pytest.FixtureRequest) -> dict[str, Any]:
    """Settings of where tables and state are: in the home, or with the parameter `store` on the S3 server."""
    if getattr(request, "param", "folder") == "folder":
        return {}
    on_a_store: dict[str, Any] = request.getfixturevalue("tables_on_a_store")
    return {**on_a_store, "state_dir": f"{on_a_store['tables_dir']}-state"}


@pytest.fixture
def things(
    settings: SettingsFactory, broker: Broker, cluster: StandaloneCluster, places: dict[str, Any]
) -> tuple[Settings, str]:
    """The topic `things`, and settings of a driver on that cluster."""
    bootstrap = broker.start()
    made = settings({"kafka.bootstrap_servers": bootstrap, "spark.master": cluster.url, **places})
    topics = Topics.of(made.kafka, bootstrap)
    if topics.describe("things"):
        topics.delete("things")
    topics.create("things", 2)
    produce(bootstrap, "things", map(thing, range(COUNT)))
    return made, bootstrap


def variables(places: Mapping[str, Any]) -> dict[str, str]:
    return {f"RECOURSE_{key.upper().replace('.', '__')}": str(value) for key, value in places.items()}


@pytest.mark.parametrize(
    ("streams", "places"),
    [
        pytest.param("plain", "folder", marks=pytest.mark.long),
        ("plain", "store"),
        pytest.param("plain,totals", "folder", marks=pytest.mark.long),
        pytest.param("plain,totals", "store", marks=pytest.mark.long),
    ],
    indirect=["places"],
)
def test_executors_write_every_record_once_although_one_machine_is_lost(
    things: tuple[Settings, str], cluster: StandaloneCluster, streams: str, places: dict[str, Any]
) -> None:
    """On a store, machines share nothing else: executors find the Kafka client's properties there."""
    made, bootstrap = things
    arguments = ("--streams", streams, "--trigger", "available-now")
    process = driver(made, bootstrap, *arguments, environment={**cluster.environment(), **variables(places)})
    wait_for(lambda: ledger(made, "plain") if (made.tables / "plain").exists() else None, "a first batch")
    cluster.kill_worker(0)
    code, output = finished(process)
    assert code == 0, output
    assert all((seen := read_status(made, name)) and seen.restarts == 0 for name in streams.split(","))
    if "totals" in streams:
        totals = {row["k"]: (row["c"], row["s"]) for row in rows(made, "totals")}
        assert totals == expected_totals(range(COUNT))
    assert_once(made, bootstrap)
    assert list(files_below(made.state / "_clients")) == [], "the client's properties are gone with the session"
    cluster.add_worker()


def assert_once(made: Settings, bootstrap: str) -> None:
    """Each record is one row."""
    assert_chained(ledger(made, "plain"))
    assert sorted((row["part"], row["off"]) for row in rows(made, "plain")) == sorted(
        (part, offset)
        for part, last in Topics.of(made.kafka, bootstrap).offsets("things").latest.items()
        for offset in range(last)
    )


@pytest.mark.long
def test_the_next_driver_repeats_the_batch_whose_files_executors_had_written(
    things: tuple[Settings, str], cluster: StandaloneCluster
) -> None:
    made, bootstrap = things
    arguments, environment = ("--streams", "plain", "--trigger", "available-now"), cluster.environment()
    code, output = finished(driver(made, bootstrap, *arguments, environment={**environment, CRASH: "plain:staged:1"}))
    assert code == -signal.SIGKILL, output
    written = {*(made.tables / "plain" / "g0001").glob("b000000001-*/**/*.parquet")}
    assert written and len(ledger(made, "plain")) == 1
    code, output = finished(driver(made, bootstrap, *arguments, environment=environment))
    assert code == 0, output
    assert not any(file.exists() for file in written), "the repeated batch has files of its own"
    assert_once(made, bootstrap)


@pytest.mark.long
def test_a_driver_that_wakes_after_another_one_took_over_commits_nothing(
    things: tuple[Settings, str], cluster: StandaloneCluster
) -> None:
    """As after a pause in which the file server has given the paused machine's locks away."""
    made, bootstrap = things
    arguments, environment = ("--streams", "plain", "--trigger", "available-now"), cluster.environment(cores=1)
    paused = driver(made, bootstrap, *arguments, environment={**environment, CRASH: "plain:staged:1:stop"})
    python = psutil.Process(paused.pid)
    try:
        wait_for(lambda: python.status() == psutil.STATUS_STOPPED, "the pause of the first driver")
        StreamFolder.of(made, "plain").lease.unlink()
        code, output = finished(driver(made, bootstrap, *arguments, environment=environment))
        assert code == 0, output
        version = DeltaTable(made.tables / "plain").version()
    finally:
        python.resume()
    code, output = finished(paused)
    assert code == PermanentError.exit_code and "g0001 batch 1 appeared in table plain" in output, output
    assert DeltaTable(made.tables / "plain").version() == version
    assert_once(made, bootstrap)
