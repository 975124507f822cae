"""Where the records of a topic begin that a recovery declares void, from the ledger of the stream that wrote them.

Generations and batches only ever grow, so everything after a replay's start lies behind what was written before it. The
first wrong offset of a partition is therefore the smallest offset that any later batch has written, of whichever
generation. What an earlier recovery has declared void lies behind it too.

The log cleaner of a compacted topic removes a right record because of a later wrong one with its key, and a wrong one
because of its correction. So only a replay that rewrites every record ends with all keys, and what it has replaced
cannot be restored.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice

from reprocessing.plan.history import generation_spans
from reprocessing.plan.plan import BEFORE_ALL, Base
from reprocessing.plan.snapshot import PlanningSnapshot, only_the_broker
from reprocessing.plan.written_topics import GroupPosition, WrittenTopics, behind, group_words
from streaming_jobs.declare.names import cluster_of
from streaming_jobs.errors import TransientError, UsageError
from streaming_jobs.ledger.entry import LedgerEntry, Txn
from streaming_jobs.ledger.positions import PartitionOffsets, TopicOffsets, WrittenRange
from streaming_jobs.platform.table_rows import dataset
from streaming_jobs.preflight.snapshot import is_compacted, ledger_file
from streaming_jobs.settings import Settings
from streaming_jobs.sinks.tables import existing_table, store_of
from streaming_jobs.sources.void_ranges import VoidRanges
from streaming_jobs.state import topic_records
from streaming_jobs.state.ledger_file import LedgerFile
from streaming_jobs.state.stream_record import Generation, StreamRecord
from streaming_jobs.state.topic_records import TopicRecord
from streaming_jobs.stream import Stream
from streaming_jobs.text import commands

_NEWEST = 500
"""Batches at most that are read from the primary table's log."""
_EVERYTHING = (
    "everything that the stream has ever written to its topics becomes void, also what came from records before the "
    "target: these are not read again"
)


def first_written(
    settings: Settings, stream: Stream, record: StreamRecord, base: Base, ids: Mapping[str, str]
) -> dict[str, dict[int, int]]:
    """By topic and partition, the first offset that the stream has written after a base; raises as `written_after`."""
    commits = store_of(stream.primary).commits(settings, stream.primary)
    in_log = (c.entry for c in commits if c.entry and (c.entry.stream, c.entry.kind) == (stream.name, "batch"))
    in_table = (lambda: _in_table(settings, stream)) if stream.batches_only else None
    return written_after(
        ledger_file(settings, stream.name),
        stream,
        base.after,
        ids,
        islice(in_log, _NEWEST),
        generations=record.generations,
        in_table=in_table,
    )


def _in_table(settings: Settings, stream: Stream) -> Iterator[tuple[Txn, WrittenRange]]:
    """Yields the ranges of all batches of the path, from the primary table of a stream of topics only."""
    table = existing_table(settings, stream.primary, stream.name).readable()
    for rows in dataset(table, settings.tables / stream.primary.name).to_batches():
        for row in rows.to_pylist():
            written = WrittenRange(
                row["topic"],
                row["topic_id"],
                row["partition"],
                row["first_offset"],
                row["end_offset"],
                row["records"],
            )
            yield Txn(row["generation"], row["batch"]), written


