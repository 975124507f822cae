"""The objects that stages work with: a recovery, one of its streams, and the functions that report progress."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from reprocessing.plan.journal import Journal
from reprocessing.plan.plan import RecoveryPlan, StreamRecoveryPlan
from reprocessing.plan.plan_file import staging_folder
from reprocessing.plan.written_topics import WrittenTopics
from reprocessing.replay import staging
from reprocessing.replay.difference import Difference
from streaming_jobs.declare.table import DeclaredTable
from streaming_jobs.errors import PreflightRefused, UsageError
from streaming_jobs.ledger.entry import LedgerEntry, Txn
from streaming_jobs.ledger.positions import TopicOffsets, decode
from streaming_jobs.platform.runtime import Runtime
from streaming_jobs.preflight.snapshot import ledger_file
from streaming_jobs.runtime.crash_points import crash_point
from streaming_jobs.settings import Settings
from streaming_jobs.sinks.base import WriteLease
from streaming_jobs.sinks.kafka.staged import written_below
from streaming_jobs.sinks.stored import StoredTable
from streaming_jobs.sinks.tables import all_tables, existing_table, open_table
from streaming_jobs.sources.base import TopicReader
from streaming_jobs.state import savepoints, stream_record
from streaming_jobs.state.ledger_file import LedgerFile
from streaming_jobs.state.savepoints import Savepoint
from streaming_jobs.state.stream_record import StreamRecord
from streaming_jobs.storage.locations import Location
from streaming_jobs.stream import Stream
from streaming_jobs.text import commands


@dataclass(frozen=True)
class StageBegun:
    """A stage that begins: its place among all stages of the plan (from 1), and what it will do, in words."""

    number: int
    stages: int
    name: str
    stream: str | None
    words: str


@dataclass(frozen=True)
class RecoveryEvents:
    """A recovery's output: text lines, stages that begin, a replay's progress (records done, total), the question
    before publishing. Without `stage`, stages are text lines."""

    tell: Callable[[str], None] = lambda _: None
    progress: Callable[[int, int], None] = lambda *_: None
    confirm: Callable[[Recovery], bool] = lambda _: True
    stage: Callable[[StageBegun], None] | None = None


@dataclass(frozen=True)
class RebuiltTables:
    """A stream with rebuilt tables that are not published; under `replay_settings` they are the stream's tables."""

    replay_settings: Settings
    stream: Stream


RunSuite = Callable[[RebuiltTables, str], Iterable[str]]
"""Runs a suite on rebuilt tables: the critical expectations that fail, in words. Suites live in a higher layer, so the
caller passes this function in."""


def no_suites(rebuilt: RebuiltTables, suite: str) -> Iterable[str]:
    raise UsageError(
        f"the plan of stream {rebuilt.stream.name} asks for the suite {suite}, which cannot be run from here",
        "carry it out with the command `recourse recover`",
    )


@dataclass
class Recovery:
    """A recovery in progress; `differences` are the audit's, once it has run."""

    settings: Settings
    streams: Mapping[str, Stream]
    plan: RecoveryPlan
    topics: TopicReader
    journal: Journal
    events: RecoveryEvents
    replay: Callable[[RecoveryContext], Mapping[str, Any]]
    """Runs a stream on its staging tables to its topics' ends; returns the findings of the stage."""
    run_suite: RunSuite = no_suites
    written: WrittenTopics | None = None
    """The topics that streams write; None: those of the settings' broker."""
    patience: float = 30.0
    """Seconds to wait for a stream to stop, beyond the stop deadline of its settings."""
    differences: list[Difference] = field(default_factory=list)
    leases: dict[str, WriteLease] = field(default_factory=dict)
    """The leases of the plan's streams, while the recovery holds them."""
    saved: set[str] = field(default_factory=set)
    """The streams that have not run since their savepoint: it was taken under the present leases."""
    warm: Callable[[], Runtime] | None = None
    """Spark that stays from round to round of a replay beside its stream; None: each replay starts its own."""

    def of(self, stream: str) -> RecoveryContext:
        return RecoveryContext(
            self.settings,
            self.streams[stream],
            self.plan.of(stream),
            self.topics,
            self.journal.of(stream),
            self.events,
            self.plan,
            self.written or self._of_the_broker,
            self.leases.get(stream),
            self.warm,
            self.of,
        )

    @cached_property
    def _of_the_broker(self) -> WrittenTopics:
        return WrittenTopics(self.settings)

    def each(self) -> list[RecoveryContext]:
        return [self.of(name) for name in self.plan.names]


