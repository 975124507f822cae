"""Apply, resume and abort plans. One operator at a time: each holds the plan's lock and its streams' leases.

The journal lists the finished stages, so `resume` begins with the first unfinished one. Streams that run are replayed
and compared beside them first (`stages/beside.py`). Then they are stopped until the plan is over: their leases are
held, and from the fence on the tables refuse every other start.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from reprocessing.explainer import explain
from reprocessing.plan.affected_streams import left_out
from reprocessing.plan.journal import journal_of, next_step
from reprocessing.plan.plan import RecoveryPlan, moved
from reprocessing.plan.plan_file import only_operator
from reprocessing.plan.registry import refuse_if_held, under_way
from reprocessing.plan.replay_range import rebuilt_since
from reprocessing.plan.snapshot import planning_snapshot
from reprocessing.replay import staging
from reprocessing.replay.difference import for_journal
from reprocessing.report.page import page, report_of
from reprocessing.stages.beside import goal_of, reason_to_stop_first, stand_by, stand_down, streams_run, warm_spark
from reprocessing.stages.publish import has_published
from reprocessing.stages.recovery import Recovery, RecoveryContext, RecoveryEvents, RunSuite, StageBegun, no_suites
from reprocessing.stages.reopen import abort
from reprocessing.stages.replay import replay
from reprocessing.stages.stages import (
    Audit,
    CleanUp,
    Compare,
    Follow,
    Result,
    Stage,
    TakeSavepoint,
    stages_now,
    stages_of,
)
from reprocessing.stages.stopped_streams import let_start, stopped_streams
from streaming_jobs.errors import UsageError
from streaming_jobs.runtime.code_version import code_version
from streaming_jobs.runtime.crash_points import crash_point
from streaming_jobs.settings import Settings
from streaming_jobs.sources.base import TopicReader
from streaming_jobs.storage.files import write_atomic
from streaming_jobs.stream import Stream
from streaming_jobs.text import commands

_SHORT = 60.0
"""Seconds of a replay for which a session stands by: longer ones would have it idle for as long."""


def recovery_of(
    settings: Settings,
    streams: Sequence[Stream],
    topics: TopicReader,
    plan: RecoveryPlan,
    events: RecoveryEvents,
    *,
    replay: Callable[[RecoveryContext], Mapping[str, Any]] = replay,
    run_suite: RunSuite = no_suites,
) -> Recovery:
    """The recovery that applies a plan; raises UsageError if `streams` are not the plan's streams.

    `replay` runs a stream on its staging tables, by default in an ordinary session; `run_suite` runs a suite.
    """
    by_name = {stream.name: stream for stream in streams}
    if set(by_name) != set(plan.names):
        raise UsageError(f"plan {plan.id} is of {' and '.join(plan.names)}", "name the plan of these streams")
    return Recovery(settings, by_name, plan, topics, journal_of(settings, plan.id), events, replay, run_suite)


def apply(recovery: Recovery, *, stop_first: bool = False) -> None:
    """Carry out a plan that was not begun, or that only waits for confirmation.

    Streams that run are replayed beside them before they stop, if their kind allows it; with `stop_first` they stop
    before the replay. Raises UsageError for a plan in any other state, and for an outdated plan.
    """
    plan, outcome = recovery.plan, recovery.journal.outcome
    if outcome == "waits for confirmation":
        resume(recovery, stop_first=stop_first)
        return
    if outcome != "planned":
        refuse_if_held(recovery.settings, plan)
        raise UsageError(f"plan {plan.id} was applied already: it is {outcome}", next_step(plan.id, outcome))
    changes: list[str] = []
    for context in recovery.each():
        now = planning_snapshot(context.settings, context.stream, context.topics).planned_against
        changes += moved(context.plan, now)
        changes += rebuilt_since(context.settings, context.stream, context.plan)
    late = left_out(recovery.settings, plan, list(recovery.streams.values()), recovery.topics)
    changes += [f"stream {name} reads what it changes, and has begun since" for name in late]
    if changes:
        raise UsageError(f"plan {plan.id} no longer holds: {'; '.join(changes)}", "make a new plan")
    resume(recovery, stop_first=stop_first)


def resume(recovery: Recovery, *, stop_first: bool = False) -> None:
    """Continue with the first stage that is not done; nothing is done twice. A published plan is left as it is.

    A replay that has followed its running stream follows again until the stream is stopped, which it need not be yet.

    Raises UsageError if the plan was aborted, if a stream has another unfinished plan, or if the code has changed.
    """
    settings, plan = recovery.settings, recovery.plan

    def check() -> None:
        if (outcome := recovery.journal.outcome) in ("aborted", "aborting"):
            raise UsageError(f"plan {plan.id} is {outcome}", next_step(plan.id, outcome))
        for name in plan.names if outcome == "planned" else ():
            if (other := under_way(settings, name)) is not None:
                raise UsageError(
                    f"plan {other.id} of stream {name} is under way",
                    next_step(other.id, journal_of(settings, other.id).outcome),
                )
        for context in recovery.each():
            _refuse_other_code(context)

    if recovery.journal.outcome == "published":
        let_start(recovery)
        return
    with only_operator(settings, plan.id):
        check()
        if _goes_beside(recovery, stop_first=stop_first):
            _run_beside(recovery, check)
            return
        with _standing_by(recovery), stopped_streams(recovery, check):
            _run_all(recovery, stages_now(plan, recovery.journal, stopping=True))


def _run_beside(recovery: Recovery, check: Callable[[], None]) -> None:
    """Run the stages beside the streams, let the sessions prepare their next start, and only then stop the streams."""
    stages = stages_of(recovery.plan, beside=True)
    stop = next(number for number, stage in enumerate(stages) if isinstance(stage, TakeSavepoint))
    follows = [stage for stage in stages if isinstance(stage, Follow)]
    with warm_spark(recovery):
        if not recovery.journal.reached(TakeSavepoint.name):
            _run_all(recovery, stages, stages[:stop], again=(Follow.name,))
        with _standing_by(recovery):
            if not recovery.journal.reached(TakeSavepoint.name):
                _run_all(recovery, stages, follows, again=(Follow.name,))
            with stopped_streams(recovery, check):
                _run_all(recovery, stages)
    stopped = next(line.at for line in recovery.journal.lines() if line.is_of(TakeSavepoint.name))
    recovery.events.tell(f"  the streams were stopped {time.time() - stopped:.1f} s ago, and may start again")


@contextmanager
def _standing_by(recovery: Recovery) -> Iterator[None]:
    """Sessions of the streams prepare their next start before the block, if it will be over in a minute or so."""
    plan = recovery.plan
    short = all(each.skips or (each.seconds is not None and each.seconds < _SHORT) for each in plan.streams)
    if streams_run(recovery.settings, plan) and (short or recovery.warm is not None):
        stand_by(recovery)
    try:
        yield
    finally:
        if recovery.journal.done(CleanUp.name) is None:
            stand_down(recovery)


def explained(settings: Settings, plan: RecoveryPlan) -> str:
    """The plan's text, with its stages in the order in which they would run now, or have run."""
    if (journal := journal_of(settings, plan.id)).outcome != "planned":
        return explain(plan, stages_now(plan, journal))
    beside = streams_run(settings, plan) and reason_to_stop_first(plan) is None
    return explain(plan, stages_of(plan, beside=beside))


