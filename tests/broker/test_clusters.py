"""Streams between two clusters, each a real broker: exactly once over kills, recovered and taken back, one away."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import Consumer, TopicPartition

from streaming_jobs.platform.broker import Broker
from streaming_jobs.settings import Settings
from streaming_jobs.sources.topics import Topics
from tests.conftest import SettingsFactory
from tests.support.driver import command, driver, finished, produce, rows, variables
from tests.support.things import thing
from tests.support.topic_reader import committed

FLOWS = "tests.support.cluster_flows"
COUNT = 3_000
MARKERS = ("__recourse.split.halves", "__recourse.split.halves.shards-2")
pytestmark = pytest.mark.timeout(1200)


@dataclass
class TwoClusters:
    """A home whose default cluster is the tests' broker, and whose cluster `eu` is a broker of its own."""

    settings: Settings
    addresses: dict[str, str]
    eu: Broker
    environment: dict[str, str] = field(init=False)

    def __post_init__(self) -> None:
        self.environment = {
            "RECOURSE_KAFKA__CLUSTERS__EU__BOOTSTRAP_SERVERS": self.addresses["eu"],
            "RECOURSE_KAFKA__GROUP_PREFIX": "shown.",
            "RECOURSE_STREAM__MAX_OFFSETS_PER_TRIGGER": "700",
            "RECOURSE_KAFKA__TIMEOUT": "5 s",
            "RECOURSE_KAFKA__CLUSTERS__EU__TIMEOUT": "5 s",
        }

    def run(self, streams: str, crash: str = "") -> str:
        """Run the streams over what there is; with `crash` the driver is killed there."""
        arguments = ("--trigger", "available-now", "--streams", streams)
        variables = {**self.environment, **({"RECOURSE_CRASH": crash} if crash else {})}
        process = driver(self.settings, self.addresses[""], *arguments, flows=FLOWS, environment=variables)
        code, output = finished(process)
        assert code == (-signal.SIGKILL if crash else 0), f"{crash}: {output[-3000:]}"
        return output

    def recourse(self, *arguments: str, code: int | None = 0) -> str:
        """What a command printed; None: whatever its exit code is."""
        own = {**variables(self.settings.home, self.addresses[""], FLOWS), **self.environment}
        done = command(self.settings.home, own, *arguments)
        assert code in (None, done.returncode), (arguments, done.stdout[-2000:], done.stderr[-2000:])
        return done.stdout + done.stderr

    def numbers(self, cluster: str) -> list[int]:
        """The committed numbers in the topic of a cluster."""
        return sorted(json.loads(m.value() or b"")["n"] for m in committed(self.addresses[cluster], "halves", 3))

    def gathered(self) -> list[tuple[int, str]]:
        return sorted((row["n"], row["topic"]) for row in rows(self.settings, "gathered"))


TRUTH = [(n, "halves@eu" if n % 2 else "halves") for n in range(COUNT)]


@pytest.fixture
def two(settings: SettingsFactory, broker: Broker, tmp_path: Path) -> Iterator[TwoClusters]:
    ours = broker.start()
    with Broker(Settings.load({"home": tmp_path / "eu"})) as eu:
        made = TwoClusters(
            settings({"kafka.bootstrap_servers": ours, "kafka.clusters.eu.bootstrap_servers": eu.start()}),
            {"": ours, "eu": eu.start()},
            eu,
        )
        topics = Topics.of(made.settings.kafka, ours)
        for name in ("things", "halves", *MARKERS):
            if topics.describe(name):
                topics.delete(name)
        topics.create("things", 2)
        for name in ("halves", "halves@eu"):
            topics.create(name, 3)
        produce(ours, "things", (thing(i) for i in range(COUNT)))
        yield made
        for name in ("things", "halves", *MARKERS):
            if topics.describe(name):
                topics.delete(name)


