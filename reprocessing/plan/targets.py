"""Targets of a recovery. Each is resolved to exact offsets per partition and the end of one batch at or before them.

    earliest, latest            the topic's first retained record; its end
    offsets, file               per partition; the file is the CSV of Kafka's tool: topic,partition,offset
    shift-by N                  N records from the stream's position, in each partition; back is negative
    duration, datetime          the first record at or after a time; a datetime names its zone; a partition that has
                                no such record stays where the stream is
    batch N, table-version V    the end of a batch, or of the batch that made a version of the primary table
    savepoint, code             a savepoint; before the first batch of a version of the code

Offsets outside of the topic's retained range are moved to its edge, and the plan notes it. If every partition
of a target is at or ahead of the stream, and at least one ahead, the plan skips the records between.
"""

from __future__ import annotations

import csv
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Literal, get_args

from reprocessing.plan.history import CommittedBatch, History, corrections, generation_spans, has_present_rows, within
from streaming_jobs.errors import UsageError
from streaming_jobs.ledger.entry import CodeVersion, Txn
from streaming_jobs.ledger.positions import TopicOffsets
from streaming_jobs.preflight.snapshot import TopicSnapshot, start_over
from streaming_jobs.state.savepoint_retention import NamedSavepoint
from streaming_jobs.state.savepoints import Savepoint
from streaming_jobs.state.stream_record import CodeSince, StreamRecord
from streaming_jobs.text.durations import parse_duration
from streaming_jobs.text.spelling import instant_words

TargetKind = Literal[
    "earliest",
    "latest",
    "offsets",
    "file",
    "shift-by",
    "duration",
    "datetime",
    "batch",
    "table-version",
    "savepoint",
    "code",
]


_NUMBER = "the number of a batch"


@dataclass(frozen=True)
class Target:
    """A target in text form; raises UsageError for an unknown kind."""

    kind: TargetKind
    value: str = ""

    def __post_init__(self) -> None:
        if self.kind not in get_args(TargetKind):
            raise UsageError(f"there is no target '{self.kind}'", f"choose one of {', '.join(get_args(TargetKind))}")

    def __str__(self) -> str:
        return f"{self.kind} {self.value}".strip()


@dataclass(frozen=True)
class Resolved:
    """A target resolved on the stream: the batch after which all is replayed (None: from the very start).

    `wanted` are the offsets of the target, `notes` the changes to them, in words. With `ahead` the stream skips forward
    to `wanted`, and there is no batch.
    """

    batch: Txn | None
    wanted: TopicOffsets
    notes: tuple[str, ...] = ()
    ahead: bool = False


@dataclass(frozen=True)
class View:
    """The facts about a stream on which a target is resolved.

    `now` in seconds since 1970; `for_time` gives the offsets for a topic and a time in ms. `names` are the named
    savepoints that have one of the stream.
    """

    record: StreamRecord
    history: History
    topics: Sequence[TopicSnapshot]
    savepoints: Sequence[Savepoint]
    for_time: Callable[[str, int], Mapping[int, int]]
    now: float
    notes: list[str] = field(default_factory=list)
    names: Mapping[str, NamedSavepoint] = field(default_factory=dict)

    @property
    def position(self) -> TopicOffsets:
        """The offsets at which the stream's last batch ended."""
        if self.history.last is None:
            raise no_batch(self.record.stream)
        return self.history.position


def no_batch(stream: str) -> UsageError:
    """The error for a stream that has finished no batch, so that a recovery has nothing to go back to or to skip."""
    return UsageError(
        f"stream {stream} has not run a batch yet",
        f"there is nothing to recover; if it cannot finish its first batch, {start_over(stream)}",
    )


def resolve(target: Target, view: View) -> Resolved:
    """The target resolved to a batch or to offsets ahead; raises UsageError if it cannot be reached."""
    if target.kind == "savepoint":
        return _savepoint(target.value, view)
    if target.kind in ("batch", "table-version", "code"):
        return _batch(target, view)
    wanted = _clamped(_wanted(target, view), view)
    if not _behind(wanted, view):
        return Resolved(None, wanted, tuple(view.notes), ahead=True)
    return at_or_before(wanted, view)


def at_or_before(wanted: TopicOffsets, view: View) -> Resolved:
    """The last batch that read no record at or after these offsets."""
    border: CommittedBatch | Savepoint | None = view.history.last_within(wanted)
    notes = list(view.notes)
    if border is None:  # the ledger may not reach back that far
        earlier = [
            s for s in view.savepoints if has_present_rows(view.record.generations, s.txn) and within(s.ends, wanted)
        ]
        border = earlier[-1] if earlier else None
    if border is not None and any(
        border.ends.get(topic, {}).get(p) != offset for topic, each in wanted.items() for p, offset in each.items()
    ):
        notes.append(f"moved back to the border of {border.txn}, which ended at {_words(border.ends)}")
    if border is None:
        notes.append(f"moved back to the stream's very start, {_words(view.record.starts)}")
    return Resolved(border.txn if border else None, wanted, tuple(notes))


