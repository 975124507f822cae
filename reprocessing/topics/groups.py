"""Consumer groups that are not ours and have read wrong records: what they see, and where they should go on."""

from __future__ import annotations

from reprocessing.topics.written_topics import GroupPosition
from streaming_jobs.ledger.positions import PartitionOffsets


def group_words(group: GroupPosition, begins: PartitionOffsets, ends: PartitionOffsets) -> str:
    """What a group has read of the wrong records of a partition, and what comes for it, in words.

    `begins` are the first wrong offsets, `ends` the offsets at which the corrected records begin.
    """
    begin, end = begins[group.partition], ends[group.partition]
    last = min(group.offset, end) - 1
    read = f"consumer group {group.group} has read {group.topic} partition {group.partition} to {group.offset - 1}"
    rest = "" if group.offset >= end else f"; {group.offset} to {end - 1} are wrong too: set its offset to {end}"
    return f"{read}: {begin} to {last} are wrong, and it gets their corrected records from {end} on{rest}"
