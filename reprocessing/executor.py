"""Apply, resume, abort and undo plans. One operator at a time: each holds the plan's lock and the stream's lease.

What is done is in the journal, so `resume` begins with the first stage that is not. The stream is asked to stop, and
stays stopped until the plan is over: its lease is held, and from the fence on the tables refuse every other start.
"""

from __future__ import annotations

import fcntl
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from reprocessing.context import RecoveryContext, RecoveryEvents
from reprocessing.journal import Journal, next_step
from reprocessing.plan import Checks, Plan, folder, load, moved, names
from reprocessing.planner import make_plan
from reprocessing.publish import has_published
from reprocessing.reopen import abort
from reprocessing.replay import last_entry
from reprocessing.report import write_report
from reprocessing.snapshot import planning_snapshot
from reprocessing.stages import stages_of
from reprocessing.targets import Resolved, Target, instant_words
from streaming_jobs.errors import LeaseBusy, UsageError
from streaming_jobs.files import private_folder
from streaming_jobs.ledger import Txn
from streaming_jobs.preflight.torn_files import mend
from streaming_jobs.runtime.code_version import code_version
from streaming_jobs.settings import Settings
from streaming_jobs.sources.topics import Topics
from streaming_jobs.state import savepoints, stop_request
from streaming_jobs.state.lease import take
from streaming_jobs.stream import Stream

_STOP_EXTRA = 30.0


def journal_of(settings: Settings, plan: str) -> Journal:
    """A plan's journal."""
    return Journal(folder(settings, plan) / "journal.jsonl")


def apply(settings: Settings, stream: Stream, topics: Topics, plan: Plan, events: RecoveryEvents) -> RecoveryContext:
    """Carry a plan out that was not begun, or that waits for nothing but confirmation.

    Raises UsageError for any other one, and for a stale one.
    """
    outcome = journal_of(settings, plan.id).outcome
    if outcome == "waits for confirmation":
        return resume(settings, stream, topics, plan, events)
    if outcome != "planned":
        raise UsageError(f"plan {plan.id} was applied already: it is {outcome}", next_step(plan.id, outcome))
    words = moved(plan, planning_snapshot(settings, stream, topics).world)
    if words:
        raise UsageError(f"plan {plan.id} no longer holds: {'; '.join(words)}", "make a new plan")
    return resume(settings, stream, topics, plan, events)


def resume(settings: Settings, stream: Stream, topics: Topics, plan: Plan, events: RecoveryEvents) -> RecoveryContext:
    """Go on with the first stage that is not done; nothing is done twice. A plan that is over is left alone.

    Raises UsageError when it was aborted, when another plan of the stream is under way, or when the code is another.
    """
    context = RecoveryContext(settings, stream, plan, topics, journal_of(settings, plan.id), events)

    def check() -> None:
        if (outcome := context.journal.outcome) in ("aborted", "aborting"):
            raise UsageError(f"plan {plan.id} is {outcome}", next_step(plan.id, outcome))
        if outcome == "planned" and (other := under_way(settings, stream.name)) is not None:
            raise UsageError(
                f"plan {other.id} of stream {stream.name} is under way",
                next_step(other.id, journal_of(settings, other.id).outcome),
            )
        _same_code(context)

    if context.journal.outcome == "published":
        stop_request.clear_for(settings, plan.stream, plan.id)
        return context
    with _working(context, check):
        for stage in stages_of(plan):
            if context.journal.done(stage.name) is not None:
                continue
            events.tell(f"{stage.name}: {stage.explain(plan)}")
            context.journal.write(stage.name, "begun")
            context.crash_point(f"recover_{stage.name}_begun")
            try:
                found = stage.run(context)
            except Exception as error:
                context.journal.write(stage.name, "failed", {"error": str(error)[:500]})
                _report(context)
                raise
            context.crash_point(f"recover_{stage.name}_ran")
            context.journal.write(stage.name, "done", found)
        _report(context)
    return context


def give_up(settings: Settings, stream: Stream, topics: Topics, plan: Plan, events: RecoveryEvents) -> RecoveryContext:
    """Abort a plan that has published nothing: the stream goes on as it was, one generation later."""
    context = RecoveryContext(settings, stream, plan, topics, journal_of(settings, plan.id), events)

    def check() -> None:
        if (outcome := context.journal.outcome) in ("aborted", "published"):
            stop_request.clear_for(settings, plan.stream, plan.id)
            raise UsageError(f"plan {plan.id} is {outcome}", next_step(plan.id, outcome))
        if not context.journal.begun("abort") and has_published(settings, stream, plan.id):
            raise UsageError(
                f"plan {plan.id} has published table {stream.primary.name}, so it can no longer be given up",
                f"finish it: recourse recover resume {plan.id}; then take it back: recourse recover undo {plan.id}",
            )

    with _only_operator(settings, plan):
        if context.journal.outcome == "planned":  # nothing was begun, so nothing has to stop
            context.journal.write("abort", "done")
            stop_request.clear_for(settings, plan.stream, plan.id)
            return context
    with _working(context, check):
        context.journal.write("abort", "begun")
        context.crash_point("recover_abort_begun")
        found = abort(context)
        context.crash_point("recover_abort_ran")
        context.journal.write("abort", "done", found)
        _report(context)
    return context


