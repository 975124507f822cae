"""What applying a plan does: one small class a stage, in order. The executor runs them, the explainer reads them.

Each stage may be run again from its beginning after a kill; what it found goes into the journal.

| stage    | what it does                                                        | published rows |
|----------|---------------------------------------------------------------------|----------------|
| keep     | the stream has stopped; a savepoint of it, for abort and undo       | old            |
| fence    | every table opens the new generation, for this plan alone           | old            |
| prepare  | the new generation's checkpoint and staging tables                  | old            |
| replay   | an ordinary session of the stream, into the staging tables          | old            |
| audit    | rules, and the difference to the published tables                   | old            |
| publish  | one commit a table                                                  | new            |
| switch   | the stream's record moves to the new generation                     | new            |
| finish   | staging goes, the stream may start                                  | new            |
"""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar, Protocol

from reprocessing import workshop
from reprocessing.audit import broken, compare
from reprocessing.plan import Plan, moved, staging
from reprocessing.planner import look
from reprocessing.publish import content_of, fence, misfit, publish, refuse_foreign
from reprocessing.work import Work
from streaming_jobs import generation as generations
from streaming_jobs import savepoints
from streaming_jobs.errors import PermanentError, PreflightRefused, RecourseError, TransientError, UsageError
from streaming_jobs.ledger import LedgerEntry, entries
from streaming_jobs.session import Session
from streaming_jobs.settings import Settings
from streaming_jobs.stream import Stream
from streaming_jobs.world import all_tables, ledger_file

Found = Mapping[str, Any]


class AuditRefused(PermanentError):
    """The rebuilt rows break a rule, or differ by more than the plan allows; nothing was published."""

    code = "REC-030"


class Stage(Protocol):
    """One stage: its name, what it will do in words, and doing it."""

    name: ClassVar[str]

    def explain(self, plan: Plan) -> str:
        """What it will do, as one line of the plan's text."""

    def run(self, work: Work) -> Found:
        """Do it, from the beginning whatever a kill has left; what it found goes into the journal."""


class Keep:
    """A savepoint of the stream as it is."""

    name: ClassVar[str] = "keep"

    def explain(self, plan: Plan) -> str:
        """What it will do."""
        return f"stop {plan.stream} and keep everything in a savepoint, so that abort and undo can bring it back"

    def run(self, work: Work) -> Found:
        """Look again now that the stream stands still, and take the savepoint."""
        work.base()
        found = look(work.settings, work.stream, work.topics)
        refuse_foreign(work.settings, work.stream, found.record)
        if words := moved(work.plan, found.world):
            raise PreflightRefused(
                f"plan {work.plan.id} no longer holds: {'; '.join(words)}",
                f"give it up, it has done nothing: recourse recover abort {work.plan.id}; then make a new plan",
            )
        committed = found.around.checkpoint.committed
        if committed is None:
            raise UsageError(f"stream {work.stream.name} has not finished a batch yet", "there is nothing to put right")
        savepoints.drop_outdated(work.settings, found.record, committed)
        taken = savepoints.take(work.settings, found.record, committed, "recovery", f"before {work.plan.id}")
        savepoints.keep_for_recovery(work.settings, taken)
        return {"savepoint": taken.id, "since": found.world.batch - work.plan.saw.batch}


class Fence:
    """The new generation on every table."""

    name: ClassVar[str] = "fence"

    def explain(self, plan: Plan) -> str:
        """What it will do."""
        return f"fence {_tables(plan)} for generation {plan.generation}: only this plan starts the stream from here on"

    def run(self, work: Work) -> Found:
        """One commit without rows a table."""
        fence(work.settings, work.stream, work.plan.id, work.plan.generation)
        return {}


