"""A driver whose producer fails finds out from the marker whether it is still the one that writes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import pytest
from confluent_kafka import KafkaError

from streaming_jobs.errors import Fenced, LedgerConflict, PermanentError
from streaming_jobs.ledger.entry import LedgerEntry, Txn
from streaming_jobs.ledger.positions import OffsetRange
from streaming_jobs.settings import TopicSinkSettings
from streaming_jobs.sinks.kafka.producer import Outgoing
from streaming_jobs.sinks.kafka.writer import Clients, PlainWriter, TransactionWriter
from tests.support.kafka_cluster import Cluster, failure

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


def test_a_batch_of_which_a_record_was_not_sent_is_not_committed() -> None:
    cluster = Cluster()
    started = opened(cluster)
    with pytest.raises(PermanentError, match="1 records of a batch of 2 were sent"):
        started.write(entry(0), Records([b"a"], missing=1))
    plain = PlainWriter("s", "topic:orders", TOPIC, TopicSinkSettings(), started.clients)
    with pytest.raises(PermanentError, match="1 records of a batch of 2 were sent"):
        plain.write(entry(0), Records([b"a"], missing=1))
    assert cluster.values(TOPIC) == [] and len(cluster.of(MARKERS)) == 1
    assert started.write(entry(0), Records([b"a", b"b"]))


def test_a_batch_whose_offsets_the_broker_did_not_all_say_is_written_again() -> None:
    """A range without them would let the void range of a later recovery begin too late."""
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
    assert [record.partition() for record in cluster.of(MARKERS)] == [0, 0]
    assert [record.partition() for record in cluster.of(TOPIC)] == [-1]
    assert cluster.producers[0].config["allow.auto.create.topics"] is False


def test_no_representation_shows_the_properties_of_clients() -> None:
    clients = Clients({"sasl.password": "hunter2"})
    shown = repr(clients) + repr(TransactionWriter("s", "n", TOPIC, TopicSinkSettings(), clients))
    assert "hunter2" not in shown + repr(PlainWriter("s", "n", TOPIC, TopicSinkSettings(), clients))


def test_readers_do_not_wait_for_a_batch_that_failed_for_good() -> None:
    cluster = Cluster()
    started = opened(cluster)
    with pytest.raises(PermanentError):
        started.write(entry(0), Records([b"a"], missing=1))
    assert cluster.producers[0].aborted.wait(10)


def test_a_producer_that_another_one_follows_is_left_without_waiting_for_an_abort() -> None:
    cluster = Cluster()
    started = opened(cluster)
    cluster.faults = [fails(KafkaError._TIMED_OUT)]
    assert started.write(entry(0), Records([b"a"]))
    assert len(cluster.producers) == 2 and not cluster.producers[0].aborted.is_set()
