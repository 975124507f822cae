"""One stage of a recovery: the contract that executor and explainer rely on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

from reprocessing.plans.plan import StreamPlan
from reprocessing.rebuild.context import Recovery

Findings = Mapping[str, Any]


class Stage(Protocol):
    """One stage: its name in the journal, the stream it is of, its words, and doing it."""

    name: ClassVar[str]

    @property
    def stream(self) -> str | None:
        """The stream it is of; None if it is of all of the plan's."""

    def explain(self) -> str:
        """One line of the plan's text."""

    def run(self, recovery: Recovery) -> Findings:
        """Do it, from the beginning whatever a kill has left; the findings go into the journal."""


@dataclass(frozen=True)
class OfOneStream:
    """The stage is of one stream, and its plan says what it does."""

    plan: StreamPlan

    @property
    def stream(self) -> str:
        """The stream."""
        return self.plan.stream


def tables_of(plan: StreamPlan) -> str:
    """The names of a stream's tables, for people."""
    return ", ".join(table.name for table in plan.saw.tables)
