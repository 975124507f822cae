"""The last stage: staging is removed, and the streams may start."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from reprocessing.plans.plan import StreamPlan
from reprocessing.rebuild import staging
from reprocessing.rebuild.context import Recovery
from reprocessing.stages.stage import Findings
from streaming_jobs.text import commands


@dataclass(frozen=True)
class CleanUp:
    """Removes the staging tables and the replay's state."""

    name: ClassVar[str] = "finish"
    stream: ClassVar[None] = None
    plans: tuple[StreamPlan, ...]

    def explain(self) -> str:
        """One line of the plan's text."""
        removal = "" if all(each.skips for each in self.plans) else "remove staging; "
        start = commands.run(*(each.stream for each in self.plans))
        what = "the stream" if len(self.plans) == 1 else "the streams"
        return f"{removal}start {what} again: {start}, or Dagster does"

    def run(self, recovery: Recovery) -> Findings:
        """Remove the staging tables and the replay's state."""
        for each in self.plans:
            staging.clear(recovery.settings, each)
        return {}
