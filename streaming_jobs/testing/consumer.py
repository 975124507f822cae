"""A Kafka consumer in memory, with gaps, ends of partitions, and errors, for the readers of topics."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from confluent_kafka import KafkaError, Message, TopicPartition

TOPIC = "things"


def record(partition: int, offset: int, value: bytes | None = b"{}", **fields: Any) -> Message:
    """A record of the topic."""
    made: dict[str, Any] = {"topic": TOPIC, "timestamp": (1, 0), "key": None, "headers": None, **fields}
    return Message(partition=partition, offset=offset, value=value, error=None, **made)


def failure(code: int, partition: int = 0, offset: int = 0, text: str = "") -> Message:
    """What a consumer returns instead of a record."""
    return Message(topic=TOPIC, partition=partition, offset=offset, error=KafkaError(code, text))


@dataclass
class MemoryConsumer:
    """`log`: partition -> offset -> record; `ends`: partition -> its end (the last record's, if it is not given).

    Records come in turns from the partitions, `most` per call at most; `failures` come first. `calls` notes what was
    asked of it.
    """

    log: Mapping[int, Mapping[int, Message]]
    ends: Mapping[int, int] = field(default_factory=dict)
    most: int = 1000
    failures: list[Message] = field(default_factory=list)
    calls: list[tuple[Any, ...]] = field(default_factory=list)
    positions: dict[int, int] = field(default_factory=dict)
    reported: set[tuple[int, int]] = field(default_factory=set)
    first: Mapping[int, int] = field(default_factory=dict)

    def end(self, partition: int) -> int:
        """The end of a partition."""
        return self.ends.get(partition, max(self.log[partition], default=-1) + 1)

    def incremental_assign(self, partitions: list[TopicPartition]) -> None:
        """Read these too."""
        self.calls.append(("assign", {p.partition: p.offset for p in partitions}))
        self.positions |= {p.partition: p.offset for p in partitions}
        self.reported = {(p, end) for p, end in self.reported if p not in {each.partition for each in partitions}}

    def incremental_unassign(self, partitions: list[TopicPartition]) -> None:
        """Read these no longer."""
        self.calls.append(("unassign", [p.partition for p in partitions]))
        for each in partitions:
            del self.positions[each.partition]

    def consume(self, num_messages: int, timeout: float) -> list[Message]:
        """The next records, then the ends of partitions, each once."""
        self.calls.append(("consume", num_messages, timeout))
        if self.failures:
            return [self.failures.pop(0)]
        out: list[Message] = []
        for partition, at in sorted(self.positions.items()):
            if at < self.first.get(partition, 0) or at > self.end(partition):
                return [failure(KafkaError._AUTO_OFFSET_RESET, partition, at, "fetch failed: offset out of range")]
            offsets = sorted(o for o in self.log[partition] if o >= at)[: min(self.most, num_messages - len(out))]
            out += [self.log[partition][o] for o in offsets]
            if offsets:
                self.positions[partition] = offsets[-1] + 1
            end = self.end(partition)
            if not any(o >= self.positions[partition] for o in self.log[partition]) and len(out) < num_messages:
                self.positions[partition] = end
                if (partition, end) not in self.reported:
                    self.reported.add((partition, end))
                    out.append(failure(KafkaError._PARTITION_EOF, partition, end))
        return out

    def close(self) -> None:
        """Note the call."""
        self.calls.append(("close",))