def written_after(
    ledger: LedgerFile,
    stream: Stream,
    after: Txn,
    ids: Mapping[str, str],
    in_log: Iterable[LedgerEntry] = (),
    *,
    generations: Sequence[Generation] = (),
    in_table: Callable[[], Iterable[tuple[Txn, WrittenRange]]] | None = None,
) -> dict[str, dict[int, int]]:
    """By topic and partition, the first offset that the stream has written after a batch.

    What it wrote to an earlier topic of the same name does not count: `ids` are those of now. `in_log` are the entries
    in the primary table's log, newest first: after a crash the ledger file may lack some. Every batch on the path of
    `generations` has to be in one of them, or in the rows of `in_table`, the primary table of a stream of topics only:
    without its ranges a void range might begin too late. Batches beside the path lie in void ranges already.

    Raises UsageError if the ledger does not reach back to the batch, or lacks one after it.
    """
    firsts: dict[str, dict[int, int]] = {}
    seen: dict[int, list[range]] = {}

    def add(txn: Txn, written: Iterable[WrittenRange]) -> None:
        _lower(firsts, (each for each in written if each.topic_id == ids.get(each.topic, each.topic_id)))
        _note(seen.setdefault(txn.generation, []), txn.batch)

    reached = False
    for entry in in_log:
        if reached := entry.kind == "batch" and entry.txn <= after:
            break
        add(entry.txn, entry.written)
    for day in ledger.days(stream.name):
        for line in day:
            if line.txn > after:
                add(line.txn, line.read().entry.written)
            else:
                reached = True
        if reached and all(line.txn <= after for line in day):
            break
    if not reached and after > BEFORE_ALL:
        raise UsageError(
            f"the ledger of stream {stream.name} does not reach back to {after}: which records of its topics came "
            "after it is not known",
            "choose a later target; or --to-batch -1, which writes all of them anew",
        )
    if after > BEFORE_ALL and (missing := _missing(generations, after, seen)):
        if in_table is None:
            raise _holes(stream.name, missing)
        _lower(
            firsts,
            (each for txn, each in in_table() if txn > after and each.topic_id == ids.get(each.topic, each.topic_id)),
        )
    return firsts


def _note(runs: list[range], batch: int) -> None:
    """Add a batch to runs of consecutive batches; the lines are mostly in order."""
    if runs and runs[-1].start <= batch <= runs[-1].stop:
        runs[-1] = range(runs[-1].start, max(runs[-1].stop, batch + 1))
    elif runs and batch == runs[-1].start - 1:
        runs[-1] = range(batch, runs[-1].stop)
    else:
        runs.append(range(batch, batch + 1))


def _missing(
    generations: Sequence[Generation], after: Txn, seen: Mapping[int, Sequence[range]]
) -> list[tuple[int, range]]:
    """The batches after a position on the path of the generations that are not among those seen, by generation.

    The last one of the current generation is the newest that was seen.
    """
    missing: list[tuple[int, range]] = []
    for number, first, last in generation_spans(generations) if generations else ():
        runs = sorted(seen.get(number, ()), key=lambda run: run.start)
        if number < after.generation:
            continue
        expected = max(first, after.batch + 1) if number == after.generation else first
        for run in runs:
            if run.start > expected:
                missing.append((number, range(expected, min(run.start, last + 1))))
            expected = max(expected, run.stop)
        if number != generations[-1].number and expected <= last:
            missing.append((number, range(expected, last + 1)))
    return [(number, batches) for number, batches in missing if batches]


def _holes(stream: str, missing: Sequence[tuple[int, range]]) -> UsageError:
    generation, batches = missing[-1]
    number = sum(len(each) for _, each in missing)
    return UsageError(
        f"the ledger of stream {stream} lacks {number:,} of the batches after the replay's start, the last of them "
        f"{Txn(generation, batches[-1])}: which records of its topics they wrote is not known",
        f"choose a target at or after that batch (--to-batch {batches[-1]}); or --to-batch -1, which writes all of "
        "them anew",
    )


def lowest(ranges: Iterable[WrittenRange]) -> dict[str, dict[int, int]]:
    """By topic and partition, the first offset of ranges."""
    firsts: dict[str, dict[int, int]] = {}
    _lower(firsts, ranges)
    return firsts


def _lower(firsts: dict[str, dict[int, int]], written: Iterable[WrittenRange]) -> None:
    for each in written:
        of_topic = firsts.setdefault(each.topic, {})
        of_topic[each.partition] = min(each.first, of_topic.get(each.partition, each.first))


