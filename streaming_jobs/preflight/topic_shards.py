"""The rules by which the shards of a topic sink must agree with its marker and the checkpoint.

1. Every shard that the sink's marker speaks of has a marker: without it, a part of a batch may be written twice.
2. A shard is ahead of the sink's marker only by the planned batch, of this generation; then the number of shards, too,
   is the declared one.
"""

from __future__ import annotations

from collections.abc import Iterator

from streaming_jobs.ledger import Txn
from streaming_jobs.preflight.findings import Finding
from streaming_jobs.preflight.snapshot import StreamSnapshot, TopicSinkSnapshot


def topic_shards(sink: TopicSinkSnapshot, snapshot: StreamSnapshot) -> Iterator[Finding]:
    """Findings about the shards of a topic that the stream writes."""
    if gone := sorted(shard for shard, marker in sink.shards.items() if marker is None):
        yield Finding(
            "refuse",
            f"topic {sink.shards_topic} lacks the markers of shards {', '.join(map(str, gone))}: nobody knows which "
            f"batches of stream {snapshot.stream} they have written to topic {sink.topic}",
            f"put the topic {sink.shards_topic} back from a copy",
        )
        return
    at = None if sink.marker is None else sink.marker.txn
    entries = [marker for marker in sink.shards.values() if marker is not None and marker.batch >= 0]
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
            "put the checkpoint back that belongs to the topic",
        )
    elif len(sink.shards) != sink.declared_shards:
        yield Finding(
            "refuse",
            f"some of the {len(sink.shards)} shards of topic {sink.topic} have {planned} and others do not; the sink "
            f"is declared with {sink.declared_shards or 'none'}",
            f"start the stream once with shards={len(sink.shards)}: it finishes the batch",
        )
