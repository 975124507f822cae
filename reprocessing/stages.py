"""What applying a plan does: one small class per stage, in order. The executor runs them, the explainer reads them.

Each stage may be run again from its beginning after a kill; what it found goes into the journal.

| stage    | what it does                                                        | published rows |
|----------|---------------------------------------------------------------------|----------------|
| keep     | the stream has stopped; a savepoint of it, for abort and undo       | old            |
| fence    | every table opens the new generation, for this plan alone           | old            |
| prepare  | the new generation's checkpoint and staging tables                  | old            |
| replay   | an ordinary session of the stream, into the staging tables          | old            |
| audit    | rules, and the difference to the published tables                   | old            |
| publish  | one commit per table                                                  | new            |
| switch   | the stream's record moves to the new generation                     | new            |
| finish   | staging goes, the stream may start                                  | new            |

A plan that goes forward replays nothing:

| confirm  | somebody agrees that the records are not needed                     | old            |
| skip     | checkpoint, tables and record go on at the plan's offsets           | old, they stay |

in the order keep, fence, confirm, skip, finish.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar, Protocol

from reprocessing import staging as workshop
from reprocessing.audit import compare
from reprocessing.conditions import broken
from reprocessing.context import RecoveryContext
from reprocessing.journal import NOT_CONFIRMED, next_step
from reprocessing.plan import Plan, moved
from reprocessing.publish import fence, fenced_by, misfit, publish, refuse_foreign
from reprocessing.reopen import skip
from reprocessing.replay import last_entry, replay
from reprocessing.replay_end import kept_table
from reprocessing.snapshot import planning_snapshot
from streaming_jobs.errors import PermanentError, PreflightRefused, UsageError
from streaming_jobs.files import sync
from streaming_jobs.preflight.take_snapshot import ledger_file
from streaming_jobs.runtime import output_plans
from streaming_jobs.sinks.tables import all_tables, begin_deletes, existing_table
from streaming_jobs.spelling import counted
from streaming_jobs.state import savepoints, stream_record
from streaming_jobs.state.stream_folder import StreamFolder

Found = Mapping[str, Any]


class AuditRefused(PermanentError):
    """The rebuilt rows break a rule, or differ by more than the plan allows; nothing was published.

    Look at the report that `recourse recover show PLAN` names. Then `recourse recover abort PLAN` lets the stream go on
    as it was; correct the code, or the rule, and plan anew.
    """

    code = "REC-030"


class Stage(Protocol):
    """One stage: its name, what it will do in words, and doing it."""

    name: ClassVar[str]

    def explain(self, plan: Plan) -> str:
        """What it will do, as one line of the plan's text."""

    def run(self, context: RecoveryContext) -> Found:
        """Do it, from the beginning whatever a kill has left; what it found goes into the journal."""


class TakeSavepoint:
    """A savepoint of the stream as it is."""

    name: ClassVar[str] = "keep"

    def explain(self, plan: Plan) -> str:
        """What it will do."""
        return f"stop {plan.stream} and keep everything in a savepoint, so that abort and undo can bring it back"

    def run(self, context: RecoveryContext) -> Found:
        """Look again now that the stream stands still, and take the savepoint."""
        context.base()
        found = planning_snapshot(context.settings, context.stream, context.topics)
        refuse_foreign(context.settings, context.stream, found.record)
        if words := moved(context.plan, found.world):
            raise PreflightRefused(
                f"plan {context.plan.id} no longer holds: {'; '.join(words)}",
                f"give it up, it has done nothing: recourse recover abort {context.plan.id}; then make a new plan",
            )
        if context.plan.skips and context.plan.stateful and found.around.checkpoint.committed != found.world.batch:
            raise UsageError(
                f"{found.world.txn} is in the tables, and the state does not know it yet",
                f"let the stream finish it (recourse streams run {context.stream.name} --trigger available-now), then "
                "resume; if it cannot start, abort, and make a plan that goes back",
            )
        committed = found.around.checkpoint.committed
        if committed is None:
            raise UsageError(
                f"stream {context.stream.name} has not finished a batch yet", "there is nothing to put right"
            )
        savepoints.drop_outdated(context.settings, context.stream, found.record, committed)
        taken = savepoints.take(
            context.settings, context.stream, found.record, committed, "recovery", f"before {context.plan.id}"
        )
        savepoints.keep_for_recovery(context.settings, taken)
        at = found.history.position
        if context.plan.skips and all(
            offset <= at.get(t, {}).get(p, 0) for t, each in context.plan.wanted.items() for p, offset in each.items()
        ):
            raise UsageError(
                f"stream {context.stream.name} has come past the plan's offsets by itself",
                f"there is nothing left to skip: recourse recover abort {context.plan.id}",
            )
        return {
            "savepoint": taken.id,
            "batch": found.world.batch,
            "position": {topic: dict(each) for topic, each in at.items()},
            "since": found.world.batch - context.plan.saw.batch,
        }


