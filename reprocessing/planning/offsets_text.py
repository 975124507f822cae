"""Offsets in text form: the CSV of Kafka's tool, and a short form for the command line."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from pathlib import Path

from streaming_jobs.errors import UsageError
from streaming_jobs.ledger.positions import TopicOffsets


def read_offsets(path: Path) -> dict[str, dict[int, int]]:
    """Offsets by topic and partition from lines `topic,partition,offset`, as kafka-consumer-groups reads and exports.

    Raises UsageError for a file that cannot be read and for a line of another form.
    """
    offsets: dict[str, dict[int, int]] = {}
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"offsets file {path} cannot be read: {error}", "correct the path") from error
    for number, row in enumerate(csv.reader(lines), 1):
        if not row:
            continue
        try:
            topic, partition, offset = row[0].strip().strip('"'), int(row[1]), int(row[2])
        except (IndexError, ValueError) as error:
            raise UsageError(
                f"line {number} of {path.name} is not topic,partition,offset: {','.join(row)}", "correct it"
            ) from error
        if partition in offsets.setdefault(topic, {}):
            raise UsageError(f"{path.name} names partition {partition} of topic {topic} twice", "keep one of them")
        offsets[topic][partition] = offset
    return offsets


def write_offsets(offsets: TopicOffsets) -> str:
    """Offsets as lines `topic,partition,offset`."""
    return "".join(f"{t},{p},{o}\n" for t, each in sorted(offsets.items()) for p, o in sorted(each.items()))


def parse_offsets(text: str, topics: Sequence[str]) -> dict[str, dict[int, int]]:
    """Parse `0:120,1:98` for a stream with one topic, `orders/0:120,...` for several; raises UsageError."""
    offsets: dict[str, dict[int, int]] = {}
    for item in text.split(","):
        place, colon, offset = item.strip().rpartition(":")
        topic, slash, partition = place.rpartition("/")
        if not colon or not partition.isdigit() or not offset.isdigit() or (not slash and len(topics) > 1):
            raise UsageError(f"'{item}' is not an offset", "write partition:offset,... or topic/partition:offset,...")
        offsets.setdefault(topic or topics[0], {})[int(partition)] = int(offset)
    return offsets
