"""Archives on a real broker: what Kafka deletes comes from them, byte for byte."""

from __future__ import annotations

import json
import signal
import subprocess
from typing import Any

import pytest
from confluent_kafka import Producer

from streaming_jobs.platform.broker import Broker
from streaming_jobs.settings import Settings
from streaming_jobs.sources.planner import SMALL
from streaming_jobs.stream import Stream
from tests.broker.conftest import BenchFactory
from tests.support import ROOT, archived
from tests.support.archived import APPEND, CREATE, delete_before, fill, in_order, truth
from tests.support.driver import Bench, assert_chained, command, driver, finished, ledger, produce, rows, variables

FLOWS = {"flows": ["tests.support.archived"]}


def seen(settings: Settings, table: str) -> list[dict[str, Any]]:
    """The rows of a copy, as the archive would have them; each says of itself whether it is a tombstone."""
    found = in_order(rows(settings, table))
    assert all(row.pop("tombstone") == (row["value"] is None) for row in found)
    return found


@pytest.mark.parametrize(
    ("topic", "keeper", "copy", "kind"),
    [
        (CREATE, archived.create_archive, archived.create_copy, "CreateTime"),
        (APPEND, archived.append_archive, archived.append_copy, "LogAppendTime"),
    ],
)
def test_what_kafka_has_deleted_comes_from_the_archive_as_kafka_gave_it(
    bench: BenchFactory, topic: str, keeper: Stream, copy: Stream, kind: str
) -> None:
    made = bench(FLOWS)
    made.topics.create(topic, 2, message_timestamp_type=kind)
    fill(made.bootstrap, topic, range(700))
    made.run(keeper)
    fill(made.bootstrap, topic, range(700, 1000))
    made.run(keeper)
    expected = truth(made.bootstrap, topic)
    assert {row["timestamp_type"] for row in expected} == {kind} and len(expected) == 1020
    assert in_order(rows(made.settings, keeper.name)) == expected
    assert rows(made.settings, keeper.dead_letters) == []
    assert_chained(ledger(made.settings, keeper.name))
    delete_before(made.bootstrap, topic, {0: 300, 1: 401})
    made.run(copy)
    assert seen(made.settings, copy.name) == expected
    assert [r.start for r in ledger(made.settings, copy.name)[0].offsets] == [{0: 0, 1: 0}], "from the archive's begin"
    made.topics.delete(topic)


