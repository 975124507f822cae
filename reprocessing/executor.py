"""Apply, resume, abort and undo plans. One operator at a time: each holds the plan's lock and the stream's lease.

What is done is in the journal, so `resume` begins with the first stage that is not. The stream is asked to stop, and
stays stopped until the plan is over: its lease is held, and from the fence on the tables refuse every other start.
"""

from __future__ import annotations

import fcntl
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from reprocessing.journal import Journal, Outcome
from reprocessing.plan import Checks, Plan, folder, load, moved, names
from reprocessing.planner import look, make_plan
from reprocessing.stages import STAGES, Work, abort
from reprocessing.targets import Resolved, Target, instant_words
from streaming_jobs import savepoints
from streaming_jobs.code_version import code_version
from streaming_jobs.errors import LeaseBusy, UsageError
from streaming_jobs.files import private_folder, write_atomic
from streaming_jobs.lease import acquire, holder
from streaming_jobs.settings import Settings
from streaming_jobs.sources.topics import Topics
from streaming_jobs.stream import Stream

_STOP_EXTRA = 30.0
_MARK = "stopped for recovery plan "


@dataclass(frozen=True)
class Talk:
    """How a recovery speaks: lines, the progress of a replay, and the question before publishing."""

    tell: Callable[[str], None] = lambda _: None
    progress: Callable[[int, int], None] = lambda *_: None
    confirm: Callable[[Work], bool] = lambda _: True


def journal_of(settings: Settings, plan: str) -> Journal:
    """A plan's journal."""
    return Journal(folder(settings, plan) / "journal.jsonl")


def apply(settings: Settings, stream: Stream, topics: Topics, plan: Plan, talk: Talk) -> Work:
    """Carry a plan out that was not begun; raises UsageError for one that was, PreflightRefused for a stale one."""
    outcome = journal_of(settings, plan.id).outcome
    if outcome != "planned":
        raise UsageError(f"plan {plan.id} was applied already: it is {outcome}", _next(plan.id, outcome))
    words = moved(plan, look(settings, stream, topics).world)
    if words:
        raise UsageError(f"plan {plan.id} no longer holds: {'; '.join(words)}", "make a new plan")
    return resume(settings, stream, topics, plan, talk)


def resume(settings: Settings, stream: Stream, topics: Topics, plan: Plan, talk: Talk) -> Work:
    """Go on with the first stage that is not done; nothing is done twice. A plan that is over is left alone."""
    with _working(settings, stream, topics, plan, talk) as work:
        outcome = work.journal.outcome
        if outcome in ("aborted", "aborting"):
            raise UsageError(f"plan {plan.id} is {outcome}", _next(plan.id, outcome))
        if outcome == "planned" and (other := under_way(settings, stream.name)) is not None:
            raise UsageError(f"plan {other.id} of stream {stream.name} is under way", _next(other.id, "applying"))
        _same_code(work)
        for stage in STAGES:
            if work.journal.done(stage.name) is not None:
                continue
            talk.tell(f"{stage.name}: {stage.explain(plan)}")
            work.journal.write(stage.name, "begun")
            work.died(f"recover_{stage.name}_begun")
            try:
                found = stage.run(work)
            except Exception as error:
                work.journal.write(stage.name, "failed", {"error": str(error)[:500]})
                raise
            work.died(f"recover_{stage.name}_ran")
            work.journal.write(stage.name, "done", found)
        return work


def give_up(settings: Settings, stream: Stream, topics: Topics, plan: Plan, talk: Talk) -> Work:
    """Abort a plan that has published nothing: the stream goes on as it was, one generation later."""
    with _working(settings, stream, topics, plan, talk) as work:
        outcome = work.journal.outcome
        if outcome in ("aborted", "published"):
            raise UsageError(f"plan {plan.id} is {outcome}", _next(plan.id, outcome))
        if work.journal.begun("publish"):
            abort(work)  # says why not
        work.journal.write("abort", "begun")
        work.died("recover_abort_begun")
        found = abort(work)
        work.died("recover_abort_ran")
        work.journal.write("abort", "done", found)
        return work


