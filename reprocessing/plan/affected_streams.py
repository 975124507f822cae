"""The downstream streams of a recovery: streams that read, from topics and tables, what the recovered streams write.

Each of them goes back to its last batch before the first wrong record, found through the ledger of the stream that
wrote it, or before the first version of a table whose rows are written anew.

A target may have read records that the plan voids, or lack records that the plan restores: a savepoint holds what its
stream had read by then, past the ranges that were void then. If the first difference lies before the target's end, its
rows and its state are wrong, and the stream goes back further: to the last batch that had read nothing from there on.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from reprocessing.plan.history import generation_spans, within
from reprocessing.plan.plan import RecoveryPlan, SawTopic, StreamRecoveryPlan, opened_by
from reprocessing.plan.snapshot import PlanningSnapshot
from reprocessing.plan.targets import Resolved, Target, at_or_before, named_savepoint, offsets_target
from reprocessing.plan.void_records import first_changed, path_with
from streaming_jobs.catalog.archive import is_archive
from streaming_jobs.catalog.graph import Graph, Node, source_node
from streaming_jobs.catalog.topology import Topology
from streaming_jobs.errors import UsageError
from streaming_jobs.ledger.entry import Txn
from streaming_jobs.ledger.positions import TopicOffsets
from streaming_jobs.preflight.snapshot import folders, ledger_file, start_over
from streaming_jobs.settings import Settings
from streaming_jobs.sinks.tables import open_tables
from streaming_jobs.sources.base import TopicReader
from streaming_jobs.sources.void_ranges import NO_VOID, VoidRanges
from streaming_jobs.state import lease, savepoints, stream_record, topic_records
from streaming_jobs.state.stream_folder import StreamFolder, stream_names
from streaming_jobs.state.stream_record import Generation
from streaming_jobs.state.topic_records import TopicRecord
from streaming_jobs.stream import Stream
from streaming_jobs.text import commands

_FOR_EVER = 1 << 62


def all_streams(settings: Settings, given: Sequence[Stream]) -> dict[str, Stream]:
    """The declared streams by name; those given count as they are."""
    return {**Topology.load(settings.flows).streams, **{stream.name: stream for stream in given}}


def downstream(streams: Mapping[str, Stream], roots: Collection[str]) -> list[str]:
    """The streams whose sources have records or rows of `roots`, with these, in the order of records.

    Archives are left out: they keep all offsets, void or not. A table that a stream looks up is not its source.
    """
    graph, reached = Graph.of(streams.values()), {Node("stream", name) for name in roots}
    for node in graph.in_order:
        before = graph.before(node)
        if node.kind == "stream":
            if is_archive(streams[node.name]):
                continue
            before = [source_node(source) for source in streams[node.name].sources.values()]
        if reached.intersection(before):
            reached.add(node)
    return [node.name for node in graph.in_order if node in reached and node.kind == "stream"]


def through_tables(streams: Mapping[str, Stream], roots: Collection[str]) -> list[str]:
    """The streams that records of `roots` reach on a way with a table in it, in the order of records."""
    graph = Graph.of(streams.values())
    reached, by_table = {Node("stream", name) for name in roots}, set[Node]()
    for node in graph.in_order:
        before = [each for each in graph.before(node) if each in reached]
        if before:
            reached.add(node)
        if any(each in by_table or each.kind == "table" for each in before):
            by_table.add(node)
    return [node.name for node in graph.in_order if node in by_table and node.kind == "stream"]


def refuse_in_first_batch(settings: Settings, stream: Stream) -> None:
    """Raise UsageError for a stream without a finished batch that may have read records which become void."""
    if _runs(settings, stream):
        raise UsageError(
            f"stream {stream.name} reads what the plan changes, runs, and has finished no batch",
            f"stop it ({commands.stop(stream.name)}), or wait until it has finished one",
        )
    if _half_written(settings, stream):
        raise UsageError(
            f"stream {stream.name} reads what the plan changes, and was ended in its first batch, which some of its "
            "tables or topics may have",
            f"let it finish this batch: {commands.run(stream.name, trigger='available-now')}; if it cannot, "
            f"{start_over(stream.name, folders(settings, stream))}",
        )


def _runs(settings: Settings, stream: Stream) -> bool:
    return lease.holder(settings, stream.name) is not None


def _half_written(settings: Settings, stream: Stream) -> bool:
    """True if a batch is planned that a table other than the primary has, or that a topic may have.

    Without that the next start repeats it, past the ranges that are void then.
    """
    record = stream_record.load(settings, stream.name)
    if record is None:
        return False
    planned = StreamFolder.of(settings, stream.name).checkpoint(record.generation).last_planned
    if planned is None:
        return False
    positions = [table.position for table in open_tables(settings, stream).values()]
    at = Txn(record.generation, planned)
    return bool(stream.topic_sinks or stream.postgres_tables) or any(
        position is not None and position >= at for position in positions
    )


def left_out(settings: Settings, plan: RecoveryPlan, streams: Sequence[Stream], topics: TopicReader) -> list[str]:
    """Streams that read what a plan changes, topics to which it appends or tables, and have begun since it was made."""
    declared, planned = all_streams(settings, streams), {*plan.names, *plan.left}
    written = {topic for each in plan.streams for topic in each.wrong_from}
    tables = {table for each in plan.streams for table in _written_anew(each, declared)}
    undeclared = _undeclared_readers(settings, {*declared, *planned}, written, topics) if written else {}
    return [*_readers_beside(settings, declared, written, planned, tables), *undeclared]


def _written_anew(plan: StreamRecoveryPlan, streams: Mapping[str, Stream]) -> list[str]:
    """The tables of a stream whose rows the plan writes anew, so that streams which read them go along."""
    if plan.skips or plan.until is not None or plan.stream not in streams:
        return []
    return [sink.name for sink in streams[plan.stream].sinks.values()]


def changed_versions(settings: Settings, plan: StreamRecoveryPlan, streams: Mapping[str, Stream]) -> dict[str, int]:
    """By table of a stream to recover, the first version whose rows the replay writes anew.

    The rows of the versions before it are those of the replay's start. A bounded recovery writes none of the rows anew
    that come after its end, so it says nothing about versions.
    """
    tables = _written_anew(plan, streams)
    if plan.base.savepoint is None or (base := savepoints.find(settings, plan.stream, plan.base.savepoint)) is None:
        return dict.fromkeys(tables, 0)
    kept = {saved.name: saved.version for saved in base.tables}
    return {table: kept[table] + 1 if table in kept else 0 for table in tables}


def refuse_undeclared(
    settings: Settings, streams: Collection[str], changed: Collection[str], topics: TopicReader
) -> None:
    """Raise UsageError for a stream that has read changed topics in this home, and is not declared now.

    Declared again, it would keep what it made of the wrong records, and read the corrected ones on top.
    """
    for name, topic in _undeclared_readers(settings, streams, changed, topics).items():
        folder = StreamFolder.of(settings, name).path
        raise UsageError(
            f"stream {name} has read topic {topic}, whose records change, and is not declared now: the plan cannot "
            "take it along",
            f"declare it again (in the flows of this home) and plan anew; or, if it shall never run again, move its "
            f"state {folder} away: its tables stay as they are, and a stream of that name then starts over",
        )


def _undeclared_readers(
    settings: Settings, streams: Collection[str], changed: Collection[str], topics: TopicReader
) -> dict[str, str]:
    """By name the streams that have begun to read one of the topics by their record, and are none of these streams."""
    found: dict[str, str] = {}
    ids: dict[str, str | None] = {}
    for name in stream_names(settings):
        record = None if name in streams else stream_record.load(settings, name)
        for bound in record.topics if record is not None else ():
            if bound.name in changed and bound.name not in ids:
                info = topics.describe(bound.name)
                ids[bound.name] = None if info is None else info.id
            if bound.topic_id and bound.topic_id == ids.get(bound.name) and _has_planned(settings, name):
                found[name] = bound.name
    return found


def _has_planned(settings: Settings, stream: str) -> bool:
    """True if a batch of the stream was begun, or may begin at any moment."""
    record = stream_record.load(settings, stream)
    generation = 1 if record is None else record.generation
    planned = StreamFolder.of(settings, stream).checkpoint(generation).last_planned
    begun = planned is not None or ledger_file(settings, stream).newest(stream) is not None
    return begun or lease.holder(settings, stream) is not None


def refuse_others(
    settings: Settings, streams: Mapping[str, Stream], topics: Collection[str], planned: Collection[str]
) -> None:
    """Raise UsageError for a stream that reads one of the topics and is not in the plan: others route records to it."""
    if others := _readers_beside(settings, streams, topics, planned):
        read = sorted(topic.name for topic in streams[others[0]].topics if topic.name in topics)
        raise UsageError(
            f"stream {others[0]} reads topic {', '.join(read)}, to which a stream of the plan has routed records "
            "without declaring it",
            "declare the topic as a sink of that stream: then its readers are taken along",
        )


def _readers_beside(
    settings: Settings,
    streams: Mapping[str, Stream],
    topics: Collection[str],
    planned: Collection[str],
    tables: Collection[str] = (),
) -> list[str]:
    """The streams that read one of the topics or tables, may have read of it, and are not in the plan; no archives."""
    return [
        name
        for name, stream in streams.items()
        if name not in planned
        and not is_archive(stream)
        and (
            any(topic.name in topics for topic in stream.topics)
            or any(table.name in tables for table in stream.tables_read)
        )
        and (
            ledger_file(settings, name).newest(name) is not None
            or _runs(settings, stream)
            or _half_written(settings, stream)
        )
    ]


def changed_by(settings: Settings, plan: StreamRecoveryPlan, opened: Generation) -> dict[str, dict[int, int]]:
    """By topic that a stream's plan appends to, the first offset from which readers will see other records.

    Ranges that become void, and void ranges of an earlier recovery that the plan undoes.
    """
    record = stream_record.existing(settings, plan.stream)
    path, changed = path_with(record, opened), {}
    for topic, begins in plan.wrong_from.items():
        known = topic_records.load(settings, topic)
        before, after = (VoidRanges(), VoidRanges()) if known is None else (known.holding(), known.holding(path))
        changed[topic] = first_changed(begins, before, after)
    return changed


@dataclass(frozen=True)
class Along:
    """What to do with downstream streams, by name; all others go back to before the first wrong record.

    `discard_state`: the same with empty state; `rebuild`: everything again from its start; `leave`: nothing, it
    keeps what it made of the wrong records and reads the corrected ones too.
    """

    discard_state: frozenset[str] = frozenset()
    rebuild: frozenset[str] = frozenset()
    leave: frozenset[str] = frozenset()

    @property
    def names(self) -> frozenset[str]:
        return self.discard_state | self.rebuild | self.leave

    def check(self, along: Collection[str]) -> None:
        """Raise UsageError for a stream that is named twice, or is not among those taken `along`."""
        for name in sorted(self.names):
            if sum(name in each for each in (self.discard_state, self.rebuild, self.leave)) > 1:
                raise UsageError(f"stream {name} is named by two options", "choose one of them")
            if name not in along:
                raise UsageError(
                    f"stream {name} is not taken along by this plan",
                    "--discard-state-of, --rebuild and --leave are for streams that read what the plan changes, "
                    f"directly or through topics: {', '.join(along) or 'there are none'}",
                )


NO_CHOICE = Along()


def goes_back_to(snapshot: PlanningSnapshot, changed: TopicOffsets) -> tuple[Target, Resolved]:
    """The target of a stream that reads changed topics or tables: its last batch before the first changed record."""
    read = {topic.name: changed.get(topic.name, {}) for topic in snapshot.preflight.topics}
    resolved = at_or_before(read, snapshot.view())
    where = " and ".join(topic for topic, each in read.items() if each)
    notes = [f"reads {where}, whose records change from these offsets on"]
    starts = snapshot.record.starts
    if any(starts.get(topic, {}).get(p, 0) > offset for topic, each in read.items() for p, offset in each.items()):
        notes.append("it began behind some of them: corrected ones of earlier records, which it never had, come too")
    return offsets_target(read), replace(resolved, notes=(*notes, *resolved.notes))


def further_back(
    snapshot: PlanningSnapshot, target: Target, resolved: Resolved, before: Mapping[str, StreamRecoveryPlan]
) -> tuple[Target, Resolved] | None:
    """The target moved back to before the first record that differs; None if it can stay.

    `before` are the plans of the streams that are recovered before this one, by stream.
    """
    if is_archive(snapshot.stream):
        return None
    view = snapshot.view()
    saved = named_savepoint(target.value, view) if target.kind == "savepoint" else None
    of_target: dict[str, dict[int, int]] = {}
    of_today: dict[str, dict[int, int]] = {}
    for topic in snapshot.preflight.topics:
        if topic.kind == "table":
            begins = [each.wrong_versions[topic.name] for each in before.values() if topic.name in each.wrong_versions]
            of_target[topic.name] = of_today[topic.name] = {0: begins[0]} if begins else {}
            continue
        record = topic_records.load(snapshot.settings, topic.name)
        if record is not None and record.topic_id != topic.topic_id:
            record = None
        today = NO_VOID if record is None else record.holding()
        after = _after(snapshot.settings, topic.name, record, today, before)
        then = today if record is None or saved is None else _at(snapshot.settings, record, saved.taken_at)
        of_target[topic.name] = then.first_difference(after)
        of_today[topic.name] = today.first_difference(after)
    if within(_ends(snapshot, resolved), of_target):
        return None
    wanted = {
        name: {p: min(each.get(p, _FOR_EVER), of_today[name].get(p, _FOR_EVER)) for p in {*each, *of_today[name]}}
        for name, each in of_target.items()
    }
    where = ", ".join(f"{topic} from {p}:{offset}" for topic, each in wanted.items() for p, offset in each.items())
    note = f"{target} has read records that are void after this plan, or lacks some that count ({where})"
    moved = at_or_before(wanted, view)
    return offsets_target(wanted), replace(moved, notes=(*resolved.notes, note, *moved.notes))


def _after(
    settings: Settings,
    topic: str,
    record: TopicRecord | None,
    today: VoidRanges,
    before: Mapping[str, StreamRecoveryPlan],
) -> VoidRanges:
    """The void ranges of a topic once the plan is carried out; ranges that the plan declares void count as endless."""
    writer = next((plan for plan in before.values() if topic in plan.wrong_from), None)
    if writer is None:
        return today
    opened = VoidRanges.of((p, begin, _FOR_EVER) for p, begin in writer.wrong_from[topic].items())
    return opened if record is None else _left_void(settings, record, writer).joined(opened)


def still_void(
    snapshot: PlanningSnapshot, topic: SawTopic, today: VoidRanges, before: Mapping[str, StreamRecoveryPlan]
) -> VoidRanges:
    """The void ranges of a topic after the plan, without the ranges that it declares; `today` are the present ones."""
    writer = next((plan for plan in before.values() if topic.name in plan.wrong_from), None)
    record = topic_records.load(snapshot.settings, topic.name)
    if is_archive(snapshot.stream) or writer is None or record is None or record.topic_id != topic.topic_id:
        return today
    return _left_void(snapshot.settings, record, writer)


def _left_void(settings: Settings, record: TopicRecord, writer: StreamRecoveryPlan) -> VoidRanges:
    return record.holding(path_with(stream_record.existing(settings, record.writer), opened_by(writer)))


def _at(settings: Settings, record: TopicRecord, at: float) -> VoidRanges:
    """The void ranges of a topic that held at a time, by the generation in which its writer was then."""
    writer = stream_record.existing(settings, record.writer)
    generations = [each for each in writer.generations if each.opened_at <= at]
    path = [number for number, _, _ in generation_spans(generations)] if generations else []
    return replace(record, void=tuple(each for each in record.void if each.at <= at)).holding(path)


def _ends(snapshot: PlanningSnapshot, resolved: Resolved) -> TopicOffsets:
    """The offsets up to which the target has read."""
    if resolved.ahead:
        return snapshot.history.position
    if resolved.batch is None:
        return snapshot.record.starts
    saved = next((each for each in snapshot.savepoints if each.txn == resolved.batch), None)
    batch = None if saved is not None else snapshot.history.find(resolved.batch)
    return saved.ends if saved is not None else batch.ends if batch is not None else resolved.wanted