def _goes_beside(recovery: Recovery, *, stop_first: bool) -> bool:
    """True if the streams run until the replay has caught up, or have done so for this plan."""
    begun = recovery.journal.reached(Follow.name)
    if begun and recovery.journal.reached(TakeSavepoint.name):
        return recovery.journal.done(Compare.name) is not None
    if stop_first or not streams_run(recovery.settings, recovery.plan):
        return False
    reason = reason_to_stop_first(recovery.plan)
    if (
        reason is None
        and not begun
        and any(goal_of(recovery.of(each.stream)) is None for each in recovery.plan.followed)
    ):
        reason = "there is nothing to replay before their last batches"
    if reason is not None:
        recovery.events.tell(f"the plan's streams stop before the replay: {reason}")
    return reason is None


def _run_all(
    recovery: Recovery, stages: Sequence[Stage], now: Sequence[Stage] | None = None, *, again: Iterable[str] = ()
) -> None:
    """Run the stages of `now` (None: all) that are not done, those of `again` also if they are."""
    for number, stage in enumerate(stages, 1):
        if now is not None and stage not in now:
            continue
        if stage.name in again or recovery.journal.done(stage.name, stage.stream) is None:
            _tell(recovery, StageBegun(number, len(stages), stage.name, stage.stream, stage.explain()))
            _run(recovery, stage)
    if now is None:
        _report(recovery)


