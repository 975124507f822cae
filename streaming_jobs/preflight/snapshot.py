"""The state of a stream at one moment, as `take_snapshot` reads it: record, checkpoint, tables and topics."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from streaming_jobs.ledger import LedgerEntry, Txn
from streaming_jobs.positions import Archived, TopicOffsets
from streaming_jobs.sinks.stored import Commit, Role
from streaming_jobs.state.stream_record import StreamRecord
from streaming_jobs.state.topic_records import VoidRange

if TYPE_CHECKING:
    from streaming_jobs.sources.topics import TopicInfo


@dataclass(frozen=True)
class TableSnapshot:
    """One sink's table: `entry` is the stream's newest ledger entry, `foreign` later commits of others.

    If the table's log no longer reaches back to that entry, `entry` comes from the ledger file beside the state.
    """

    name: str
    role: Role
    table_id: str | None
    owner: str | None
    txn: Txn | None
    entry: LedgerEntry | None = None
    foreign: tuple[Commit, ...] = ()
    log_reaches_entry: bool = True


@dataclass(frozen=True)
class TopicSnapshot:
    """One source topic as the broker describes it now; `topic_id` is None if it does not exist.

    With an archive, `earliest` is the first offset that can be read, there or in Kafka. A table that the stream reads
    is a topic too (`kind`); its offsets are versions, and `continues` is as in `OffsetBounds`. With `content_gone` the
    planned batch reads the table's content at a version, and that can no longer be read. A `compacted` topic keeps only
    the newest record of each key. `void_since` are the void ranges that were declared after the stream's last batch.
    """

    name: str
    topic_id: str | None
    earliest: Mapping[int, int] = field(default_factory=dict)
    latest: Mapping[int, int] = field(default_factory=dict)
    retention_ms: int = -1
    archived: Archived | None = None
    continues: Mapping[int, int] = field(default_factory=dict)
    kind: Literal["topic", "table"] = "topic"
    content_gone: int | None = None
    compacted: bool = False
    void_since: tuple[VoidRange, ...] = ()


@dataclass(frozen=True)
class ShardsSnapshot:
    """The newest batch of each shard of a topic, for one number of shards; `topic` has their markers.

    `marked`: the marker of the sink speaks of them.
    """

    topic: str
    newest: Mapping[int, LedgerEntry | None]
    marked: bool = True


@dataclass(frozen=True)
class TopicSinkSnapshot:
    """One topic that the stream writes: `info` is None if it does not exist, `marker` is its newest batch's entry.

    `marker_info` is the topic of the marker, None without one. `name` is the sink's name in ledger entries. `shards`
    are those that the marker speaks of, and those of the declared number, if that is another one.
    """

    name: str
    topic: str
    info: TopicInfo | None
    exactly_once: bool
    acks: str = "all"
    marker_topic: str = ""
    marker: LedgerEntry | None = None
    marker_info: TopicInfo | None = None
    shards: tuple[ShardsSnapshot, ...] = ()
    declared_shards: int = 0

    @property
    def written_id(self) -> str | None:
        """The id of the topic that the newest batch was written to; None if it wrote nothing to it."""
        written = self.marker.written if self.marker is not None else ()
        return next((each.topic_id for each in written if each.topic == self.topic and each.topic_id), None)

    @property
    def marker_topics(self) -> str:
        """The topics that say which batches the topic has, in words."""
        names = [self.marker_topic, *(shards.topic for shards in self.shards)]
        return f"marker topic{'s' * (len(names) > 1)} {', '.join(names)}"


@dataclass(frozen=True)
class CheckpointSnapshot:
    """The checkpoint: last planned and last committed batch, the ends of both, the start of the planned one."""

    planned: int | None = None
    committed: int | None = None
    ends: Mapping[int, TopicOffsets] = field(default_factory=dict)
    starts: Mapping[int, TopicOffsets] = field(default_factory=dict)


@dataclass(frozen=True)
class StreamSnapshot:
    """Everything that `check_start` looks at; `folders` are the stream's state folder and its tables."""

    stream: str
    record: StreamRecord | None
    checkpoint: CheckpointSnapshot
    tables: tuple[TableSnapshot, ...]
    topics: tuple[TopicSnapshot, ...]
    folders: tuple[Path, ...] = ()
    topic_sinks: tuple[TopicSinkSnapshot, ...] = ()
    topic_sinks_known: bool = False
    """False where nobody looked at the topics that it writes, as in a replay."""

    @property
    def start_over(self) -> str:
        """The last resort, as the next step of an error."""
        return start_over(self.stream, self.folders)

    def write_again(self, sink: TopicSinkSnapshot) -> str:
        """The ways to write all records of a topic once more, with their cost: its markers have to go with it."""
        return (
            f"declare a new stream with a new output topic; or delete topic {sink.topic} and its "
            f"{sink.marker_topics} together, create {sink.topic} again, and {self.start_over}. In both cases the "
            f"records that are in {sink.topic} now are written again"
        )


def start_over(stream: str, folders: Sequence[Path] = ()) -> str:
    """The instruction to start a stream over, with its cost; `folders` are its state and its tables."""
    places = " ".join(shlex.quote(str(folder)) for folder in folders) or "its state folder and its tables"
    return (
        f"start the stream over: move {places} away (readers lose these rows until the topic is read again) and run "
        f"`recourse streams run {stream}`"
    )


def restore_checkpoint(stream: str, folders: Sequence[Path] = ()) -> str:
    """The instruction to restore a checkpoint that cannot be trusted, as the next step of an error."""
    return (
        "put the checkpoint folder back from the newest copy, taken together with the tables; without one, "
        f"{start_over(stream, folders)}"
    )