def plan_undo(settings: Settings, stream: Stream, topics: Topics, plan: Plan) -> Plan:
    """The plan that takes a published one back: to the savepoint from before it, and what came since after that.

    Raises UsageError when it was not published, was undone already, or its savepoint is gone.
    """
    journal = journal_of(settings, plan.id)
    if journal.outcome != "published":
        raise UsageError(f"plan {plan.id} is {journal.outcome}, not published", next_step(plan.id, journal.outcome))
    if (undo := undone_by(settings, plan)) is not None:
        raise UsageError(
            f"plan {plan.id} was undone by {undo} already", f"to have it again: recourse recover undo {undo}"
        )
    found = journal.done("keep")
    kept = savepoints.find(settings, stream.name, found["savepoint"]) if found else None
    if kept is None:
        raise UsageError(f"the savepoint from before plan {plan.id} was dropped", "it can no longer be undone")
    situation = planning_snapshot(settings, stream, topics)
    lives = {g.number: g for g in situation.record.generations}
    number: int | None = situation.record.generation
    while number is not None and lives[number].aborts:
        number = lives[number].from_generation
    if number != plan.generation:
        raise UsageError(
            f"stream {stream.name} is in generation {situation.record.generation}; plan {plan.id} opened "
            f"{plan.generation}",
            "undo the later recovery first",
        )
    resolved = Resolved(kept.txn, kept.ends, (f"everything as it was on {instant_words(kept.taken_at)}",))
    return make_plan(
        situation, Target("savepoint", f"from before {plan.id}"), Checks(), resolved=resolved, undoes=plan.id, base=kept
    )


def undone_by(settings: Settings, plan: Plan) -> str | None:
    """The plan that has taken a published one back and was not taken back itself."""
    for name in names(settings):
        if name.rpartition("-")[0] != plan.stream or journal_of(settings, name).outcome != "published":
            continue
        undo = load(settings, name)
        if undo.undoes == plan.id and undone_by(settings, undo) is None:
            return name
    return None


def under_way(settings: Settings, stream: str) -> Plan | None:
    """The plan of this stream that is begun and not over."""
    for name in names(settings):
        mine = name.rpartition("-")[0] == stream
        if mine and journal_of(settings, name).outcome not in ("planned", "published", "aborted"):
            return load(settings, name)
    return None


def needed_savepoints(settings: Settings, stream: str) -> dict[str, str]:
    """Savepoints that a plan under way needs, with the plan's name."""
    plan = under_way(settings, stream)
    if plan is None:
        return {}
    kept = journal_of(settings, plan.id).done("keep")
    found = {plan.base.savepoint: plan.id} if plan.base.savepoint else {}
    return found | ({kept["savepoint"]: plan.id} if kept else {})


def report_of(settings: Settings, plan: str) -> Path:
    """Where a plan's report lies, once it was carried out as far as it goes."""
    return folder(settings, plan) / "report.html"


def _report(context: RecoveryContext) -> None:
    """What could not be written is told, and changes nothing of the outcome."""
    try:
        write_report(report_of(context.settings, context.plan.id), context.plan, context.journal, context.differences)
    except OSError as error:
        context.events.tell(f"the report could not be written: {error}")


def _same_code(context: RecoveryContext) -> None:
    """Refuse to replay with other code than the plan names, however long the plan has lain."""
    now = code_version(context.stream, context.settings.flows)
    if context.journal.done("replay") is None and now != context.plan.saw.code:
        raise UsageError(
            f"plan {context.plan.id} no longer holds: the code is {now.hash}, not {context.plan.saw.code.hash}",
            f"deploy that code again, or give the plan up: recourse recover abort {context.plan.id}",
        )


@contextmanager
def _working(context: RecoveryContext, check: Callable[[], None]) -> Iterator[None]:
    """Hold the plan and the stream. `check` refuses before the stream is stopped, and again once nobody else can act.

    The stream may start again, if the plan has stopped it, when nothing was begun or the plan is over.
    """
    if context.plan.stream != context.stream.name:
        raise UsageError(f"plan {context.plan.id} is of stream {context.plan.stream}", "name that stream's plan")
    name = context.stream.name
    patience = context.settings.for_stream(name).stop_deadline.total_seconds() + _STOP_EXTRA
    with _only_operator(context.settings, context.plan):
        check()
        stop_request.ask_for(context.settings, name, context.plan.id)
        try:
            with take(context.settings, name, purpose=f"recovery {context.plan.id}", wait=patience):
                mend(context.settings, context.stream, _reached(context))
                check()
                yield
        finally:
            if context.journal.outcome in ("planned", "published", "aborted"):
                stop_request.clear_for(context.settings, name, context.plan.id)


def _reached(context: RecoveryContext) -> Txn:
    """Where the journal, or the stream's record, says that every table is."""
    journal, plan, generation = context.journal, context.plan, context.record.generation
    if generation < plan.generation and journal.done("publish") is not None:
        return last_entry(context.own, context.stream).txn
    fenced = generation < plan.generation and journal.done("fence") is not None
    return Txn(plan.generation if fenced else generation, -1)


@contextmanager
def _only_operator(settings: Settings, plan: Plan) -> Iterator[None]:
    with (private_folder(folder(settings, plan.id)) / "lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise LeaseBusy(f"somebody else is at plan {plan.id}", "wait until they are done") from error
        yield
