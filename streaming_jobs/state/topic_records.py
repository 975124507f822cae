"""The records of topics: which of their offsets are void.

    <state>/_topics/<topic>.json

The stream that writes a topic has a generation of its own for each recovery, and so has each void range: it holds as
long as its generation is on the path of the stream's generations. An undo goes back to an earlier generation, so the
ranges of the recovery that it takes back hold no more; to undo the undo brings them back.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from streaming_jobs.declare.names import is_topic_name
from streaming_jobs.errors import PreflightRefused, UsageError
from streaming_jobs.settings import Settings
from streaming_jobs.sources.void_ranges import NO_VOID, VoidRanges
from streaming_jobs.state.records import parsed_record, record_bytes
from streaming_jobs.state.stream_folder import state_files
from streaming_jobs.storage.object_files import ObjectFiles, ObjectHandle
from streaming_jobs.text import commands


@dataclass(frozen=True)
class VoidRange:
    """Offsets of one partition that a plan has declared void, from `begin` up to `end`, which is not one of them.

    `generation` is that of the stream which writes the topic, or 0 if another stream writes it now: then the range
    always holds. `at` in seconds since 1970. `left` are streams that have read it and stay as they are.
    """

    partition: int
    begin: int
    end: int
    plan: str
    generation: int
    at: float
    left: tuple[str, ...] = ()


@dataclass(frozen=True)
class TopicRecord:
    """One topic: the stream that writes it, the path of that stream's generations, and all void ranges ever.

    While a plan appends corrected records, it is `under_way`, and no reader may start.
    """

    topic: str
    topic_id: str
    writer: str
    path: tuple[int, ...]
    void: tuple[VoidRange, ...]
    under_way: str | None = None

    def holding(self, path: Sequence[int] | None = None) -> VoidRanges:
        """The ranges that hold now, or that would hold on another path."""
        return VoidRanges.of((each.partition, each.begin, each.end) for each in self.holding_ranges(path))

    def holding_ranges(self, path: Sequence[int] | None = None) -> list[VoidRange]:
        """The same ranges, as they were declared."""
        on_path = {0, *(self.path if path is None else path)}
        return [each for each in self.void if each.generation in on_path]


def load(settings: Settings, topic: str) -> TopicRecord | None:
    """The record of a topic; None if the topic never had void ranges. Raises PreflightRefused if it is damaged."""
    return _load(_handle(settings, topic))[0]


def _load(handle: ObjectHandle) -> tuple[TopicRecord | None, str]:
    """The record, and its tag."""

    def damaged(error: Exception) -> PreflightRefused:
        return PreflightRefused(
            f"{handle} cannot be read ({error}): nobody knows which offsets of the topic are void",
            "put it back from the newest copy of the state folder",
        )

    found = handle.read()
    return (None, "") if found is None else (parsed_record(handle, found, _record, damaged), found.tag)


def _record(value: dict[str, Any]) -> TopicRecord:
    void = tuple(VoidRange(**{**each, "left": tuple(each.get("left", ()))}) for each in value["void"])
    of_topic = (value["topic"], value["topic_id"], value["writer"])
    return TopicRecord(*of_topic, tuple(value["path"]), void, value["under_way"])


def void_of(settings: Settings, topic: str, topic_id: str) -> VoidRanges:
    """The ranges of a topic that are never read again, without ranges of an earlier topic of that name.

    Raises PreflightRefused while a recovery appends to the topic.
    """
    record = load(settings, topic)
    if record is None or record.topic_id != topic_id:
        return NO_VOID
    if record.under_way is not None:
        raise PreflightRefused(
            f"plan {record.under_way} is appending corrected records to topic {topic}",
            f"finish it: {commands.resume(record.under_way)}, or {commands.abort(record.under_way)}",
        )
    return record.holding()


def declare_void(
    settings: Settings,
    topic: str,
    topic_id: str,
    *,
    writer: str,
    path: Sequence[int],
    ranges: Iterable[VoidRange] = (),
    under_way: str | None = None,
) -> None:
    """Add void ranges, and note the path of the writer's generations; durable when this returns.

    The ranges of the same plan and generation are replaced, so it may be repeated. Without any of it, and without a
    record, nothing is written. Raises TransientError if another process writes the record at the same moment.
    """
    handle, added = _handle(settings, topic), list(ranges)
    before, tag = _load(handle)
    same = before is not None and before.topic_id == topic_id
    if not added and not same and under_way is None:
        return
    of = {(each.plan, each.generation) for each in added}
    known = _known(before, writer) if before is not None and same else ()
    kept = [each for each in known if (each.plan, each.generation) not in of]
    record = TopicRecord(topic, topic_id, writer, tuple(path), (*kept, *added), under_way)
    data = record_bytes(asdict(record))
    if before is None:
        handle.create(data)
    else:
        handle.replace(data, tag)


def under_way_of(settings: Settings, plan: str) -> list[TopicRecord]:
    """The records of the topics to which a plan is appending."""
    names = (name for name in _files(settings).names() if name.endswith(".json"))
    records = (load(settings, name.removesuffix(".json")) for name in names)
    return [record for record in records if record is not None and record.under_way == plan]


def _known(before: TopicRecord, writer: str) -> tuple[VoidRange, ...]:
    """The ranges of a topic; of one that another stream wrote before, those that hold, for good."""
    if before.writer == writer:
        return before.void
    return tuple(replace(each, generation=0) for each in before.void if each.generation in (0, *before.path))


def _files(settings: Settings) -> ObjectFiles:
    return state_files(settings).below("_topics")


def _handle(settings: Settings, topic: str) -> ObjectHandle:
    if not is_topic_name(topic):
        raise UsageError(f"'{topic}' is not the name of a topic", "use letters, digits, '.', '_' and '-'")
    return ObjectHandle(_files(settings), f"{topic}.json")
