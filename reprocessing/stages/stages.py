"""The stages of a recovery, one small class each; executor and explainer walk the same list.

Each stage may be run again from its beginning after a kill; the journal keeps its findings. A stage belongs to one
stream, or to all of the plan's streams together: all streams are fenced before any is rebuilt, and nothing is published
before everything that was rebuilt has been compared.

    follow               each stream   beside the running stream: replays until little is left
    compare              all streams   beside them: the audit of what was replayed, and the question
    take_savepoint       each stream   takes a savepoint of the stopped stream, for abort and undo
    fence                each          opens the new generation on every table, for this plan alone
    void_records         each          waits until no transaction is open in its topics; voids the wrong records
    append_records       each          appends the corrected records that a replay beside its stream has staged
    prepare              each          makes the new generation's checkpoint and staging tables
    replay               each          runs an ordinary session of the stream into the staging tables
    add_later_rows       each          adds the rows after the end of a bounded recovery, as they are
    audit                all streams   checks rules, compares with the published tables, asks for confirmation
    confirm              all           asks for confirmation if there are no rebuilt rows to compare
    publish              each          commits once per table: from here on readers see the new rows
    skip                 each          lets checkpoint, tables and record continue at the plan's offsets
    switch_generation    each          moves the stream's record to the new generation
    continue_generation  each          the same after a bounded recovery, which continues after the last batch
    clean_up             all           removes staging; the streams may start

A stream that is rewound has prepare, replay, publish and switch_generation; if its recovery is bounded, add_later_rows
and continue_generation. If the streams run meanwhile (`beside.py`), prepare, follow and compare come first, and the
replay reads what is left; a stream that reads a table, or a topic of the plan, is replayed when its writer has stopped.
A stream that skips forward has skip. A stream that writes topics has void_records, and its replay appends the corrected
records; those that it has made beside the stream are appended by append_records.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Protocol

from reprocessing.plan.journal import NOT_CONFIRMED, Journal, next_step
from reprocessing.plan.plan import RecoveryPlan, StreamRecoveryPlan, moved, opened_by
from reprocessing.plan.replay_range import rebuilt_since
from reprocessing.plan.snapshot import PlanningSnapshot, planning_snapshot
from reprocessing.plan.written_topics import GroupPosition, group_words
from reprocessing.replay import staging
from reprocessing.replay.difference import for_journal
from reprocessing.stages.beside import follow, left_words, published_then
from reprocessing.stages.bounded import (
    add_later_rows,
    combined,
    continue_after,
    publish_position,
    refuse_other_changes,
)
from reprocessing.stages.checks import RebuiltStream, checks_of
from reprocessing.stages.database_tables import refuse_unfinished_tables
from reprocessing.stages.publish import fence, fenced_by, has_published, publish, refuse_foreign
from reprocessing.stages.recovery import Recovery, RecoveryContext
from reprocessing.stages.reopen import check_skip, skip
from reprocessing.stages.replay import border_words, replay_batches, rows_past_the_border
from reprocessing.stages.staged_records import append_records, refuse_incomplete
from reprocessing.stages.void_ranges import (
    appended_until,
    border_offsets,
    fence_topics,
    fenced_versions,
    mark_topics,
    range_lists,
    refuse_ahead,
    refuse_left,
    refuse_unfinished,
    release,
    void_records,
)
from streaming_jobs.errors import PermanentError, PreflightRefused, UsageError
from streaming_jobs.ledger.positions import OffsetRange, decode, ends_of
from streaming_jobs.runtime import output_plans
from streaming_jobs.runtime.redrive_commits import refuse_begun
from streaming_jobs.sinks.stored import Content
from streaming_jobs.sinks.tables import begin_late
from streaming_jobs.state import savepoints, stream_record
from streaming_jobs.state.checkpoint import move
from streaming_jobs.state.redrive_requests import RedriveRequests
from streaming_jobs.state.stream_folder import StreamFolder
from streaming_jobs.text import commands
from streaming_jobs.text.spelling import counted

Result = Mapping[str, Any]


class AuditRefused(PermanentError):
    """The rebuilt rows break a rule, or differ by more than the plan allows; nothing was published.

    Look at the report that `recourse recover show PLAN` names. Then `recourse recover abort PLAN` lets the stream
    continue as it was; correct the code, or the rule, and plan anew.
    """

    code = "REC-030"


class Stage(Protocol):
    name: ClassVar[str]
    """In the journal and in the plan's text."""

    @property
    def stream(self) -> str | None:
        """None if the stage is of all streams of the plan."""

    def explain(self) -> str:
        """One line of the plan's text."""

    def run(self, recovery: Recovery) -> Result:
        """Run the stage from its beginning, also after a kill; returns the findings for the journal."""


