"""The work of one launch, in the process of the recovery: plan, carry out, report. Without Dagster."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

from orchestration.recoveries.events import ChangedTable, Ended, Event, OffsetSpan, PlanShown, Progress, Said
from orchestration.recoveries.request import Launch, carry_out, generations, make_requested, make_undo, topics_of
from reprocessing import executor
from reprocessing.plan.journal import journal_of
from reprocessing.plan.plan import RecoveryPlan
from reprocessing.plan.plan_file import folder, load, undos_of
from reprocessing.replay.words import difference_lines
from reprocessing.stages.recovery import Recovery, RecoveryEvents, StageBegun
from reprocessing.stages.stages import AuditRefused
from streaming_jobs.catalog.topology import Topology
from streaming_jobs.settings import Settings

WAITS = "waits for confirmation"
_UNDER_WAY = ("applying", WAITS, "refused")
"""Outcomes of a plan that has begun and has not ended."""


@dataclass
class Worker:
    settings: Settings
    topology: Topology
    emit: Callable[[Event], None]
    _stage: StageBegun | None = None
    _compared: bool = False

    def run(self, launch: Launch) -> None:
        """Carry out a launch and report its end; raises the error of the planner or of the recovery."""
        apply = partial(self._apply, stop_first=launch.stop_first)
        if launch.request is not None:
            made = make_requested(self.settings, self.topology, lambda: topics_of(self.settings), launch.request)
            if launch.do == "plan":
                self._show(made)
                self.emit(Ended(made.id, "planned"))
                return
            self._carry_out(made, apply, launch.pause)
        elif launch.do == "undo":
            self._carry_out(self._undo_of(launch.plan), apply, launch.pause)
        else:
            resume = partial(executor.resume, stop_first=launch.stop_first)
            acts: dict[str, Callable[[Recovery], None]] = {
                "apply": apply,
                "resume": resume,
                "abort": executor.give_up,
            }
            self._carry_out(load(self.settings, launch.plan), acts[launch.do], launch.pause)

    def _undo_of(self, name: str) -> RecoveryPlan:
        """The plan that undoes plan `name`: an unfinished undo, else a new one."""
        for undo in undos_of(self.settings, name):
            if journal_of(self.settings, undo).outcome in _UNDER_WAY:
                return load(self.settings, undo)
        return make_undo(self.settings, self.topology, name)

    def _apply(self, recovery: Recovery, *, stop_first: bool) -> None:
        """Apply a plan, or continue it where it was cut off."""
        if recovery.journal.outcome != "applying":
            executor.apply(recovery, stop_first=stop_first)
            return
        last = recovery.journal.lines()[-1]
        self.emit(Said(f"plan {recovery.plan.id} was begun and is not over (stage {last.stage}); it continues there"))
        executor.resume(recovery, stop_first=stop_first)

    def _carry_out(self, plan: RecoveryPlan, act: Callable[[Recovery], None], pause: bool) -> None:
        self._show(plan)
        begun: list[Recovery] = []
        events = RecoveryEvents(
            tell=lambda text: self.emit(Said(text.strip())),
            progress=self._progress,
            confirm=lambda recovery: self._compare(recovery) and not pause,
            stage=self._begin,
        )
        try:
            recovery = carry_out(self.settings, self.topology, plan, events, act, begun.append)
        except AuditRefused:
            (recovery,) = begun
            self._compare(recovery)
            if not pause or recovery.journal.outcome != WAITS:
                raise
        outcome = recovery.journal.outcome
        spans = list(spans_of(recovery)) if outcome == "published" else []
        self.emit(Ended(plan.id, outcome, generations(recovery), spans, plan.skips))

    def _begin(self, stage: StageBegun) -> None:
        self._stage = stage
        self.emit(stage)

    def _progress(self, done: int, total: int) -> None:
        self.emit(Progress(None if self._stage is None else self._stage.stream, done, total))

    def _show(self, plan: RecoveryPlan) -> None:
        place = folder(self.settings, plan.id)
        text = executor.explained(self.settings, plan)
        self.emit(PlanShown(plan.id, text, plan.target, list(plan.names), str(place), plan.records, plan.undoes))

    def _compare(self, recovery: Recovery) -> bool:
        """Report what the audit found, once; returns True."""
        if not self._compared:
            self._compared = True
            for each in recovery.differences:
                lines = [line.strip() for line in difference_lines(each)]
                self.emit(ChangedTable(each.table, each.old_rows, each.new_rows, *each.counts, lines))
        return True


def spans_of(recovery: Recovery) -> Iterator[OffsetSpan]:
    """The offsets that a published recovery has replayed or skipped."""
    for plan in recovery.plan.streams:
        if plan.skips:
            for topic, partition, begin, end in plan.skipped():
                yield OffsetSpan(plan.stream, topic, partition, begin, end)
            continue
        found = recovery.journal.done("replay", plan.stream) or {}
        for topic, partition, begin, planned in plan.ranges():
            end = planned
            with contextlib.suppress(KeyError):
                end = found["ends"][topic][str(partition)]  # the replay includes newer records
            yield OffsetSpan(plan.stream, topic, partition, begin, end)
