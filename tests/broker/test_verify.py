"""The verifier on real topics and streams that are not shipped: while records arrive, and as a person runs it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from streaming_jobs.platform.broker import Broker
from streaming_jobs.sources.topics import Topics
from streaming_jobs.verification.topic import CommittedReader
from tests.conftest import SettingsFactory
from tests.support import ROOT
from tests.support.driver import command, driver, finished, ledger, produce
from tests.support.driver import rows as made_rows
from tests.support.things import thing
from tests.support.waiting import wait_for

_WITHOUT_END = """
import sys
import time

from confluent_kafka import Producer

from tests.support.things import thing

bootstrap, topic, at_once, number = sys.argv[1], sys.argv[2], int(sys.argv[3]), 2_000
producer, made = Producer({"bootstrap.servers": bootstrap, "linger.ms": 0}), thing(0)
while not time.sleep(0.001):
    for _ in range(at_once):
        for partition in (0, 1):
            key, value = thing(number) if at_once == 1 else made
            number += 1
            producer.produce(topic, key=key, value=value, partition=partition)
    producer.poll(0)
"""


@contextmanager
def produced_without_end(bootstrap: str, topic: str, at_once: int) -> Iterator[None]:
    """Records keep arriving in both partitions, so that no reader comes to a partition's end and finds it at rest."""
    command = [sys.executable, "-c", _WITHOUT_END, bootstrap, topic, str(at_once)]
    sender = subprocess.Popen(command, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)})
    try:
        yield
    finally:
        sender.kill()
        sender.wait()


def test_a_topic_that_grows_is_read_up_to_where_it_ended(broker: Broker, settings: SettingsFactory, topic: str) -> None:
    bootstrap = broker.start()
    made = settings({"kafka.bootstrap_servers": bootstrap})
    topics = Topics.of(made.kafka, bootstrap)
    topics.create(topic, 2)
    produce(bootstrap, topic, (thing(i) for i in range(5_000)))
    with produced_without_end(bootstrap, topic, 20):
        wait_for(lambda: topics.offsets(topic).total > 6_000, "the sender's first records")
        before = topics.offsets(topic).total
        content = CommittedReader.at(made.kafka, bootstrap, topic).content()
        after = topics.offsets(topic).total
    assert before <= content.records <= after
    assert all(len(p.offsets) == p.high - p.low for p in content.partitions.values())


FLOWS = """
from collections import Counter

from streaming_jobs import truth
from tests.support import things
from tests.support.driver import on_topic

plain, totals, windows, parity = (
    on_topic(stream, "{topic}") for stream in (things.plain, things.totals, things.windows, things.parity)
)


@truth(totals)
def totals_by_hand(records):
    counts, sums = Counter(), Counter()
    for record in records:
        counts[record.value["k"]] += 1
        sums[record.value["k"]] += record.value["n"]
    return [{{"k": key, "c": counts[key], "s": sums[key]}} for key in counts]


@truth("odds")
def odds_by_hand(records):
    return [{{"k": r.value["k"], "n": r.value["n"], "off": r.offset}} for r in records if r.value["n"] % 2]
"""
STREAMS = ("plain", "totals", "windows", "parity")


@pytest.mark.long
def test_streams_that_are_not_shipped_are_verified_while_records_arrive(
    broker: Broker, settings: SettingsFactory, tmp_path: Path
) -> None:
    bootstrap, topic = broker.start(), "verified-while-it-grows"
    made = settings({"kafka.bootstrap_servers": bootstrap})
    topics = Topics.of(made.kafka, bootstrap)
    topics.create(topic, 2)
    (tmp_path / "verified_flows.py").write_text(FLOWS.format(topic=topic))
    produce(bootstrap, topic, [*(thing(i) for i in range(2_000)), (b"x", b"{"), (b"x", None), (b"x", b'{"k": "x"}')])
    environment = {
        **os.environ,
        "PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}",
        "RECOURSE_HOME": str(made.home),
        "RECOURSE_KAFKA__BOOTSTRAP_SERVERS": bootstrap,
        "RECOURSE_FLOWS": '["verified_flows"]',
    }

    def verified(*arguments: str) -> dict[str, Any]:
        done = command(tmp_path, environment, "verify", *arguments, "-o", "json")
        assert done.returncode == 0, done.stdout + done.stderr
        assert f"reading topic {topic}" in done.stderr
        return dict(json.loads(done.stdout))

    session = driver(
        made,
        bootstrap,
        "--streams",
        ",".join(STREAMS),
        flows="verified_flows",
        environment={"PYTHONPATH": environment["PYTHONPATH"], "RECOURSE_STREAM__MAX_OFFSETS_PER_TRIGGER": "3000"},
    )
    try:
        with produced_without_end(bootstrap, topic, 1):
            wait_for(
                lambda: all(len(ledger(made, name)) > 2 for name in ("plain", "totals", "windows", "evens")), "rows"
            )
            live = verified()
            assert session.poll() is None, "the session runs on"
        session.terminate()
        code, output = finished(session, 60)
        assert code == 0, output[-2000:]
    finally:
        if session.poll() is None:
            os.killpg(session.pid, signal.SIGKILL)
            session.wait()
    assert live["proved"] and live["unread"] and [verdict["verdict"] for verdict in live["streams"]] == ["ok"] * 4
    rest = verified("--strict", "--recompute")
    outcomes = {f"{one['table']}: {one['what']}": one for verdict in rest["streams"] for one in verdict["comparisons"]}
    rows, refused = len(made_rows(made, "plain")), 3
    assert outcomes["plain: records"]["text"] == f"by part and off: {rows:,} records are each in exactly one row"
    assert "the plan leaves some out (Filter)" in outcomes["evens: records"]["text"]
    assert outcomes["windows: records"]["verdict"] == "not compared"
    for what in ("plain: row counts", "odds: row counts", "totals: keys", "totals: truth", "odds: truth"):
        assert outcomes[what]["verdict"] == "ok", outcomes[what]
    for table in ("plain", "totals", "windows", "evens", "odds"):
        assert outcomes[f"{table}: recomputed"]["verdict"] == "ok", outcomes[f"{table}: recomputed"]
    assert "open yet or too late: not compared" in outcomes["windows: recomputed"]["text"]
    for stream in STREAMS:
        assert (
            f"{refused} refused records are there, each once"
            in outcomes[f"{stream}_dead_letters: dead letters"]["text"]
        )
    assert "not compared: the columns part" in outcomes["odds: truth"]["text"]