@dataclass(frozen=True)
class OfOneStream:
    plan: StreamRecoveryPlan

    @property
    def stream(self) -> str:
        return self.plan.stream


def stages_of(plan: RecoveryPlan, *, beside: bool = False, staged: bool = False) -> tuple[Stage, ...]:
    """The stages in their order; `beside`: the streams run until take_savepoint; `staged`: they have done so before."""
    return tuple(_stages(plan, beside, staged))


def stages_now(plan: RecoveryPlan, journal: Journal, *, stopping: bool = False) -> tuple[Stage, ...]:
    """The stages of a plan that run now, or ran, by its journal; `stopping`: its streams stop, if they have not.

    A plan that was compared beside its streams keeps those stages: it was confirmed there.
    """
    followed, compared = journal.reached(Follow.name), journal.done(Compare.name) is not None
    begun = followed or journal.reached(Prepare.name)
    running = begun and not (stopping or journal.reached(TakeSavepoint.name))
    return stages_of(plan, beside=compared or running, staged=followed)


def _stages(plan: RecoveryPlan, beside: bool, staged: bool) -> Iterator[Stage]:
    rewound = [each for each in plan.streams if not each.skips]
    skipping = [each for each in plan.streams if each.skips]
    follow = plan.followed if beside else ()
    if beside:
        yield from map(Prepare, rewound)
        yield from map(Follow, follow)
        yield Compare(follow)
    yield from map(TakeSavepoint, plan.streams)
    yield from map(Fence, plan.streams)
    yield from (VoidRecords(each) for each in rewound if each.wrong_from)
    if not beside:
        yield from map(Prepare, rewound)
    if beside or staged:
        yield from (AppendRecords(each) for each in plan.followed if each.wrong_from)
    yield from (Replay(each, rest=each in follow) for each in rewound)
    yield from (AddLaterRows(each) for each in rewound if each.until is not None)
    if rewound:
        yield Audit(tuple(rewound), tuple(skipping), asks=len(follow) < len(rewound))
    else:
        yield Confirm(tuple(skipping))
    yield from map(Publish, rewound)
    yield from map(Skip, skipping)
    yield from (SwitchGeneration(each) if each.until is None else ContinueGeneration(each) for each in rewound)
    yield CleanUp(plan.streams)


def _table_names(plan: StreamRecoveryPlan) -> str:
    return ", ".join(table.name for table in plan.saw.tables)


