"""Topics in a file: some records at their own places, for the processes of Spark that read Kafka otherwise.

A redrive writes the records that it sends through a stream into such a file. Offsets without a record are gaps, as
Kafka has them too.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from streaming_jobs.ledger.positions import OffsetBounds
from streaming_jobs.sources.base import TopicInfo
from streaming_jobs.sources.range_reader import RangeReader
from streaming_jobs.text.durations import parse_duration

if TYPE_CHECKING:
    from confluent_kafka import Message

    from streaming_jobs.sources.base import Span
    from streaming_jobs.storage.locations import Location

_NEVER = parse_duration("1 minute")


class KeptRecord(NamedTuple):
    """A record of a topic; `timestamp` is librdkafka's: (number of its type, milliseconds since 1970)."""

    timestamp: tuple[int, int]
    key: bytes | None
    value: bytes | None
    headers: Sequence[tuple[str, bytes | None]] | None


Records = Mapping[str, Mapping[int, Mapping[int, KeptRecord]]]
"""Topic -> partition -> offset -> record."""


@dataclass(frozen=True)
class KeptTopics:
    """The records as topics (`TopicReader`); `ids` are those of the topics."""

    records: Records
    ids: Mapping[str, str]

    def describe(self, name: str) -> TopicInfo | None:
        return TopicInfo(name, self.ids[name], len(self.offsets(name).latest)) if name in self.ids else None

    def offsets(self, name: str) -> OffsetBounds:
        """From the first record to the last one of each partition; of a topic without records one that is empty."""
        there = {p: offsets for p, offsets in self.records.get(name, {}).items() if offsets}
        first = {partition: min(offsets) for partition, offsets in there.items()}
        last = {partition: max(offsets) + 1 for partition, offsets in there.items()}
        return OffsetBounds(first or {0: 0}, last or {0: 0})

    def latest(self, name: str) -> dict[int, int]:
        return self.offsets(name).latest

    def high_watermarks(self, name: str) -> dict[int, int]:
        return self.latest(name)

    def offsets_for_time(self, name: str, ms: int) -> dict[int, int]:  # noqa: ARG002 - they are read from the first on
        return self.offsets(name).earliest

    def mean_size(self, name: str, starts: Mapping[int, int]) -> float | None:  # noqa: ARG002 - they are few
        return 1.0


@dataclass
class KeptReader(RangeReader):
    kept: Mapping[int, Mapping[int, KeptRecord]] = field(default_factory=dict)

    def read(self, spans: Mapping[int, Span], most: int) -> Iterator[list[Message]]:
        """Yields the records of the ranges, `most` at a time, in order within each partition."""
        from confluent_kafka import Message

        found = [
            Message(
                topic=self.topic,
                partition=partition,
                offset=offset,
                timestamp=record.timestamp,
                key=record.key,
                value=record.value,
                headers=list(record.headers) if record.headers else None,
                error=None,
            )
            for partition, (begin, end) in sorted(spans.items())
            for offset, record in sorted(self.kept.get(partition, {}).items())
            if begin <= offset < end
        ]
        yield from (found[at : at + most] for at in range(0, len(found), most))


@dataclass(frozen=True)
class KeptClients:
    """Clients of the topics that `save` has written to `file` (`TopicClients` in `sources/kafka.py`)."""

    file: Path

    @staticmethod
    def save(topics: KeptTopics, file: Path) -> KeptClients:
        file.touch(mode=0o600)
        file.write_bytes(pickle.dumps(topics))
        return KeptClients(file)

    @cached_property
    def _kept(self) -> KeptTopics:
        topics = pickle.loads(self.file.read_bytes())  # noqa: S301 - written by `save`, for this user alone
        assert isinstance(topics, KeptTopics)
        return topics

    def __getstate__(self) -> dict[str, Path]:
        return {"file": self.file}

    def topics(self, topic: str, client: Location) -> KeptTopics:  # noqa: ARG002 - they are of one cluster
        return self._kept

    def reader(self, topic: str, client: Location, *, ahead: int | None = None) -> RangeReader:  # noqa: ARG002
        kept = self._kept.records.get(topic, {})
        return KeptReader(topic, {"bootstrap.servers": str(self.file)}, _NEVER, kept=kept)
