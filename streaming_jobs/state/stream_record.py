"""A stream's record and its checkpoint generations: `<state>/<stream>/stream.json` and `g0001/`, `g0002/` ...

The record has the current generation, the tables and topics that the stream is bound to, and the foreign commits that a
person has accepted. It is replaced as a whole, and durable before anything relies on it. Whoever holds the stream's
lease writes it, under the tag of the record that was read: a driver that has lost the lease replaces no newer record.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from streaming_jobs.errors import Fenced, PreflightRefused, UsageError
from streaming_jobs.ledger.entry import CodeVersion, Txn
from streaming_jobs.ledger.positions import OffsetRange, PartitionOffsets, TopicOffsets, decode_partitions
from streaming_jobs.settings import Settings
from streaming_jobs.sinks.stored import Commit
from streaming_jobs.sinks.tables import all_tables, store_of
from streaming_jobs.state.checkpoint import CheckpointDamaged
from streaming_jobs.state.lease import take
from streaming_jobs.state.records import parsed_record, record_bytes
from streaming_jobs.state.stream_folder import StreamFolder
from streaming_jobs.storage.locations import remove_tree
from streaming_jobs.storage.object_files import AlreadyThere, Changed, ObjectHandle
from streaming_jobs.stream import Stream
from streaming_jobs.text import commands


@dataclass(frozen=True)
class CorrectedBatches:
    """The batches that a bounded recovery has corrected: those after one position and up to another.

    `offsets` are those that its replay has read, `rows` the numbers of rows by the names of a batch's entry, `code` the
    hash of the code that made them: together the entry of all these batches.
    """

    after: Txn
    up_to: Txn
    offsets: tuple[OffsetRange, ...] = ()
    rows: Mapping[str, int] = field(default_factory=dict)
    code: str = ""


@dataclass(frozen=True)
class Generation:
    """One life of the checkpoint; `opened_at` in seconds since 1970, `reason` in words.

    A generation opened by a recovery begins after `from_batch` (-1: at the very start) of generation `from_generation`.
    Its batch numbers continue from there; if it `restarts`, with empty state, they begin at 0 again. One that `aborts`
    continues with the rows and the state from before a recovery that was given up. One that has `corrected` earlier
    batches continues with the state from before it, and with the corrected rows.
    """

    number: int
    opened_at: float
    reason: str
    from_generation: int | None = None
    from_batch: int = -1
    restarts: bool = False
    aborts: bool = False
    corrected: CorrectedBatches | None = None

    @property
    def first_batch(self) -> int:
        return 0 if self.restarts else self.from_batch + 1


@dataclass(frozen=True)
class BoundTable:
    """A table the stream writes: its name, its Delta table id, and its role."""

    name: str
    table_id: str
    role: str


@dataclass(frozen=True)
class BoundTopic:
    """A topic the stream reads: its name, its Kafka topic id, and the offsets of the first start."""

    name: str
    topic_id: str
    start: PartitionOffsets


@dataclass(frozen=True)
class Accepted:
    """A foreign commit that a person has declared right; `at` in seconds since 1970."""

    table: str
    version: int
    why: str
    at: float


@dataclass(frozen=True)
class CodeSince:
    """The code that ran from a batch on."""

    hash: str
    package: str
    generation: int
    batch: int
    at: float
    formerly: str = ""

    @property
    def version(self) -> CodeVersion:
        return CodeVersion(self.hash, self.package, self.formerly)

    @property
    def since(self) -> Txn:
        return Txn(self.generation, self.batch)


ADOPTED = "adopted from query"
"""The beginning of the reason of a first generation that goes on where another job has stopped."""


@dataclass(frozen=True)
class StreamRecord:
    """The content of stream.json.

    `tag` is that of the object which the record was read from: `save` replaces this one only. "": there was none; None:
    `save` replaces any.
    """

    stream: str
    generations: tuple[Generation, ...]
    tables: tuple[BoundTable, ...] = ()
    topics: tuple[BoundTopic, ...] = ()
    accepted: tuple[Accepted, ...] = ()
    code: tuple[CodeSince, ...] = ()
    state_fingerprint: Mapping[str, str] = field(default_factory=dict)
    void_ranges: tuple[Mapping[str, Any], ...] = ()
    tag: str | None = field(default=None, compare=False, repr=False)

    @property
    def generation(self) -> int:
        return self.generations[-1].number

    @property
    def adopted(self) -> bool:
        """True for a stream that began with the rows of another job (`inspection/adoption.py`)."""
        return self.generations[0].reason.startswith(ADOPTED)

    def table(self, name: str) -> BoundTable | None:
        return next((t for t in self.tables if t.name == name), None)

    def topic(self, name: str) -> BoundTopic | None:
        return next((t for t in self.topics if t.name == name), None)

    @property
    def starts(self) -> TopicOffsets:
        """The offsets of the first start: topic -> partition -> offset."""
        return {topic.name: topic.start for topic in self.topics}

    def accepts(self, table: str) -> frozenset[int]:
        """Versions of the table that a person has accepted."""
        return frozenset(a.version for a in self.accepted if a.table == table)

    def with_code(self, code: CodeVersion, batch: int) -> StreamRecord:
        """The record after the code changed; itself when it did not."""
        if self.code and self.code[-1].version == code:
            return self
        since = CodeSince(code.hash, code.package, self.generation, batch, time.time(), code.formerly)
        return replace(self, code=(*self.code, since))


def load(settings: Settings, stream: str) -> StreamRecord | None:
    """The stream's record, or None before its first start; raises PreflightRefused if it is damaged."""
    return read(StreamFolder.of(settings, stream).record)


