"""Streams on a real broker: their start, their stop, and unusual records and batches."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime

import pytest
from confluent_kafka import Producer
from pyspark.sql import DataFrame
from pyspark.sql import functions as F
from pyspark.sql.types import LongType, StringType, StructField, StructType

from streaming_jobs.errors import OutputMismatch
from streaming_jobs.formats import Json
from streaming_jobs.platform.broker import Broker
from streaming_jobs.state.stream_folder import StreamFolder
from streaming_jobs.stream import DeltaTable, KafkaTopic, stream
from tests.broker.conftest import BenchFactory
from tests.support.driver import Bench, assert_chained, ledger, on_topic, produce, rows
from tests.support.things import KEYS, THING, THINGS, expected_totals, parity, plain, thing, totals, windows
from tests.support.waiting import wait_for


def fed(bench: Bench, topic: str, records: int, *, partitions: int = 1) -> None:
    bench.topics.create(topic, partitions)
    produce(bench.bootstrap, topic, map(thing, range(records)))


def numbers(bench: Bench, table: str) -> list[int]:
    return sorted(row["n"] for row in rows(bench.settings, table))


@pytest.mark.parametrize(
    "flags",
    [
        {"stream.path": "driver"},
        {"stream.path": "executor"},
        pytest.param({"stream.committer": "spark"}, marks=pytest.mark.long),
    ],
)
def test_every_way_into_a_table_writes_the_same_rows(bench: BenchFactory, topic: str, flags: dict[str, object]) -> None:
    topic = topic.replace("[", "-").replace("]", "-")
    made = bench({"stream.max_offsets_per_trigger": 700, **flags})
    fed(made, topic, 1200, partitions=2)
    for declared in (plain, totals):
        made.run(on_topic(declared, topic))
    assert numbers(made, "plain") == list(range(1200))
    assert {row["k"] for row in rows(made.settings, "plain")} == set(KEYS)
    assert {row["k"]: (row["c"], row["s"]) for row in rows(made.settings, "totals")} == expected_totals(range(1200))
    assert_chained(ledger(made.settings, "plain"))
    assert_chained(ledger(made.settings, "totals"))


def test_batches_without_rows_are_committed_and_survive_a_restart(bench: BenchFactory, topic: str) -> None:
    made = bench({"stream.max_offsets_per_trigger": 500})
    fed(made, topic, 1500)
    made.run(on_topic(windows, topic))  # the first ones close no window
    first = ledger(made.settings, "windows")
    assert any(entry.rows.get("written", 0) == 0 for entry in first)
    produce(made.bootstrap, topic, map(thing, range(1500, 6000)))
    made.run(on_topic(windows, topic))
    assert_chained(ledger(made.settings, "windows"))
    closed = [
        row for row in rows(made.settings, "windows") if row["start"] < datetime(2024, 1, 1, 0, 0, 40, tzinfo=UTC)
    ]
    assert len(closed) == 4 * len(KEYS)
    assert sum(row["c"] for row in closed) == 4000


def test_two_tables_of_one_stream_are_committed_together(bench: BenchFactory, topic: str) -> None:
    made = bench({"stream.max_offsets_per_trigger": 400})
    fed(made, topic, 1000)
    made.run(on_topic(parity, topic))
    assert numbers(made, "evens") == list(range(0, 1000, 2))
    assert numbers(made, "odds") == list(range(1, 1000, 2))
    for entry in ledger(made.settings, "evens"):
        assert set(entry.txns) == {"odds", "parity_dead_letters"}


@pytest.mark.parametrize(("start", "expected"), [("latest", 0), ("2024-01-01T00:00:05+00:00", 500)])
def test_a_first_start_begins_where_it_is_told(bench: BenchFactory, topic: str, start: str, expected: int) -> None:
    topic = f"start-at-{expected}"
    made = bench({"stream.start": start})
    made.topics.create(topic, 1)
    producer = Producer({"bootstrap.servers": made.bootstrap})
    for number in range(1000):
        key, value = thing(number)
        producer.produce(topic, key=key, value=value, timestamp=1_704_067_200_000 + number * 10)
    assert producer.flush(30) == 0
    made.run(on_topic(plain, topic))
    assert len(rows(made.settings, "plain")) == expected
    produce(made.bootstrap, topic, map(thing, range(1000, 1010)))
    made.run(on_topic(plain, topic))
    assert len(rows(made.settings, "plain")) == expected + 10


def test_a_busy_stream_stops_at_a_batch_border_and_goes_on_from_there(bench: BenchFactory, topic: str) -> None:
    made = bench({"stream.max_offsets_per_trigger": 50, "stream.min_commit_interval": "10 ms"})
    fed(made, topic, 5000)
    running = made.start(on_topic(plain, topic), "continuous")
    wait_for(lambda: running.poll(made.spark) or (running.status.batch or 0) >= 2, "the third batch")
    running.request_stop()
    made.finish(running, 30)
    assert running.status.state == "stopped" and running.pipeline is not None and running.pipeline.stopped_at_border
    checkpoint = StreamFolder.of(made.settings, "plain").checkpoint(1)
    assert 0 < len(rows(made.settings, "plain")) == 50 * ((checkpoint.last_committed or 0) + 1) < 5000
    made.settings.tables.exists()
    faster = Bench(
        made.settings.model_copy(
            update={"stream": made.settings.stream.model_copy(update={"max_offsets_per_trigger": 5000})}
        ),
        made.bootstrap,
        made.spark,
    )
    faster.run(on_topic(plain, topic))
    assert numbers(made, "plain") == list(range(5000))


def test_an_idle_stream_stops_within_seconds(bench: BenchFactory, topic: str) -> None:
    made = bench()
    fed(made, topic, 10)
    running = made.start(on_topic(plain, topic), "continuous")
    wait_for(lambda: running.poll(made.spark) or running.status.batch == 0, "the first batch")
    running.request_stop()
    made.finish(running, 10)
    assert running.status.state == "stopped" and running.status.error is None


def test_a_broker_killed_and_restarted_is_waited_for(bench: BenchFactory, broker: Broker, topic: str) -> None:
    made = bench({"stream.max_offsets_per_trigger": 1000})
    fed(made, topic, 100)
    running = made.start(on_topic(plain, topic), "continuous")
    wait_for(lambda: running.poll(made.spark) or running.status.batch == 0, "the first batch")
    broker.kill()
    assert broker.restart() == made.bootstrap
    produce(made.bootstrap, topic, map(thing, range(100, 200)))
    wait_for(lambda: running.poll(made.spark) or numbers(made, "plain") == list(range(200)), "the records sent since")
    running.request_stop()
    made.finish(running)


def test_a_topic_made_anew_under_a_running_stream_stops_it(bench: BenchFactory, topic: str) -> None:
    made = bench()
    fed(made, topic, 100)
    running = made.start(on_topic(plain, topic), "continuous")
    wait_for(lambda: running.poll(made.spark) or running.status.batch == 0, "the first batch")
    made.topics.delete(topic)
    made.topics.create(topic, 1)
    produce(made.bootstrap, topic, map(thing, range(1000, 1500)))
    made.finish(running, 120)
    assert running.status.state == "failed"
    assert running.status.error is not None and running.status.error["code"] in ("REC-022",), running.status.error
    assert numbers(made, "plain") == list(range(100))


def test_only_committed_records_are_read(bench: BenchFactory, topic: str) -> None:
    made = bench()
    made.topics.create(topic, 1)
    producer = Producer({"bootstrap.servers": made.bootstrap, "transactional.id": topic})
    producer.init_transactions(30)
    for first, commit in ((0, True), (100, False), (200, True)):
        producer.begin_transaction()
        for number in range(first, first + 100):
            key, value = thing(number)
            producer.produce(topic, key=key, value=value)
        producer.flush(30)
        producer.commit_transaction(30) if commit else producer.abort_transaction(30)
    made.run(on_topic(plain, topic))
    assert numbers(made, "plain") == [*range(100), *range(200, 300)]


KEYED = KafkaTopic("keyed", value=Json(THING), tombstones="keep", headers=True)


@stream(source=KEYED, sink=DeltaTable("latest", keys=["k"], delete_when="gone"))
def latest(things: DataFrame) -> DataFrame:
    """The last value of every key; a tombstone takes the key away, and a header names who sent it."""
    sender = F.expr("cast(filter(_source.headers, h -> h.key = 'by')[0].value as string)")
    return things.select(
        F.coalesce("k", F.col("_source.key").cast("string")).alias("k"),
        "n",
        sender.alias("sender"),
        F.col("_source.tombstone").alias("gone"),
        "_source",
    )


@pytest.mark.parametrize("path", ["driver", "executor"])
def test_the_last_record_of_a_key_wins_and_a_tombstone_deletes_it(bench: BenchFactory, path: str) -> None:
    topic = f"tombstones-{path}"
    made = bench({"stream.path": path})
    made.topics.create(topic, 1)
    produce(made.bootstrap, topic, map(thing, range(60)), headers={"by": b"test"})
    produce(made.bootstrap, topic, [(b"x", None)])
    made.run(on_topic(latest, topic))
    table = {row["k"]: (row["n"], row["sender"]) for row in rows(made.settings, "latest")}
    assert table == {key: (54 + place, "test") for place, key in enumerate(KEYS) if key != "x"}
    produce(made.bootstrap, topic, [(b"a b", None), thing(65)])
    made.run(on_topic(latest, topic))
    assert {row["k"] for row in rows(made.settings, "latest")} == {"c:d", "50%", "e/f", "gö", "x"}


LOOSE = StructType([StructField("k", StringType()), StructField("n", LongType(), nullable=False)])


@stream(source=KafkaTopic("loose", value=Json(LOOSE)), sink=DeltaTable("by_key", keys=["k"]))
def by_key(things: DataFrame) -> DataFrame:
    """Rows whose key can be missing."""
    return things.select("k", "n", "_source")


@pytest.mark.parametrize("path", ["driver", "executor"])
def test_a_row_without_its_key_is_a_dead_letter(bench: BenchFactory, path: str) -> None:
    topic = f"null-keys-{path}"
    made = bench({"stream.path": path})
    made.topics.create(topic, 1)
    produce(made.bootstrap, topic, [(None, b'{"k": "a", "n": 1}'), (None, b'{"n": 2}'), (None, b"junk")])
    made.run(on_topic(by_key, topic))
    assert [row["n"] for row in rows(made.settings, "by_key")] == [1]
    letters = {row["reason"]: row for row in rows(made.settings, "by_key_dead_letters")}
    assert set(letters) == {"null_key", "malformed_json"}
    assert letters["null_key"]["offset"] == 1 and letters["malformed_json"]["value"] == b"junk"


def test_bad_records_of_every_kind_become_dead_letters_of_a_stateful_stream_too(
    bench: BenchFactory, topic: str
) -> None:
    made = bench()
    made.topics.create(topic, 1)
    good = thing(7)[1].decode()
    bad = {
        "malformed_json": b"{",
        "empty_value": b"",
        "trailing_data": f"{good} x".encode(),
        "not_an_object": b"[1]",
        "missing_field": b'{"k": "a", "n": 1}',
        "wrong_type": good.replace("7,", '"7",').encode(),
        "tombstone": None,
        "invalid_utf8": b'{"k": "\xff", "n": 1, "t": "2024-01-01T00:00:00Z"}',
    }
    produce(made.bootstrap, topic, [(b"key", value) for value in bad.values()])
    produce(made.bootstrap, topic, [(b"key", f"{good}{good}".encode()), thing(7)])
    for declared in (plain, totals):
        running = made.run(on_topic(declared, topic))
        assert running.status.state == "stopped" and running.status.dead_letters == 9
        letters = rows(made.settings, declared.dead_letters)
        assert [row["reason"] for row in sorted(letters, key=lambda row: row["offset"])] == [*bad, "trailing_data"]
        assert all(row["topic"] == topic and row["key"] == b"key" and row["detail"] for row in letters)
        assert [row["value"] for row in sorted(letters, key=lambda row: row["offset"])][:8] == list(bad.values())
    assert numbers(made, "plain") == [7]
    assert rows(made.settings, "totals") == [{"k": KEYS[1], "c": 1, "s": 7}]


def test_a_column_that_new_code_adds_is_added_and_null_where_older_code_runs_and_other_changes_are_refused(
    bench: BenchFactory, topic: str
) -> None:
    made = bench()
    fed(made, topic, 10)
    made.run(on_topic(plain, topic))
    wider = replace(plain, function=lambda things: plain(things).withColumn("double", F.col("n") * 2))
    produce(made.bootstrap, topic, [thing(10)])
    made.run(on_topic(wider, topic))
    doubles = {row["n"]: row["double"] for row in rows(made.settings, "plain")}
    assert doubles == {**dict.fromkeys(range(10)), 10: 20}
    produce(made.bootstrap, topic, [thing(11)])
    made.run(on_topic(plain, topic))
    assert {row["n"]: row["double"] for row in rows(made.settings, "plain")} == {**doubles, 11: None}
    other = replace(plain, function=lambda things: plain(things).withColumn("double", F.lit("text")))
    running = made.run(on_topic(other, topic))
    assert running.status.error is not None and running.status.error["code"] == OutputMismatch.code
    assert "column double" in running.status.error["found"]


def test_a_changed_aggregation_on_kept_state_is_refused(bench: BenchFactory, topic: str) -> None:
    made = bench()
    fed(made, topic, 10)
    made.run(on_topic(totals, topic))
    largest = replace(
        totals, function=lambda things: things.groupBy("k").agg(F.count(F.lit(1)).alias("c"), F.max("n").alias("s"))
    )
    running = made.run(on_topic(largest, topic))
    assert running.status.state == "failed" and running.status.error is not None
    assert "built by another aggregation" in running.status.error["found"]


def test_several_rows_of_one_key_without_an_order_are_refused(bench: BenchFactory, topic: str) -> None:
    made = bench({"stream.max_restarts": 0})
    fed(made, topic, 12)
    unordered = stream(
        source=replace(THINGS, event_time=None, lateness=None), sink=DeltaTable("last", keys=["k"]), name="last"
    )(lambda things: things.select("k", "n"))
    running = made.run(on_topic(unordered, topic))
    assert running.status.state == "failed" and running.status.error is not None
    assert "nothing says which one is last" in running.status.error["found"]
    assert rows(made.settings, "last") == []