def wrong_from(
    base: Base,
    ends: TopicOffsets,
    firsts: TopicOffsets,
    *,
    known: Sequence[TopicOffsets] = (),
    in_flight: Sequence[WrittenRange] = (),
) -> dict[str, dict[int, int]]:
    """By topic and partition, the first offset that becomes void; where nothing is wrong, the end.

    `ends` has all topics to which the stream has written, `firsts` what `written_after` the base says. `known` are
    offsets from which on it is wrong in any case, `in_flight` a batch that only the topic has.
    """
    wrong = {topic: dict(each) for topic, each in firsts.items()}
    _lower(wrong, in_flight)
    if base.after == BEFORE_ALL:
        wrong = {topic: dict.fromkeys(each, 0) for topic, each in ends.items()}
    found: dict[str, dict[int, int]] = {}
    for topic, of_topic in ends.items():
        each_of = [offsets.get(topic, {}) for offsets in (wrong, *known)]
        found[topic] = {p: min(end, *(offsets.get(p, end) for offsets in each_of)) for p, end in of_topic.items()}
    return found


def topics_written(stream: Stream, firsts: Mapping[str, PartitionOffsets]) -> list[str]:
    """The topics that the stream declares, and those to which it has routed records."""
    return list(dict.fromkeys([*(sink.name for sink in stream.topic_sinks.values()), *firsts]))


def declared_since(
    records: Iterable[TopicRecord], record: StreamRecord, base: Base, opened: Generation
) -> dict[str, dict[int, int]]:
    """By topic and partition, where void ranges begin that were declared for generations after a replay's start.

    The new generation starts before these, so they leave the path and their ranges would no longer hold.
    A replay that was given up has appended records there which are in no ledger.
    """
    path, after = set(path_with(record, opened)), base.after
    origins = {each.number: Txn(each.from_generation or 0, each.from_batch) for each in record.generations}
    later = {number for number, origin in origins.items() if number not in path and origin >= after}
    found: dict[str, dict[int, int]] = {}
    for topic in (each for each in records if each.writer == record.stream):
        for void in (each for each in topic.void if each.generation in later):
            of_topic = found.setdefault(topic.topic, {})
            of_topic[void.partition] = min(void.begin, of_topic.get(void.partition, void.begin))
    return found


def path_of(record: StreamRecord) -> list[int]:
    """The generations whose records count now."""
    return [number for number, _, _ in generation_spans(record.generations)]


def path_with(record: StreamRecord, opened: Generation) -> list[int]:
    """The generations whose records count, once a generation is opened."""
    kept = [each for each in record.generations if each.number != opened.number]
    return [number for number, _, _ in generation_spans((*kept, opened))]


def first_changed(begins: PartitionOffsets, before: VoidRanges, after: VoidRanges) -> dict[int, int]:
    """By partition the first offset from which readers see other records: wrong ones, or void ones that count again."""
    changed = dict(begins)
    for partition, spans in before.spans.items():
        still = after.spans.get(partition, ())
        for begin, end in spans:
            if not any(first <= begin and end <= last for first, last in still):
                changed[partition] = min(begin, changed.get(partition, begin))
    return changed


@dataclass(frozen=True)
class WrittenAtPlanning:
    """By topic and partition, the first offset that becomes void, and the end; notes about others who read them.

    A declared topic that does not exist yet has no partitions in `wrong_from`, and is not in `ends`.
    """

    wrong_from: Mapping[str, Mapping[int, int]] = field(default_factory=dict)
    ends: TopicOffsets = field(default_factory=dict)
    notes: tuple[str, ...] = ()


NOTHING_WRITTEN = WrittenAtPlanning()


def check_topic_sinks(snapshot: PlanningSnapshot, *, bounded: bool) -> None:
    """Raise for a stream that writes topics if their ends are not known, or if the recovery is bounded."""
    if not snapshot.stream.topic_sinks:
        return
    if snapshot.unreachable is not None:
        raise only_the_broker(snapshot.unreachable, "where the topics end that the stream writes")
    if bounded:
        name = snapshot.stream.name
        raise UsageError(
            f"stream {name} writes topics: corrected records come after all others, so its readers would have them "
            "twice",
            "plan without --until",
        )


