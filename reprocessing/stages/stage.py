"""One stage of a recovery: the contract that executor and explainer rely on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

from reprocessing.plans.plan import StreamPlan
from reprocessing.rebuild.context import Recovery

Findings = Mapping[str, Any]


class Stage(Protocol):
    """One stage: its name in the journal, its stream, its line in the plan's text, and its run."""

    name: ClassVar[str]

    @property
    def stream(self) -> str | None:
        """The stage's stream; None if it is of all streams of the plan."""

    def explain(self) -> str:
        """One line of the plan's text."""

    def run(self, recovery: Recovery) -> Findings:
        """Run the stage from its beginning, also after a kill; returns the findings for the journal."""


@dataclass(frozen=True)
class OfOneStream:
    """A stage of one stream, with the plan for that stream."""

    plan: StreamPlan

    @property
    def stream(self) -> str:
        """The stream."""
        return self.plan.stream


def tables_of(plan: StreamPlan) -> str:
    """The names of a stream's tables, for people."""
    return ", ".join(table.name for table in plan.saw.tables)