class Prepare:
    """The replay's state folder and tables."""

    name: ClassVar[str] = "prepare"

    def explain(self, plan: Plan) -> str:
        """What it will do."""
        if plan.base.savepoint is None:
            return "staging tables and state start empty"
        state = "state and tables" if plan.stateful else "tables"
        return f"{state} start as of savepoint {plan.base.savepoint} (hard links, no copy)"

    def run(self, work: Work) -> Found:
        """Make them anew."""
        workshop.prepare(work.settings, work.plan, work.record, work.base())
        return {}


class Replay:
    """The ordinary session, in the workshop."""

    name: ClassVar[str] = "replay"

    def explain(self, plan: Plan) -> str:
        """What it will do."""
        seconds = "" if plan.seconds is None else f", about {plan.seconds:,.0f} s at the stream's own pace"
        return f"replay {plan.records:,} records with code {plan.saw.code[0]} into staging tables{seconds}"

    def run(self, work: Work) -> Found:
        """Run to the topic's end, and look whether that is as far as the stream had come."""
        began = time.monotonic()
        session = Session(work.own, [work.stream], trigger="available-now")
        over = threading.Event()
        watcher = threading.Thread(target=_watch, args=(session, work, over), daemon=True)
        watcher.start()
        try:
            code = session.run()
        finally:
            over.set()
            watcher.join()
        if code != 0:
            error = (session.running[0].status.error or {}) if session.running else {}
            permanent = error.get("permanent") == "true"
            raise (PermanentError if permanent else TransientError)(
                f"the replay failed: {error.get('code', '')} {error.get('found', 'see its log')}",
                f"recourse recover abort {work.plan.id}, correct it, and plan again"
                if permanent
                else f"go on with it: recourse recover resume {work.plan.id}",
            )
        last = _last(work.own, work.stream)
        kept = work.kept().ends
        reached = {r.topic: dict(r.end) for r in last.offsets}
        for topic, ends in kept.items():
            for partition, end in ends.items():
                if reached.get(topic, {}).get(partition, 0) < end:
                    raise PermanentError(
                        f"the replay ended at {reached}, before where the stream was, {kept}",
                        f"records are missing from topic {topic}; abort: recourse recover abort {work.plan.id}",
                    )
        return {"batch": last.batch, "seconds": round(time.monotonic() - began, 1), "records": _replayed(work, reached)}


class Audit:
    """Rules and differences."""

    name: ClassVar[str] = "audit"

    def explain(self, plan: Plan) -> str:
        """What it will do."""
        rules = "".join(f"; every row: {rule}" for rule in plan.checks.rules)
        bound = "" if plan.checks.max_changed is None else f"; at most {plan.checks.max_changed:.1%} of the rows change"
        return f"compare staging with the published tables{rules}{bound}"

    def run(self, work: Work) -> Found:
        """Compare; raises AuditRefused, which leaves the plan to be aborted or resumed."""
        plan, staged = work.plan, staging(work.settings, work.plan.id)
        refuse_foreign(work.settings, work.stream, work.record)
        bad = {
            rule: count for rule, count in broken(staged / work.stream.primary.name, plan.checks.rules).items() if count
        }
        work.differences = [
            compare(declared.name, work.settings.tables / declared.name, staged / declared.name, declared.keys)
            for declared, _ in all_tables(work.stream)
        ]
        said = [f"{count:,} rows break the rule {rule}" for rule, count in bad.items()]
        for declared, _ in all_tables(work.stream):
            said += misfit(work.settings.tables / declared.name, staged / declared.name)
        limit = plan.checks.max_changed
        said += [
            f"{d.share:.1%} of the rows of {d.table} change, at most {limit:.1%} may"
            for d in work.differences
            if limit is not None and d.share > limit
        ]
        if said:
            raise AuditRefused(
                "; ".join(said), f"correct the function and plan again: recourse recover abort {plan.id}"
            )
        if not work.talk.confirm(work):
            raise AuditRefused("not confirmed", f"resume or abort it: recourse recover abort {plan.id}")
        return {"differences": [dataclasses.asdict(replace(d, sample=())) for d in work.differences]}


