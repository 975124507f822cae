"""The stages that rebuild one stream beside its published rows, and put the rebuilt rows in their place."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

from reprocessing.plans.plan import opened_by
from reprocessing.rebuild import staging
from reprocessing.rebuild.bounded import combined, refuse_other_changes, to_publish
from reprocessing.rebuild.context import Recovery, RecoveryContext
from reprocessing.rebuild.publish import has_published, publish
from reprocessing.rebuild.replay_end import rows_past_the_border
from reprocessing.rebuild.void import appended_until, border_offsets, mark_topics, release
from reprocessing.report.batches import replay_batches
from reprocessing.stages.stage import Findings, OfOneStream, tables_of
from streaming_jobs.ledger.positions import OffsetRange, ends_of
from streaming_jobs.platform.files import sync
from streaming_jobs.preflight.snapshot import ledger_file
from streaming_jobs.runtime import output_plans
from streaming_jobs.sinks.stored import Content
from streaming_jobs.state import stream_record
from streaming_jobs.state.stream_folder import StreamFolder
from streaming_jobs.text.spelling import counted


@dataclass(frozen=True)
class Prepare(OfOneStream):
    """The replay's state folder and tables."""

    name: ClassVar[str] = "prepare"

    def explain(self) -> str:
        """One line of the plan's text."""
        if self.plan.base.savepoint is None:
            return "staging tables and state start empty"
        state = "state and tables" if self.plan.stateful and not self.plan.discards_state else "tables"
        empty = "; state starts empty" if self.plan.discards_state else ""
        return f"{state} start as of savepoint {self.plan.base.savepoint} (hard links, no copy){empty}"

    def run(self, recovery: Recovery) -> Findings:
        """Make the folder and the tables anew."""
        context = recovery.of(self.stream)
        staging.prepare(context.settings, context.stream, self.plan, context.record, context.base())
        staging.sync_all(context.settings, self.plan)
        return {}


@dataclass(frozen=True)
class Replay(OfOneStream):
    """The ordinary session, on the staging tables."""

    name: ClassVar[str] = "replay"

    def explain(self) -> str:
        """One line of the plan's text."""
        seconds = "" if self.plan.seconds is None else f", about {self.plan.seconds:,.0f} s at the stream's own pace"
        records = counted(self.plan.records, self.plan.unit)
        end = "" if self.plan.until is None else f", up to the end of batch {self.plan.until.batch} and no further,"
        written = ", ".join(self.plan.wrong_from)
        topics = f", and append the corrected records to {written}" if written else ""
        return f"replay {records}{end} with code {self.plan.saw.code.hash} into staging tables{topics}{seconds}"

    def run(self, recovery: Recovery) -> Findings:
        """Run the session to the topics' end, or to that of a bounded recovery."""
        context = recovery.of(self.stream)
        findings = recovery.replay(context)
        staging.sync_all(context.settings, self.plan)
        if self.plan.wrong_from:
            findings = {**findings, "appended": appended_until(context, border_offsets(context))}
        return {**findings, "batches": self._batches(context)}

    def _batches(self, context: RecoveryContext) -> Findings:
        """The batches for the report; a ledger that cannot be read does not end the recovery."""
        try:
            return replay_batches(context)
        except (OSError, EOFError, ValueError) as error:
            context.events.tell(f"  the report will show no batches: {error}")
            return {}


@dataclass(frozen=True)
class Publish(OfOneStream):
    """The commits that make the rebuilt rows visible."""

    name: ClassVar[str] = "publish"

    def explain(self) -> str:
        """One line of the plan's text."""
        return f"one commit per table makes the rebuilt rows the published ones: {tables_of(self.plan)}"

    def run(self, recovery: Recovery) -> Findings:
        """Publish the staging tables' files."""
        context = recovery.of(self.stream)
        if self.plan.until is not None and not has_published(context.settings, context.stream, self.plan.id):
            refuse_other_changes(context)  # not after the last commit: then nobody can give the plan up any more
        contents = {name: table.content() for name, table in combined(context).items()}
        said = to_publish(context)
        mark_topics(context, said.at)
        published = publish(
            context.settings,
            context.stream,
            contents,
            record=context.record,
            plan=self.plan.id,
            at=said.at,
            offsets=said.offsets,
            code=said.code,
            new=self._new(context, said.offsets),
            between=lambda _: context.crash_point("recover_publish_between"),
        )
        return {"tables": [dataclasses.asdict(table) for table in published]}

    def _new(self, context: RecoveryContext, offsets: Sequence[OffsetRange]) -> dict[str, Content]:
        """By table, the rows of records that no batch had read before; a bounded recovery reads none."""
        if self.plan.until is not None:
            return {name: table.no_rows() for name, table in context.staged().items()}
        return rows_past_the_border(context, ends_of(offsets))


@dataclass(frozen=True)
class SwitchGeneration(OfOneStream):
    """The record, the checkpoint and the ledger of the new generation become the stream's."""

    name: ClassVar[str] = "switch"

    def explain(self) -> str:
        """One line of the plan's text."""
        opened, before = self.plan.generation, self.plan.saw.generation
        return f"the stream continues in generation {opened}; generation {before} stays on disk"

    def run(self, recovery: Recovery) -> Findings:
        """Move the checkpoint, adopt the ledger's lines, then write the record."""
        context, number = recovery.of(self.stream), self.plan.generation
        record = context.record
        if record.generation == number:
            return {"generation": number}
        rebuilt = StreamFolder.of(context.own, self.stream)
        stream_folder = StreamFolder.of(context.settings, self.stream)
        source, target = rebuilt.checkpoint(number).folder, stream_folder.checkpoint(number).folder
        if not target.exists():
            source.rename(target)
            sync(target.parent)
        context.crash_point("recover_switch_between")
        release(context)
        ledger_file(context.settings, self.stream).adopt(ledger_file(context.own, self.stream))
        output_plans.adopt(stream_folder.output_plans, rebuilt.output_plans)
        replayed = stream_record.load(context.own, self.stream)
        assert replayed is not None
        stream_record.save(
            context.settings,
            replace(
                replayed,
                generations=(*record.generations, opened_by(self.plan)),
                tables=record.tables,
                topics=record.topics if self.plan.discards_state else replayed.topics,
                accepted=record.accepted,
            ),
        )
        return {"generation": number}