@dataclass(frozen=True)
class RecoveryContext:
    settings: Settings
    stream: Stream
    plan: StreamRecoveryPlan
    topics: TopicReader
    journal: Journal
    events: RecoveryEvents
    whole: RecoveryPlan
    written: WrittenTopics
    lease: WriteLease | None = None
    warm: Callable[[], Runtime] | None = None
    other: Callable[[str], RecoveryContext] | None = None
    """The context of another stream of the plan, by name; None if the plan has no other."""

    @property
    def record(self) -> StreamRecord:
        return stream_record.existing(self.settings, self.stream.name)

    @property
    def replay_settings(self) -> Settings:
        return staging.settings_of(self.settings, self.plan)

    def published(self) -> dict[str, StoredTable]:
        """The stream's tables by name; raises PreflightRefused if one is gone."""
        name = self.stream.name
        return {each.name: existing_table(self.settings, each, name) for each, _ in all_tables(self.stream)}

    def staged(self) -> dict[str, StoredTable]:
        return {each.name: self.rebuilt_table(each) for each, _ in all_tables(self.stream)}

    def beside(self, folder: str) -> Location:
        """The location of further tables beside the staging tables, which are removed with them."""
        return staging_folder(self.settings, self.plan, folder)

    @property
    def scratch(self) -> Path:
        """A folder of this machine for scratch files, which is removed with the staging tables."""
        return staging.scratch_folder(self.settings, self.plan)

    @property
    def staged_records(self) -> Path:
        """The folder in which the records of the stream's topics wait for its stop, in a folder for each topic."""
        return self.scratch / "_records"

    def rebuilt_table(self, declared: DeclaredTable, folder: str = "") -> StoredTable:
        """A staging table, or that of a folder beside them; raises PreflightRefused if it is gone."""
        table = open_table(self.replay_settings.with_tables(self.beside(folder)), declared, self.stream.name)
        if table is None:
            raise PreflightRefused(
                f"staging table {declared.name} of plan {self.plan.id} is gone",
                f"give the plan up: {commands.abort(self.plan.id)}; then make a new one",
            )
        return table

    def base(self) -> Savepoint | None:
        """The savepoint at which the replay starts; raises PreflightRefused if it was dropped."""
        return None if self.plan.base.savepoint is None else self.savepoint(self.plan.base.savepoint)

    @property
    def position(self) -> TopicOffsets:
        """Where the stream was when it was stopped, with a batch that is in the tables and not in `commits`."""
        return decode(self.result("take_savepoint")["position"])

    @property
    def stopped_at(self) -> Txn:
        """The last batch in the tables when the stream was stopped."""
        return Txn(self.plan.saw.generation, self.result("take_savepoint")["batch"])

    def replayed(self) -> Iterator[LedgerEntry]:
        """Yields the entries of the replay's batches, oldest first; one that a kill has repeated comes twice.

        Those of batches whose records were staged have the ranges to which these were appended since.
        """
        days, appended = list(self._ledger.days(self.stream.name)), written_below(self.staged_records)
        for line in (line for day in reversed(days) for line in day):
            entry = line.read().entry
            yield replace(entry, written=appended[entry.txn]) if entry.txn in appended else entry

    @property
    def _ledger(self) -> LedgerFile:
        return ledger_file(self.replay_settings, self.stream.name)

    def adopt_ledger(self) -> None:
        """Let the stream's ledger have the lines of the replay."""
        ledger_file(self.settings, self.stream.name).adopt(self._ledger, written_below(self.staged_records))

    def kept(self) -> Savepoint:
        return self.savepoint(self.result("take_savepoint")["savepoint"])

    @property
    def runtime(self) -> Runtime | None:
        """The Spark of the next replay; None: it starts its own."""
        return None if self.warm is None else self.warm()

    def result(self, stage: str) -> Mapping[str, Any]:
        result = self.journal.done(stage)
        assert result is not None
        return result

    def savepoint(self, name: str) -> Savepoint:
        savepoint = savepoints.find(self.settings, self.stream.name, name)
        if savepoint is None:
            raise PreflightRefused(f"savepoint {name} of stream {self.stream.name} is gone", "make a new plan")
        return savepoint

    def crash_point(self, point: str) -> None:
        crash_point(point, self.stream.name, 0)
