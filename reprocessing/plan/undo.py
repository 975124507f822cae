"""The plan that takes a published one back."""

from __future__ import annotations

from collections.abc import Mapping

from reprocessing.plan.affected_streams import Along
from reprocessing.plan.journal import journal_of, next_step
from reprocessing.plan.plan import RecoveryPlan
from reprocessing.plan.planner import RecoveryRequest, make_plan
from reprocessing.plan.registry import refuse_if_held, undone_by
from reprocessing.plan.snapshot import PlanningSnapshot, planning_snapshot
from reprocessing.plan.targets import Resolved, Target
from streaming_jobs.errors import UsageError
from streaming_jobs.ledger.positions import decode
from streaming_jobs.settings import Settings
from streaming_jobs.sources.base import TopicReader
from streaming_jobs.state import savepoints
from streaming_jobs.state.savepoints import Savepoint
from streaming_jobs.stream import Stream
from streaming_jobs.text import commands
from streaming_jobs.text.spelling import instant_words


def plan_undo(
    settings: Settings, streams: Mapping[str, Stream], topics: TopicReader, plan: RecoveryPlan
) -> RecoveryPlan:
    """The plan that takes a published one back: to the savepoints from before it, then a replay of the records since.

    Raises UsageError if it was not published, was undone already, or a savepoint is gone.
    """
    journal = journal_of(settings, plan.id)
    if journal.outcome != "published":
        refuse_if_held(settings, plan)
        raise UsageError(f"plan {plan.id} is {journal.outcome}, not published", next_step(plan.id, journal.outcome))
    if (undo := undone_by(settings, plan)) is not None:
        raise UsageError(f"plan {plan.id} was undone by {undo} already", f"to have it again: {commands.undo(undo)}")
    requests = []
    for name in plan.names:
        before = _savepoint_before(settings, plan, name)
        snapshot = planning_snapshot(settings, streams[name], topics)
        _refuse_later(snapshot, plan)
        back_to = Resolved(before.txn, before.ends, (f"everything as it was on {instant_words(before.taken_at)}",))
        target = Target("savepoint", f"from before {plan.id}")
        voided = journal.done("void_records", name)
        wrong_from = None if voided is None else decode(voided["kept"])
        requests.append(RecoveryRequest(snapshot, target, resolved=back_to, base=before, wrong_from=wrong_from))
    return make_plan(settings, requests, undoes=plan.id, along=Along(leave=frozenset(plan.left)))


def _savepoint_before(settings: Settings, plan: RecoveryPlan, stream: str) -> Savepoint:
    findings = journal_of(settings, plan.id).done("take_savepoint", stream)
    before = savepoints.find(settings, stream, findings["savepoint"]) if findings else None
    if before is None:
        raise UsageError(f"the savepoint from before plan {plan.id} was dropped", "it can no longer be undone")
    return before


def _refuse_later(snapshot: PlanningSnapshot, plan: RecoveryPlan) -> None:
    """Raise UsageError if a later recovery has opened a generation; aborted recoveries do not count."""
    generations = {each.number: each for each in snapshot.record.generations}
    number: int | None = snapshot.record.generation
    while number is not None and generations[number].aborts:
        number = generations[number].from_generation
    opened = plan.of(snapshot.stream.name).generation
    if number != opened:
        raise UsageError(
            f"stream {snapshot.stream.name} is in generation {snapshot.record.generation}; plan {plan.id} opened "
            f"{opened}",
            "undo the later recovery first",
        )