def _wanted(target: Target, view: View) -> dict[str, dict[int, int]]:
    names = [topic.name for topic in view.topics]
    if target.kind == "earliest":
        return {topic.name: dict(topic.earliest) for topic in view.topics}
    if target.kind == "latest":
        return {topic.name: dict(topic.latest) for topic in view.topics}
    if target.kind == "offsets":
        return complete(parse_offsets(target.value, names), view)
    if target.kind == "file":
        return complete(read_offsets(Path(target.value)), view)
    if target.kind == "shift-by":
        shift = integer(target, "a number of records, such as -1000")
        return {topic: {p: max(o + shift, 0) for p, o in each.items()} for topic, each in view.position.items()}
    return _at_time(instant(target, view.now), view)


def _at_time(at: float, view: View) -> dict[str, dict[int, int]]:
    """The first records at or after a time; a partition without one stays where the stream is, which is noted."""
    wanted: dict[str, dict[int, int]] = {}
    dated = False
    for topic in view.topics:
        offsets = wanted[topic.name] = dict(view.for_time(topic.name, int(at * 1000)))
        late = [p for p, offset in offsets.items() if offset >= topic.latest.get(p, 0)]
        dated = dated or len(late) < len(offsets)
        for partition in late:  # a time after the newest record does not ask to skip unread records
            here = view.position.get(topic.name, {}).get(partition, topic.earliest.get(partition, 0))
            offsets[partition] = min(offsets[partition], here)
        if late:
            view.notes.append(
                f"no record of {topic.name} at or after that time in partitions {_list(late)}: they stay where the "
                "stream is"
            )
    if not dated:
        raise UsageError(
            f"no record of {_list(topic.name for topic in view.topics)} at or after {instant_words(at)}",
            "choose an earlier time; to skip what was not read yet: --to-latest",
        )
    return wanted


def instant(target: Target, now: float) -> float:
    """The time of a duration or datetime in seconds since 1970; raises UsageError for any other text."""
    if target.kind == "duration":
        return now - parse_duration(target.value).total_seconds()
    try:
        at = datetime.fromisoformat(target.value)
    except ValueError as error:
        raise UsageError(f"'{target.value}' is not a time", "write 2026-11-21T08:00:00+00:00") from error
    if at.tzinfo is None:
        raise UsageError(
            f"the time {target.value} names no zone", f"write {at.isoformat()}+00:00 for UTC, or the zone that you mean"
        )
    return at.timestamp()


def complete(offsets: dict[str, dict[int, int]], view: View) -> dict[str, dict[int, int]]:
    """Raise UsageError unless the offsets name the partitions that the stream reads, and perhaps ones added since."""
    there = {topic.name: set(topic.latest) for topic in view.topics}
    for topic, position in view.position.items():
        missing = sorted(set(position) - set(offsets.get(topic, {})))
        if missing:
            raise UsageError(
                f"the offsets leave out partition {_list(missing)} of topic {topic}", "name every partition"
            )
        unknown = sorted(set(offsets[topic]) - set(position) - there.get(topic, set()))
        if unknown:
            raise UsageError(f"topic {topic} has no partition {_list(unknown)}", "leave it out")
    if others := sorted(set(offsets) - set(view.position)):
        raise UsageError(f"stream {view.record.stream} does not read topic {_list(others)}", "leave it out")
    return offsets


def _clamped(wanted: dict[str, dict[int, int]], view: View) -> dict[str, dict[int, int]]:
    """The offsets, moved into the topic's retained range; each move is noted."""
    known = {topic.name: topic for topic in view.topics}
    for topic, each in wanted.items():
        for partition, offset in each.items():
            first, end = known[topic].earliest.get(partition, 0), known[topic].latest.get(partition, 0)
            inside = min(max(offset, first), end)
            if inside != offset:
                edge = "first record left" if inside == first else "end"
                view.notes.append(f"{topic} partition {partition}: {offset} moved to the topic's {edge}, {inside}")
            each[partition] = inside
    return wanted


def _behind(wanted: dict[str, dict[int, int]], view: View) -> bool:
    """True if the target rewinds; a partition ahead of the stream then stays where the stream is, which is noted.

    Raises UsageError for the stream's own position.
    """
    at = {topic: dict(view.position.get(topic, {})) for topic in wanted}
    for topic, each in wanted.items():
        for partition in each:
            if partition not in at[topic]:
                view.notes.append(f"partition {partition} of {topic} is new: the stream has read nothing of it yet")
                at[topic][partition] = 0
    pairs = [(topic, partition, offset) for topic, each in wanted.items() for partition, offset in each.items()]
    back = any(offset < at[topic][partition] for topic, partition, offset in pairs)
    if not back and all(offset == at[topic][partition] for topic, partition, offset in pairs):
        raise UsageError(f"stream {view.record.stream} is at {_words(view.position)} already", "choose another target")
    for topic, partition, offset in pairs:
        if back and offset > at[topic][partition]:
            wanted[topic][partition] = at[topic][partition]
            view.notes.append(
                f"{topic} partition {partition}: {offset} is ahead of the stream, which is at {at[topic][partition]}; "
                "nothing is skipped in a plan that goes back"
            )
    return back