class Fence:
    """The new generation on every table."""

    name: ClassVar[str] = "fence"

    def explain(self, plan: Plan) -> str:
        """What it will do."""
        return f"fence {_tables(plan)} for generation {plan.generation}: only this plan starts the stream from here on"

    def run(self, context: RecoveryContext) -> Found:
        """One commit without rows a table; until the first of them the stream may have run on, so it is kept again."""
        if not fenced_by(context.settings, context.stream, context.plan.id):
            context.journal.write("keep", "done", TakeSavepoint().run(context))
        begin_deletes(context.settings, context.stream, generation=context.record.generation)
        fence(context.settings, context.stream, context.plan.id, context.plan.generation)
        return {}


class Prepare:
    """The replay's state folder and tables."""

    name: ClassVar[str] = "prepare"

    def explain(self, plan: Plan) -> str:
        """What it will do."""
        if plan.base.savepoint is None:
            return "staging tables and state start empty"
        state = "state and tables" if plan.stateful and not plan.discards_state else "tables"
        empty = "; state starts empty" if plan.discards_state else ""
        return f"{state} start as of savepoint {plan.base.savepoint} (hard links, no copy){empty}"

    def run(self, context: RecoveryContext) -> Found:
        """Make them anew."""
        workshop.prepare(context.settings, context.stream, context.plan, context.record, context.base())
        workshop.sync_all(context.settings, context.plan)
        return {}


class Replay:
    """The ordinary session, in the workshop."""

    name: ClassVar[str] = "replay"

    def explain(self, plan: Plan) -> str:
        """What it will do."""
        seconds = "" if plan.seconds is None else f", about {plan.seconds:,.0f} s at the stream's own pace"
        return f"replay {counted(plan.records, 'record')} with code {plan.saw.code.hash} into staging tables{seconds}"

    def run(self, context: RecoveryContext) -> Found:
        """Run to the topic's end."""
        found = replay(context)
        workshop.sync_all(context.settings, context.plan)
        return found


class Audit:
    """Rules and differences."""

    name: ClassVar[str] = "audit"

    def explain(self, plan: Plan) -> str:
        """What it will do."""
        rules = "".join(f"; every row: {rule}" for rule in plan.checks.rules)
        bound = "" if plan.checks.max_changed is None else f"; at most {plan.checks.max_changed:.1%} of the rows change"
        return f"compare staging with the published tables, as of where these end in the topics{rules}{bound}"

    def run(self, context: RecoveryContext) -> Found:
        """Compare; raises AuditRefused, which leaves the plan to be aborted or resumed."""
        plan, stream = context.plan, context.stream
        refuse_foreign(context.settings, stream, context.record)
        published = {d.name: existing_table(context.settings, d, stream.name) for d, _ in all_tables(stream)}
        staged = {d.name: existing_table(context.own, d, stream.name) for d, _ in all_tables(stream)}
        bad = broken(staged[stream.primary.name].readable(), plan.checks.rules)
        context.events.tell(_as_of(context))
        context.differences = [
            compare(
                declared.name,
                published[declared.name].readable(),
                (kept_table(context, declared) or staged[declared.name]).readable(),
                declared.keys,
            )
            for declared, role in all_tables(stream)
            if role != "deletes"  # they follow from the rows, and are as old as the batches that noted them
        ]
        said = [each.words(rule) for rule, each in bad.items() if each.rows]
        for name, table in published.items():
            said += misfit(table, staged[name])
        limit = plan.checks.max_changed
        said += [
            f"{d.share:.1%} of the rows of {d.table} change, at most {limit:.1%} may"
            for d in context.differences
            if limit is not None and d.share > limit
        ]
        if said:
            raise AuditRefused(
                "; ".join(said), f"give it up, correct the function and plan again: recourse recover abort {plan.id}"
            )
        _ask(context)
        return {"differences": [dataclasses.asdict(replace(d, sample=())) for d in context.differences]}