def _tell(recovery: Recovery, begun: StageBegun) -> None:
    if recovery.events.stage is not None:
        recovery.events.stage(begun)
        return
    of_which = "" if begun.stream is None or len(recovery.plan.streams) == 1 else f" ({begun.stream})"
    recovery.events.tell(f"{begun.name}{of_which}: {begun.words}")


def _run(recovery: Recovery, stage: Stage) -> None:
    recovery.journal.write(stage.name, "begun", stream=stage.stream)
    _crash_point(recovery, f"recover_{stage.name}_begun", stage.stream)
    try:
        findings = stage.run(recovery)
    except Exception as error:
        failure: Result = {"error": str(error)[:500]}
        if isinstance(stage, Audit):  # so that a later report, of an abort for example, still shows them
            failure = {**failure, "differences": for_journal(recovery.differences)}
        recovery.journal.write(stage.name, "failed", failure, stream=stage.stream)
        _report(recovery)
        raise
    _crash_point(recovery, f"recover_{stage.name}_ran", stage.stream)
    recovery.journal.write(stage.name, "done", findings, stream=stage.stream)


def give_up(recovery: Recovery) -> None:
    """Abort a plan that has published nothing: its streams continue as they were, one generation later."""
    settings, plan, journal = recovery.settings, recovery.plan, recovery.journal

    def check() -> None:
        if (outcome := journal.outcome) in ("aborted", "published"):
            let_start(recovery)
            raise UsageError(f"plan {plan.id} is {outcome}", next_step(plan.id, outcome))
        for context in recovery.each() if not journal.begun("abort") else ():
            if _has_changed(context):
                table = context.stream.primary.name
                raise UsageError(
                    f"plan {plan.id} has published table {table}, so it can no longer be given up",
                    f"finish it: {commands.resume(plan.id)}; then take it back: {commands.undo(plan.id)}",
                )

    with only_operator(settings, plan.id):
        begun = journal.outcome != "planned"
        if not begun or (journal.reached(Follow.name) and not journal.reached(TakeSavepoint.name)):
            for each in plan.streams if begun else ():  # their streams run, or would: there is only staging to remove
                staging.clear(settings, each)
            journal.write("abort", "done")
            let_start(recovery)
            return
        with stopped_streams(recovery, check):
            journal.write("abort", "begun")
            _crash_point(recovery, "recover_abort_begun")
            generations = {context.stream.name: abort(context)["generation"] for context in recovery.each()}
            _crash_point(recovery, "recover_abort_ran")
            only = generations[plan.names[0]] if len(generations) == 1 else generations
            journal.write("abort", "done", {"generation": only})
            _report(recovery)


def _has_changed(context: RecoveryContext) -> bool:
    """True if a stream continues as the plan wants it: from there on the plan cannot be given up."""
    journaled = any(context.journal.done(stage) is not None for stage in ("publish", "skip"))
    opened = context.record.generation == context.plan.generation
    return journaled or opened or has_published(context.settings, context.stream, context.plan.id)


def _refuse_other_code(context: RecoveryContext) -> None:
    """Refuse to replay with other code than that of the plan, also long after the plan was made; a skip runs none."""
    if context.plan.skips and context.journal.done("take_savepoint") is not None:
        return
    now = code_version(context.stream, context.settings.flows)
    if context.journal.done("replay") is None and now != context.plan.saw.code:
        raise UsageError(
            f"plan {context.plan.id} no longer holds: the code is {now.hash}, not {context.plan.saw.code.hash}",
            f"deploy that code again, or give the plan up: {commands.abort(context.plan.id)}",
        )


def _report(recovery: Recovery) -> None:
    """Write the report; a failure is only reported to the operator, and does not change the outcome."""
    plan = recovery.plan
    try:
        content = page(plan, recovery.journal, recovery.differences, explain(plan, stages_now(plan, recovery.journal)))
        write_atomic(report_of(recovery.settings, plan.id), content)
    except OSError as error:
        recovery.events.tell(f"the report could not be written: {error}")


def _crash_point(recovery: Recovery, point: str, stream: str | None = None) -> None:
    crash_point(point, stream or recovery.plan.names[0], 0)
