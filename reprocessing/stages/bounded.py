"""The stages that only a bounded recovery has: rows after its end are added, and the stream continues after them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from reprocessing.rebuild.bounded import combine, continue_after
from reprocessing.rebuild.context import Recovery
from reprocessing.stages.stage import Findings, OfOneStream


@dataclass(frozen=True)
class Combine(OfOneStream):
    """The rebuilt rows and those that came after them, as one content per table."""

    name: ClassVar[str] = "combine"

    def explain(self) -> str:
        """One line of the plan's text."""
        assert self.plan.until is not None
        return f"add the rows that came after batch {self.plan.until.batch}, as they are, to the rebuilt ones"

    def run(self, recovery: Recovery) -> Findings:
        """Make the tables to publish anew."""
        return combine(recovery.of(self.stream))


@dataclass(frozen=True)
class ContinueGeneration(OfOneStream):
    """The new generation continues where the one before it ended."""

    name: ClassVar[str] = "switch"

    def explain(self) -> str:
        """One line of the plan's text."""
        opened, before = self.plan.generation, self.plan.saw.generation
        return (
            f"the stream continues in generation {opened}, after the last batch of generation {before}; no later "
            "record is read again"
        )

    def run(self, recovery: Recovery) -> Findings:
        """Copy the checkpoint, then write the record."""
        return continue_after(recovery.of(self.stream))
