"""The state of one stream's verification, shared by all comparisons of its tables."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from streaming_jobs.verification.beside_tables import Beside
from streaming_jobs.verification.dead_letters import Refusals
from streaming_jobs.verification.lineage import Batch, Coverage
from streaming_jobs.verification.offset_ranges import Span
from streaming_jobs.verification.position import version_at
from streaming_jobs.verification.rebuilt_slices import RebuiltSlice, by_other_code
from streaming_jobs.verification.subject import Comparison, Outcome, Subject
from streaming_jobs.verification.topic import TopicContent


@dataclass
class Judged:
    """The state of one stream's verification: coverage, position, the version of the primary table, and outcomes."""

    subject: Subject
    tables: Path
    topics: Mapping[str, TopicContent]
    coverage: Coverage
    beside: Beside | None
    position: Batch | None
    version: int
    refusals: Refusals | None
    found: list[Comparison] = field(default_factory=list)
    lost: list[Span] = field(default_factory=list)
    doubled: list[Span] = field(default_factory=list)

    def tell(self, table: str, what: str, verdict: Outcome, text: str) -> None:
        self.found.append(Comparison(table, what, verdict, text))

    def accepted(self, table: str) -> bool:
        """True if a foreign commit has changed the rows of that table, and was accepted."""
        return self.beside is not None and self.beside.changed(table)

    def slices(self, table: str) -> list[RebuiltSlice]:
        return self.beside.slices_of(table) if self.beside is not None else []

    def replaced(self, table: str) -> bool:
        """True if rebuilt slices of that table may have other rows than the batches made."""
        return by_other_code(self.slices(table), {entry.code for entry in self.coverage.entries})

    def version_of(self, table: str) -> int | None:
        """The version of a table that belongs to the primary's position: the others commit before it.

        None without such a table; raises VersionGone.
        """
        if table == self.subject.table:
            return self.version
        return version_at(self.tables / table, self.position)
