"""Carrying out a plan, and the plan that takes one back: the same for the command line and for the job `recover`."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from reprocessing.plans.plan import RecoveryPlan
    from reprocessing.rebuild.context import Recovery, RecoveryEvents
    from streaming_jobs.catalog.topology import Topology
    from streaming_jobs.settings import Settings
    from streaming_jobs.sources.topics import Topics


def topics_of(settings: Settings) -> Topics:
    """The topics of the settings' broker."""
    from streaming_jobs.platform.broker import bootstrap_servers
    from streaming_jobs.sources.topics import Topics

    return Topics.of(settings.kafka, bootstrap_servers(settings))


def carry_out(
    settings: Settings,
    topology: Topology,
    plan: RecoveryPlan,
    events: RecoveryEvents,
    act: Callable[[Recovery], None],
    begun: Callable[[Recovery], None] = lambda _: None,
) -> Recovery:
    """Let `act` (apply, resume, give up) work on the recovery of a plan; the recovery as it is then.

    `begun` gets the recovery before that. Suites run in a Spark session of their own, which ends with this call.
    """
    from orchestration.recoveries.suite_gate import suite_runner
    from reprocessing.executor import recovery_of

    streams = topology.select(plan.names)
    with suite_runner(settings, topology) as run_suite:
        recovery = recovery_of(settings, streams, topics_of(settings), plan, events, run_suite=run_suite)
        begun(recovery)
        act(recovery)
    return recovery


def make_undo(settings: Settings, topology: Topology, name: str) -> RecoveryPlan:
    """The plan that takes the published plan `name` back; raises UsageError if that cannot be done."""
    from reprocessing.plans.plan_file import load
    from reprocessing.undo import plan_undo

    plan = load(settings, name)
    streams = {stream.name: stream for stream in topology.select(plan.names)}
    return plan_undo(settings, streams, topics_of(settings), plan)


def generations(recovery: Recovery) -> dict[str, int]:
    """The present generation of each stream of a recovery."""
    return {each.stream.name: each.record.generation for each in recovery.each()}
