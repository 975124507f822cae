"""A topic whose marker is lost: prove which batches the topic has, and write the marker again.

The primary table's newest entry lists the newest batch of the topic. Each record that the stream has written names its
batch in its headers. So if every record of the topic is of another writer, or of a batch up to the listed one, then the
topic has exactly these batches: a batch that only the topic has would be a later one, and its transaction is whole.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from reprocessing.topics.written_topics import WrittenTopics
from streaming_jobs.declare.topic_sink import KafkaSink
from streaming_jobs.errors import UsageError
from streaming_jobs.ledger.entry import LedgerEntry, Txn
from streaming_jobs.ledger.positions import PartitionOffsets
from streaming_jobs.preflight.snapshot import ledger_file
from streaming_jobs.settings import Settings
from streaming_jobs.sinks.kafka.markers import ensure_marker_topic, marker_topic
from streaming_jobs.sinks.stored import entries
from streaming_jobs.sinks.tables import store_of
from streaming_jobs.sources.base import Span
from streaming_jobs.sources.topics import Topics
from streaming_jobs.state.lease import take
from streaming_jobs.stream import Stream

_OWN = "recourse."


def write_markers(
    settings: Settings, stream: Stream, topics: WrittenTopics, reader: Topics
) -> Iterator[tuple[str, Txn]]:
    """Write each lost marker of the stream's topics again; yields the topics with the batch that they have.

    The stream has to be stopped. Raises UsageError if no marker is lost, or if one cannot be proved.
    """
    with take(settings, stream.name, purpose="write a marker again", wait=0):
        sinks = [each for each in stream.topic_sinks.values() if each.exactly_once]
        lost = [each for each in sinks if topics.newest(stream, each) is None]
        if not lost:
            raise UsageError(f"no marker of stream {stream.name} is lost", "there is nothing to write again")
        listed = entries(store_of(stream.primary).commits(settings, stream.primary), 1)
        for sink in lost:
            at = _listed(stream, sink, listed[0][1] if listed else None)
            earliest = reader.offsets(sink.name).earliest
            _prove(settings, stream, sink, topics, at, earliest)
            name = marker_topic(settings.topic_sink.prefix, stream.name, sink.name)
            ensure_marker_topic(reader, name, reader.describe(sink.name))
            topics.mark(stream, sink, at, "", at)
            yield sink.name, at


def _listed(stream: Stream, sink: KafkaSink, newest: LedgerEntry | None) -> Txn:
    """The newest batch of the topic by the primary table; raises UsageError without one, or if many topics have it."""
    number = None if newest is None else newest.txns.get(sink.ledger_name)
    if number is None:
        raise UsageError(
            f"table {stream.primary.name} lists no batch of topic {sink.name}", "declare the topic in a new stream"
        )
    if sink.route is not None or sink.shards is not None:
        raise UsageError(
            f"stream {stream.name} writes topic {sink.name} by route or in shards: more than one transaction, or more "
            "than one topic, would have to be proved",
            "put the marker topics back from a copy",
        )
    return Txn.of(number)


def _prove(
    settings: Settings, stream: Stream, sink: KafkaSink, topics: WrittenTopics, at: Txn, earliest: PartitionOffsets
) -> None:
    """Raise UsageError for a record that may be of a batch after a position."""
    ends = topics.settled(sink.name)
    known = _known_ends(settings, stream, sink.name, topics.topic_id(sink.name) or "", at)
    spans: dict[int, Span] = {p: (max(known.get(p, 0), earliest.get(p, 0)), end) for p, end in ends.items()}
    for records in topics.blocks(sink.name, {p: span for p, span in spans.items() if span[0] < span[1]}):
        columns = zip(*(records.column(name).to_pylist() for name in ("partition", "offset", "headers")), strict=True)
        for partition, offset, headers in columns:
            if _may_be_later({each["key"]: each["value"] for each in headers or ()}, stream.name, at):
                raise UsageError(
                    f"record {offset} of topic {sink.name}, partition {partition}, is or may be of a batch of stream "
                    f"{stream.name} after {at}, which table {stream.primary.name} does not have",
                    "put the marker topic back from a copy; what else there is, preflight says at the next start",
                )


def _known_ends(settings: Settings, stream: Stream, topic: str, topic_id: str, at: Txn) -> dict[int, int]:
    """By partition, the offset after the last record of batches up to a position, as far as the ledger reaches back."""
    ends: dict[int, int] = {}
    for day in ledger_file(settings, stream.name).days(stream.name):
        for line in day:
            for each in line.read().entry.written if line.txn <= at else ():
                if (each.topic, each.topic_id) == (topic, topic_id):
                    ends[each.partition] = max(each.end, ends.get(each.partition, 0))
    return ends


def _may_be_later(headers: Mapping[str, bytes | None], stream: str, at: Txn) -> bool:
    """True for a record of the stream of a later batch, and for one that does not say whose it is."""
    found = {name: headers.get(_OWN + name) for name in ("stream", "generation", "batch")}
    if found["stream"] is None or found["generation"] is None or found["batch"] is None:
        return True
    return found["stream"] == stream.encode() and Txn(int(found["generation"]), int(found["batch"])) > at
