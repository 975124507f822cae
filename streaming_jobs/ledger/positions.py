"""The position of a stream in its topics: topic -> partition -> offset of the first record that is not read yet.

The one model of it for checkpoints, ledger, records, savepoints and plans. On disk a partition's number is text, as
JSON has no other keys; only `decode` and `decode_partitions` make it a number again.
"""

from __future__ import annotations

import base64
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

PartitionOffsets = Mapping[int, int]
"""partition -> offset"""

TopicOffsets = Mapping[str, PartitionOffsets]
"""topic -> partition -> offset"""

Place = tuple[str, int]
"""A topic's name and the number of one of its partitions."""


@dataclass(frozen=True)
class OffsetRange:
    """The offsets that one batch read of one topic: per partition the first one, and the one after the last."""

    topic: str
    topic_id: str
    start: PartitionOffsets
    end: PartitionOffsets

    @property
    def records(self) -> int:
        """Offsets in the range; transaction markers and compacted offsets count too."""
        return sum(end - self.start.get(partition, 0) for partition, end in self.end.items())

    def same_offsets(self, other: OffsetRange) -> bool:
        """True if both cover the same offsets of the same topic."""
        return (self.topic, dict(self.start), dict(self.end)) == (other.topic, dict(other.start), dict(other.end))


@dataclass(frozen=True)
class WrittenRange:
    """The records that one batch wrote to a partition of a topic: the first offset, the one after the last, the number.

    Records of other writers and transaction markers may lie among them.
    """

    topic: str
    topic_id: str
    partition: int
    first: int
    end: int
    records: int


@dataclass(frozen=True)
class Archived:
    """What an archive adds to a topic, by partition: the offsets that it covers, and Kafka's own first offsets."""

    name: str
    bounds: Mapping[int, tuple[int, int]]
    first: PartitionOffsets


@dataclass(frozen=True)
class OffsetBounds:
    """First and next offset of a topic by partition; `latest` is the last stable one, where read_committed ends.

    With an archive, `earliest` is the first offset that can be read, there or in Kafka. `continues`, of a table that
    is read: from 0 its whole content can be read, and from this version on what each one added, but nothing between.
    """

    earliest: dict[int, int]
    latest: dict[int, int]
    archived: Archived | None = None
    continues: Mapping[int, int] = field(default_factory=dict)

    @property
    def counts(self) -> dict[int, int]:
        """Offsets held by partition; equal to records where no transaction markers are in the topic."""
        return {partition: end - self.earliest[partition] for partition, end in self.latest.items()}

    @property
    def total(self) -> int:
        return sum(self.counts.values())


def first_after(begin: int, partition: int, earliest: PartitionOffsets, continues: PartitionOffsets) -> int | None:
    """The first readable offset if the beginning of a range is gone; None if it is readable."""
    if begin < earliest.get(partition, 0):
        return earliest[partition]
    return continues[partition] if 0 < begin < continues.get(partition, 0) else None


def starts_of(ranges: Iterable[OffsetRange]) -> TopicOffsets:
    """The first offsets of ranges: topic -> partition -> offset."""
    return {each.topic: dict(each.start) for each in ranges}


def ends_of(ranges: Iterable[OffsetRange]) -> TopicOffsets:
    """The offsets after the last ones of ranges: topic -> partition -> offset."""
    return {each.topic: dict(each.end) for each in ranges}


def offsets_between(begin: TopicOffsets, end: TopicOffsets) -> int:
    """The number of offsets from one position to another; a partition that only the second one has counts whole."""
    begins = by_place(begin)
    return sum(max(offset - begins.get(place, 0), 0) for place, offset in by_place(end).items())


def by_place(offsets: TopicOffsets) -> dict[Place, int]:
    return {(topic, partition): offset for topic, each in offsets.items() for partition, offset in each.items()}


def by_topic(offsets: Mapping[Place, int]) -> dict[str, dict[int, int]]:
    """The offsets by topic, then by partition: the inverse of `by_place`."""
    nested: dict[str, dict[int, int]] = {}
    for (topic, partition), offset in offsets.items():
        nested.setdefault(topic, {})[partition] = offset
    return nested


def decode_partitions(value: Mapping[str, int]) -> dict[int, int]:
    """Offsets by partition as read from JSON; raises ValueError, AttributeError or TypeError for anything else."""
    return {int(partition): int(offset) for partition, offset in value.items()}


