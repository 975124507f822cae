"""The shipped streams on a Spark cluster whose machines have nothing of the project, equal to the truth.

Executors read, judge and write each batch (`stream.path = "executor"`). Tables are in a folder that all machines have.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import pytest

from orchestration.bundle.job_yaml import FILE_NAME, load
from streaming_jobs.examples.flights import feeder
from streaming_jobs.examples.flights.streams import STREAMS
from streaming_jobs.examples.flights.truth import KEYS, as_frame, compare, differences
from streaming_jobs.examples.shop import streams as shop
from streaming_jobs.examples.shop.orders import orders, true_availability
from streaming_jobs.platform import table_rows
from streaming_jobs.platform.broker import Broker
from streaming_jobs.settings import Settings
from streaming_jobs.sources.topics import Topics
from streaming_jobs.state.status import read_status, streams_with_status
from tests.conftest import SettingsFactory
from tests.support import ROOT
from tests.support.driver import driver, finished, produce
from tests.support.standalone import StandaloneCluster, standalone

SHARE = 0.05
"""Of the flights: 16,838, of which the last ten days' windows stay open."""
FLIGHTS = "streaming_jobs.examples.flights.streams"
pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StandaloneCluster]:
    with standalone(tmp_path_factory.mktemp("cluster")) as cluster:
        yield cluster


@pytest.fixture
def home(settings: SettingsFactory, broker: Broker) -> Settings:
    return settings({"kafka.bootstrap_servers": broker.start()})


def feed(made: Settings) -> None:
    """The topic of the flights with nothing but one feed of their first part."""
    _created(made, {"flights": 4})
    assert feeder.feed(made, rate=None, share=SHARE).records


def test_the_flights_are_equal_to_the_truth(home: Settings, cluster: StandaloneCluster) -> None:
    feed(home)
    _run(home, ("--streams", ",".join(KEYS)), FLIGHTS, cluster.environment(records=6000))
    checks = compare(home, STREAMS, SHARE)
    assert len(checks) == len(STREAMS) and all(check.ok and check.found_rows for check in checks), checks


def test_what_the_shop_can_deliver_follows_from_the_orders_through_two_topics(
    home: Settings, cluster: StandaloneCluster
) -> None:
    made = orders(3000)
    _created(home, shop.TOPICS)
    assert home.kafka.bootstrap_servers is not None
    produce(home.kafka.bootstrap_servers, shop.ORDERS.name, ((order.product.encode(), order.value) for order in made))
    for name in ("stock_changes", "stock", "availability"):
        _run(home, ("--streams", name), shop.__name__, cluster.environment(records=1500))
    found = table_rows.rows(home.tables / "availability").select(["product", "pieces", "available"])
    assert found.sort_by("product").to_pylist() == true_availability(made)


def test_the_shipped_bundle_writes_the_same_rows_as_target_dev_and_as_target_cluster(
    tmp_path: Path, broker: Broker, cluster: StandaloneCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    for variable, value in (("spark_master", cluster.url), ("executor_memory", "512m")):
        monkeypatch.setenv(f"BUNDLE_VAR_{variable}", value)
    shared = {"kafka.bootstrap_servers": broker.start()}
    homes = {target: Settings.load({"home": tmp_path / target, **shared}) for target in ("dev", "cluster")}
    feed(homes["dev"])
    for target, made in homes.items():
        [job] = load(ROOT / FILE_NAME, target).jobs
        log = _run(
            made, job.arguments({"max_offsets_per_trigger": "6000"}), FLIGHTS, {"RECOURSE_STREAM__PATH": "executor"}
        )
        assert ("executors checked" in log) == (target == "cluster")
    for stream, keys in KEYS.items():
        dev, there = (as_frame(table_rows.rows(made.tables / stream)) for made in homes.values())
        assert len(dev) and not differences(dev, there, keys), stream
    assert all(check.ok for made in homes.values() for check in compare(made, STREAMS, SHARE))


def _created(made: Settings, wanted: Mapping[str, int]) -> None:
    """Topics without records, whatever an earlier test has left in them."""
    assert made.kafka.bootstrap_servers is not None
    topics = Topics.of(made.kafka, made.kafka.bootstrap_servers)
    for name, partitions in wanted.items():
        if topics.describe(name):
            topics.delete(name)
        topics.create(name, partitions)


def _run(made: Settings, arguments: Sequence[str], flows: str, environment: Mapping[str, str]) -> str:
    """The log of a driver with these options, which ends when its streams have read everything; none may restart."""
    assert made.kafka.bootstrap_servers is not None
    until_end = ("--trigger", "available-now")
    process = driver(made, made.kafka.bootstrap_servers, *arguments, *until_end, flows=flows, environment=environment)
    code, output = finished(process, 400)
    assert code == 0, output
    statuses = [read_status(made, name) for name in streams_with_status(made)]
    assert statuses and all(status is not None and not status.restarts for status in statuses), output
    return output
