"""Streams that write topics, from end to end on a real broker with Spark."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from confluent_kafka import Message, Producer
from pyspark.sql import DataFrame
from pyspark.sql import functions as F
from pyspark.sql.types import LongType, StringType, StructField, StructType

from reprocessing.plan.written_topics import WrittenTopics, write_markers
from streaming_jobs.declare.topic_sink import KafkaSink
from streaming_jobs.errors import PermanentError, PreflightRefused, UsageError
from streaming_jobs.formats import Json, Raw, Text
from streaming_jobs.stream import KafkaTopic, Stream, stream
from streaming_jobs.verification.recompute import recompute
from streaming_jobs.verification.verification import Options, verify_streams
from tests.broker.conftest import BenchFactory
from tests.support.driver import Bench, ledger, on_topic, produce, rows
from tests.support.things import KEYS, THINGS, thing
from tests.support.topic_flows import COPIES, both, copied, read_copies, total_changes
from tests.support.topic_reader import committed, headers, partition_of

PARTITIONS = 3
COUNT = 2000


def to_topic(flow: Stream, source: str, target: str) -> Stream:
    """The stream on topics of this test."""
    sinks = {n: replace(s, topic=replace(s.topic, name=target)) for n, s in flow.topic_sinks.items()}
    return replace(on_topic(flow, source), topic_sinks=sinks)


@pytest.fixture
def made(bench: BenchFactory, topic: str) -> tuple[Bench, str, str]:
    """A bench, a topic with 2,000 records, and an empty topic to write."""
    home = bench({"stream.max_offsets_per_trigger": 700})
    source, target = f"{topic}-in", f"{topic}-out"
    home.topics.create(source, 2)
    home.topics.create(target, PARTITIONS)
    produce(home.bootstrap, source, (thing(i) for i in range(COUNT)))
    return home, source, target


def read(home: Bench, target: str) -> list[Message]:
    return committed(home.bootstrap, target, PARTITIONS)


@pytest.mark.parametrize("path", ["driver", "executor"])
def test_a_topic_has_every_record_once_in_order_and_is_read_back_equal(
    bench: BenchFactory, made: tuple[Bench, str, str], path: str
) -> None:
    home, source, target = made
    home = bench({"stream.max_offsets_per_trigger": 700, "stream.path": path})
    flow = to_topic(copied, source, target)
    home.run(flow)
    produce(home.bootstrap, source, (thing(i) for i in range(COUNT, COUNT + 100)))
    home.run(flow)
    records = read(home, target)
    assert sorted(json.loads(m.value() or b"")["n"] for m in records) == [*range(COUNT + 100)]
    for key in KEYS:
        offsets = [json.loads(m.value() or b"")["off"] for m in records if m.key() == key.encode()]
        assert offsets == sorted(offsets) and len(offsets) > COUNT // len(KEYS)
    for m in records[:50]:
        value = json.loads(m.value() or b"")
        assert m.partition() == partition_of(m.key() or b"", PARTITIONS)
        assert m.timestamp()[1] == 1_704_067_200_000 + value["n"] * 10
        assert headers(m)["recourse.source"] == f"{source}/{value['part']}/{value['off']}".encode()
        assert (headers(m)["recourse.stream"], headers(m)["recourse.generation"]) == (b"copied", b"1")

    batches = rows(home.settings, "copied_batches")
    assert sum(row["records"] for row in batches) == COUNT + 100
    for row in batches:
        own = [m for m in records if m.partition() == row["partition"] and _batch(m) == row["batch"]]
        assert own[0].offset() == row["first_offset"]
        assert own[-1].offset() == row["end_offset"] - 1 and len(own) == row["records"]
    entries = ledger(home.settings, "copied_batches")
    assert sum(each.records for entry in entries for each in entry.written) == COUNT + 100
    assert not (home.settings.tables / "copied_batches" / "_topics" / target).exists() or not list(
        (home.settings.tables / "copied_batches" / "_topics" / target).iterdir()
    )

    home.run(on_topic(read_copies, target))
    table = sorted(rows(home.settings, "read_copies"), key=lambda row: int(row["n"]))
    assert [row["n"] for row in table] == [*range(COUNT + 100)] and table[7]["k"] == KEYS[7 % len(KEYS)]
    assert rows(home.settings, "read_copies_dead_letters") == []


def _batch(message: Message) -> int:
    return int(headers(message)["recourse.batch"])


def test_a_table_and_a_topic_have_the_same_batches(made: tuple[Bench, str, str]) -> None:
    home, source, target = made
    home.run(to_topic(both, source, target))
    odd = [json.loads(m.value() or b"")["n"] for m in read(home, target)]
    assert sorted(odd) == [*range(1, COUNT, 2)]
    assert sorted(row["n"] for row in rows(home.settings, "both_table")) == [*range(0, COUNT, 2)]
    newest = ledger(home.settings, "both_table")[-1]
    assert newest.txns[f"topic:{target}"] == newest.txn.version
    assert newest.rows[f"topic:{target}"] == sum(each.records for each in newest.written)


@pytest.mark.parametrize("flow", [copied, both])
def test_verify_finds_nothing_wrong_with_a_stream_that_writes_topics(
    made: tuple[Bench, str, str], flow: Stream
) -> None:
    home, source, target = made
    made_here = to_topic(flow, source, target)
    home.run(made_here)
    verdict, readers = verify_streams(home.settings, [made_here], [], home.bootstrap, Options(finished=True))
    assert verdict.ok, verdict
    assert verdict.records == COUNT
    (one,) = verdict.streams
    again = recompute(home.settings, made_here, home.spark, home.bootstrap, one, readers)
    assert all(comparison.verdict in ("ok", "not compared") for comparison in again), again


def test_changes_of_a_state_are_written_and_the_last_one_of_a_key_is_right(made: tuple[Bench, str, str]) -> None:
    home, source, target = made
    home.run(to_topic(total_changes, source, target))
    last = {m.key(): json.loads(m.value() or b"")["c"] for m in read(home, target)}
    assert last == {key.encode(): len(range(i, COUNT, len(KEYS))) for i, key in enumerate(KEYS)}


NOTE = StructType([StructField("n", LongType(), nullable=False), StructField("note", StringType(), nullable=False)])


def routed(target: str, other: str, **options: Any) -> Stream:
    """Records with every option: each tenth to another topic, with headers, tombstones, too large ones, null notes."""
    declared = KafkaTopic(target, value=Json(NOTE), tombstones="keep")
    sink = KafkaSink(declared, key="key", headers="extra", route="where", **options)

    @stream(source=THINGS, sink=sink, name="routed")
    def flow(things: DataFrame) -> DataFrame:
        n = F.col("n")
        tomb = n % 10 == 1
        return things.select(
            F.when(~tomb, n).alias("n"),
            F.when(n % 10 == 2, F.repeat(F.lit("x"), 5000)).when(~tomb & (n % 10 != 3), F.lit("fine")).alias("note"),
            "_source.key",
            F.when(n % 10 == 4, F.lit(other)).when(n % 10 == 5, F.lit("no-such-topic")).alias("where"),
            F.create_map(F.lit("n"), n.cast("string")).alias("extra"),
            "_source",
        )

    return flow


def test_routes_headers_tombstones_and_what_no_topic_takes(made: tuple[Bench, str, str], topic: str) -> None:
    home, source, _ = made
    other, small = f"{topic}-other", f"{topic}-small"
    home.topics.create(other, PARTITIONS)
    home.topics.create(small, PARTITIONS, max_message_bytes="4000")
    home.run(on_topic(routed(small, other, unknown_topic="dead_letter"), source))
    records, elsewhere = read(home, small), read(home, other)
    by_number = {int(headers(m)["n"]): m for m in records}
    assert len(by_number) == len(records)
    assert sorted(by_number) == [i for i in range(COUNT) if i % 10 not in (2, 3, 4, 5)]
    assert sorted(int(headers(m)["n"]) for m in elsewhere) == [i for i in range(COUNT) if i % 10 == 4]
    assert all((m.value() is None) == (i % 10 == 1) for i, m in by_number.items())
    assert by_number[7].value() == b'{"n":7,"note":"fine"}'
    letters = rows(home.settings, "routed_dead_letters")
    reasons = {2: "too_large", 3: "missing_field", 5: "unknown_topic"}
    assert len(letters) == 3 * COUNT // 10
    places = {(m["partition"], m["offset"]) for m in letters}
    assert len(places) == len(letters)
    for letter in letters:
        number = int(dict(json.loads(letter["value"])["__headers"][0].items())["value"])
        assert letter["reason"] == reasons[number % 10], letter
        assert letter["topic"] == source
    unknown = next(letter for letter in letters if letter["reason"] == "unknown_topic")
    assert "no-such-topic" in unknown["detail"]
    batches = rows(home.settings, "routed_batches")
    assert {row["topic"] for row in batches} == {small, other}
    assert sum(row["records"] for row in batches) == len(records) + len(elsewhere)


def test_a_route_to_no_topic_stops_the_stream_before_anything_is_written(made: tuple[Bench, str, str]) -> None:
    home, source, target = made
    running = home.finish(home.start(on_topic(routed(target, target), source)))
    error = running.status.error or {}
    assert error["code"] == PermanentError.code and "no-such-topic" in error["found"]
    assert read(home, target) == []


@pytest.mark.parametrize(("declared", "column"), [(Raw(), "binary"), (Text(), "string")])
def test_bytes_and_text_are_written_as_they_are(
    made: tuple[Bench, str, str], declared: Raw | Text, column: str
) -> None:
    home, source, target = made
    sink = KafkaSink(KafkaTopic(target, value=declared))

    @stream(source=THINGS, sink=sink, name="values")
    def values(things: DataFrame) -> DataFrame:
        return things.select(F.concat(F.lit("n="), F.col("n").cast("string")).cast(column).alias("value"))

    home.run(on_topic(values, source))
    records = read(home, target)
    assert sorted(m.value() or b"" for m in records) == sorted(b"n=%d" % i for i in range(COUNT))
    assert {m.key() for m in records} == {None} and "recourse.source" not in headers(records[0])


def test_a_marker_that_is_gone_is_refused_before_the_start(made: tuple[Bench, str, str]) -> None:
    home, source, target = made
    flow = to_topic(copied, source, target)
    home.run(flow)
    home.topics.delete(f"__recourse.copied.{target}")
    with pytest.raises(PreflightRefused, match="marker of topic .* is gone") as refused:
        home.start(flow)
    assert "recourse streams write-marker copied" in refused.value.next_step


def test_a_marker_that_is_gone_is_proved_and_written_again(made: tuple[Bench, str, str]) -> None:
    home, source, target = made
    flow = to_topic(copied, source, target)
    home.run(flow)
    home.topics.delete(f"__recourse.copied.{target}")
    written = WrittenTopics(home.settings)
    ((topic, at),) = write_markers(home.settings, flow, written, home.topics)
    newest = ledger(home.settings, "copied_batches")[-1]
    assert (topic, at) == (target, newest.txn)
    with pytest.raises(UsageError, match="no marker of stream copied is lost"):
        list(write_markers(home.settings, flow, written, home.topics))
    produce(home.bootstrap, source, (thing(i) for i in range(COUNT, COUNT + 100)))
    home.run(flow)
    assert sorted(json.loads(m.value() or b"")["n"] for m in read(home, target)) == [*range(COUNT + 100)]

    home.topics.delete(f"__recourse.copied.{target}")
    later = [("recourse.stream", b"copied"), ("recourse.generation", b"1"), ("recourse.batch", b"99")]
    producer = Producer({"bootstrap.servers": home.bootstrap})
    producer.produce(target, b"a batch that no table has", headers=later)
    producer.flush(15)
    with pytest.raises(UsageError, match="is or may be of a batch of stream copied after"):
        list(write_markers(home.settings, flow, written, home.topics))


def test_a_topic_that_does_not_exist_is_refused_before_the_start(made: tuple[Bench, str, str]) -> None:
    home, source, _ = made
    with pytest.raises(PreflightRefused, match="topic nowhere, which stream copied writes, does not exist"):
        home.start(to_topic(copied, source, "nowhere"))


def test_at_least_once_writes_everything_without_a_marker(made: tuple[Bench, str, str]) -> None:
    home, source, target = made
    flow = to_topic(copied, source, target)
    plain = {n: replace(s, delivery="at_least_once") for n, s in flow.topic_sinks.items()}
    home.run(replace(flow, topic_sinks=plain))
    assert sorted(json.loads(m.value() or b"")["n"] for m in read(home, target)) == [*range(COUNT)]
    assert home.topics.describe(f"__recourse.copied.{target}") is None
    assert sum(row["records"] for row in rows(home.settings, "copied_batches")) == COUNT


def test_the_declared_topic_is_the_one_that_readers_name() -> None:
    assert copied.topic_sinks["copies"].topic is COPIES is next(iter(read_copies.sources.values()))