def plan_undo(settings: Settings, stream: Stream, topics: Topics, plan: Plan) -> Plan:
    """The plan that takes a published one back: to the savepoint from before it, and what came since after that.

    Raises UsageError when it was not published, was undone already, or its savepoint is gone.
    """
    journal = journal_of(settings, plan.id)
    if journal.outcome != "published":
        raise UsageError(f"plan {plan.id} is {journal.outcome}, not published", _next(plan.id, journal.outcome))
    found = journal.done("keep")
    kept = savepoints.find(settings, stream.name, found["savepoint"]) if found else None
    if kept is None:
        raise UsageError(f"the savepoint from before plan {plan.id} was dropped", "it can no longer be undone")
    situation = look(settings, stream, topics)
    lives = {g.number: g for g in situation.record.generations}
    number: int | None = situation.record.generation
    while number is not None and lives[number].reason.startswith("abort of "):
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


def under_way(settings: Settings, stream: str) -> Plan | None:
    """The plan of this stream that is begun and not over."""
    for name in names(settings):
        plan = load(settings, name)
        if plan.stream == stream and journal_of(settings, name).outcome in ("applying", "aborting", "refused"):
            return plan
    return None


def needed_savepoints(settings: Settings, stream: str) -> dict[str, str]:
    """Savepoints that a plan under way needs, with the plan's name."""
    plan = under_way(settings, stream)
    if plan is None:
        return {}
    kept = journal_of(settings, plan.id).done("keep")
    found = {plan.base.savepoint: plan.id} if plan.base.savepoint else {}
    return found | ({kept["savepoint"]: plan.id} if kept else {})


def _same_code(work: Work) -> None:
    """Refuse to replay with other code than the plan names, however long the plan has lain."""
    now = code_version(work.stream, work.settings.flows)
    if work.journal.done("replay") is None and (now.hash, now.package) != work.plan.saw.code:
        raise UsageError(
            f"plan {work.plan.id} no longer holds: the code is {now.hash}, not {work.plan.saw.code[0]}",
            f"deploy that code again, or give the plan up: recourse recover abort {work.plan.id}",
        )


@contextmanager
def _working(settings: Settings, stream: Stream, topics: Topics, plan: Plan, talk: Talk) -> Iterator[Work]:
    if plan.stream != stream.name:
        raise UsageError(f"plan {plan.id} is of stream {plan.stream}", "name that stream's plan")
    with _only_operator(settings, plan):
        mark = _stop(settings, stream)
        own = settings.for_stream(stream.name)
        patience = own.stop_deadline.total_seconds() + _STOP_EXTRA
        try:
            lease = acquire(settings, stream.name, purpose=f"recovery {plan.id}", wait=patience)
        except LeaseBusy:
            if mark is not None and journal_of(settings, plan.id).outcome == "planned":
                mark.unlink(missing_ok=True)  # nothing was begun, so the stream goes on
            raise
        try:
            work = Work(
                settings=settings,
                stream=stream,
                plan=plan,
                topics=topics,
                journal=journal_of(settings, plan.id),
                tell=talk.tell,
                progress=talk.progress,
                confirm=lambda _: talk.confirm(work),
            )
            yield work
            if mark is not None and work.journal.outcome in ("published", "aborted"):
                mark.unlink(missing_ok=True)
        finally:
            lease.release()


@contextmanager
def _only_operator(settings: Settings, plan: Plan) -> Iterator[None]:
    with (private_folder(folder(settings, plan.id)) / "lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise LeaseBusy(f"somebody else is at plan {plan.id}", "wait until they are done") from error
        yield


def _stop(settings: Settings, stream: Stream) -> Path | None:
    """Ask a running stream to stop. The marker that asks is returned if it is ours: it goes when the plan is over."""
    marker = private_folder(settings.state / stream.name) / "stop"
    if marker.exists():
        return marker if marker.read_text(encoding="utf-8").startswith(_MARK) else None
    if holder(settings, stream.name) is None:
        return None
    write_atomic(marker, f"{_MARK}\n")
    return marker


def _next(plan: str, outcome: Outcome) -> str:
    return {
        "planned": f"apply it: recourse recover apply {plan}",
        "applying": f"go on with it: recourse recover resume {plan}",
        "refused": f"resume or abort it: recourse recover abort {plan}",
        "published": f"take it back: recourse recover undo {plan}",
        "aborting": f"finish that: recourse recover abort {plan}",
        "aborted": "make a new plan",
    }[outcome]
