"""The journal of a recovery: one line per step, durable before the next begins.

`<state>/recoveries/<plan>/journal.jsonl`. A stage is begun, then done; a kill leaves a stage begun, and each stage may
be run again from its beginning. A line that a kill of an earlier version cut off is ignored.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from reprocessing.plan.plan_file import plan_object
from streaming_jobs.errors import PreflightRefused
from streaming_jobs.ledger.entry import LedgerEntry
from streaming_jobs.platform import json_lines
from streaming_jobs.settings import Settings
from streaming_jobs.storage.object_files import ObjectHandle
from streaming_jobs.text import commands

State = Literal["begun", "done", "failed"]
PlanOutcome = Literal["planned", "applying", "waits for confirmation", "published", "aborting", "aborted", "refused"]

OVER = ("planned", "published", "aborted")
"""Outcomes of a plan that stops no stream."""
NOT_CONFIRMED = "not confirmed"
"""The error in the journal if publishing was not confirmed."""

_FORMER_NAMES = {
    "take_savepoint": "keep",
    "void_records": "settle",
    "add_later_rows": "combine",
    "switch_generation": "switch",
    "continue_generation": "switch",
    "clean_up": "finish",
}
"""Names of stages in journals of earlier versions, which a home may still have."""


@dataclass(frozen=True)
class Line:
    """One step: its stage, its state, its time (seconds since 1970), its findings (`found`), and its stream.

    A line without a stream is of all streams of the plan: of a stage that they share, or of a plan with only one.
    """

    stage: str
    state: State
    at: float
    found: Mapping[str, Any]
    stream: str | None = None

    def is_of(self, *stages: str) -> bool:
        return any(self.stage in (stage, _FORMER_NAMES.get(stage)) for stage in stages)


@dataclass(frozen=True)
class Journal:
    """The journal of one plan; with `stream`, of the stages of one of its streams."""

    handle: ObjectHandle
    stream: str | None = None

    def lines(self) -> list[Line]:
        """All complete lines of the plan, oldest first."""
        return [Line(**value) for value in json_lines.read(self.handle)]

    def write(
        self, stage: str, state: State, findings: Mapping[str, Any] | None = None, *, stream: str | None = None
    ) -> None:
        """Add a line; it is durable when this returns. Raises TransientError if another process adds one meanwhile."""
        line = {"stage": stage, "state": state, "at": round(time.time(), 3), "found": dict(findings or {})}
        if (stream := stream or self.stream) is not None:
            line["stream"] = stream
        json_lines.add(self.handle, line, attempts=1)  # one process works on a plan: the other line would be unknown

    def done(self, stage: str, stream: str | None = None) -> Mapping[str, Any] | None:
        """The findings of a stage of a stream that is done; None if it is not."""
        return next((line.found for line in reversed(self._of(stage, stream)) if line.state == "done"), None)

    def begun(self, stage: str, stream: str | None = None) -> bool:
        return bool(self._of(stage, stream))

    def first_begun(self, stage: str) -> float | None:
        """When a stage of a stream was begun first, in seconds since 1970; None if it was not."""
        return next((line.at for line in self._of(stage, None) if line.state == "begun"), None)

    def reached(self, stage: str) -> bool:
        """True if a stage was begun, of whichever stream."""
        return any(line.is_of(stage) for line in self.lines())

    def _of(self, stage: str, stream: str | None) -> list[Line]:
        streams = (None, stream or self.stream)
        return [line for line in self.lines() if line.is_of(stage) and line.stream in streams]

    def of(self, stream: str) -> Journal:
        return Journal(self.handle, stream)

    @property
    def outcome(self) -> PlanOutcome:
        plan = Journal(self.handle)
        if plan.done("abort") is not None:
            return "aborted"
        if plan.begun("abort"):
            return "aborting"
        if plan.done("clean_up") is not None:
            return "published"
        lines = self.lines()
        if not lines:
            return "planned"
        last = lines[-1]
        if last.is_of("audit", "confirm", "compare") and last.state == "failed":
            return "waits for confirmation" if NOT_CONFIRMED in str(last.found.get("error")) else "refused"
        return "applying"


def journal_of(settings: Settings, plan: str) -> Journal:
    return Journal(plan_object(settings, plan, "journal.jsonl"))


class RecoveryUnderWay(PreflightRefused):
    """A recovery has fenced the table, or has published to it, and is not over."""


def refuse_under_way(table: str, entry: LedgerEntry, generation: int) -> None:
    """Raise RecoveryUnderWay if the newest entry of a table is of a recovery that has not switched the generation yet.

    `generation` is that of the stream's record.
    """
    if entry.kind == "fence" or (entry.kind == "publish" and entry.generation > generation):
        plan = str(entry.plan)
        raise RecoveryUnderWay(f"the recovery plan {plan} of table {table} is under way", next_step(plan, "applying"))


def next_step(plan: str, outcome: PlanOutcome) -> str:
    abort = f"give it up: {commands.abort(plan)}"
    return {
        "planned": f"apply it: {commands.apply(plan)}",
        "applying": f"continue it: {commands.resume(plan)}, or {abort}",
        "waits for confirmation": f"confirm it: {commands.apply(plan, yes=True)}, or {abort}",
        "refused": f"check again: {commands.resume(plan)}, or {abort}",
        "published": f"take it back: {commands.undo(plan)}",
        "aborting": f"finish that: {commands.abort(plan)}",
        "aborted": "make a new plan",
    }[outcome]
