"""Whether a stream's target has read records that the plan makes void, or has missed some that count again.

A savepoint holds what its stream had read by then, past the ranges that were void then. If the plan leaves other
ranges, and the first difference lies before the savepoint's end, its rows and its state are wrong, and the stream goes
back further: to the last batch that had read nothing from there on. The same is true of any other target of a stream
that reads what an earlier one of the plan corrects.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from reprocessing.planning.history import generation_spans, within
from reprocessing.planning.snapshot import PlanningSnapshot
from reprocessing.planning.targets import Resolved, Target, at_or_before, named_savepoint
from reprocessing.planning.wrong_records import path_with
from reprocessing.plans.plan import SawTopic, StreamPlan, opened_by
from streaming_jobs.catalog.archive import is_archive
from streaming_jobs.errors import PreflightRefused
from streaming_jobs.ledger.positions import TopicOffsets
from streaming_jobs.settings import Settings
from streaming_jobs.sources.void_ranges import NO_VOID, VoidRanges
from streaming_jobs.state import stream_record, topic_records
from streaming_jobs.state.stream_record import StreamRecord
from streaming_jobs.state.topic_records import TopicRecord

_FOR_EVER = 1 << 62


def further_back(
    snapshot: PlanningSnapshot, target: Target, resolved: Resolved, before: Mapping[str, StreamPlan]
) -> tuple[Target, Resolved] | None:
    """The target moved back to before the first record that differs; None if it can stay.

    `before` are the plans of the streams that are put right before this one, by stream.
    """
    if is_archive(snapshot.stream):
        return None
    view = snapshot.view()
    saved = named_savepoint(target.value, view) if target.kind == "savepoint" else None
    of_target: dict[str, dict[int, int]] = {}
    of_today: dict[str, dict[int, int]] = {}
    for topic in snapshot.around.topics:
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
    words = ",".join(f"{topic}/{p}:{offset}" for topic, each in wanted.items() for p, offset in sorted(each.items()))
    return Target("offsets", words), replace(moved, notes=(*resolved.notes, note, *moved.notes))


def _after(
    settings: Settings, topic: str, record: TopicRecord | None, today: VoidRanges, before: Mapping[str, StreamPlan]
) -> VoidRanges:
    """The void ranges of a topic once the plan is carried out; what it declares void is taken to go on for ever."""
    writer = next((plan for plan in before.values() if topic in plan.wrong_from), None)
    if writer is None:
        return today
    opened = VoidRanges.of((p, begin, _FOR_EVER) for p, begin in writer.wrong_from[topic].items())
    return opened if record is None else _left_void(settings, record, writer).joined(opened)


def still_void(
    snapshot: PlanningSnapshot, topic: SawTopic, today: VoidRanges, before: Mapping[str, StreamPlan]
) -> VoidRanges:
    """The void ranges of a topic once the plan is carried out, without those that it declares; `today` are today's."""
    writer = next((plan for plan in before.values() if topic.name in plan.wrong_from), None)
    record = topic_records.load(snapshot.settings, topic.name)
    if is_archive(snapshot.stream) or writer is None or record is None or record.topic_id != topic.topic_id:
        return today
    return _left_void(snapshot.settings, record, writer)


def _left_void(settings: Settings, record: TopicRecord, writer: StreamPlan) -> VoidRanges:
    return record.holding(path_with(_record(settings, record.writer), opened_by(writer)))


def _at(settings: Settings, record: TopicRecord, at: float) -> VoidRanges:
    """The void ranges of a topic that held at a time, by the generation in which its writer was then."""
    generations = [each for each in _record(settings, record.writer).generations if each.opened_at <= at]
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


def _record(settings: Settings, stream: str) -> StreamRecord:
    record = stream_record.load(settings, stream)
    if record is None:
        raise PreflightRefused(f"stream {stream} writes a topic with void ranges and has no record", "put it back")
    return record
