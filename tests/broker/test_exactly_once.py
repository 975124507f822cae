"""A driver killed at every named point of a batch: afterwards every offset is in the tables exactly once."""

from __future__ import annotations

import signal
from datetime import timedelta

import pytest

from streaming_jobs.platform.broker import Broker
from streaming_jobs.runtime.crash_points import POINTS
from streaming_jobs.settings import Settings
from streaming_jobs.sources.topics import Topics
from tests.conftest import SettingsFactory
from tests.support.driver import assert_chained, driver, finished, ledger, produce, rows
from tests.support.things import BEGIN, KEYS, expected_totals, thing

TOPIC = "things"
COUNT = 6000
STREAMS = "plain,totals,parity,windows"


@pytest.fixture
def fed(settings: SettingsFactory, broker: Broker) -> tuple[Settings, str]:
    """The topic `things` with 6,000 records on two partitions, every 500th of them junk."""
    bootstrap = broker.start()
    made = settings({"kafka.bootstrap_servers": bootstrap, "stream.max_offsets_per_trigger": 1000})
    topics = Topics.of(made.kafka, bootstrap)
    if topics.describe(TOPIC):
        topics.delete(TOPIC)
    topics.create(TOPIC, 2)
    produce(
        bootstrap,
        TOPIC,
        ((key, b"junk" if i % 500 == 499 else value) for i in range(COUNT) for key, value in [thing(i)]),
    )
    return made, bootstrap


KILLS = (
    "plain:staged:2",  # on the executor path: its files are there and no version lists them
    "totals:primary_committed:2",  # the rows are in the table, the state may not be in the checkpoint
    "parity:secondary_committed:1",
)
MORE_KILLS = (
    "plain:batch_started:1",
    "plain:secondary_committed:3",  # its dead letters are committed, by the executors
    "plain:batch_committed:3",
    "totals:staged:1",
    "windows:staged:1",
    "windows:primary_committed:2",
    "parity:primary_committed:2",
)


def test_every_point_of_a_batch_is_killed_at() -> None:
    assert {kill.split(":")[1] for kill in (*KILLS, *MORE_KILLS)} == set(POINTS)


@pytest.mark.timeout(1500)
@pytest.mark.parametrize("kills", [KILLS, pytest.param(MORE_KILLS, marks=pytest.mark.long)])
def test_a_kill_at_any_point_of_a_batch_loses_nothing_and_doubles_nothing(
    fed: tuple[Settings, str], kills: tuple[str, ...]
) -> None:
    settings, bootstrap = fed
    arguments = ("--trigger", "available-now", "--set", "stream.max_offsets_per_trigger=1000")
    arguments += ("--set", "streams.plain.path=executor", "--streams")
    for kill in kills:
        stream = kill.partition(":")[0]
        process = driver(settings, bootstrap, *arguments, stream, environment={"RECOURSE_CRASH": kill})
        code, output = finished(process)
        assert code == -signal.SIGKILL, f"{kill}: {output[-3000:]}"
    code, output = finished(driver(settings, bootstrap, *arguments, STREAMS))
    assert code == 0, output[-3000:]

    good = [i for i in range(COUNT) if i % 500 != 499]
    plain = rows(settings, "plain")
    assert sorted(row["n"] for row in plain) == good
    letters = rows(settings, "plain_dead_letters")
    places = {(row["part"], row["off"]) for row in plain} | {(row["partition"], row["offset"]) for row in letters}
    assert len(places) == len(plain) + len(letters) == COUNT
    assert {(row["k"]): (row["c"], row["s"]) for row in rows(settings, "totals")} == expected_totals(good)
    assert sorted(row["n"] for table in ("evens", "odds") for row in rows(settings, table)) == good
    closed = [row for row in rows(settings, "windows") if row["start"] < BEGIN + timedelta(seconds=40)]
    assert sum(row["c"] for row in closed) == sum(1 for i in good if i < 4000)
    assert len({(row["start"], row["k"]) for row in closed}) == len(closed) == 4 * len(KEYS)
    for stream in ("totals", "parity", "windows"):
        assert len(rows(settings, f"{stream}_dead_letters")) == COUNT // 500
    for table in ("plain", "totals", "evens", "windows"):
        assert_chained(entries := ledger(settings, table))
        assert sum(r.records for entry in entries for r in entry.offsets) == COUNT