@dataclass(frozen=True)
class CommittedOffsets:
    """The committed offsets of all consumer groups of a topic's cluster, requested once for all streams of a plan."""

    settings: Settings
    _known: dict[str, Sequence[GroupPosition] | TransientError] = field(default_factory=dict)

    def of(self, topic: str) -> Sequence[GroupPosition] | TransientError:
        """The offsets; an error if they cannot be had."""
        cluster = cluster_of(topic)
        if cluster not in self._known:
            try:
                self._known[cluster] = WrittenTopics(self.settings).committed(cluster)
            except TransientError as error:
                self._known[cluster] = error
        return self._known[cluster]


def written_topics(
    snapshot: PlanningSnapshot, start: Base, known: TopicOffsets | None, committed: CommittedOffsets, *, discards: bool
) -> WrittenAtPlanning:
    """The topics of a stream whose replay begins at `start`; `known` offsets are wrong in any case."""
    stream = snapshot.stream
    if not stream.topic_sinks:
        return NOTHING_WRITTEN
    settings, sinks = snapshot.settings, [sink.name for sink in stream.topic_sinks.values()]
    ids = {name: info.id for name in sinks if (info := snapshot.topics.describe(name)) is not None}
    firsts = first_written(settings, stream, snapshot.record, start, ids)
    names = topics_written(stream, {**firsts, **(known or {})})
    there = [name for name in names if name in ids or snapshot.topics.describe(name) is not None]
    ends = {name: snapshot.topics.latest(name) for name in there}
    records = [each for name in there if (each := topic_records.load(settings, name)) is not None]
    opened = Generation(snapshot.record.generation + 1, 0.0, "", start.generation, start.batch)
    earlier = declared_since(records, snapshot.record, start, opened)
    absent = {name: dict[int, int]() for name in sinks if name not in ids}  # may be created until records are appended
    wrong = {**wrong_from(start, ends, firsts, known=[known or {}, earlier]), **absent}
    notes = [
        *_compacted(snapshot, start, wrong, ends),
        *_groups(committed, wrong, ends),
        *([_EVERYTHING] if discards and start.after == BEFORE_ALL else []),
    ]
    return WrittenAtPlanning(wrong, ends, tuple(notes))


def _compacted(snapshot: PlanningSnapshot, start: Base, wrong: TopicOffsets, ends: TopicOffsets) -> Iterator[str]:
    """Notes about compacted topics; raises UsageError if records that stay may have been removed from one."""
    for name, begins in wrong.items():
        info = snapshot.topics.describe(name)
        void = any(begin < ends[name][partition] for partition, begin in begins.items())
        if info is None or not is_compacted(info) or not void:
            continue
        if start.after != BEFORE_ALL:
            stream = snapshot.stream.name
            raise UsageError(
                f"topic {name} of stream {stream} is compacted: its cleaner removes records before the replay's start "
                "because of wrong ones with the same key, and no replay from there brings them back",
                f"let stream {stream} write all its records anew, with the code that is right: "
                f"{commands.plan(stream, to_batch=-1)}",
            )
        yield (
            f"topic {name} is compacted: consumers that are not ours keep the wrong value of each key that the replay "
            "does not write again (send them a tombstone for such a key); once its cleaner has run, neither abort nor "
            "undo brings the replaced records back"
        )


def _groups(committed: CommittedOffsets, wrong: TopicOffsets, ends: TopicOffsets) -> Iterator[str]:
    """Notes about consumer groups that have read wrong records; they are not ours, since ours commit no offsets."""
    for name, begins in wrong.items():
        if read := {p: begin for p, begin in begins.items() if begin < ends[name][p]}:
            if isinstance(found := committed.of(name), TransientError):
                yield f"whether other consumers have read wrong records of {name} is not known: {found.found}"
            else:
                yield from (group_words(group, begins, ends[name]) for group in behind(found, name, read))
