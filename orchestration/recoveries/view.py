"""What a person sees of a recovery in Dagster: lines and tags of its run, and marks on its streams' tables."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from orchestration.recoveries import metadata as made
from orchestration.recoveries.events import Ended, Event, Failed, PlanShown, Progress, Said, TableChange
from orchestration.recoveries.metadata import Metadata
from orchestration.recoveries.words import Pace
from orchestration.sessions.tags import PLAN_TAG, STAGE_TAG
from reprocessing.stages.recovery import StageBegun

SOON, LATE = 5.0, 300.0
"""Seconds between two lines of progress: at first, and at most. In between a twentieth of the replay's time so far."""


class Page(Protocol):
    """The places in Dagster that a recovery writes to."""

    @property
    def run_id(self) -> str:
        """Id of the run."""

    def line(self, text: str) -> None:
        """A line of the run's log."""

    def tag(self, name: str, value: str) -> None:
        """A tag of the run."""

    def observe(self, stream: str, metadata: Metadata) -> None:
        """An observation of each table of a stream."""

    def rebuilt(self, stream: str, metadata: Metadata) -> None:
        """A materialisation of each table of a stream."""


@dataclass
class View:
    """Turns the events of one process into lines, tags and marks; `clock` gives seconds."""

    page: Page
    clock: Callable[[], float] = time.monotonic
    shown: PlanShown | None = None
    ended: Ended | None = None
    failed: Failed | None = None
    stage: StageBegun | None = None
    changes: list[TableChange] = field(default_factory=list)
    _since: float = 0.0
    _pace: Pace | None = None
    _told: float = float("-inf")
    _done: int = 0

    def take(self, event: Event) -> None:
        """Show one event."""
        match event:
            case PlanShown():
                self.shown = event
                self.page.tag(PLAN_TAG, event.plan)
                self.page.line(event.text)
            case StageBegun():
                self._begin(event)
            case Progress():
                self._progress(event)
            case Said():
                self.page.line(event.text)
            case TableChange():
                self.changes.append(event)
                self.page.line("\n".join(event.lines))
            case Ended():
                self.ended = event
                self._end(event)
            case Failed():
                self.failed = event

    def stopped(self, outcome: str, words: str) -> None:
        """Mark the tables of a recovery that has stopped before its end; `words` say why."""
        how = "stopped" if outcome in ("applying", "aborting") else outcome
        self.page.tag(STAGE_TAG, f"{how} in {self._where}" if self._where else how)
        if self.shown is not None and self.stage is not None:
            for stream in self.shown.streams:
                self.page.observe(stream, made.not_over(self.shown, self.page.run_id, self._where, outcome, words))

    @property
    def in_words(self) -> str:
        """The plan and its stage, such as `plan inventory-0001, in stage replay`; empty before there is a plan."""
        if self.shown is None:
            return ""
        return f"plan {self.shown.plan}" + (f", in stage {self._where}" if self._where else "")

    @property
    def _where(self) -> str:
        return self.stage.name if self.stage is not None else ""

    def _begin(self, stage: StageBegun) -> None:
        assert self.shown is not None, "a plan is shown before its stages"
        if self.stage is None:
            for stream in self.shown.streams:
                self.page.observe(stream, made.under_recovery(self.shown, self.page.run_id))
        self._stage_over()
        self.stage, self._since = stage, self.clock()
        self._pace, self._told, self._done = Pace(self.clock), float("-inf"), 0
        of_which = f" ({stage.stream})" if stage.stream and len(self.shown.streams) > 1 else ""
        place = f"{stage.number} of {stage.stages}"
        self.page.tag(STAGE_TAG, f"{place}: {stage.name}{of_which}")
        self.page.line(f"stage {place}, {stage.name}{of_which}: {stage.words}")

    def _progress(self, progress: Progress) -> None:
        now = self.clock()
        self._pace = self._pace or Pace(self.clock)
        words = self._pace.words(progress.done, progress.total)
        over = progress.done >= progress.total
        pause = min(max((now - self._since) / 20, SOON), LATE)
        if not over and (now - self._told < (pause if progress.done > self._done else LATE)):
            return
        self._told, self._done = now, progress.done
        share = f" ({progress.done / progress.total:.0%})" if progress.total else ""
        self.page.line(f"replay: {words}{share}")

    def _stage_over(self) -> None:
        if self.stage is not None:
            self.page.line(f"stage {self.stage.name} took {self.clock() - self._since:.1f} s")

    def _end(self, ended: Ended) -> None:
        assert self.shown is not None
        self._stage_over()
        self.page.tag(STAGE_TAG, ended.outcome)
        following = made.next_words(ended.plan, ended.outcome)
        where = ", ".join(f"stream {stream} is in generation {number}" for stream, number in ended.generations.items())
        self.page.line(
            f"plan {ended.plan} is {ended.outcome}" + "".join(f"; {text}" for text in (where, following) if text)
        )
        if ended.outcome == "planned":
            return
        for stream in self.shown.streams:
            marks = made.after_recovery(self.shown, ended, stream, self.page.run_id)
            changed = ended.outcome == "published" and not ended.skips
            (self.page.rebuilt if changed else self.page.observe)(stream, marks)
