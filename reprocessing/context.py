"""What the stages of a recovery work with, and how they speak."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from reprocessing import staging
from reprocessing.audit import Difference
from reprocessing.journal import Journal
from reprocessing.plan import Plan
from streaming_jobs.errors import PreflightRefused
from streaming_jobs.runtime.crash_points import crash_point
from streaming_jobs.settings import Settings
from streaming_jobs.sources.topics import Topics
from streaming_jobs.state import savepoints, stream_record
from streaming_jobs.state.savepoints import Savepoint
from streaming_jobs.state.stream_record import StreamRecord
from streaming_jobs.stream import Stream


@dataclass(frozen=True)
class RecoveryEvents:
    """How a recovery speaks: lines, a replay's progress (records done, of how many), the question before publishing."""

    tell: Callable[[str], None] = lambda _: None
    progress: Callable[[int, int], None] = lambda *_: None
    confirm: Callable[[RecoveryContext], bool] = lambda _: True


@dataclass
class RecoveryContext:
    """What stages work with; `differences` are there once the audit has compared."""

    settings: Settings
    stream: Stream
    plan: Plan
    topics: Topics
    journal: Journal
    events: RecoveryEvents
    differences: list[Difference] = field(default_factory=list)

    @property
    def record(self) -> StreamRecord:
        """The stream's record as it is now."""
        record = stream_record.load(self.settings, self.stream.name)
        assert record is not None
        return record

    @property
    def own(self) -> Settings:
        """The settings of the replay."""
        return staging.settings_of(self.settings, self.plan)

    def base(self) -> Savepoint | None:
        """The savepoint that the replay starts from; raises PreflightRefused if it was dropped."""
        return None if self.plan.base.savepoint is None else self.savepoint(self.plan.base.savepoint)

    def kept(self) -> Savepoint:
        """The savepoint of the stream as the plan found it."""
        return self.savepoint(self.found("keep")["savepoint"])

    def found(self, stage: str) -> Mapping[str, Any]:
        """What a stage that is done has found."""
        found = self.journal.done(stage)
        assert found is not None
        return found

    def savepoint(self, name: str) -> Savepoint:
        """A savepoint that is there."""
        found = savepoints.find(self.settings, self.stream.name, name)
        if found is None:
            raise PreflightRefused(f"savepoint {name} of stream {self.stream.name} is gone", "make a new plan")
        return found

    def crash_point(self, point: str) -> None:
        """A place where a test may kill this process."""
        crash_point(point, self.stream.name, 0)
