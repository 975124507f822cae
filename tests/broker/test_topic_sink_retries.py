"""Tasks that Spark repeats: rows of an attempt that failed, or came second, are in no topic."""

from __future__ import annotations

import json
from pathlib import Path

from streaming_jobs.platform.broker import Broker
from streaming_jobs.sources.topics import Topics
from tests.conftest import QUICK_START, SettingsFactory
from tests.support.driver import driver, finished, ledger, produce
from tests.support.retried_flows import BY_DRIVER, BY_EXECUTORS, FAILURES
from tests.support.things import thing
from tests.support.topic_reader import committed

FLOWS = "tests.support.retried_flows"
PARTITIONS = 3
COUNT = 6000


def test_tasks_that_fail_after_their_last_row_and_are_repeated_write_each_record_once(
    settings: SettingsFactory, broker: Broker, tmp_path: Path
) -> None:
    bootstrap = broker.start()
    made, topics = settings({"kafka.bootstrap_servers": bootstrap}), Topics.of(settings().kafka, bootstrap)
    streams = {"retried_by_driver": BY_DRIVER.name, "retried_by_executors": BY_EXECUTORS.name}
    for name in ("things", *streams.values(), *(f"__recourse.{stream}.{topic}" for stream, topic in streams.items())):
        if topics.describe(name):
            topics.delete(name)
    topics.create("things", 2)
    for name in streams.values():
        topics.create(name, PARTITIONS)
    produce(bootstrap, "things", (thing(i) for i in range(COUNT)))
    failures = tmp_path / "failures"
    failures.mkdir()
    environment = {
        FAILURES: str(failures),
        "RECOURSE_SPARK__MASTER": "local[2,3]",  # three attempts for each task
        "RECOURSE_SPARK__EXTRA": json.dumps(QUICK_START | {"spark.speculation": "true"}),
        "RECOURSE_STREAM__MAX_OFFSETS_PER_TRIGGER": "2000",
        "RECOURSE_STREAMS__RETRIED_BY_DRIVER__PATH": "driver",
        "RECOURSE_STREAMS__RETRIED_BY_EXECUTORS__PATH": "executor",
    }
    arguments = ("--trigger", "available-now", "--streams", ",".join(streams))
    code, output = finished(driver(made, bootstrap, *arguments, flows=FLOWS, environment=environment))
    assert code == 0, output[-3000:]
    for stream, topic in streams.items():
        records = committed(bootstrap, topic, PARTITIONS)
        assert sorted(json.loads(m.value() or b"")["n"] for m in records) == [*range(COUNT)]
        last: dict[bytes | None, int] = {}
        for m in records:
            offset = json.loads(m.value() or b"")["off"]
            assert offset > last.get(m.key(), -1), f"key {m.key()!r} is out of order"
            last[m.key()] = offset
        assert len(ledger(made, f"{stream}_batches")) >= 3
    lost = sum(int(file.name.partition("-")[0]) for file in failures.iterdir())
    assert lost == 2 * COUNT, "each row of both streams was made by an attempt that failed afterwards"
