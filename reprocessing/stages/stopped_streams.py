"""The streams of a plan in progress: stopped, their leases held, truncated files repaired."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

from reprocessing.plan.journal import OVER
from reprocessing.stages.bounded import publish_position
from reprocessing.stages.publish import fenced_by
from reprocessing.stages.recovery import Recovery, RecoveryContext
from streaming_jobs.ledger.entry import Txn
from streaming_jobs.preflight.truncated_files import repair
from streaming_jobs.state.lease import take
from streaming_jobs.state.requests import STOP


@contextmanager
def stopped_streams(recovery: Recovery, check: Callable[[], None]) -> Iterator[None]:
    """Hold the streams of a plan that is held. `check` may refuse before they are stopped, and under their leases.

    At the end the plan's stop requests are removed if no stream was fenced, or if the plan is over.
    """
    settings, plan = recovery.settings, recovery.plan
    check()
    try:
        for name in plan.names:
            STOP.ask_for(settings, name, plan.id)
        with _leases(recovery):
            for context in recovery.each():
                repair(settings, context.stream, _reached(context))
            check()
            yield
    finally:
        if recovery.journal.outcome in OVER or not _has_fenced(recovery):
            let_start(recovery)


def let_start(recovery: Recovery) -> None:
    """Remove the plan's stop requests, so that its streams may start."""
    for name in recovery.plan.names:
        STOP.clear_for(recovery.settings, name, recovery.plan.id)


@contextmanager
def _leases(recovery: Recovery) -> Iterator[None]:
    """Hold the leases of all streams, taken in the order of their names, so that no two recoveries block each other."""
    settings, plan = recovery.settings, recovery.plan
    began = time.monotonic()
    with ExitStack() as leases:
        for name in sorted(plan.names):
            patience = settings.for_stream(name).stop_deadline.total_seconds() + recovery.patience
            left = max(patience - (time.monotonic() - began), 0.0)
            lease = leases.enter_context(take(settings, name, purpose=f"recovery {plan.id}", wait=left))
            recovery.leases[name] = lease
        leases.callback(recovery.leases.clear)
        leases.callback(recovery.saved.clear)
        yield


def _has_fenced(recovery: Recovery) -> bool:
    """True if a table of the plan's streams is fenced, or may be: then the streams stay stopped."""
    try:
        return any(
            recovery.journal.begun("fence", context.stream.name)
            and fenced_by(recovery.settings, context.stream, recovery.plan.id)
            for context in recovery.each()
        )
    except Exception as error:  # noqa: BLE001 - the error that has brought us here is the one to be raised
        recovery.events.tell(f"the streams stay stopped, since their tables cannot be looked at: {error}")
        return True


def _reached(context: RecoveryContext) -> Txn:
    """The position that every table has reached, by the journal and the stream's record."""
    journal, plan, generation = context.journal, context.plan, context.record.generation
    if generation < plan.generation and journal.done("publish") is not None:
        return publish_position(context).at
    fenced = generation < plan.generation and journal.done("fence") is not None
    return Txn(plan.generation if fenced else generation, -1)