class Publish:
    """The commits that make the rebuilt rows visible."""

    name: ClassVar[str] = "publish"

    def explain(self, plan: Plan) -> str:
        """What it will do."""
        return f"one commit per table makes the rebuilt rows the published ones: {_tables(plan)}"

    def run(self, context: RecoveryContext) -> Found:
        """Publish the staging tables' files."""
        staged = (existing_table(context.own, each, context.stream.name) for each, _ in all_tables(context.stream))
        contents = {table.name: table.content() for table in staged}
        last = last_entry(context.own, context.stream)
        begins = context.plan.base.ends  # so that who reads the log knows from where on the rows were rebuilt
        offsets = [replace(each, start=dict(begins.get(each.topic, {}))) for each in last.offsets]
        done = publish(
            context.settings,
            context.stream,
            contents,
            record=context.record,
            plan=context.plan.id,
            at=last.txn,
            offsets=offsets,
            code=last.code,
            between=lambda _: context.crash_point("recover_publish_between"),
        )
        return {"tables": [dataclasses.asdict(table) for table in done]}


class Confirm:
    """The question, where nothing is rebuilt that could be looked at."""

    name: ClassVar[str] = "confirm"

    def explain(self, plan: Plan) -> str:
        """What it will do."""
        records = sum(end - begin for _, _, begin, end in plan.skipped())
        return f"ask whether {'this one record' if records == 1 else f'these {records:,} records'} may be left out"

    def run(self, context: RecoveryContext) -> Found:
        """Ask; raises AuditRefused."""
        _ask(context)
        return {}


class Skip:
    """The stream goes on further ahead; nothing is rebuilt."""

    name: ClassVar[str] = "skip"

    def explain(self, plan: Plan) -> str:
        """What it will do."""
        return f"go on in generation {plan.generation} with the first record after them"

    def run(self, context: RecoveryContext) -> Found:
        """Open the generation there."""
        return skip(context)


class SwitchGeneration:
    """The record, the checkpoint and the ledger of the new generation become the stream's."""

    name: ClassVar[str] = "switch"

    def explain(self, plan: Plan) -> str:
        """What it will do."""
        return f"the stream goes on in generation {plan.generation}; generation {plan.saw.generation} stays on disk"

    def run(self, context: RecoveryContext) -> Found:
        """Move the checkpoint, adopt the ledger's lines, then write the record."""
        name, number = context.stream.name, context.plan.generation
        record = context.record
        if record.generation == number:
            return {"generation": number}
        source = StreamFolder.of(context.own, name).checkpoint(number).folder
        target = StreamFolder.of(context.settings, name).checkpoint(number).folder
        if not target.exists():
            source.rename(target)
            sync(target.parent)
        context.crash_point("recover_switch_between")
        ledger_file(context.settings, name).adopt(ledger_file(context.own, name))
        output_plans.adopt(
            StreamFolder.of(context.settings, name).output_plans, StreamFolder.of(context.own, name).output_plans
        )
        replayed = stream_record.load(context.own, name)
        assert replayed is not None
        stream_record.save(
            context.settings,
            replace(
                replayed,
                generations=(*record.generations, workshop.opened_by(context.plan)),
                tables=record.tables,
                topics=record.topics if context.plan.discards_state else replayed.topics,
                accepted=record.accepted,
            ),
        )
        return {"generation": number}


class CleanUp:
    """Staging goes."""

    name: ClassVar[str] = "finish"

    def explain(self, plan: Plan) -> str:
        """What it will do."""
        staging_goes = "" if plan.skips else "remove staging; "
        return f"{staging_goes}start the stream again: recourse streams run {plan.stream}, or Dagster does"

    def run(self, context: RecoveryContext) -> Found:
        """Remove the workshop and the stop marker that the plan has set."""
        workshop.clear(context.settings, context.plan)
        return {}


BACK: tuple[Stage, ...] = (
    TakeSavepoint(),
    Fence(),
    Prepare(),
    Replay(),
    Audit(),
    Publish(),
    SwitchGeneration(),
    CleanUp(),
)
FORWARD: tuple[Stage, ...] = (TakeSavepoint(), Fence(), Confirm(), Skip(), CleanUp())


def stages_of(plan: Plan) -> tuple[Stage, ...]:
    """The stages of a plan, in order."""
    return FORWARD if plan.skips else BACK


def _ask(context: RecoveryContext) -> None:
    if not context.events.confirm(context):
        raise AuditRefused(NOT_CONFIRMED, next_step(context.plan.id, "waits for confirmation"))


def _as_of(context: RecoveryContext) -> str:
    """Which moment of the replay is compared with the published tables."""
    since = context.found("replay").get("since", 0)
    if since is None:
        return (
            "  the replay has no batch that ends where the published tables do: what came since shows as a difference"
        )
    if not since:
        return "  compared where the published tables end"
    came = counted(since, "record")
    return (
        f"  compared where the published tables end; {came} that came since {'is' if since == 1 else 'are'} rebuilt too"
    )


def _tables(plan: Plan) -> str:
    return ", ".join(table.name for table in plan.saw.tables)