def existing(settings: Settings, stream: str) -> StreamRecord:
    """The record of a stream that has run; raises PreflightRefused if it is gone."""
    record = load(settings, stream)
    if record is None:
        raise PreflightRefused(f"the record of stream {stream} is gone", "put it back from a copy")
    return record


def read(handle: ObjectHandle) -> StreamRecord | None:
    """The record in an object, or None if there is none; raises as `load` does."""
    if (found := handle.read()) is None:
        return None
    record = parsed_record(handle, found, _record, lambda error: CheckpointDamaged(f"{handle} cannot be read: {error}"))
    return replace(record, tag=found.tag)


def _record(value: dict[str, Any]) -> StreamRecord:
    return StreamRecord(
        stream=value["stream"],
        generations=tuple(_generation(g) for g in value["generations"]),
        tables=tuple(BoundTable(**t) for t in value["tables"]),
        topics=tuple(BoundTopic(**{**t, "start": decode_partitions(t["start"])}) for t in value["topics"]),
        accepted=tuple(Accepted(**a) for a in value["accepted"]),
        code=tuple(CodeSince(**c) for c in value["code"]),
        state_fingerprint=value["state_fingerprint"],
        void_ranges=tuple(value["void_ranges"]),
    )


def _generation(value: dict[str, Any]) -> Generation:
    corrected = value.pop("corrected", None)
    return Generation(**value, corrected=None if corrected is None else _corrected(corrected))


def _corrected(value: dict[str, Any]) -> CorrectedBatches:
    offsets = (
        OffsetRange(r["topic"], r["topic_id"], decode_partitions(r["start"]), decode_partitions(r["end"]))
        for r in value["offsets"]
    )
    after, up_to = (Txn(**value[name]) for name in ("after", "up_to"))
    return CorrectedBatches(after, up_to, tuple(offsets), value["rows"], value["code"])


def save(settings: Settings, record: StreamRecord) -> StreamRecord:
    """Write the record, durable when this returns, and return it with its tag.

    Raises Fenced if another driver has written the record since this one was read.
    """
    value = asdict(record)
    del value["tag"]
    for generation in value["generations"]:
        for added in ("aborts", "corrected"):  # so that an earlier version can read a record without them
            if not generation[added]:
                del generation[added]
    handle, data = StreamFolder.of(settings, record.stream).record, record_bytes(value)
    try:
        if record.tag is None:
            tag = handle.put(data)
        else:
            tag = handle.replace(data, record.tag) if record.tag else handle.create(data)
    except (AlreadyThere, Changed) as error:
        raise Fenced(
            f"{handle} was written by another driver after this one read it", "end this process, or run it again"
        ) from error
    return replace(record, tag=tag)


def prune(settings: Settings, record: StreamRecord, keep: int) -> list[str]:
    """Remove the checkpoints of past generations except the newest `keep`; returns the removed names.

    An undo or an abort returns to a savepoint and needs none of them. The caller holds the lease.
    """
    home = StreamFolder.of(settings, record.stream)
    over = [home.checkpoint(each.number).folder for each in record.generations[:-1]]
    there = set(home.files.folders())
    gone = [place for place in over[: max(len(over) - keep, 0)] if place.name in there]
    for place in gone:
        remove_tree(place)
    return [place.name for place in gone]


def first(stream: str) -> StreamRecord:
    """The record of a stream that has never run: generation 1."""
    return StreamRecord(stream, (Generation(1, time.time(), "first start"),), tag="")


def accept(
    settings: Settings, stream: Stream, table: str, version: int, why: str, read: Iterable[Commit] | None = None
) -> None:
    """Record that a foreign commit on one of the stream's tables, or on a table that it reads, is right.

    `read` are the commits of a table that it reads, without those of the stream that writes it. Raises UsageError for
    an unknown table and for a version that is not such a commit: a version accepted ahead of time would let a later,
    unknown commit pass.
    """
    if not why.strip():
        raise UsageError("an accepted commit needs a reason", "say it with --why")
    with take(settings, stream.name, purpose="accept", wait=2.0):
        record = load(settings, stream.name)
        declared = next((each for each, _ in all_tables(stream) if each.name == table), None)
        if record is None or (read is None and (record.table(table) is None or declared is None)):
            raise UsageError(f"stream {stream.name} has no table {table}", f"see `{commands.describe()}`")
        commits = read if declared is None else store_of(declared).commits(settings, declared)
        _check_foreign(commits or (), stream.name, table, version)
        exception = Accepted(table, version, why.strip(), time.time())
        save(settings, replace(record, accepted=(*record.accepted, exception)))


def _check_foreign(commits: Iterable[Commit], stream: str, table: str, version: int) -> None:
    commit = next((c for c in commits if c.version == version), None)
    if commit is None:
        wrong = "is not in the table's log"
    elif commit.entry is not None and commit.entry.stream == stream:
        wrong = f"was written by stream {stream} itself"
    elif not commit.changes_data:
        wrong = "changed no rows, so nothing forbids it"
    else:
        return
    raise UsageError(
        f"version {version} of table {table} {wrong}", "name the version that the refusal of the start named"
    )