def encode_ranges(ranges: Iterable[OffsetRange], *, packed: bool = False) -> dict[str, Any]:
    """Ranges by topic, as an entry has them in JSON; `packed`: those of topics with many partitions in short."""
    return {
        each.topic: {"id": each.topic_id, **_packed(each)}
        if packed and _packs(each)
        else {"id": each.topic_id, "start": each.start, "end": each.end}
        for each in ranges
    }


def decode_ranges(value: Mapping[str, Any]) -> tuple[OffsetRange, ...]:
    """Ranges as `encode_ranges` has made them, and as JSON has them."""
    return tuple(
        OffsetRange(topic, read["id"], *_unpacked(read))
        if "packed" in read
        else OffsetRange(topic, read["id"], decode_partitions(read["start"]), decode_partitions(read["end"]))
        for topic, read in value.items()
    )


def is_packed(encoded: Mapping[str, Any]) -> bool:
    """True if ranges that `encode_ranges` has made are in the short form for one of the topics."""
    return any("packed" in read for read in encoded.values())


# Many partitions in short: 2 to 5 bytes each instead of 30.
#
# An entry is read alone: by preflight beside the checkpoint, after a log was cleaned, from a topic's marker. So it
# always has all partitions, and saves bytes by their form. Two rows of numbers, by partition: the ends, from their
# middle (0, -1, 1, -2 ... as 0, 1, 2, 3), and the offsets read. Each is in Rice's code, which is the shortest for
# numbers that are mostly small: `n >> k` ones, a zero, and the lowest k bits of n. `packed` is [partitions, middle, k
# of the ends, k of the offsets]; `bits` has the rows in base 85 with a point for the dollar, which Spark's settings
# would expand; `new` names the partitions without a start.

_MANY = 32
"""Partitions from which on a topic's range is written in short."""
_DOLLAR = str.maketrans("$.", ".$")


def _packs(read: OffsetRange) -> bool:
    """True for a topic of many partitions that are all there and have been read forwards."""
    size = len(read.end)
    return (
        size >= _MANY
        and all(p in read.end for p in range(size))
        and all(0 <= start <= read.end.get(p, -1) for p, start in read.start.items())
    )


def _packed(read: OffsetRange) -> dict[str, Any]:
    ends = [read.end[p] for p in range(len(read.end))]
    middle = sorted(ends)[len(ends) // 2]
    rows = (
        [2 * (end - middle) if end >= middle else 2 * (middle - end) - 1 for end in ends],
        [end - read.start.get(p, end) for p, end in enumerate(ends)],
    )
    lows = [_best(row) for row in rows]
    bits = "".join(_rice(n, k) for row, k in zip(rows, lows, strict=True) for n in row)
    bits += "0" * (-len(bits) % 8)
    text = base64.b85encode(int(bits, 2).to_bytes(len(bits) // 8, "big")).decode().translate(_DOLLAR)
    new = [p for p in range(len(ends)) if p not in read.start]
    return {"packed": [len(ends), middle, *lows], "bits": text, **({"new": new} if new else {})}


def _best(row: list[int]) -> int:
    """The number of low bits with which a row becomes shortest."""
    return min(range(max(row).bit_length() + 1), key=lambda k: sum((n >> k) + k for n in row))


def _rice(n: int, k: int) -> str:
    return "1" * (n >> k) + "0" + (format(n & ((1 << k) - 1), f"0{k}b") if k else "")


def _unpacked(read: Mapping[str, Any]) -> tuple[dict[int, int], dict[int, int]]:
    size, middle, *lows = read["packed"]
    data = base64.b85decode(read["bits"].translate(_DOLLAR))
    bits, at, rows = format(int.from_bytes(data, "big"), f"0{8 * len(data)}b"), 0, list[list[int]]()
    for k in lows:
        row = []
        for _ in range(size):
            zero = bits.index("0", at)
            row.append((zero - at) << k | int(bits[zero + 1 : zero + 1 + k] or "0", 2))
            at = zero + 1 + k
        rows.append(row)
    end = {p: middle - (n + 1) // 2 if n % 2 else middle + n // 2 for p, n in enumerate(rows[0])}
    new = {*read.get("new", ())}
    return {p: end[p] - count for p, count in enumerate(rows[1]) if p not in new}, end


def decode(value: Mapping[str, Mapping[str, int]]) -> dict[str, dict[int, int]]:
    """Offsets by topic and partition as read from JSON; raises as `decode_partitions` does."""
    return {topic: decode_partitions(each) for topic, each in value.items()}