class Publish:
    """The commits that make the rebuilt rows visible."""

    name: ClassVar[str] = "publish"

    def explain(self, plan: Plan) -> str:
        """What it will do."""
        return f"one commit a table makes the rebuilt rows the published ones: {_tables(plan)}"

    def run(self, work: Work) -> Found:
        """Publish the staging tables' files."""
        staged = staging(work.settings, work.plan.id)
        contents = {declared.name: content_of(staged / declared.name) for declared, _ in all_tables(work.stream)}
        last = _last(work.own, work.stream)
        done = publish(
            work.settings,
            work.stream,
            contents,
            plan=work.plan.id,
            at=last.txn,
            offsets=last.offsets,
            code=last.code,
            between=lambda _: work.crash_point("recover_publish_between"),
        )
        return {"tables": [dataclasses.asdict(table) for table in done]}


class Switch:
    """The record, the checkpoint and the ledger of the new generation become the stream's."""

    name: ClassVar[str] = "switch"

    def explain(self, plan: Plan) -> str:
        """What it will do."""
        return f"the stream goes on in generation {plan.generation}; generation {plan.saw.generation} stays on disk"

    def run(self, work: Work) -> Found:
        """Move the checkpoint, adopt the ledger's lines, then write the record."""
        name, number = work.stream.name, work.plan.generation
        record = work.record
        if record.generation == number:
            return {"generation": number}
        source = generations.checkpoint(work.own, name, number).folder
        target = generations.checkpoint(work.settings, name, number).folder
        if not target.exists():
            source.rename(target)
        work.crash_point("recover_switch_between")
        ledger_file(work.settings, name).adopt(ledger_file(work.own, name))
        replayed = generations.load(work.own, name)
        assert replayed is not None
        generations.save(
            work.settings,
            replace(
                replayed,
                generations=(*record.generations, workshop.opened_by(work.plan)),
                tables=record.tables,
                accepted=record.accepted,
            ),
        )
        return {"generation": number}


class Finish:
    """Staging goes."""

    name: ClassVar[str] = "finish"

    def explain(self, plan: Plan) -> str:
        """What it will do."""
        return f"remove staging; start the stream again: recourse streams run {plan.stream}, or Dagster does"

    def run(self, work: Work) -> Found:
        """Remove the workshop and the stop marker that the plan has set."""
        workshop.clear(work.settings, work.plan)
        return {}


STAGES: tuple[Stage, ...] = (Keep(), Fence(), Prepare(), Replay(), Audit(), Publish(), Switch(), Finish())


def _watch(session: Session, work: Work, over: threading.Event) -> None:
    """Tell how far the replay is, once a second."""
    ends = {(topic, p): (begin, end) for topic, p, begin, end in work.plan.ranges()}
    total = sum(end - begin for begin, end in ends.values())
    while not over.wait(1.0):
        for running in list(session.running):
            pipeline = running.pipeline
            if pipeline is None or running.status.batch is None:
                continue
            try:
                reached = pipeline.checkpoint.end(running.status.batch)
            except RecourseError:  # Spark is writing it
                continue
            done = sum(
                offset - ends.get((t, p), (offset, 0))[0] for t, each in reached.items() for p, offset in each.items()
            )
            work.talk.progress(done, max(total, done))


def _replayed(work: Work, reached: Mapping[str, Mapping[int, int]]) -> int:
    begins = {(topic, p): begin for topic, p, begin, _ in work.plan.ranges()}
    return sum(end - begins.get((t, p), 0) for t, each in reached.items() for p, end in each.items())


def _last(own: Settings, stream: Stream) -> LedgerEntry:
    found = entries(own.tables / stream.primary.name, 1)
    if not found or found[0][1].batch < 0:
        raise PermanentError("the replay wrote no batch", "the topic holds no records; abort the plan")
    return found[0][1]


def _tables(plan: Plan) -> str:
    return ", ".join(table.name for table in plan.saw.tables)
