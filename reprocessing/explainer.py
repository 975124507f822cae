"""A plan in words, for people. The steps are read from the same stages that the executor runs."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from reprocessing.plan.plan import RecoveryPlan, StreamRecoveryPlan
from reprocessing.stages.stages import Compare, Stage, stages_of
from streaming_jobs.text import commands
from streaming_jobs.text.spelling import counted, instant_words

_COMMITS = 2
"""Number of commits that a plan adds to each table's log: the fence, and the publish."""
_APPENDED = 20_000.0
"""Staged records appended to topics, and compared there, in a second: assumed before the stream's first append."""


def explain(plan: RecoveryPlan, stages: Sequence[Stage] | None = None) -> str:
    """The text of a plan with these stages; by default those of streams that stop first."""
    stages = stages_of(plan) if stages is None else stages
    beside, lines = any(isinstance(stage, Compare) for stage in stages), [*_head(plan)]
    for each in plan.streams:
        lines += [*_stream(each), "", *(_skipped(each) if each.skips else _replayed(plan, each, beside)), ""]
    return "\n".join([*lines, *_steps(plan, stages), "", *_after(plan)]) + "\n"


def _head(plan: RecoveryPlan) -> Iterator[str]:
    does = "; ".join(f"{_does(plan, each)}, stream {each.stream}" for each in plan.streams)
    yield f"Plan {plan.id}: {does}"
    yield f"  made         {instant_words(plan.made_at)}, fingerprint {plan.fingerprint}"


def _does(plan: RecoveryPlan, each: StreamRecoveryPlan) -> str:
    return (
        f"take back {plan.undoes}"
        if plan.undoes
        else f"{'skip ahead' if each.skips else 'rewind'} to {each.target_words}"
    )


def _stream(plan: StreamRecoveryPlan) -> Iterator[str]:
    yield f"  stops        {plan.stream}, which is in generation {plan.saw.generation}, batch {plan.saw.batch}"
    if not plan.skips:
        yield f"  code         {plan.saw.code} runs the replay"
        at = f"savepoint {plan.base.savepoint}" if plan.base.savepoint else "empty tables"
        yield f"  starts from  {at}"
    if plan.until is not None:
        yield (
            f"  until        {plan.until.txn} ({plan.until.target}): up to there rows are corrected, later ones "
            "stay as they are"
        )
    yield f"  state        {_state(plan)}"
    for table in plan.saw.tables:
        becomes = "keeps its rows" if plan.skips else "restored" if plan.until is None else "corrected up to there"
        versions = f"version {table.version}, afterwards {table.version + _COMMITS} or later"
        size = f"{table.mode}, {counted(table.files, 'file')}, {_size(table.size)}"
        yield f"  table        {table.name} ({size}): {becomes}; {versions}"
    yield from _topics(plan)
    yield "  downstream   readers of these tables see one commit that changes rows"
    yield from (f"  note         {note}" for note in plan.notes)


def _topics(plan: StreamRecoveryPlan) -> Iterator[str]:
    """The topics that the stream writes, with the offsets that become void, as of planning."""
    for topic, begins in plan.wrong_from.items():
        ends = plan.ends_written.get(topic, {})
        ranges = {p: (begin, ends[p]) for p, begin in sorted(begins.items()) if begin < ends.get(p, 0)}
        total = sum(end - begin for begin, end in ranges.values())
        words = ", ".join(f"partition {p}: {begin} to {end - 1}" for p, (begin, end) in ranges.items())
        become = f"{counted(total, 'offset', 'becomes', 'become')} void ({words})" if ranges else "nothing becomes void"
        yield f"  topic        {topic}: {become}; corrected records are appended"


def _size(size: float) -> str:
    return f"{size / 1e6:,.1f} MB" if size >= 100_000 else f"{size / 1e3:,.1f} KB"


def _state(plan: StreamRecoveryPlan) -> str:
    if not plan.stateful:
        return "the stream keeps none"
    if plan.skips:
        return "kept; it never learns of the records that are skipped"
    if plan.discards_state:
        return (
            "discarded. What will be wrong: totals begin at nothing, windows and joins lack the records before the "
            "replay, repeated records are no longer known as such"
        )
    if plan.base.savepoint is None:
        return "cleared; right, because every record since the stream's start is read again"
    return f"kept from savepoint {plan.base.savepoint}"


