"""What a recovery has done so far: one line a step, on disk before the next begins.

`<state>/recoveries/<plan>/journal.jsonl`. A stage is begun, then done; a kill leaves a stage begun, and each stage may
be run again from its beginning. A line that a kill cut off counts as not written.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from streaming_jobs.files import private_folder, sync

Outcome = Literal["planned", "applying", "waits for confirmation", "published", "aborting", "aborted", "refused"]

NOT_CONFIRMED = "not confirmed"
"""What the stage that asks has found when nobody said yes."""


@dataclass(frozen=True)
class Line:
    """One step: what it is about, what became of it, when (seconds since 1970), and what it found."""

    stage: str
    state: Literal["begun", "done", "failed"]
    at: float
    found: Mapping[str, Any]


@dataclass(frozen=True)
class Journal:
    """The journal of one plan."""

    path: Path

    def lines(self) -> list[Line]:
        """All whole lines, oldest first."""
        try:
            texts = self.path.read_text(encoding="utf-8").split("\n")
        except FileNotFoundError:
            return []
        found = []
        for text in texts:
            try:
                found.append(Line(**json.loads(text)))
            except ValueError:  # cut off by a kill
                continue
        return found

    def write(
        self, stage: str, state: Literal["begun", "done", "failed"], found: Mapping[str, Any] | None = None
    ) -> None:
        """Add a line; it is on disk when this returns."""
        line = {"stage": stage, "state": state, "at": round(time.time(), 3), "found": dict(found or {})}
        private_folder(self.path.parent)
        with self.path.open("ab+") as file:
            if file.tell():
                file.seek(-1, os.SEEK_END)
                broken = file.read(1) != b"\n"
            else:
                broken = False
            file.write((b"\n" if broken else b"") + json.dumps(line, separators=(",", ":")).encode() + b"\n")
            file.flush()
            os.fsync(file.fileno())
        sync(self.path.parent)

    def done(self, stage: str) -> Mapping[str, Any] | None:
        """What a stage found, if it is done."""
        return next((x.found for x in reversed(self.lines()) if x.stage == stage and x.state == "done"), None)

    def begun(self, stage: str) -> bool:
        """True if a stage was ever begun."""
        return any(line.stage == stage for line in self.lines())

    @property
    def outcome(self) -> Outcome:
        """How far the plan has come."""
        if self.done("abort") is not None:
            return "aborted"
        if self.begun("abort"):
            return "aborting"
        if self.done("finish") is not None:
            return "published"
        lines = self.lines()
        if not lines:
            return "planned"
        last = lines[-1]
        if last.stage in ("audit", "confirm") and last.state == "failed":
            return "waits for confirmation" if NOT_CONFIRMED in str(last.found.get("error")) else "refused"
        return "applying"


def next_step(plan: str, outcome: Outcome) -> str:
    """What can be done with a plan that has come so far."""
    abort = f"give it up: recourse recover abort {plan}"
    return {
        "planned": f"apply it: recourse recover apply {plan}",
        "applying": f"go on with it: recourse recover resume {plan}, or {abort}",
        "waits for confirmation": f"confirm it: recourse recover apply {plan} --yes, or {abort}",
        "refused": f"check again: recourse recover resume {plan}, or {abort}",
        "published": f"take it back: recourse recover undo {plan}",
        "aborting": f"finish that: recourse recover abort {plan}",
        "aborted": "make a new plan",
    }[outcome]
