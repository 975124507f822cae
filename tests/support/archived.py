"""Topics with an archive, a stream that copies what it sees of each record, and records of every kind."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from confluent_kafka import Consumer, Producer, TopicPartition
from confluent_kafka.admin import AdminClient
from pyspark.sql import DataFrame
from pyspark.sql import functions as F

from streaming_jobs import DeltaTable, KafkaTopic, Raw, archive, stream
from streaming_jobs.catalog.archive import COLUMNS
from streaming_jobs.sources.record_blocks import TIMESTAMP_TYPES

CREATE, APPEND = "archived-create", "archived-append"
"""Two topics: the records' times are those of producers, and of the broker."""

create_archive = archive(CREATE, name="create_archive")
append_archive = archive(APPEND, name="append_archive")


def _topic(name: str) -> KafkaTopic:
    return KafkaTopic(name, value=Raw(), tombstones="keep", headers=True, timestamp_type=True)


def _copied(records: DataFrame) -> DataFrame:
    columns = [c for c in COLUMNS if c not in ("timestamp_ms", "value")]
    return records.select(
        *(F.col("_source")[c].alias(c) for c in columns),
        F.unix_millis(F.col("_source")["timestamp"]).alias("timestamp_ms"),
        "value",
        F.col("_source")["tombstone"].alias("tombstone"),
    )


@stream(source=_topic(CREATE), sink=DeltaTable("create_copy"))
def create_copy(records: DataFrame) -> DataFrame:
    """All that a stream sees of the records."""
    return _copied(records)


@stream(source=_topic(APPEND), sink=DeltaTable("append_copy"))
def append_copy(records: DataFrame) -> DataFrame:
    """All that a stream sees of the records."""
    return _copied(records)


def fill(bootstrap: str, topic: str, numbers: Iterable[int], partitions: int = 2) -> None:
    """Send records of every kind: no key, an empty one, tombstones, bytes, headers; transactions, aborted ones too."""
    transactional = Producer({"bootstrap.servers": bootstrap, "transactional.id": f"fill-{topic}"})
    transactional.init_transactions(30)
    for number in numbers:
        if number % 50 == 0:  # leaves a marker behind, and each second time records that nobody reads
            transactional.begin_transaction()
            for partition in range(partitions):
                transactional.produce(topic, b"in a transaction %d" % number, partition=partition)
            (transactional.commit_transaction if number % 100 else transactional.abort_transaction)(30)
            plain = Producer({"bootstrap.servers": bootstrap, "enable.idempotence": True})
        plain.produce(
            topic,
            key=(None, b"", b"\xff\x00", b"k%d" % number)[number % 4],
            value=(b"", None, b"\x80\xff", b"value %d" % number)[number // 4 % 4],
            headers=([], [("a", b"1"), ("a", None)], [("b", b"\xff")])[number % 3],
            partition=number % partitions,
            timestamp=1_600_000_000_000 + number * 1000,
        )
        plain.poll(0)
        if number % 50 == 49:
            assert plain.flush(30) == 0
    assert plain.flush(30) == 0


def truth(bootstrap: str, topic: str, partitions: int = 2) -> list[dict[str, Any]]:
    """Every record that Kafka gives from the topic's beginning on, by partition and offset, as the archive has it."""
    consumer = Consumer(
        {
            "bootstrap.servers": bootstrap,
            "group.id": "truth",
            "enable.partition.eof": True,
            "isolation.level": "read_committed",
        }
    )
    consumer.assign([TopicPartition(topic, partition, 0) for partition in range(partitions)])
    found: list[dict[str, Any]] = []
    waiting = set(range(partitions))
    while waiting:
        message = consumer.poll(30)
        assert message is not None, "the topic's end did not come"
        if message.error() is not None:
            waiting.discard(message.partition() or 0)
            continue
        kind, at = message.timestamp()
        headers = [{"key": k, "value": v} for k, v in message.headers() or []]
        found.append(
            {
                "topic": topic,
                "partition": message.partition(),
                "offset": message.offset(),
                "timestamp_ms": at,
                "timestamp_type": TIMESTAMP_TYPES[kind],
                "key": message.key(),
                "value": message.value(),
                "headers": headers or None,
            }
        )
    consumer.close()
    return in_order(found)


def in_order(rows: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Rows by partition and offset."""
    return sorted(rows, key=lambda row: (row["partition"], row["offset"]))


def delete_before(bootstrap: str, topic: str, offsets: dict[int, int]) -> None:
    """Have Kafka delete the records before these offsets by partition, as retention does."""
    wanted = [TopicPartition(topic, partition, offset) for partition, offset in offsets.items()]
    admin = AdminClient({"bootstrap.servers": bootstrap})  # it answers as long as it is there
    for future in admin.delete_records(wanted).values():
        future.result(30)