def test_a_backlog_that_kafka_no_longer_has_is_read_by_workers_and_records_of_ten_megabytes_too(
    bench: BenchFactory,
) -> None:
    made = bench({**FLOWS, "stream.batch_seconds": "60 seconds"})  # so that batches grow on a slow machine too
    made.topics.create(CREATE, 2, max_message_bytes=str(11 << 20))
    count = 3 * SMALL
    produce(made.bootstrap, CREATE, ((b"%d" % n, b"value %d" % n) for n in range(count)))
    producer = Producer({"bootstrap.servers": made.bootstrap, "message.max.bytes": 11 << 20})
    large = [bytes([n]) * (10 << 20) for n in range(3)]
    for value in large:
        producer.produce(CREATE, value=value, partition=1)
    assert producer.flush(60) == 0
    made.run(archived.create_archive)
    ends = made.topics.latest(CREATE)
    delete_before(made.bootstrap, CREATE, {0: ends[0] // 2, 1: ends[1]})
    made.run(archived.create_copy)
    batches = ledger(made.settings, "create_copy")
    assert max(sum(r.records for r in batch.offsets) for batch in batches) > SMALL, "workers read some of it"
    assert_chained(batches)
    found = seen(made.settings, "create_copy")
    assert sorted((row["partition"], row["offset"]) for row in found) == [(p, o) for p in ends for o in range(ends[p])]
    assert {row["value"] for row in found} == {*(b"value %d" % n for n in range(count)), *large}
    assert found == in_order(rows(made.settings, "create_archive"))
    made.topics.delete(CREATE)


JSON = ("--output", "json")
LATER = 1_600_000_100_000
"""The time of the hundredth record, ms."""
KILLS = ("staged:0", "primary_committed:1")
MORE_KILLS = ("batch_started:0", "staged:1", "primary_committed:2", "batch_committed:3")


@pytest.mark.long
@pytest.mark.parametrize("kills", [KILLS, MORE_KILLS])
def test_a_recovery_replays_from_the_archive_that_was_killed_in_its_commits(
    bench: BenchFactory, broker: Broker, kills: tuple[str, ...]
) -> None:
    made, bootstrap = bench(FLOWS), broker.start()
    made.topics.create(CREATE, 2)
    fill(bootstrap, CREATE, range(1000))
    expected = truth(bootstrap, CREATE)
    for kill in kills:
        code, output = finished(run(made, "create_archive", {"RECOURSE_CRASH": f"create_archive:{kill}"}))
        assert code == -signal.SIGKILL, f"{kill}: {output[-3000:]}"
    made.run(archived.create_archive)
    assert in_order(rows(made.settings, "create_archive")) == expected, "neither a gap nor a double"
    assert_chained(ledger(made.settings, "create_archive"))
    made.run(archived.create_copy)
    assert seen(made.settings, "create_copy") == expected

    delete_before(bootstrap, CREATE, {0: 200, 1: 333})
    planned = recourse(made, "recover", "plan", "create_copy", "--to-earliest")
    assert planned.returncode == 0, planned.stderr
    assert "533 records of them from table create_archive" in planned.stdout, planned.stdout
    assert "partition 0: 0 to 199, partition 1: 0 to 332" in planned.stdout, planned.stdout
    applied = recourse(made, "recover", "apply", "create_copy-0001", "--yes")
    assert applied.returncode == 0, applied.stderr
    assert seen(made.settings, "create_copy") == expected
    verified = recourse(made, "recover", "show", "create_copy-0001", "--output", "json")
    assert '"outcome": "published"' in verified.stdout

    at_time = recourse(made, "recover", "plan", "create_copy", "--to-datetime", "2020-09-13T12:28:20+00:00", *JSON)
    assert at_time.returncode == 0, at_time.stderr
    first = {
        p: min(r["offset"] for r in expected if r["partition"] == p and r["timestamp_ms"] >= LATER) for p in (0, 1)
    }
    wanted = json.loads(at_time.stdout)["streams"][0]["wanted"][CREATE]
    assert {int(p): offset for p, offset in wanted.items()} == first

    fill(bootstrap, CREATE, range(1000, 1100))
    end = made.topics.latest(CREATE)[0]
    delete_before(bootstrap, CREATE, {0: end - 5})
    refused = recourse(made, "recover", "plan", "create_copy", "--to-batch", "-1")
    hole = f"offsets {archive_end(made)} to {end - 6} of topic {CREATE}, partition 0, are gone"
    assert refused.returncode == 2 and hole in refused.stderr, refused.stderr
    made.topics.delete(CREATE)


def archive_end(made: Bench) -> int:
    """The offset at which the archive's partition 0 ends."""
    return int(ledger(made.settings, "create_archive")[-1].offsets[0].end[0])


def run(made: Bench, name: str, environment: dict[str, str]) -> subprocess.Popen[str]:
    """One stream over all records there are, in a process of its own."""
    arguments = ("--trigger", "available-now", "--set", "stream.max_offsets_per_trigger=200", "--streams", name)
    flows = FLOWS["flows"][0]
    return driver(made.settings, made.bootstrap, *arguments, flows=flows, environment=environment)


def recourse(made: Bench, *arguments: str) -> subprocess.CompletedProcess[str]:
    """A command on the bench's home."""
    return command(ROOT, variables(made.settings.home, made.bootstrap, "tests.support.archived"), *arguments)
