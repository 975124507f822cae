"""From its marker a driver or a shard finds out whether it still writes, and each batch is written once.

The topic of markers is as safe as the topic whose batches it knows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import KafkaError, KafkaException

from streaming_jobs.errors import ConfigurationError, Fenced, LedgerConflict, PermanentError
from streaming_jobs.ledger.entry import CodeVersion, LedgerEntry, Txn
from streaming_jobs.ledger.positions import OffsetRange, WrittenRange
from streaming_jobs.settings import TopicSinkSettings
from streaming_jobs.sinks.base import BatchOfRows
from streaming_jobs.sinks.kafka.clients import ClientLost, producer_config
from streaming_jobs.sinks.kafka.markers import ensure_marker_topic, marker_topic
from streaming_jobs.sinks.kafka.producer import BatchProducer, Outgoing
from streaming_jobs.sinks.kafka.sharded import ShardedWriter, merged
from streaming_jobs.sinks.kafka.shards import ShardWriter, shards_topic
from streaming_jobs.sinks.kafka.writer import Clients, PlainWriter, TransactionWriter
from streaming_jobs.sources.topics import TopicInfo
from tests.support.kafka_cluster import Cluster, Producer, failure

TOPIC, MARKERS = "orders", "__recourse.s.orders"


@pytest.fixture(autouse=True)
def _claims_are_quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("streaming_jobs.sinks.kafka.writer._CLAIM", 0.0)


@dataclass
class Records:
    """The records of one batch."""

    values: Sequence[bytes]
    topic_ids: Mapping[str, str] = field(default_factory=dict)
    most_bytes: int = 1_048_588
    missing: int = 0

    @property
    def count(self) -> int:
        return len(self.values) + self.missing

    def __iter__(self) -> Iterator[Outgoing]:
        yield from (Outgoing(TOPIC, None, value) for value in self.values)


def writer(cluster: Cluster) -> TransactionWriter:
    clients = Clients({}, producer=cluster.producer, consumer=cluster.consumer)
    return TransactionWriter("s", "topic:orders", TOPIC, TopicSinkSettings(), clients)


def opened(cluster: Cluster, generation: int = 1) -> TransactionWriter:
    made = writer(cluster)
    made.open(generation)
    return made


def entry(batch: int, end: int = 10) -> LedgerEntry:
    offsets = (OffsetRange("raw", "id", {0: 0}, {0: end}),)
    return LedgerEntry("batch", "s", "topic:orders", 1, batch, offsets)


def fails(code: int) -> Callable[[], None]:
    def fail() -> None:
        raise failure(code)

    return fail


def test_a_driver_that_lost_its_client_does_not_take_another_driver_s_batch_for_its_own() -> None:
    """It was stopped in a transaction; its call failed by its deadline, so that nothing said "fenced"."""
    cluster = Cluster()
    stopped = opened(cluster)
    others: list[TransactionWriter] = []

    def other_driver_takes_over() -> None:
        others.append(opened(cluster))
        others[0].write(entry(0, end=20), Records([b"of the other"]))
        raise failure(KafkaError._TIMED_OUT)

    cluster.faults = [other_driver_takes_over]
    with pytest.raises(Fenced, match="another driver writes topic orders"):
        stopped.write(entry(0, end=10), Records([b"of the stopped"]))
    assert others[0].write(entry(1), Records([b"goes on"]))
    assert cluster.values(TOPIC) == [b"of the other", b"goes on"]


def test_a_start_after_a_kill_outlasts_a_fenced_opening_transaction() -> None:
    cluster = Cluster()
    killed = opened(cluster)
    killed.write(entry(0), Records([b"a"]))
    cluster.faults = [fails(KafkaError.INVALID_PRODUCER_EPOCH)]
    started = opened(cluster)
    assert started.position == Txn(1, 0)
    assert started.write(entry(1), Records([b"b"]))
    assert cluster.values(TOPIC) == [b"a", b"b"]


def test_a_driver_whose_opening_fails_ends_if_a_third_one_has_opened_the_topic() -> None:
    cluster = Cluster()
    opened(cluster).write(entry(0), Records([b"a"]))
    others: list[TransactionWriter] = []

    def third_driver_opens() -> None:
        others.append(opened(cluster))
        raise failure(KafkaError._TIMED_OUT)

    cluster.faults = [third_driver_opens]
    with pytest.raises(Fenced):
        opened(cluster)
    assert others[0].write(entry(1), Records([b"b"]))


def test_after_its_own_marker_the_one_of_the_driver_before_ends_it_too() -> None:
    cluster = Cluster()
    before = opened(cluster)
    now = opened(cluster)
    cluster.committed += cluster.of(MARKERS)[:1]
    now.close()
    with pytest.raises(Fenced):
        now.write(entry(0), Records([b"a"]))
    assert before.position == Txn(1, -1)


@pytest.mark.parametrize(
    ("batch", "end", "text"), [(3, 11, "with other offsets"), (2, 10, "which is at g0001 batch 3")]
)
def test_only_the_batch_itself_is_there_already(batch: int, end: int, text: str) -> None:
    cluster = Cluster()
    opened(cluster).write(entry(3), Records([b"a"]))
    started = opened(cluster)
    assert not started.write(entry(3), Records([b"a"]))
    with pytest.raises(LedgerConflict, match=text):
        started.write(entry(batch, end), Records([b"b"]))
    assert cluster.values(TOPIC) == [b"a"]


def test_a_batch_of_which_a_record_was_not_sent_is_not_committed_and_one_without_all_its_offsets_is_written_again() -> (
    None
):
    cluster = Cluster()
    started = opened(cluster)
    with pytest.raises(PermanentError, match="1 records of a batch of 2 were sent"):
        started.write(entry(0), Records([b"a"], missing=1))
    plain = PlainWriter("s", "topic:orders", TOPIC, TopicSinkSettings(), started.clients)
    with pytest.raises(PermanentError, match="1 records of a batch of 2 were sent"):
        plain.write(entry(0), Records([b"a"], missing=1))
    assert cluster.values(TOPIC) == [] and len(cluster.of(MARKERS)) == 1
    assert started.write(entry(0), Records([b"a", b"b"]))
    # A range without them would let the void range of a later recovery begin too late.
    cluster = Cluster()
    driver = opened(cluster)
    cluster.unsaid = 1
    assert driver.write(entry(0), Records([b"a", b"b"]))
    assert cluster.values(TOPIC) == [b"a", b"b"] and cluster.unsaid == 0
    assert [(each.first, each.end) for each in driver.newest.written] == [(0, 2)]  # type: ignore[union-attr]


@pytest.mark.parametrize(("left", "text"), [(0, "and now has none"), (1, "and now that of g0001 batch -1")])
def test_a_marker_that_is_gone_or_older_ends_the_driver_before_it_writes_a_batch_again(left: int, text: str) -> None:
    cluster = Cluster()
    started = opened(cluster)
    started.write(entry(0), Records([b"a"]))
    cluster.committed = [*cluster.of(MARKERS)[:left], *cluster.of(TOPIC)]
    cluster.faults = [fails(KafkaError._TIMED_OUT)]
    with pytest.raises(PermanentError, match=f"had the marker of g0001 batch 0, {text}"):
        started.write(entry(1), Records([b"b"]))
    assert cluster.values(TOPIC) == [b"a"]


def test_markers_go_to_partition_0_of_a_topic_that_producers_do_not_make() -> None:
    cluster = Cluster()
    opened(cluster).write(entry(0), Records([b"a"]))
    assert [record.partition() for record in cluster.of(MARKERS)] == [0, 0, 0]
    assert [record.partition() for record in cluster.of(TOPIC)] == [-1]
    assert cluster.producers[0].config["allow.auto.create.topics"] is False


def test_the_partition_of_markers_is_enrolled_beside_that_of_the_first_record_and_readers_see_the_marker_alone() -> (
    None
):
    cluster = Cluster()
    driver = opened(cluster)
    assert driver.write(entry(0), Records([b"a", b"b"]))
    written = cluster.committed[1:]
    assert [(record.topic(), record.value()) for record in written[:3]] == [
        (TOPIC, b"a"),
        (MARKERS, b""),
        (TOPIC, b"b"),
    ]
    assert written[1].key() != written[3].key() and len(written) == 4
    assert driver.newest.written == (WrittenRange(TOPIC, "", -1, 0, 2, 2),)  # type: ignore[union-attr]
    cluster.committed.pop()  # no transaction ends so; were it the newest record, it would be no marker
    started = writer(cluster)
    started.mark(lambda at: at)  # type: ignore[arg-type, return-value]
    assert started.position == Txn(1, -1)


def test_a_batch_whose_enrolling_record_fails_is_written_by_another_producer() -> None:
    cluster = Cluster()
    driver = opened(cluster)
    cluster.refuses = MARKERS
    assert driver.write(entry(0), Records([b"a"]))
    assert cluster.values(TOPIC) == [b"a"] and len(cluster.producers) == 2


def test_no_representation_shows_the_properties_of_clients() -> None:
    clients = Clients({"sasl.password": "hunter2"})
    shown = repr(clients) + repr(TransactionWriter("s", "n", TOPIC, TopicSinkSettings(), clients))
    assert "hunter2" not in shown + repr(PlainWriter("s", "n", TOPIC, TopicSinkSettings(), clients))


def test_a_producer_that_another_one_follows_is_left_without_waiting_and_readers_wait_for_no_failed_batch() -> None:
    cluster = Cluster()
    started = opened(cluster)
    cluster.faults = [fails(KafkaError._TIMED_OUT)]
    assert started.write(entry(0), Records([b"a"]))
    assert len(cluster.producers) == 2 and not cluster.producers[0].aborted.is_set()
    with pytest.raises(PermanentError):
        started.write(entry(1), Records([b"a"], missing=1))
    assert cluster.producers[1].aborted.wait(10)


SHARD_MARKERS = "__recourse.s.orders.shards-1"


def shard(cluster: Cluster, owner: str = "") -> ShardWriter:
    clients = Clients({}, producer=cluster.producer, consumer=cluster.consumer)
    return ShardWriter("s", "topic:orders", TOPIC, TopicSinkSettings(), clients, owner=owner)


def claimed(cluster: Cluster, owner: str) -> None:
    writer = shard(cluster)
    writer.look()
    writer.claim(owner, 1)
    writer.close()


def test_a_process_of_a_driver_that_another_one_has_replaced_writes_nothing() -> None:
    cluster = Cluster()
    claimed(cluster, "old")
    begun = shard(cluster, "old")
    begun.write(entry(0), Records([b"a"]))
    claimed(cluster, "new")
    for zombie in (begun, shard(cluster, "old")):
        with pytest.raises(Fenced, match="another driver writes topic orders"):
            zombie.write(entry(1), Records([b"zombie"]))
    assert shard(cluster, "new").write(entry(1), Records([b"b"]))
    assert cluster.values(TOPIC) == [b"a", b"b"]


def test_a_process_whose_shard_moved_to_another_one_takes_it_back_without_waiting() -> None:
    cluster = Cluster()
    claimed(cluster, "driver")
    first, second = shard(cluster, "driver"), shard(cluster, "driver")
    first.write(entry(0), Records([b"a"]))
    first.renew()
    assert len(cluster.producers) == 2, "its producer is the newest: it is kept"
    second.write(entry(1), Records([b"b"]))
    first.renew()
    assert first.position is None, "it asks the marker again"
    assert not first.write(entry(1), Records([b"b"])) and first.write(entry(2), Records([b"c"]))
    assert cluster.values(TOPIC) == [b"a", b"b", b"c"]


def test_a_shard_is_written_once_by_whichever_process_is_first_and_not_without_its_marker() -> None:
    cluster = Cluster()
    with pytest.raises(PermanentError, match="had a marker of shard 0, and now has none"):
        shard(cluster, "driver").write(entry(0), Records([b"a"]))
    assert cluster.values(TOPIC) == []
    cluster = Cluster()
    claimed(cluster, "driver")
    assert shard(cluster, "driver").write(entry(0), Records([b"a"]))
    again = shard(cluster, "driver")
    assert not again.write(entry(0), Records([b"a"])) and again.position == Txn(1, 0)
    assert cluster.values(TOPIC) == [b"a"]
    assert [record.partition() for record in cluster.of(SHARD_MARKERS)] == [0, 0, 0]


def test_a_new_generation_claims_its_shards_and_an_older_one_is_refused() -> None:
    cluster = Cluster()
    claimed(cluster, "driver")
    shard(cluster, "driver").write(entry(5), Records([b"a"]))
    writer = shard(cluster)
    writer.look()
    writer.claim("next", 2)
    assert writer.position == Txn(2, -1)
    with pytest.raises(Fenced, match="in generation 2"):
        shard(cluster).claim("older", 1)


def test_only_large_batches_and_those_begun_go_by_shards() -> None:
    def writer(shards: int) -> ShardedWriter:
        clients = Clients({})
        return ShardedWriter("s", "topic:orders", TOPIC, TopicSinkSettings(), clients, shards=shards, client=Path())

    small, large = BatchOfRows(1, 4, driver=True), BatchOfRows(1, 4, driver=False)
    assert not writer(0).by_shards(large) and writer(2).by_shards(large) and not writer(2).by_shards(small)
    begun = writer(2)
    begun.begun = Txn(1, 4)
    assert begun.by_shards(small) and not begun.by_shards(replace(small, batch=5))


def driver(cluster: Cluster) -> ShardedWriter:
    clients = Clients({}, producer=cluster.producer, consumer=cluster.consumer)
    return ShardedWriter("s", "topic:orders", TOPIC, TopicSinkSettings(), clients, shards=2)


def of_driver(cluster: Cluster, writer: ShardedWriter, number: int) -> ShardWriter:
    clients = Clients({}, producer=cluster.producer, consumer=cluster.consumer)
    made = ShardWriter("s", "topic:orders", TOPIC, TopicSinkSettings(), clients, owner=writer.owner)
    made.shard, made.shards = number, 2
    return made


def test_a_shard_that_the_driver_before_wrote_until_it_was_claimed_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("streaming_jobs.sinks.kafka.sharded._AT_ONCE", 1)
    cluster = Cluster()
    before, after = driver(cluster), driver(cluster)
    before.open(1)
    late = of_driver(cluster, before, 1)
    cluster.faults = [lambda: late.write(entry(0), Records([b"a"]))]  # while shard 0 is claimed
    after.open(1)
    assert after.begun == Txn(1, 0)
    with pytest.raises(Fenced, match="another driver writes topic orders"):
        of_driver(cluster, before, 0).write(entry(0), Records([b"b"]))


def test_half_a_batch_is_finished_by_the_code_that_began_it() -> None:
    cluster = Cluster()
    before = driver(cluster)
    before.open(1)
    begun = replace(entry(0), code=CodeVersion("old", "1"))
    of_driver(cluster, before, 1).write(begun, Records([b"a"]))
    corrected, same = driver(cluster), driver(cluster)
    corrected.code, same.code = CodeVersion("new", "1"), CodeVersion("old", "2")
    with pytest.raises(PermanentError, match="written by code old, and others do not; the code is new now"):
        corrected.open(1)
    same.open(1)
    of_driver(cluster, same, 0).write(begun, Records([b"b"]))
    corrected = driver(cluster)
    corrected.code = CodeVersion("new", "1")
    corrected.open(1)
    assert corrected.begun == Txn(1, 0), "all shards have it: only its marker is missing"


def test_a_shard_whose_marker_cannot_be_read_gets_another_producer(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = Cluster()
    claimed(cluster, "driver")
    writer = shard(cluster, "driver")
    writer.write(entry(0), Records([b"a"]))
    with monkeypatch.context() as patch:
        patch.setattr(writer, "_read", lambda: (_ for _ in ()).throw(ClientLost("too late")))
        writer.renew()
    assert not writer.write(entry(0), Records([b"a"])) and len(cluster.producers) == 3


def test_shards_with_batches_of_a_topic_without_a_marker_are_not_opened() -> None:
    cluster = Cluster()
    before = driver(cluster)
    before.open(1)
    of_driver(cluster, before, 1).write(entry(0), Records([b"a"]))
    markers = "__recourse.s.orders"
    cluster.committed = [record for record in cluster.committed if record.topic() not in (TOPIC, markers)]
    with pytest.raises(ConfigurationError, match="topic orders has no marker, and its shards have g0001 batch 0"):
        driver(cluster).open(1)


def test_ranges_of_shards_become_one_per_partition_and_another_number_has_other_markers() -> None:
    parts = [("a", "id", 1, 5, 9, 3), ("a", "id", 0, 2, 4, 2), ("a", "id", 1, 3, 6, 2), ("b", "", 0, 0, 1, 1)]
    assert merged(WrittenRange(*part) for part in parts) == (
        WrittenRange("a", "id", 0, 2, 4, 2),
        WrittenRange("a", "id", 1, 3, 9, 5),
        WrittenRange("b", "", 0, 0, 1, 1),
    )
    assert shards_topic("recourse", "s", TOPIC, 1) == SHARD_MARKERS != shards_topic("recourse", "s", TOPIC, 2)


@pytest.mark.parametrize(
    ("ahead", "generation"), [({Txn(1, 4): 3}, 1), ({Txn(1, 4): 2}, 2), ({Txn(1, 4): 2, Txn(1, 5): 2}, 1)]
)
def test_half_a_batch_is_finished_in_its_generation_by_as_many_shards(ahead: dict[Txn, int], generation: int) -> None:
    writer = ShardedWriter("s", "topic:orders", TOPIC, TopicSinkSettings(), Clients({}), shards=2)
    writer.newest = entry(3)
    writer._refuse_half_a_batch({Txn(1, 4): 2}, 1)
    with pytest.raises(ConfigurationError, match="start the stream once as it was|and others do not"):
        writer._refuse_half_a_batch(ahead, generation)


DATA = TopicInfo("orders", "id", 6, -1, "delete", replicas=3, min_insync_replicas=2)


@dataclass
class Maker:
    """Makes topics as it is told."""

    made: dict[str, TopicInfo] = field(default_factory=dict)

    def describe(self, name: str) -> TopicInfo | None:
        return self.made.get(name)

    def create(
        self, name: str, partitions: int, retention_ms: int = -1, *, replicas: int = -1, **properties: str
    ) -> TopicInfo:
        in_sync = int(properties.get("min_insync_replicas", 1))
        most = int(properties["max_message_bytes"])
        info = TopicInfo(name, "m", partitions, retention_ms, properties["cleanup_policy"], replicas, in_sync, most)
        return self.made.setdefault(name, info)


def test_the_marker_topic_has_the_replicas_of_the_topic_and_takes_markers_that_are_larger_than_a_record() -> None:
    info = ensure_marker_topic(Maker(), "__m", DATA)
    assert (info.partitions, info.replicas, info.min_insync_replicas) == (1, 3, 2)
    assert ensure_marker_topic(Maker(), "__m", None).replicas == -1
    # A batch of a thousand partitions has a marker of a hundred kilobytes, however small its records are.
    config = producer_config({}, TopicSinkSettings(max_record_kb=100), "an id")
    assert config["message.max.bytes"] == ensure_marker_topic(Maker(), "__m", DATA).max_message_bytes == 8 << 20
    assert producer_config({}, TopicSinkSettings(max_record_kb=100))["message.max.bytes"] == 100_000


@pytest.mark.parametrize("by_client", [True, False])
def test_a_marker_that_is_too_large_is_named(by_client: bool) -> None:
    too_large = KafkaError(KafkaError.MSG_SIZE_TOO_LARGE, "Broker: Message size too large")

    class Refusing(Producer):
        def produce(self, topic: str, value: Any, key: Any, partition: int, report: Any, *further: Any) -> None:
            if by_client and topic == "__m":
                raise KafkaException(too_large)
            refused = (lambda _, record: report(too_large, record)) if topic == "__m" else report
            super().produce(topic, value, key, partition, refused, *further)

    producer = BatchProducer({}, timedelta(seconds=5), lambda config: Refusing(Cluster(), config))
    records = [Outgoing("orders", None, b"r", (), 0, -1)]
    with pytest.raises(PermanentError, match="the marker of the batch, 9 bytes, in topic __m: .*too large") as refused:
        producer.transact(records, 1, {}, lambda _: Outgoing("__m", b"k", b"123456789"))
    assert "max.message.bytes=8388608 on topic __m" in refused.value.next_step


def test_markers_of_a_sink_are_in_the_cluster_of_its_topic() -> None:
    assert marker_topic("recourse", "s", "orders@eu") == "__recourse.s.orders@eu"
    assert shards_topic("recourse", "s", "orders@eu", 2) == "__recourse.s.orders.shards-2@eu"
