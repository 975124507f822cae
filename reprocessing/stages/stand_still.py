"""The stages before anything is rebuilt: a savepoint of the stopped stream, then the fence on its tables."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from reprocessing.planning.other_changes import rebuilt_since
from reprocessing.planning.snapshot import PlanningSnapshot, planning_snapshot
from reprocessing.plans.plan import moved
from reprocessing.rebuild.bounded import refuse_other_changes
from reprocessing.rebuild.context import Recovery
from reprocessing.rebuild.publish import fence, fenced_by, refuse_foreign
from reprocessing.rebuild.void import fence_topics, refuse_unfinished, stored
from reprocessing.stages.stage import Findings, OfOneStream, tables_of
from streaming_jobs.errors import PreflightRefused, UsageError
from streaming_jobs.sinks.tables import begin_late
from streaming_jobs.state import savepoints
from streaming_jobs.text import commands


@dataclass(frozen=True)
class TakeSavepoint(OfOneStream):
    """Takes a savepoint of the stream as it is."""

    name: ClassVar[str] = "keep"

    def explain(self) -> str:
        """One line of the plan's text."""
        return f"stop {self.stream} and keep everything in a savepoint, so that abort and undo can bring it back"

    def run(self, recovery: Recovery) -> Findings:
        """Check the plan again, now that the stream is stopped, and take the savepoint."""
        context = recovery.of(self.stream)
        context.base()
        if self.plan.until is not None:
            refuse_other_changes(context, waiting=True)
        snapshot = planning_snapshot(context.settings, context.stream, context.topics)
        refuse_foreign(context.settings, context.stream, snapshot.record)
        refuse_unfinished(context, snapshot.world.txn)
        committed = self._refuse(snapshot)
        savepoints.drop_outdated(context.settings, context.stream, snapshot.record, committed)
        note = f"before {self.plan.id}"
        taken = savepoints.take(context.settings, context.stream, snapshot.record, committed, "recovery", note)
        savepoints.keep_for_recovery(context.settings, taken)
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
            "batch": snapshot.world.batch,
            "position": {topic: dict(each) for topic, each in position.items()},
            "starts": {topic: dict(each) for topic, each in snapshot.record.starts.items()},
            "since": snapshot.world.batch - self.plan.saw.batch,
        }

    def _refuse(self, snapshot: PlanningSnapshot) -> int:
        """The last committed batch of the checkpoint; raises if the plan no longer holds or there is none."""
        words = moved(self.plan, snapshot.world)
        if words := [*words, *rebuilt_since(snapshot.settings, snapshot.stream, self.plan)]:
            raise PreflightRefused(
                f"plan {self.plan.id} no longer holds: {'; '.join(words)}",
                f"give it up, it has done nothing: {commands.abort(self.plan.id)}; then make a new plan",
            )
        committed = snapshot.around.checkpoint.committed
        keeps_the_last = (
            self.plan.until is not None
            or (self.plan.skips and self.plan.stateful)
            or bool(snapshot.stream.topic_sinks)  # a batch is repeated in another generation, and written again
        )
        if keeps_the_last and committed != snapshot.world.batch:
            way_out = "goes back" if self.plan.until is None else "goes back, without --until"
            raise UsageError(
                f"{snapshot.world.txn} is in the tables, and the {'state' if self.plan.stateful else 'checkpoint'} "
                "does not know it yet",
                f"let the stream finish it ({commands.run(self.stream, trigger='available-now')}), then resume; if it "
                f"cannot start, abort, and make a plan that {way_out}",
            )
        if committed is None:
            raise UsageError(f"stream {self.stream} has not finished a batch yet", "there is nothing to put right")
        return committed


@dataclass(frozen=True)
class Fence(OfOneStream):
    """The new generation on every table."""

    name: ClassVar[str] = "fence"

    def explain(self) -> str:
        """One line of the plan's text."""
        fenced = ", ".join([tables_of(self.plan), *self.plan.wrong_from])
        return f"fence {fenced} for generation {self.plan.generation}: only this plan starts the stream from here on"

    def run(self, recovery: Recovery) -> Findings:
        """Make one commit without rows per table.

        Before the first of them the stream may have run on, so its savepoint is taken again.
        """
        context = recovery.of(self.stream)
        if not fenced_by(context.settings, context.stream, self.plan.id):
            context.journal.write("keep", "done", TakeSavepoint(self.plan).run(recovery))
        begin_late(context.settings, context.stream, generation=context.record.generation)
        fence(context.settings, context.stream, self.plan.id, self.plan.generation)
        return {"in_flight": stored(fence_topics(context))} if context.stream.topic_sinks else {}
