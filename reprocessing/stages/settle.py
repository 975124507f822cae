"""The stage in which the topics of a recovery stand still: their wrong records become void."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from reprocessing.rebuild.context import Recovery
from reprocessing.rebuild.void import settle
from reprocessing.stages.stage import Findings, OfOneStream
from reprocessing.topics.groups import group_words
from reprocessing.topics.written_topics import GroupPosition


@dataclass(frozen=True)
class Settle(OfOneStream):
    """Every transaction in the topics of one stream is over; their ends are noted, and the wrong records void."""

    name: ClassVar[str] = "settle"

    def explain(self) -> str:
        """One line of the plan's text."""
        return (
            f"wait until no transaction is open in {', '.join(self.plan.wrong_from)}, note the end, and declare the "
            "wrong records void: no stream reads them again"
        )

    def run(self, recovery: Recovery) -> Findings:
        """Settle the topics, and list the consumer groups that have read wrong records."""
        context = recovery.of(self.stream)
        findings = settle(context)
        for group in (GroupPosition(*each) for each in findings["groups"]):
            begins, ends = findings["begins"][group.topic], findings["ends"][group.topic]
            recovery.events.tell(f"  {group_words(group, begins, ends)}")
        return findings