@pytest.mark.long
def test_a_stream_reads_one_cluster_and_writes_both_and_another_reads_both_exactly_once_over_kills(
    two: TwoClusters,
) -> None:
    for crash in ("split:secondary_committed:1", "split:transaction_open:2"):
        two.run("split", crash)
    two.run("split")
    assert two.numbers("") == [*range(0, COUNT, 2)] and two.numbers("eu") == [*range(1, COUNT, 2)]
    ours, eu = (_names(address) for address in (two.addresses[""], two.addresses["eu"]))
    assert MARKERS[0] in ours & eu and MARKERS[1] in eu - ours, "each transaction is of one cluster, with its marker"
    two.run("gathered")
    assert two.gathered() == TRUTH

    assert "every offset is in its table exactly once" in two.recourse("verify")
    shown: list[dict[str, Any]] = json.loads(two.recourse("topics", "--seconds", "0", "--output", "json"))
    assert {each["topic"]: each["lag"] for each in shown} == {
        "things": {"split": 0},
        "halves": {"gathered": 0},
        "halves@eu": {"gathered": 0},
    }
    assert f"{two.addresses['eu']} answers" in two.recourse("doctor", code=None)
    for cluster in ("", "eu"):
        assert _shown(two.addresses[cluster], "shown.gathered", "halves") == _ends(two, cluster)


@pytest.mark.long
def test_a_recovery_voids_and_writes_records_in_both_clusters_and_is_taken_back(two: TwoClusters) -> None:
    two.run("split")
    two.run("gathered")
    before = _ends(two, "eu")
    plan: dict[str, Any] = json.loads(two.recourse("recover", "plan", "split", "--to-batch", "1", "--output", "json"))
    two.recourse("recover", "apply", plan["id"], "--yes")
    assert sum(_ends(two, "eu").values()) > sum(before.values())
    assert two.gathered() == TRUTH
    voided = json.loads(two.recourse("topics", "halves@eu", "--seconds", "0", "--output", "json"))[0]["void"]
    assert {each["plan"] for each in voided} == {plan["id"]}
    assert "every offset is in its table exactly once" in two.recourse("verify")
    two.recourse("recover", "undo", plan["id"], "--yes")
    assert two.gathered() == TRUTH
    produce(two.addresses[""], "things", (thing(i) for i in range(COUNT, COUNT + 100)))
    two.run("split")
    two.run("gathered")
    assert two.gathered() == [*TRUTH, *((n, "halves@eu" if n % 2 else "halves") for n in range(COUNT, COUNT + 100))]


def test_a_cluster_that_is_away_stops_its_own_streams_only_and_the_error_names_its_settings(two: TwoClusters) -> None:
    two.eu.kill()
    arguments = ("--trigger", "available-now", "--streams", "plain")
    ours = driver(
        two.settings, two.addresses[""], *arguments, flows="tests.support.things", environment=two.environment
    )
    code, output = finished(ours)
    assert code == 0, output[-2000:]
    assert len(rows(two.settings, "plain")) == COUNT
    said = two.recourse("send", "halves@eu", "-", "--yes", code=1)
    assert "kafka.clusters.eu.bootstrap_servers" in said


def _names(address: str) -> set[str]:
    consumer = Consumer({"bootstrap.servers": address, "group.id": "names"})
    try:
        return set(consumer.list_topics(timeout=10).topics)
    finally:
        consumer.close()


def _shown(address: str, group: str, topic: str) -> dict[int, int]:
    """The committed offsets of a consumer group, as any tool for Kafka sees them."""
    consumer = Consumer({"bootstrap.servers": address, "group.id": group})
    try:
        return {p.partition: p.offset for p in consumer.committed([TopicPartition(topic, n) for n in range(3)], 10)}
    finally:
        consumer.close()


def _ends(two: TwoClusters, cluster: str) -> dict[int, int]:
    return Topics.of(two.settings.kafka, two.addresses[""]).latest("halves@eu" if cluster else "halves")