@dataclass(frozen=True)
class TakeSavepoint(OfOneStream):
    name: ClassVar[str] = "take_savepoint"

    def explain(self) -> str:
        return f"stop {self.stream} and keep everything in a savepoint, so that abort and undo can bring it back"

    def run(self, recovery: Recovery) -> Result:
        """Check the plan again, now that the stream is stopped, and take the savepoint."""
        context = recovery.of(self.stream)
        context.base()
        refuse_begun(RedriveRequests.of(context.settings, self.stream))
        if self.plan.until is not None:
            refuse_other_changes(context, waiting=True)
        snapshot = planning_snapshot(context.settings, context.stream, context.topics)
        refuse_foreign(context.settings, context.stream, snapshot.record)
        refuse_unfinished(context, snapshot.planned_against.txn)
        refuse_ahead(context, snapshot.planned_against.txn)
        refuse_unfinished_tables(context, snapshot.planned_against.txn)
        committed = self._committed(snapshot)
        savepoints.drop_outdated(context.settings, context.stream, snapshot.record, committed)
        note = f"before {self.plan.id}"
        taken = savepoints.take(context.settings, context.stream, snapshot.record, committed, "recovery", note)
        savepoints.keep_for_recovery(context.settings, taken)
        if self.stream in recovery.leases:
            recovery.saved.add(self.stream)
        position = snapshot.history.position
        if self.plan.skips and all(
            offset <= position.get(t, {}).get(p, 0)
            for t, each in self.plan.wanted.items()
            for p, offset in each.items()
        ):
            raise UsageError(
                f"stream {self.stream} has read past the plan's offsets since",
                f"there is nothing left to skip: {commands.abort(self.plan.id)}",
            )
        return {
            "savepoint": taken.id,
            "batch": snapshot.planned_against.batch,
            "position": {topic: dict(each) for topic, each in position.items()},
            "starts": {topic: dict(each) for topic, each in snapshot.record.starts.items()},
            "since": snapshot.planned_against.batch - self.plan.saw.batch,
        }

    def _committed(self, snapshot: PlanningSnapshot) -> int:
        """The last committed batch of the checkpoint; raises if the plan no longer holds or there is none."""
        changes = moved(self.plan, snapshot.planned_against)
        if changes := [*changes, *rebuilt_since(snapshot.settings, snapshot.stream, self.plan)]:
            raise PreflightRefused(
                f"plan {self.plan.id} no longer holds: {'; '.join(changes)}",
                f"give it up, it has done nothing: {commands.abort(self.plan.id)}; then make a new plan",
            )
        committed = snapshot.preflight.checkpoint.committed
        keeps_the_last = (
            self.plan.until is not None
            or (self.plan.skips and self.plan.stateful)
            or bool(snapshot.stream.topic_sinks)  # a batch is repeated in another generation, and written again
            or bool(self.plan.wrong_versions)  # the same, and read again
        )
        if keeps_the_last and committed != snapshot.planned_against.batch:
            way_out = "goes back" if self.plan.until is None else "goes back, without --until"
            raise UsageError(
                f"{snapshot.planned_against.txn} is in the tables, and the "
                f"{'state' if self.plan.stateful else 'checkpoint'} does not know it yet",
                f"let the stream finish it ({commands.run(self.stream, trigger='available-now')}), then resume; if it "
                f"cannot start, abort, and make a plan that {way_out}",
            )
        if committed is None:
            raise UsageError(f"stream {self.stream} has not finished a batch yet", "there is nothing to recover")
        return committed


@dataclass(frozen=True)
class Fence(OfOneStream):
    name: ClassVar[str] = "fence"

    def explain(self) -> str:
        fenced = ", ".join([_table_names(self.plan), *self.plan.wrong_from])
        return f"fence {fenced} for generation {self.plan.generation}: only this plan starts the stream from here on"

    def run(self, recovery: Recovery) -> Result:
        """Make one commit without rows per table.

        Before the first of them the stream may have run on since an earlier stop: then its savepoint is taken again.
        """
        context = recovery.of(self.stream)
        if self.stream not in recovery.saved and not fenced_by(context.settings, context.stream, self.plan.id):
            context.journal.write(TakeSavepoint.name, "done", TakeSavepoint(self.plan).run(recovery))
        begin_late(context.settings, context.stream, generation=context.record.generation)
        fence(context.settings, context.stream, self.plan.id, self.plan.generation, lease=context.lease)
        in_flight = {"in_flight": range_lists(fence_topics(context))} if context.stream.topic_sinks else {}
        return {**in_flight, **fenced_versions(context)}


@dataclass(frozen=True)
class VoidRecords(OfOneStream):
    name: ClassVar[str] = "void_records"

    def explain(self) -> str:
        return (
            f"wait until no transaction is open in {', '.join(self.plan.wrong_from)}, note the end, and declare the "
            "wrong records void: no stream reads them again"
        )

    def run(self, recovery: Recovery) -> Result:
        findings = void_records(recovery.of(self.stream))
        for group in (GroupPosition(*each) for each in findings["groups"]):
            begins, ends = findings["begins"][group.topic], findings["ends"][group.topic]
            recovery.events.tell(f"  {group_words(group, begins, ends)}")
        return findings


