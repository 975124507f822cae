"""The rules by which the shards of a topic sink must agree with its marker and the checkpoint.

1. Every shard that the sink's marker speaks of has a marker: without it, a part of a batch may be written twice.
2. A shard is ahead of the sink's marker only by the planned batch, of this generation; then the number of shards, too,
   is the declared one. A sink without a marker has no shard with a batch: such a marker is of a topic that is gone.
"""

from __future__ import annotations

from collections.abc import Iterator

from streaming_jobs.ledger import Txn
from streaming_jobs.preflight.findings import Finding
from streaming_jobs.preflight.snapshot import ShardsSnapshot, StreamSnapshot, TopicSinkSnapshot


def topic_shards(sink: TopicSinkSnapshot, snapshot: StreamSnapshot) -> Iterator[Finding]:
    """Findings about the shards of a topic that the stream writes."""
    for shards in sink.shards:
        yield from _of_one_number(shards, sink, snapshot)


def _of_one_number(shards: ShardsSnapshot, sink: TopicSinkSnapshot, snapshot: StreamSnapshot) -> Iterator[Finding]:
    number = len(shards.newest)
    if shards.marked and (gone := sorted(shard for shard, marker in shards.newest.items() if marker is None)):
        yield Finding(
            "refuse",
            f"topic {shards.topic} lacks the markers of shards {', '.join(map(str, gone))}: nobody knows which "
            f"batches of stream {snapshot.stream} they have written to topic {sink.topic}",
            f"put the topic {shards.topic} back from a copy; or {snapshot.write_again(sink)}",
        )
        return
    at = None if sink.marker is None else sink.marker.txn
    entries = [marker for marker in shards.newest.values() if marker is not None and marker.batch >= 0]
    ahead = sorted({entry.txn for entry in entries if at is None or entry.txn > at})
    if not ahead:
        return
    planned = None
    if snapshot.record is not None and snapshot.checkpoint.planned is not None:
        planned = Txn(snapshot.record.generation, snapshot.checkpoint.planned)
    if ahead != [planned]:
        yield Finding(
            "refuse",
            f"shards of topic {sink.topic} have {', '.join(map(str, ahead))}, which is not the planned batch of stream "
            f"{snapshot.stream}, {planned or 'none'}",
            "put the checkpoint back that belongs to the topic"
            if shards.marked
            else f"put the checkpoint back that belongs to the topic; or delete topic {shards.topic}, if topic "
            f"{sink.topic} was deleted and made anew",
        )
    elif number != sink.declared_shards:
        yield Finding(
            "refuse",
            f"some of the {number} shards of topic {sink.topic} have {planned} and others do not; the sink "
            f"is declared with {sink.declared_shards or 'none'}",
            f"start the stream once with shards={number}: it finishes the batch",
        )
