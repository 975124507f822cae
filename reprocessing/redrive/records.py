"""The records of what was set aside, as Kafka had them: from dead letters, the topic, or its archive.

The dead letter of a whole record has the record's bytes, so that it can be redriven when no topic has it any more. The
dead letter of a row, and a quarantined row, name the record of which the row was made.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from reprocessing.redrive.selection import SetAside
from streaming_jobs.errors import OffsetsLost
from streaming_jobs.settings import Settings
from streaming_jobs.sinks.redriven import Place
from streaming_jobs.sources.archived_ranges import read_ranges
from streaming_jobs.sources.base import Span, TopicReader
from streaming_jobs.sources.connection import client_file, remove_client_file
from streaming_jobs.sources.kafka import KAFKA
from streaming_jobs.sources.kept_topics import KeptRecord
from streaming_jobs.sources.record_blocks import TIMESTAMP_TYPES
from streaming_jobs.state.stream_record import StreamRecord
from streaming_jobs.stream import KafkaTopic, Stream
from streaming_jobs.table_sources.archives import Archives

_TOGETHER = 500
"""Offsets between two records that are read in one range."""
_MOST = 1_000
_COLUMNS = ("offset", "key", "headers", "timestamp_type")


@dataclass
class Gathered:
    """The records by place, and by place the reason why a record cannot be read any more."""

    records: dict[Place, KeptRecord]
    lost: dict[Place, str]


def gather(
    settings: Settings,
    stream: Stream,
    record: StreamRecord,
    rows: Sequence[SetAside],
    topics: TopicReader,
    bootstrap: str,
) -> Gathered:
    """Each record once; Kafka is asked only for what the dead letters do not have."""
    declared = {topic.name: topic for topic in stream.topics}
    found, wanted = Gathered({}, {}), dict[str, set[tuple[int, int]]]()
    for row in rows:
        if row.place is None or row.place in found.records:
            continue
        if (letter := _of_letter(row, declared.get(row.place[0]))) is not None:
            found.records[row.place] = letter
        else:
            wanted.setdefault(row.place[0], set()).add(row.place[1:])
    for topic, places in wanted.items():
        _read(settings, stream, record, topic, places, topics, bootstrap, found)
    return found


def _of_letter(row: SetAside, topic: KafkaTopic | None) -> KeptRecord | None:
    """The record in its dead letter; None if that has a row instead, or not all of what the stream reads."""
    if not row.is_whole or row.at is None or topic is None or topic.timestamp_type:
        return None
    values = row.values
    headers = values["headers"]
    pairs = None if headers is None else tuple((each["key"], each["value"]) for each in headers)
    return KeptRecord((1, round(row.at * 1000)), values["key"], values["value"], pairs)


def _read(
    settings: Settings,
    stream: Stream,
    record: StreamRecord,
    topic: str,
    places: set[tuple[int, int]],
    topics: TopicReader,
    bootstrap: str,
    found: Gathered,
) -> None:
    bound, info = record.topic(topic), topics.describe(topic)
    topic_id = bound.topic_id if bound is not None else ""
    if info is None or info.id != topic_id:
        found.lost |= dict.fromkeys(((topic, *p) for p in places), f"topic {topic} is not the one that was read")
        return
    first = topics.offsets(topic).earliest
    archive = Archives(settings).of(stream, topic, topic_id)
    client = client_file(settings, bootstrap)
    reader = KAFKA.reader(topic, client)
    try:
        for partition, span in ranges(places):
            try:
                for block in read_ranges(
                    reader, {partition: span}, _MOST, archive, first, lambda: topics.offsets(topic).earliest
                ):
                    columns = (block.column(name).to_pylist() for name in _COLUMNS)
                    for *values, value, ms in zip(*columns, block.values, block.times.tolist(), strict=True):
                        offset, key, headers, kind = values
                        if (partition, offset) in places:
                            pairs = None if headers is None else tuple((h["key"], h["value"]) for h in headers)
                            stamp = TIMESTAMP_TYPES.index(kind), ms
                            found.records[(topic, partition, offset)] = KeptRecord(stamp, key, value, pairs)
            except OffsetsLost as lost:
                reader.close()
                within = [place for place in places if place[0] == partition and span[0] <= place[1] < span[1]]
                found.lost |= {(topic, *place): lost.found for place in within}
    finally:
        reader.close()
        remove_client_file(client)
    for place in places:
        if (topic, *place) not in found.records:
            found.lost.setdefault((topic, *place), "Kafka has no record at this offset: it was compacted away")


def ranges(places: Iterable[tuple[int, int]]) -> Iterator[tuple[int, Span]]:
    """Yields ranges of offsets by partition that have all of the places; distant ones are in ranges of their own."""
    begin = end = -1
    partition = -1
    for number, offset in sorted(places):
        if number == partition and offset < end + _TOGETHER:
            end = offset + 1
            continue
        if partition >= 0:
            yield partition, (begin, end)
        partition, begin, end = number, offset, offset + 1
    if partition >= 0:
        yield partition, (begin, end)


def by_topic(records: Mapping[Place, KeptRecord]) -> dict[str, dict[int, dict[int, KeptRecord]]]:
    kept: dict[str, dict[int, dict[int, KeptRecord]]] = {}
    for (topic, partition, offset), record in records.items():
        kept.setdefault(topic, {}).setdefault(partition, {})[offset] = record
    return kept