@dataclass(frozen=True)
class AppendRecords(OfOneStream):
    name: ClassVar[str] = "append_records"

    def explain(self) -> str:
        return f"append the staged records to {', '.join(self.plan.wrong_from)}, batch by batch"

    def run(self, recovery: Recovery) -> Result:
        return append_records(recovery.of(self.stream))


@dataclass(frozen=True)
class Prepare(OfOneStream):
    name: ClassVar[str] = "prepare"

    def explain(self) -> str:
        if self.plan.base.savepoint is None:
            return "staging tables and state start empty"
        state = "state and tables" if self.plan.stateful and not self.plan.discards_state else "tables"
        empty = "; state starts empty" if self.plan.discards_state else ""
        return f"{state} start as of savepoint {self.plan.base.savepoint} (their files are shared){empty}"

    def run(self, recovery: Recovery) -> Result:
        context = recovery.of(self.stream)
        staging.prepare(context.settings, context.stream, self.plan, context.record, context.base())
        staging.sync_all(context.settings, self.plan)
        return {}


@dataclass(frozen=True)
class Follow(OfOneStream):
    name: ClassVar[str] = "follow"

    def explain(self) -> str:
        seconds = "" if self.plan.seconds is None else f", about {self.plan.seconds:,.0f} s at the stream's own pace"
        records = counted(self.plan.records, self.plan.unit)
        topics = f" and files, for {', '.join(self.plan.wrong_from)}," if self.plan.wrong_from else ""
        return (
            f"replay {records} with code {self.plan.saw.code.hash} into staging tables{topics} while the stream "
            f"runs{seconds}, until little is left"
        )

    def run(self, recovery: Recovery) -> Result:
        context = recovery.of(self.stream)
        findings = follow(context)
        staging.sync_all(context.settings, self.plan)
        recovery.events.tell(f"  the replay is {left_words(context, decode(findings['ends']))}")
        return findings


@dataclass(frozen=True)
class Replay(OfOneStream):
    name: ClassVar[str] = "replay"
    rest: bool = False
    """The replay has followed the running stream, and reads what is left."""

    def explain(self) -> str:
        if self.rest:
            return "replay what the stream has read since, to where it has stopped, and what came since"
        seconds = "" if self.plan.seconds is None else f", about {self.plan.seconds:,.0f} s at the stream's own pace"
        records = counted(self.plan.records, self.plan.unit)
        end = "" if self.plan.until is None else f", up to the end of batch {self.plan.until.batch} and no further,"
        written = ", ".join(self.plan.wrong_from)
        topics = f", and append the corrected records to {written}" if written else ""
        return f"replay {records}{end} with code {self.plan.saw.code.hash} into staging tables{topics}{seconds}"

    def run(self, recovery: Recovery) -> Result:
        context = recovery.of(self.stream)
        refuse_left(context)
        findings = recovery.replay(context)
        staging.sync_all(context.settings, self.plan)
        if self.plan.wrong_from:
            findings = {**findings, "appended": appended_until(context, border_offsets(context))}
        return {**findings, "batches": self._batches(context)}

    def _batches(self, context: RecoveryContext) -> Result:
        """The batches for the report; a ledger that cannot be read does not end the recovery."""
        try:
            return replay_batches(context)
        except (OSError, EOFError, ValueError) as error:
            context.events.tell(f"  the report will show no batches: {error}")
            return {}


@dataclass(frozen=True)
class AddLaterRows(OfOneStream):
    name: ClassVar[str] = "add_later_rows"

    def explain(self) -> str:
        assert self.plan.until is not None
        return f"add the rows that came after batch {self.plan.until.batch}, as they are, to the rebuilt ones"

    def run(self, recovery: Recovery) -> Result:
        return add_later_rows(recovery.of(self.stream))