def _batch(target: Target, view: View) -> Resolved:
    position = view.position  # raises where there is no batch
    if target.kind == "code":
        since = named_code(target.value, view.record)
        wrote = [
            each.after
            for each in corrections(view.record.generations)
            if since.version.same_code(CodeVersion(each.code, ""))
        ]
        return Resolved(*before(min([since.since, *(Txn(at.generation, at.batch + 1) for at in wrote)]), view))
    if target.kind == "batch" and integer(target, _NUMBER) == -1:
        return Resolved(None, view.record.starts)
    batch = named_batch(target, view)
    if batch.ends == position:
        raise UsageError(f"{batch.txn} is where the stream is now", "choose an earlier one; a recovery goes back")
    return Resolved(batch.txn, batch.ends)


def named_batch(target: Target, view: View) -> CommittedBatch:
    """The batch of a number, or that made a version of the primary table; raises UsageError if the ledger has none."""
    history = view.history
    if target.kind == "table-version":
        version = integer(target, "a version of the table")
        table = next(t.name for t in view.record.tables if t.role == "primary")
        batch = history.at_version(table, version)
        if batch is None:
            raise UsageError(f"no batch in the ledger is as old as version {version} of {table}", "choose a savepoint")
        return batch
    number = integer(target, _NUMBER)
    batch = history.numbered(number, lambda txn: has_present_rows(view.record.generations, txn))
    if batch is None:
        known = sorted(batch.txn.batch for batch in history.newest_first())
        raise UsageError(f"batch {number} is not in the ledger ({known[0]} to {known[-1]} are)", "choose one of those")
    return batch


def before(txn: Txn, view: View) -> tuple[Txn | None, TopicOffsets]:
    """The last batch before a position, and its end offsets; None and the offsets of the start if there was none.

    Raises UsageError if neither ledger nor savepoints reach back to it.
    """
    batch = view.history.before(txn)
    if batch is not None:
        return batch.txn, batch.ends
    generations = view.record.generations
    earlier = [s for s in view.savepoints if has_present_rows(generations, s.txn) and s.txn < txn]
    if earlier:
        return earlier[-1].txn, earlier[-1].ends
    number, first, _ = next(generation_spans(generations))
    if txn > Txn(number, first):
        raise UsageError(f"what came before {txn} is no longer in the ledger", "choose a savepoint, or --to-batch -1")
    return None, view.record.starts


def named_code(text: str, record: StreamRecord) -> CodeSince:
    """The newest code whose hash begins with `text`, from the start of its unbroken run; raises UsageError if none.

    A change of the package's version does not break a run: the function is the same.
    """
    codes = record.code
    at = max((i for i, code in enumerate(codes) if text and _named(code, text)), default=None)
    if at is None:
        known = _list([c.hash for c in record.code])
        raise UsageError(f"stream {record.stream} has never run code '{text}'", f"it ran {known}")
    while at and codes[at - 1].version.same_code(codes[at].version):
        at -= 1
    return codes[at]


def _named(code: CodeSince, text: str) -> bool:
    """True if the text begins a hash of the code, with or without the number of the scheme."""
    return any(each.startswith(text) or each.partition("-")[2].startswith(text) for each in code.version.names)


def _savepoint(name: str, view: View) -> Resolved:
    savepoint = named_savepoint(name, view)
    if savepoint is None:
        known = _list([*view.names, *(s.id for s in view.savepoints)]) or "there are none"
        raise UsageError(f"stream {view.record.stream} has no savepoint '{name}'", f"choose one: {known}")
    notes = []
    if name in view.names:
        notes.append(f"{name} is savepoint {savepoint.id} of stream {view.record.stream}")
        if savepoint.taken_at > view.names[name].taken_at:
            notes.append(f"it was taken anew on {instant_words(savepoint.taken_at)}, after its rows had been changed")
    return Resolved(savepoint.txn, savepoint.ends, tuple(notes))


def named_savepoint(name: str, view: View) -> Savepoint | None:
    """The savepoint of the stream by its own name, or by the name of a savepoint of several streams."""
    own = view.names[name].streams[view.record.stream] if name in view.names else name
    return next((s for s in view.savepoints if s.id == own), None)


def integer(target: Target, what: str) -> int:
    """The target's number; raises UsageError if it has none, with the words `what` it should be."""
    try:
        return int(target.value)
    except ValueError as error:
        raise UsageError(f"--{target.kind} {target.value}: not {what}", f"give {what}") from error


def _list(items: Iterable[object]) -> str:
    return ", ".join(str(item) for item in items)


def _words(offsets: TopicOffsets) -> str:
    return "; ".join(f"{t} " + ", ".join(f"{p}:{o}" for p, o in sorted(each.items())) for t, each in offsets.items())


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
    return "".join(f"{t},{p},{o}\n" for t, each in sorted(offsets.items()) for p, o in sorted(each.items()))


def offsets_target(offsets: TopicOffsets) -> Target:
    """The target of these offsets, as `parse_offsets` reads them."""
    each = (f"{t}/{p}:{o}" for t, partitions in offsets.items() for p, o in sorted(partitions.items()))
    return Target("offsets", ",".join(each))


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
