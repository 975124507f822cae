"""Apply, resume and abort plans. One operator at a time: each holds the plan's lock and its streams' leases.

The journal has the stages that are done, so `resume` begins with the first one that is not. The streams are stopped
until the plan is over: their leases are held, and from the fence on the tables refuse every other start.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from reprocessing.explainer import explain
from reprocessing.planning.downstream import left_out
from reprocessing.planning.other_changes import rebuilt_since
from reprocessing.planning.snapshot import planning_snapshot
from reprocessing.plans.journal import OVER, journal_of, next_step
from reprocessing.plans.plan import RecoveryPlan, moved
from reprocessing.plans.plan_file import folder, load, names_of, only_operator, undos_of
from reprocessing.rebuild.audit import stored
from reprocessing.rebuild.bounded import to_publish
from reprocessing.rebuild.context import (
    Recovery,
    RecoveryContext,
    RecoveryEvents,
    RunSuite,
    StageBegun,
    no_suites,
)
from reprocessing.rebuild.publish import fenced_by, has_published
from reprocessing.rebuild.reopen import abort
from reprocessing.rebuild.replay import replay
from reprocessing.report.page import write_report
from reprocessing.stages import Audit, Stage, stages_of
from reprocessing.stages.stage import Findings
from streaming_jobs.errors import UsageError
from streaming_jobs.ledger.entry import Txn
from streaming_jobs.preflight.torn_files import mend
from streaming_jobs.runtime.code_version import code_version
from streaming_jobs.runtime.crash_points import crash_point
from streaming_jobs.settings import Settings
from streaming_jobs.sources.base import TopicReader
from streaming_jobs.state import stop_request
from streaming_jobs.state.lease import take
from streaming_jobs.stream import Stream
from streaming_jobs.text import commands


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
    """The recovery that carries out a plan; raises UsageError if `streams` are not those of the plan.

    `replay` runs a stream on its staging tables, by default in an ordinary session; `run_suite` runs a suite.
    """
    by_name = {stream.name: stream for stream in streams}
    if set(by_name) != set(plan.names):
        raise UsageError(f"plan {plan.id} is of {' and '.join(plan.names)}", "name the plan of these streams")
    return Recovery(settings, by_name, plan, topics, journal_of(settings, plan.id), events, replay, run_suite)


def apply(recovery: Recovery) -> None:
    """Carry out a plan that was not begun, or that only waits for confirmation.

    Raises UsageError for a plan in any other state, and for one that no longer holds.
    """
    plan, outcome = recovery.plan, recovery.journal.outcome
    if outcome == "waits for confirmation":
        resume(recovery)
        return
    if outcome != "planned":
        refuse_at_work(recovery.settings, plan)
        raise UsageError(f"plan {plan.id} was applied already: it is {outcome}", next_step(plan.id, outcome))
    changes = [
        each
        for context in recovery.each()
        for each in (
            *moved(context.plan, planning_snapshot(context.settings, context.stream, context.topics).world),
            *rebuilt_since(context.settings, context.stream, context.plan),
        )
    ]
    late = left_out(recovery.settings, plan, list(recovery.streams.values()), recovery.topics)
    changes += [f"stream {name} reads its topics, and has begun since" for name in late]
    if changes:
        raise UsageError(f"plan {plan.id} no longer holds: {'; '.join(changes)}", "make a new plan")
    resume(recovery)


def resume(recovery: Recovery) -> None:
    """Continue with the first stage that is not done; nothing is done twice. A published plan is left as it is.

    Raises UsageError if it was aborted, if another plan of a stream is under way, or if the code has changed.
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
        _let_start(recovery)
        return
    with _working(recovery, check):
        stages = stages_of(plan)
        for number, stage in enumerate(stages, 1):
            if recovery.journal.done(stage.name, stage.stream) is None:
                _tell(recovery, StageBegun(number, len(stages), stage.name, stage.stream, stage.explain()))
                _run(recovery, stage)
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
        failure: Findings = {"error": str(error)[:500]}
        if stage.name == Audit.name:  # so that a later report, of an abort for example, still shows them
            failure = {**failure, "differences": stored(recovery.differences)}
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
            _let_start(recovery)
            raise UsageError(f"plan {plan.id} is {outcome}", next_step(plan.id, outcome))
        for context in recovery.each() if not journal.begun("abort") else ():
            if _has_changed(context):
                table = context.stream.primary.name
                raise UsageError(
                    f"plan {plan.id} has published table {table}, so it can no longer be given up",
                    f"finish it: {commands.resume(plan.id)}; then take it back: {commands.undo(plan.id)}",
                )

    with only_operator(settings, plan.id):
        if journal.outcome == "planned":  # nothing was begun, so no stream has to stop
            journal.write("abort", "done")
            _let_start(recovery)
            return
    with _working(recovery, check):
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


