"""Checks that rebuilt rows have to pass before they are published; the audit walks the list of them.

A new kind of check is a new class here, and a line in `checks_of`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

from reprocessing.plan.conditions import broken
from reprocessing.plan.plan import StreamRecoveryPlan, Until
from reprocessing.replay.difference import Difference, compare_stored, compared_tables, not_compared
from reprocessing.stages.bounded import combined_settings, compared_folder, rows_until, unequal_later_rows
from reprocessing.stages.publish import incompatible, misfit
from reprocessing.stages.recovery import RebuiltTables, RecoveryContext, RunSuite, no_suites
from reprocessing.stages.replay import kept_table
from reprocessing.stages.topic_difference import topic_differences
from streaming_jobs.declare.table import DeclaredTable
from streaming_jobs.platform.table_rows import QueryFailed
from streaming_jobs.sinks.stored import StoredTable
from streaming_jobs.sinks.tables import all_tables
from streaming_jobs.text.spelling import counted


@dataclass(frozen=True)
class RebuiltStream:
    """One stream that was rebuilt: its published and its staging tables by name, opened once.

    The staging tables of a bounded recovery are not those to publish: they end with the last batch to correct.
    """

    context: RecoveryContext
    published: Mapping[str, StoredTable]
    staged: Mapping[str, StoredTable]

    @classmethod
    def of(cls, context: RecoveryContext) -> RebuiltStream:
        return cls(context, context.published(), context.staged())

    @cached_property
    def differences(self) -> list[Difference]:
        """The differences of every topic, and of every table with rows of its own; computed when first asked for."""
        stream = self.context.stream
        batches = stream.primary.name if stream.topics_only else None  # its rows are the batches themselves
        compared = [declared for declared in compared_tables(stream) if declared.name != batches]
        return [*topic_differences(self.context), *map(self._difference, compared)]

    def _difference(self, declared: DeclaredTable) -> Difference:
        """The difference of a table; a lack of memory or disk does not end the recovery."""
        folder = compared_folder(self.context)
        try:
            return compare_stored(
                self.context.replay_settings, folder, declared, self.context.stream.name, *self._compared(declared)
            )
        except QueryFailed as error:
            return not_compared(declared.name, error.found)

    def _compared(self, declared: DeclaredTable) -> tuple[StoredTable, StoredTable]:
        """The published and the rebuilt rows, as of the same records."""
        if self.context.plan.until is not None:
            return rows_until(self.context, declared), self.staged[declared.name]
        rebuilt = kept_table(self.context, declared) or self.staged[declared.name]
        return self.published[declared.name], rebuilt


class AuditCheck(Protocol):
    def words(self) -> str:
        """The check as a part of the plan's text; empty for a check that every plan has."""

    def refusals(self, rebuilt: RebuiltStream) -> Iterator[str]:
        """The reasons why the rows may not be published, in words; none if they pass."""


@dataclass(frozen=True)
class EveryRow:
    """A condition in SQL holds for every row of the primary table."""

    rule: str

    def words(self) -> str:
        return f"every row: {self.rule}"

    def refusals(self, rebuilt: RebuiltStream) -> Iterator[str]:
        staged = rebuilt.staged[rebuilt.context.stream.primary.name]
        rows = broken(staged.readable(), self.rule)
        if rows.rows:
            yield rows.words(self.rule)


@dataclass(frozen=True)
class FitsTheTable:
    """The rebuilt files can become those of the published tables: columns, types and partitions are the same.

    An undo goes back to rows from before a column that the undone recovery may have added: it is null in them.
    """

    def words(self) -> str:
        """Empty: every plan has this check."""
        return ""

    def refusals(self, rebuilt: RebuiltStream) -> Iterator[str]:
        """The columns and partitions that differ; a combined table has also the columns of the later rows."""
        reasons = misfit if rebuilt.context.whole.undoes is None else incompatible
        for name, table in rebuilt.published.items():
            yield from reasons(table, rebuilt.staged[name])


@dataclass(frozen=True)
class AtMostChanged:
    """At most a share of the rows of any published table changes, appears or vanishes."""

    share: float

    def words(self) -> str:
        return f"at most {self.share:.1%} of the rows change"

    def refusals(self, rebuilt: RebuiltStream) -> Iterator[str]:
        for difference in rebuilt.differences:
            if difference.unknown:
                yield f"whether more than {self.share:.1%} of the rows of {difference.table} change is not known: " + (
                    difference.unknown
                )
            elif difference.share > self.share:
                yield f"{difference.share:.1%} of the rows of {difference.table} change, at most {self.share:.1%} may"


@dataclass(frozen=True)
class SuitePasses:
    suite: str
    run: RunSuite

    def words(self) -> str:
        return f"suite {self.suite}"

    def refusals(self, rebuilt: RebuiltStream) -> Iterator[str]:
        published = RebuiltTables(combined_settings(rebuilt.context), rebuilt.context.stream)
        for words in self.run(published, self.suite):
            yield f"suite {self.suite}: {words}"


@dataclass(frozen=True)
class LaterRowsUnchanged:
    """The rows after the end of a bounded recovery are the same as before, in every table."""

    until: Until

    def words(self) -> str:
        return f"the rows after batch {self.until.batch} are the same as before"

    def refusals(self, rebuilt: RebuiltStream) -> Iterator[str]:
        for declared, _ in all_tables(rebuilt.context.stream):
            if rows := unequal_later_rows(rebuilt.context, declared):
                yield (
                    f"{counted(rows, 'row')} of table {declared.name} after batch {self.until.batch} would not be the "
                    "same as before"
                )


def checks_of(plan: StreamRecoveryPlan, run_suite: RunSuite = no_suites) -> tuple[AuditCheck, ...]:
    bound = plan.checks.max_changed
    return (
        *(EveryRow(rule) for rule in plan.checks.rules),
        *(SuitePasses(suite, run_suite) for suite in plan.checks.suites),
        FitsTheTable(),
        *([] if plan.until is None else [LaterRowsUnchanged(plan.until)]),
        *(AtMostChanged(share) for share in ([] if bound is None else [bound])),
    )