def _replayed(whole: RecoveryPlan, plan: StreamRecoveryPlan, beside: bool) -> Iterator[str]:
    positions = {(t.name, p): t.earliest.get(p, 0) for t in plan.saw.topics for p in t.latest}
    yield f"  {'topic':<24} {'partition':>9} {'retained from':>13} {'target':>10} {'replay from':>11} {'end':>10}"
    for topic, partition, begin, end in plan.ranges():
        wanted = plan.wanted.get(topic, {}).get(partition, begin)
        retained = positions.get((topic, partition), 0)
        yield f"  {topic:<24} {partition:>9} {retained:>13,} {wanted:>10,} {begin:>11,} {end:>10,}"
    yield from _from_archives(plan)
    if plan.void:
        yield f"  {counted(plan.void, 'offset', 'is', 'are')} void, and not read"
    size = "" if plan.size is None else f", about {_size(plan.size)}"
    time = "as long as it takes" if plan.seconds is None else f"about {plan.seconds:,.0f} s and Spark's start"
    time = time if plan.records else "for Spark's start"
    records = counted(plan.records, plan.unit)
    still = f"the stream runs meanwhile, and {_stands_still(whole)}" if beside else f"the stream stands still {time}"
    if beside and plan not in whole.followed:
        still = f"the stream runs until the other streams' replays have caught up, and {_stands_still(whole)}"
    yield f"  {records}{size} to replay; {still}, its tables stay readable"


def _stands_still(plan: RecoveryPlan) -> str:
    """For how long the streams of a plan stand still at the end: together, since all are published together."""
    parts = ["for seconds at the end"]
    for each in plan.followed:
        offsets = sum(
            end - each.wrong_from.get(topic, {}).get(p, end)
            for topic, ends in each.ends_written.items()
            for p, end in ends.items()
        )
        if offsets:
            rate, topics = each.append_rate or _APPENDED, ", ".join(each.wrong_from)
            seconds = math.ceil(offsets / rate)
            words = f"at {'an assumed ' if each.append_rate is None else ''}{rate:,.0f} a second"
            words += "" if each.append_rate is None else ", as in the recovery before"
            parts.append(f"about {seconds:,} s to append to {topics}, for {counted(offsets, 'offset')} {words}")
    for each in plan.streams:
        if each not in plan.followed:
            time = "an unknown time" if each.seconds is None else f"about {math.ceil(each.seconds):,} s"
            parts.append(f"{time} to replay {counted(each.records, each.unit)} of {each.stream}")
    return f"stands still {', plus '.join(parts)}"


def _from_archives(plan: StreamRecoveryPlan) -> Iterator[str]:
    """The offsets that the replay reads from archives, by topic; empty if Kafka has all of its records."""
    names = {topic.name: topic.archive for topic in plan.saw.topics}
    for topic, archive in names.items():
        parts = [(p, begin, end) for name, p, begin, end in plan.archived() if name == topic]
        if not parts:
            continue
        total = sum(end - begin for _, begin, end in parts)
        ranges = ", ".join(f"partition {p}: {begin} to {end - 1}" for p, begin, end in parts)
        yield f"  {counted(total, 'record')} of them from table {archive}, since Kafka has them no longer ({ranges})"
        rest = sum(end - begin for name, _, begin, end in plan.ranges() if name == topic) - total
        yield f"  {counted(rest, 'record')} of {topic} from Kafka"


def _skipped(plan: StreamRecoveryPlan) -> Iterator[str]:
    yield f"  {'topic':<24} {'partition':>9} {'skip from':>10} {'to':>10} {'records':>10}"
    total = 0
    for topic, partition, begin, end in plan.skipped():
        total += end - begin
        yield f"  {topic:<24} {partition:>9} {begin:>10,} {end:>10,} {end - begin:>10,}"
    left = counted(total, plan.unit, "is", "are")
    yield f"  {left} never read; the stream stands still for seconds, its tables stay readable"


def _steps(plan: RecoveryPlan, stages: Sequence[Stage]) -> Iterator[str]:
    yield "  What will happen:"
    for number, stage in enumerate(stages, 1):
        of_which = "" if stage.stream is None or len(plan.streams) == 1 else f"{stage.stream}: "
        yield f"  {number}. {stage.name:<19} {of_which}{stage.explain()}"


def _after(plan: RecoveryPlan) -> Iterator[str]:
    done = "skipped" if plan.skips else "published"
    yield f"  Apply:  {commands.apply(plan.id)}"
    yield f"  Before it has {done} it can be given up: {commands.abort(plan.id)}"
    yield f"  After that it can be taken back, as long as its savepoint is kept: {commands.undo(plan.id)}"
    if any(each.skips for each in plan.streams):
        yield "  Lost for good: nothing, as long as the topic keeps the records: undo reads them"
    if not plan.skips:
        yield "  Lost for good: nothing, as long as the savepoints are kept"
    if plan.undoes:
        yield f"  What {plan.undoes} published vanishes; records that came since are replayed with the code above"
