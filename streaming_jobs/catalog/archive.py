"""The declaration of an archive: an ordinary stream that writes a topic's records, unchanged, to a Delta table.

    flights_archive = archive(FLIGHTS)

The table's columns are a contract (`columns`). The table is partitioned by Kafka's partition: a replay reads offsets of
partitions, so each file belongs to one of them, and the bounds on `offset` in the table's log say which offsets it has.
Kafka's date would not do: producers choose it, and a batch of old records would be as many files as it has dates.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from streaming_jobs.declare.names import AT
from streaming_jobs.errors import UsageError
from streaming_jobs.stream import DeltaTable, KafkaTopic, Stream

if TYPE_CHECKING:
    from pyspark.sql import DataFrame
    from pyspark.sql.types import StructType

COLUMNS = ("topic", "partition", "offset", "timestamp_ms", "timestamp_type", "key", "value", "headers")


def archive(topic: KafkaTopic | str, *, name: str | None = None, owners: Sequence[str] = ()) -> Stream:
    """Declare the archive of a topic: a stream and its table, both named `name` (default: `<topic>_archive`,
    of a topic in another cluster `<topic>_<cluster>_archive`).

    Raises UsageError if that is not a valid stream name, since names of topics may have other characters.
    """
    topic_name = topic if isinstance(topic, str) else topic.name
    chosen = f"{topic_name.replace(AT, '_')}_archive" if name is None else name
    raw = importlib.import_module("streaming_jobs.formats.raw").Raw  # its types are PySpark's, which takes long
    source = KafkaTopic(topic_name, value=raw(), tombstones="keep", headers=True, timestamp_type=True)
    table = DeltaTable(
        chosen,
        schema=columns(),
        partition_by=["partition"],
        description=f"Every record of topic {topic_name} as Kafka had it, once",
        owners=owners,
    )
    about = f"Archive of topic {topic_name}: its records as Kafka has them, for replays beyond its retention."
    return Stream(chosen, as_they_are, {"records": source}, {chosen: table}, description=about, owners=owners)


def as_they_are(records: DataFrame) -> DataFrame:
    """The function of every archive: the records' bytes and places; nothing is decoded, and none is refused."""
    from pyspark.sql import functions as F

    place = F.col("_source")
    return records.select(
        place["topic"].alias("topic"),
        place["partition"].alias("partition"),
        place["offset"].alias("offset"),
        F.unix_millis(place["timestamp"]).alias("timestamp_ms"),
        place["timestamp_type"].alias("timestamp_type"),
        place["key"].alias("key"),
        F.col("value"),
        place["headers"].alias("headers"),
    )


def columns() -> StructType:
    """The columns of every archive's table, a contract.

    The time is a number, since a table's TIMESTAMP holds fewer times than Kafka does.
    """
    from pyspark.sql import types as T

    def column(name: str, kind: T.DataType, comment: str) -> T.StructField:
        return T.StructField(name, kind, True, {"comment": comment})

    header = T.StructType([T.StructField("key", T.StringType()), T.StructField("value", T.BinaryType())])
    made = [
        column("topic", T.StringType(), "the topic's name"),
        column("partition", T.IntegerType(), "Kafka's partition"),
        column("offset", T.LongType(), "the record's offset; offsets have gaps, as in Kafka"),
        column("timestamp_ms", T.LongType(), "time the record carries, milliseconds since 1970; -1: none"),
        column("timestamp_type", T.StringType(), "CreateTime, LogAppendTime or NoTimestampType"),
        column("key", T.BinaryType(), "the key's bytes; null: no key"),
        column("value", T.BinaryType(), "the value's bytes; null: a tombstone"),
        column("headers", T.ArrayType(header), "the headers in their order, with repeated keys; null: none"),
    ]
    return T.StructType(made)


def is_archive(stream: Stream) -> bool:
    return stream.function is as_they_are


def archive_of(topic: str, streams: Iterable[Stream]) -> Stream | None:
    """The archive of a topic among the declared streams; raises UsageError for several."""
    found = [each for each in streams if is_archive(each) and any(t.name == topic for t in each.topics)]
    if len(found) > 1:
        names = ", ".join(each.name for each in found)
        raise UsageError(f"topic {topic} has several archives: {names}", "declare one")
    return found[0] if found else None
