"""Topics of a schema registry, read and written by streams: versions of a schema, a registry that is away, a replay."""

from __future__ import annotations

import io
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fastavro
import pytest
from confluent_kafka import Producer

from streaming_jobs.formats.framing import ID_HEADER
from streaming_jobs.platform.broker import Broker
from streaming_jobs.settings import Settings
from streaming_jobs.sources.topics import Topics
from tests.support import ROOT
from tests.support.driver import command, rows
from tests.support.registry import RegistryDouble, served

ORDER: dict[str, Any] = {
    "type": "record",
    "name": "Order",
    "fields": [{"name": "id", "type": "long"}, {"name": "price", "type": "double"}],
}
NOTED = {**ORDER, "fields": [*ORDER["fields"], {"name": "note", "type": ["null", "string"], "default": None}]}
OTHER = {**ORDER, "fields": [{"name": "id", "type": "string"}, {"name": "price", "type": "double"}]}
FLOWS = f"""
from streaming_jobs import Avro, DeltaTable, KafkaSink, KafkaTopic, stream

NOTED = Avro({NOTED!r}, ids="header")
PRICED = KafkaTopic("priced-orders", value=Avro({NOTED!r}))

@stream(source=KafkaTopic("avro-orders", value=NOTED), sink={{"t": DeltaTable("noted"), "o": KafkaSink(PRICED)}})
def noted(orders):
    return {{"t": orders.drop("_source"), "o": orders}}

@stream(source=KafkaTopic("avro-orders", value=NOTED), sink=DeltaTable("plain"))
def plain(orders):
    return orders.drop("_source")

@stream(source=PRICED, sink=DeltaTable("priced"))
def priced(orders):
    return orders.drop("_source")
"""
TOPICS = ("avro-orders", "priced-orders")


class Home:
    """A project with two streams, the topics between them, and the registry of their schemas."""

    def __init__(self, folder: Path, bootstrap: str, registry: RegistryDouble) -> None:
        self.folder, self.bootstrap, self.registry = folder, bootstrap, registry
        (folder / "code").mkdir()
        (folder / "code" / "avro_flows.py").write_text(FLOWS)
        self.settings = Settings.load({"home": folder})

    def send(self, schema: Any, prefix: bytes, *values: Any, header: bool = False) -> None:
        producer = Producer({"bootstrap.servers": self.bootstrap, "enable.idempotence": True})
        for value in values:
            file = io.BytesIO()
            fastavro.schemaless_writer(file, fastavro.parse_schema(schema), value)
            headers = [(ID_HEADER, prefix)] if header else []
            producer.produce(TOPICS[0], file.getvalue() if header else prefix + file.getvalue(), headers=headers)
        assert producer.flush(30) == 0

    def __call__(self, *arguments: str) -> str:
        """Run a command; what it printed."""
        environment = {
            **os.environ,
            "RECOURSE_HOME": str(self.folder),
            "RECOURSE_FLOWS": '["avro_flows"]',
            "RECOURSE_KAFKA__BOOTSTRAP_SERVERS": self.bootstrap,
            "RECOURSE_REGISTRY__URL": self.registry.url,
            "RECOURSE_REGISTRY__UNKNOWN_FOR": "0 ms",
            "PYTHONDONTWRITEBYTECODE": "1",
            "PYTHONPATH": os.pathsep.join([str(self.folder / "code"), str(ROOT)]),
        }
        done = command(self.folder, environment, *arguments)
        assert done.returncode == 0, done.stderr + done.stdout
        return done.stdout

    def read(self, stream: str) -> None:
        self("streams", "run", stream, "--trigger", "available-now")

    def table(self, name: str) -> list[tuple[Any, ...]]:
        return sorted((row["id"], row["price"], row["note"]) for row in rows(self.settings, name))


@pytest.fixture
def home(broker: Broker, tmp_path: Path) -> Iterator[Home]:
    with served(RegistryDouble()) as registry:
        home = Home(tmp_path, broker.start(), registry)
        topics = Topics.of(home.settings.kafka, home.bootstrap)
        for topic in TOPICS:
            topics.create(topic, 1)
        yield home
        for topic in TOPICS:
            topics.delete(topic)


def test_versions_of_a_schema_dead_letters_and_a_replay_without_the_registry(home: Home) -> None:
    registry = home.registry
    first, second, other = (registry.register("avro-orders-value", each) for each in (ORDER, NOTED, OTHER))
    written = registry.register("priced-orders-value", NOTED)
    home.send(ORDER, b"\0" + first.to_bytes(4, "big"), {"id": 1, "price": 1.5}, {"id": 2, "price": 2.5})
    home.send(NOTED, b"\0" + second.to_bytes(4, "big"), {"id": 3, "price": 3.5, "note": "new"}, header=True)
    home.send(NOTED, b"\1" + registry.guid(second).bytes, {"id": 4, "price": 4.5, "note": None}, header=True)
    home.send(OTHER, b"\0" + other.to_bytes(4, "big"), {"id": "x", "price": 0.0})
    home.send(ORDER, b"\0\0\0\0\x63", {"id": 5, "price": 0.0})
    home.send(ORDER, b"{", {"id": 6, "price": 0.0})
    expected = [(1, 1.5, None), (2, 2.5, None), (3, 3.5, "new"), (4, 4.5, None)]
    home.read("noted")
    assert home.table("noted") == expected
    letters = {row["reason"] for row in rows(home.settings, "noted_dead_letters")}
    assert letters == {"incompatible_schema", "unknown_schema", "not_framed"}

    registry.fault = 503  # from here on nothing needs the registry
    home.read("priced")
    assert home.table("priced") == expected, "what the first stream has written"
    assert f"id-{written}.json" in {path.name for path in (home.folder / "state" / "_schemas").iterdir()}
    plan = json.loads(home("recover", "plan", "priced", "--to-batch", "-1", "--output", "json"))
    home("recover", "apply", plan["id"], "--yes")
    assert home.table("priced") == expected
    said = home("verify", "noted", "priced")
    assert "wrong" not in said, said


def test_a_registry_that_is_away_only_delays_a_stream(home: Home) -> None:
    number = home.registry.register("avro-orders-value", ORDER)
    home.send(ORDER, b"\0" + number.to_bytes(4, "big"), {"id": 1, "price": 1.5})
    home.registry.fault, home.registry.faults = 503, 2
    home.read("plain")
    assert home.table("plain") == [(1, 1.5, None)]
    assert home.registry.requests == [f"GET /schemas/ids/{number}"] * 3, "it was asked until it answered"
    assert rows(home.settings, "plain_dead_letters") == []