def undone_by(settings: Settings, plan: RecoveryPlan) -> str | None:
    """The plan that has undone a published one and was not undone itself."""
    for name in undos_of(settings, plan.id):
        if journal_of(settings, name).outcome == "published" and undone_by(settings, load(settings, name)) is None:
            return name
    return None


def under_way(settings: Settings, stream: str) -> RecoveryPlan | None:
    """The plan of this stream that was begun and is not over."""
    for name in names_of(settings, stream):
        if journal_of(settings, name).outcome not in OVER:
            return load(settings, name)
    return None


def needed_savepoints(settings: Settings, stream: str) -> dict[str, str]:
    """Savepoints of a stream that a plan under way needs, with the plan's name."""
    plan = under_way(settings, stream)
    if plan is None:
        return {}
    before = journal_of(settings, plan.id).done("keep", stream)
    base, until = plan.of(stream).base.savepoint, plan.of(stream).until
    needed = {base: plan.id} if base else {}
    needed |= {until.savepoint: plan.id} if until is not None else {}
    return needed | ({before["savepoint"]: plan.id} if before else {})


def report_of(settings: Settings, plan: str) -> Path:
    """The path of a plan's report, which is written when a stage fails or the plan is over."""
    return folder(settings, plan) / "report.html"


def _report(recovery: Recovery) -> None:
    """Write the report; a failure is only reported to the operator, and does not change the outcome."""
    path = report_of(recovery.settings, recovery.plan.id)
    try:
        write_report(path, recovery.plan, recovery.journal, recovery.differences, explain(recovery.plan))
    except OSError as error:
        recovery.events.tell(f"the report could not be written: {error}")


def _crash_point(recovery: Recovery, point: str, stream: str | None = None) -> None:
    crash_point(point, stream or recovery.plan.names[0], 0)


def _let_start(recovery: Recovery) -> None:
    """Remove the plan's stop requests, so that its streams may start."""
    for name in recovery.plan.names:
        stop_request.clear_for(recovery.settings, name, recovery.plan.id)


def _refuse_other_code(context: RecoveryContext) -> None:
    """Refuse to replay with other code than that of the plan, also long after the plan was made; a skip runs none."""
    if context.plan.skips and context.journal.done("keep") is not None:
        return
    now = code_version(context.stream, context.settings.flows)
    if context.journal.done("replay") is None and now != context.plan.saw.code:
        raise UsageError(
            f"plan {context.plan.id} no longer holds: the code is {now.hash}, not {context.plan.saw.code.hash}",
            f"deploy that code again, or give the plan up: {commands.abort(context.plan.id)}",
        )


@contextmanager
def _working(recovery: Recovery, check: Callable[[], None]) -> Iterator[None]:
    """Hold the plan and its streams. `check` may refuse before the streams are stopped, and again under their leases.

    At the end the plan's stop requests are removed if no stream was fenced, or if the plan is over.
    """
    settings, plan = recovery.settings, recovery.plan
    with only_operator(settings, plan.id):
        check()
        try:
            for name in plan.names:
                stop_request.ask_for(settings, name, plan.id)
            with _leases(recovery):
                for context in recovery.each():
                    mend(settings, context.stream, _reached(context))
                check()
                yield
        finally:
            if recovery.journal.outcome in OVER or not _has_fenced(recovery):
                _let_start(recovery)


def _has_fenced(recovery: Recovery) -> bool:
    """True if a table of the plan's streams is fenced, or if that cannot be told: then the streams stay stopped."""
    try:
        return any(
            recovery.journal.begun("fence", context.stream.name)
            and fenced_by(recovery.settings, context.stream, recovery.plan.id)
            for context in recovery.each()
        )
    except Exception as error:  # noqa: BLE001 - the error that has brought us here is the one to be raised
        recovery.events.tell(f"the streams stay stopped, since their tables cannot be looked at: {error}")
        return True


@contextmanager
def _leases(recovery: Recovery) -> Iterator[None]:
    """Hold the leases of all streams, taken in the order of their names, so that no two recoveries block each other."""
    settings, plan = recovery.settings, recovery.plan
    began = time.monotonic()
    with ExitStack() as leases:
        for name in sorted(plan.names):
            patience = settings.for_stream(name).stop_deadline.total_seconds() + recovery.patience
            left = max(patience - (time.monotonic() - began), 0.0)
            leases.enter_context(take(settings, name, purpose=f"recovery {plan.id}", wait=left))
        yield


def _reached(context: RecoveryContext) -> Txn:
    """The position that every table has reached, by the journal and the stream's record."""
    journal, plan, generation = context.journal, context.plan, context.record.generation
    if generation < plan.generation and journal.done("publish") is not None:
        return to_publish(context).at
    fenced = generation < plan.generation and journal.done("fence") is not None
    return Txn(plan.generation if fenced else generation, -1)


def refuse_at_work(settings: Settings, plan: RecoveryPlan) -> None:
    """Raise LeaseBusy while another process works on a plan: whatever its outcome is so far, that one goes on."""
    with only_operator(settings, plan.id):
        pass
