"""A stream runs, and is recovered, on a cluster with ACLs with exactly the rights that docs/secure.md lists."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import Consumer, ConsumerGroupTopicPartitions, TopicPartition
from confluent_kafka.admin import (  # type: ignore[attr-defined]  # its stubs do not name what it re-exports
    AclBinding,
    AclOperation,
    AclPermissionType,
    AdminClient,
    ResourcePatternType,
    ResourceType,
)
from pyspark.sql import SparkSession

from streaming_jobs.errors import UsageError
from tests.conftest import SettingsFactory
from tests.support.driver import Bench, produce
from tests.support.secured_broker import secured_broker
from tests.support.things import thing
from tests.support.topic_flows import copied
from tests.support.topic_reader import committed

IN, OUT = "things", "copies"
TOPIC, ID, GROUP = ResourceType.TOPIC, ResourceType.TRANSACTIONAL_ID, ResourceType.GROUP
Rights = Sequence[tuple[ResourceType, str, ResourcePatternType, Sequence[str]]]
RIGHTS: Rights = [
    (TOPIC, IN, ResourcePatternType.LITERAL, ["DESCRIBE", "READ"]),
    (TOPIC, OUT, ResourcePatternType.LITERAL, ["DESCRIBE", "DESCRIBE_CONFIGS", "READ", "WRITE"]),
    (TOPIC, "__recourse.", ResourcePatternType.PREFIXED, ["DESCRIBE", "DESCRIBE_CONFIGS", "CREATE", "READ", "WRITE"]),
    (ID, "recourse.", ResourcePatternType.PREFIXED, ["DESCRIBE", "WRITE"]),
    (GROUP, "shown.", ResourcePatternType.PREFIXED, ["READ"]),
]


@pytest.fixture
def secured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[str, str]]:
    """The addresses of a broker with ACLs: for its administrator, and for the user `jo`."""
    plain = 'org.apache.kafka.common.security.plain.PlainLoginModule required user_jo="jos";'
    with secured_broker(tmp_path / "broker", monkeypatch, "PLAIN", plain) as addresses:
        yield addresses


def test_the_documented_rights_are_enough_for_a_stream_that_reads_and_writes_topics_and_its_recovery(
    secured: tuple[str, str], settings: SettingsFactory, spark: SparkSession
) -> None:
    administrator, address = secured
    chosen: dict[str, Any] = {
        "kafka.bootstrap_servers": address,
        "kafka.security_protocol": "SASL_PLAINTEXT",
        "kafka.sasl_mechanism": "PLAIN",
        "kafka.sasl_username": "jo",
        "kafka.sasl_password": "jos",
        "kafka.group_prefix": "shown.",
    }
    open_home = Bench(settings({"kafka.bootstrap_servers": administrator}), administrator, spark)
    for name in (IN, OUT):
        open_home.topics.create(name, 1)
    produce(administrator, IN, (thing(i) for i in range(500)))
    home, flow = Bench(settings(chosen), address, spark), copied
    with pytest.raises(UsageError, match="right DESCRIBE on the topic"):
        home.topics.describe(IN)
    grant(administrator)
    for so_far in (500, 600):
        running = home.run(flow)
        assert running.status.state == "stopped", running.status.error
        assert len(committed(administrator, OUT, 1)) == so_far
        produce(administrator, IN, (thing(i) for i in range(so_far, so_far + 100)))
    assert home.shown is not None
    home.shown.close(30)
    asked = [ConsumerGroupTopicPartitions(f"shown.{flow.name}")]
    admin = AdminClient({"bootstrap.servers": administrator})
    for future in admin.list_consumer_group_offsets(asked).values():
        assert [(p.topic, p.partition, p.offset) for p in future.result(30).topic_partitions] == [(IN, 0, 600)]

    reader = Consumer({"bootstrap.servers": administrator, "group.id": "billing"})
    reader.commit(offsets=[TopicPartition(OUT, 0, 10)], asynchronous=False)
    reader.close()
    log_in = {f"RECOURSE_{name.replace('.', '__').upper()}": value for name, value in chosen.items()}
    recourse = partial(home.recourse, "tests.support.topic_flows", **log_in)

    what = ("--to-batch", "-1", "--max-changed", "100%", "--output", "json")
    planned = json.loads(recourse("recover", "plan", "copied", *what))
    assert "billing" not in json.dumps(planned), "a group that jo may not see"
    grant(administrator, [(GROUP, "*", ResourcePatternType.LITERAL, ["DESCRIBE"])])
    plan = json.loads(recourse("recover", "plan", "copied", *what))
    recourse("recover", "apply", plan["id"], "--yes")
    assert "consumer group billing has read" in json.dumps(plan)
    assert len(committed(administrator, OUT, 1)) > 600, "corrected records come after the wrong ones"


def grant(administrator: str, rights: Rights = RIGHTS) -> None:
    """Give `jo` the rights."""
    allow = AclPermissionType.ALLOW
    bindings = [
        AclBinding(kind, name, pattern, "User:jo", "*", AclOperation[right], allow)
        for kind, name, pattern, each in rights
        for right in each
    ]
    admin = AdminClient({"bootstrap.servers": administrator})  # its requests end with it
    for future in admin.create_acls(bindings).values():
        future.result(timeout=30)
