"""The stage that lets a stream continue at later offsets; nothing is rebuilt."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from reprocessing.rebuild.context import Recovery
from reprocessing.rebuild.reopen import skip
from reprocessing.stages.stage import Findings, OfOneStream


@dataclass(frozen=True)
class Skip(OfOneStream):
    """The stream continues at the plan's offsets."""

    name: ClassVar[str] = "skip"

    def explain(self) -> str:
        """One line of the plan's text."""
        return f"continue in generation {self.plan.generation} with the first record after them"

    def run(self, recovery: Recovery) -> Findings:
        """Open the generation there."""
        return skip(recovery.of(self.stream))