@dataclass(frozen=True)
class Audit:
    """The checks and differences of every rebuilt stream, and the request to confirm all that the plan does.

    `skipping` are the plans of streams that skip records beside them: their tables are checked too, since no stream
    may be refused once another one has published.
    """

    name: ClassVar[str] = "audit"
    stream: ClassVar[None] = None
    plans: tuple[StreamRecoveryPlan, ...]
    skipping: tuple[StreamRecoveryPlan, ...] = ()
    asks: bool = True

    def explain(self) -> str:
        checks = dict.fromkeys(check.words() for plan in self.plans for check in checks_of(plan))
        parts = [*dict.fromkeys(map(_compared_words, self.plans)), *filter(None, checks)]
        return "; ".join([*parts, *([_ask_words(self.skipping)] if self.skipping else [])])

    def run(self, recovery: Recovery) -> Result:
        """Compare; raises AuditRefused, after which the plan can be aborted or resumed."""
        recovery.differences = []
        refusals: list[str] = []
        for plan in self.plans:
            context = recovery.of(plan.stream)
            refuse_foreign(context.settings, context.stream, context.record)
            rebuilt = self._rebuilt(context)
            for check in checks_of(plan, recovery.run_suite):
                refused = list(check.refusals(rebuilt))
                refusals += refused
                if check.words() and not refused:
                    recovery.events.tell(f"  passed: {check.words()}")
            recovery.events.tell(self._border_words(context))
            recovery.differences += rebuilt.differences
        _check_skips(recovery, self.skipping)
        if refusals:
            raise AuditRefused(
                "; ".join(refusals),
                f"give it up, correct the function and plan again: {commands.abort(recovery.plan.id)}",
            )
        if self.asks:
            _ask(recovery)
        return {"differences": for_journal(recovery.differences)}

    def _rebuilt(self, context: RecoveryContext) -> RebuiltStream:
        return RebuiltStream.of(context)

    def _border_words(self, context: RecoveryContext) -> str:
        return border_words(context)


@dataclass(frozen=True)
class Compare(Audit):
    """The audit beside the running streams, of the records that the replay has read so far."""

    name: ClassVar[str] = "compare"

    def _rebuilt(self, context: RecoveryContext) -> RebuiltStream:
        refuse_incomplete(context)  # here too, while the streams run
        return RebuiltStream(context, published_then(context), context.staged())

    def _border_words(self, context: RecoveryContext) -> str:
        return f"  compared as of batch {context.result(Follow.name)['batch']} of the running stream"


@dataclass(frozen=True)
class Confirm:
    name: ClassVar[str] = "confirm"
    stream: ClassVar[None] = None
    plans: tuple[StreamRecoveryPlan, ...]

    def explain(self) -> str:
        return _ask_words(self.plans)

    def run(self, recovery: Recovery) -> Result:
        _check_skips(recovery, self.plans)
        _ask(recovery)
        return {}


def _compared_words(plan: StreamRecoveryPlan) -> str:
    end = "as of where these end in the topics" if plan.until is None else f"as of batch {plan.until.batch}"
    return f"compare staging with the published tables, {end}"


def _ask_words(plans: Sequence[StreamRecoveryPlan]) -> str:
    records = sum(end - begin for plan in plans for _, _, begin, end in plan.skipped())
    return f"ask whether {'this one record' if records == 1 else f'these {records:,} records'} may be left out"


def _check_skips(recovery: Recovery, plans: Sequence[StreamRecoveryPlan]) -> None:
    for plan in plans:
        check_skip(recovery.of(plan.stream))


def _ask(recovery: Recovery) -> None:
    """Raise AuditRefused if the person who was asked has not confirmed."""
    if not recovery.events.confirm(recovery):
        raise AuditRefused(NOT_CONFIRMED, next_step(recovery.plan.id, "waits for confirmation"))


