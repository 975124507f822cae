"""The recovery that rebuilds a stream's state from its records: its command, its cost, its losses; and its plan.

A deploy with `--rebuild` makes these plans, and applies them as `recourse recover apply` does: beside the running
stream, whose code serves readers until the rebuilt rows are published. A plan that a kill interrupted is continued.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from orchestration.deploys.plan import DeployPlan, StreamDeploy
from orchestration.recoveries.request import PlanRequest, carry_out, make_requested, topics_of
from reprocessing import executor
from reprocessing.plan.affected_streams import downstream
from reprocessing.plan.journal import journal_of
from reprocessing.plan.plan import RecoveryPlan
from reprocessing.plan.registry import under_way
from reprocessing.plan.replay_range import lost
from reprocessing.plan.snapshot import PlanningSnapshot, look_for_plan
from reprocessing.stages.recovery import RecoveryEvents
from streaming_jobs.catalog.topology import Topology
from streaming_jobs.errors import RecourseError
from streaming_jobs.ledger.positions import first_after, offsets_between
from streaming_jobs.platform.broker import bootstrap_servers
from streaming_jobs.settings import Settings
from streaming_jobs.sources.topics import Topics
from streaming_jobs.stream import Stream
from streaming_jobs.text import commands
from streaming_jobs.text.spelling import counted


@dataclass(frozen=True)
class Rebuild:
    """What rebuilding a stream's state takes, in `lines`; `lost` says which records are gone, if some are."""

    lines: tuple[str, ...] = ()
    lost: str = ""


def rebuild_of(settings: Settings, stream: Stream) -> Rebuild:
    """The rebuild of a stream; only the command if the stream's files or the broker do not say more."""
    if stream.postgres_tables:
        return Rebuild((f"rebuild the state: {stream.rebuild_step()}",))
    try:
        snapshot = look_for_plan(settings, stream, lambda: Topics.of(settings.kafka, bootstrap_servers(settings)))
        topics = {topic.name: topic for topic in snapshot.preflight.topics}
        return Rebuild(tuple(words_of(snapshot)), lost(snapshot.record.starts, topics) or "")
    except RecourseError as error:
        command = f"rebuild the state: {commands.plan(stream.name, to_batch=-1)}"
        return Rebuild((command, f"what that costs is not known: {error.found}"))


def rebuilding(settings: Settings, plan: DeployPlan, *, discard_state: bool) -> DeployPlan:
    """The plan that rebuilds each stream which only its state keeps from running the new code.

    A stream whose records are gone in part is rebuilt only with `discard_state`.
    """
    return replace(plan, streams=tuple(_rebuilding(settings, each, discard_state) for each in plan.streams))


def _rebuilding(settings: Settings, each: StreamDeploy, discard_state: bool) -> StreamDeploy:
    if each.action == "recovering" and _begun(settings, each) is not None:
        return replace(each, action="rebuild")
    if not each.rebuildable:
        return each
    if each.lost and not discard_state:
        return replace(each, refused=(f"{each.lost}; to rebuild the state without them: --discard-state",))
    return replace(each, action="rebuild", refused=())


def _begun(settings: Settings, each: StreamDeploy) -> RecoveryPlan | None:
    """The unfinished plan of a stream that replays with the code of the deploy."""
    plan = under_way(settings, each.stream)
    fits = plan is not None and plan.undoes is None and plan.of(each.stream).saw.code.hash == each.after
    return plan if fits else None


def recovery_plans(settings: Settings, topology: Topology, plan: DeployPlan) -> list[RecoveryPlan]:
    """The recoveries of the streams to rebuild, upstream streams first; each takes its downstream streams along.

    Raises UsageError or PreflightRefused for a stream that cannot be rebuilt.
    """
    rebuilt = {each.stream: each for each in plan.rebuilt}
    made: list[RecoveryPlan] = []
    for name in downstream(topology.streams, rebuilt):
        if name not in rebuilt or any(name in each.names for each in made):
            continue
        if (begun := _begun(settings, rebuilt[name])) is not None:
            made.append(begun)
            continue
        along = tuple(each for each in downstream(topology.streams, [name]) if each in rebuilt and each != name)
        discards = bool(rebuilt[name].lost)
        request = PlanRequest((name,), {"batch": "-1"}, discard_state=discards, rebuild=along)
        made.append(make_requested(settings, topology, lambda: topics_of(settings), request))
    return made


def rebuild(settings: Settings, topology: Topology, plan: RecoveryPlan, events: RecoveryEvents) -> str:
    """Apply a plan, or continue it; returns the reason why it has not published, or an empty text."""
    begun = journal_of(settings, plan.id).outcome not in ("planned", "waits for confirmation")
    try:
        carry_out(settings, topology, plan, events, executor.resume if begun else executor.apply)
    except RecourseError as error:
        return f"plan {plan.id}: {error}"
    return ""


def words_of(snapshot: PlanningSnapshot) -> Iterator[str]:
    name, starts = snapshot.stream.name, snapshot.record.starts
    topics = {topic.name: topic for topic in snapshot.preflight.topics}
    gone = lost(starts, topics)
    begins = {
        topic: {
            partition: first_after(offset, partition, topics[topic].earliest, topics[topic].continues) or offset
            for partition, offset in each.items()
        }
        for topic, each in starts.items()
        if topic in topics
    }
    records = offsets_between(begins, {topic.name: topic.latest for topic in topics.values()})
    pace = snapshot.history.pace()
    largest = snapshot.settings.for_stream(name).max_offsets_per_trigger
    time = f", about {records / pace.rate(records, largest):,.0f} s and Spark's start" if pace and records else ""
    cost = f"{counted(records, 'record')}{time}"
    if not gone:
        yield f"rebuild the state: {commands.plan(name, to_batch=-1)} ({cost})"
    else:
        yield f"the state cannot be rebuilt from all records: {gone}"
        for topic, each in begins.items():
            for partition, first in sorted(each.items()):
                if first > starts[topic][partition]:
                    yield (
                        f"lost would be {topic}/{partition}: offsets {starts[topic][partition]:,} to {first - 1:,}; "
                        f"totals begin at offset {first:,}"
                    )
        yield (
            f"rebuild it from the records that are left, and lose these: "
            f"{commands.plan(name, to_batch=-1, discard_state=True)} ({cost})"
        )
    yield from snapshot.notes