@dataclass(frozen=True)
class Publish(OfOneStream):
    name: ClassVar[str] = "publish"

    def explain(self) -> str:
        return f"one commit per table makes the rebuilt rows the published ones: {_table_names(self.plan)}"

    def run(self, recovery: Recovery) -> Result:
        context = recovery.of(self.stream)
        if self.plan.until is not None and not has_published(context.settings, context.stream, self.plan.id):
            refuse_other_changes(context)  # only before the last commit: until then the plan can be given up
        contents = {name: table.content() for name, table in combined(context).items()}
        position = publish_position(context)
        mark_topics(context, position.at)
        published = publish(
            context.settings,
            context.stream,
            contents,
            record=context.record,
            plan=self.plan.id,
            position=position,
            new=self._new(context, position.offsets),
            between=lambda _: context.crash_point("recover_publish_between"),
            lease=context.lease,
        )
        return {"tables": [dataclasses.asdict(table) for table in published]}

    def _new(self, context: RecoveryContext, offsets: Sequence[OffsetRange]) -> dict[str, Content]:
        """By table, the rows of records that no batch had read before; a bounded recovery reads none."""
        if self.plan.until is not None:
            return {name: table.no_rows() for name, table in context.staged().items()}
        return rows_past_the_border(context, ends_of(offsets))


@dataclass(frozen=True)
class Skip(OfOneStream):
    name: ClassVar[str] = "skip"

    def explain(self) -> str:
        return f"continue in generation {self.plan.generation} with the first record after them"

    def run(self, recovery: Recovery) -> Result:
        return skip(recovery.of(self.stream))


@dataclass(frozen=True)
class SwitchGeneration(OfOneStream):
    """The record, the checkpoint and the ledger of the new generation become the stream's."""

    name: ClassVar[str] = "switch_generation"

    def explain(self) -> str:
        opened, before = self.plan.generation, self.plan.saw.generation
        return f"the stream continues in generation {opened}; generation {before} stays on disk"

    def run(self, recovery: Recovery) -> Result:
        """Move the checkpoint, adopt the ledger's lines, then write the record."""
        context, number = recovery.of(self.stream), self.plan.generation
        record = context.record
        if record.generation == number:
            return {"generation": number}
        rebuilt = StreamFolder.of(context.replay_settings, self.stream)
        stream_folder = StreamFolder.of(context.settings, self.stream)
        source, target = rebuilt.checkpoint(number).folder, stream_folder.checkpoint(number).folder
        move(source, target)
        context.crash_point("recover_switch_generation_between")
        release(context)
        context.adopt_ledger()
        output_plans.adopt(stream_folder.output_plans, rebuilt.output_plans)
        replayed = stream_record.existing(context.replay_settings, self.stream)
        stream_record.save(
            context.settings,
            replace(
                replayed,
                generations=(*record.generations, opened_by(self.plan)),
                tables=record.tables,
                topics=record.topics if self.plan.discards_state else replayed.topics,
                accepted=record.accepted,
                tag=record.tag,
            ),
        )
        return {"generation": number}


@dataclass(frozen=True)
class ContinueGeneration(OfOneStream):
    """The new generation of a bounded recovery continues where the one before it ended."""

    name: ClassVar[str] = "continue_generation"

    def explain(self) -> str:
        opened, before = self.plan.generation, self.plan.saw.generation
        return (
            f"the stream continues in generation {opened}, after the last batch of generation {before}; no later "
            "record is read again"
        )

    def run(self, recovery: Recovery) -> Result:
        return continue_after(recovery.of(self.stream))


@dataclass(frozen=True)
class CleanUp:
    name: ClassVar[str] = "clean_up"
    stream: ClassVar[None] = None
    plans: tuple[StreamRecoveryPlan, ...]

    def explain(self) -> str:
        removal = "" if all(each.skips for each in self.plans) else "remove staging; "
        start = commands.run(*(each.stream for each in self.plans))
        what = "the stream" if len(self.plans) == 1 else "the streams"
        return f"{removal}start {what} again: {start}, or Dagster does"

    def run(self, recovery: Recovery) -> Result:
        for each in self.plans:
            staging.clear(recovery.settings, each)
        return {}
