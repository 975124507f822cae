"""The examination of one stream: what all comparisons of its tables share, and the version of a table at a position."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from streaming_jobs.storage.locations import Location
from streaming_jobs.verification.dead_letters import Refusals
from streaming_jobs.verification.delta_log import read_commit, versions
from streaming_jobs.verification.lineage import Batch, Coverage
from streaming_jobs.verification.offset_ranges import Span
from streaming_jobs.verification.state_evidence import ChangedRows, Redriven, StateEvidence, by_other_code, uncounted
from streaming_jobs.verification.subject import Comparison, ComparisonOutcome, Subject
from streaming_jobs.verification.topic import CommittedTopic


class VersionGone(Exception):
    """A running stream has cleaned up the version that belongs to the position."""

    def __init__(self) -> None:
        super().__init__("its version at the position that is judged is cleaned up already: verify again")


def version_at(table: Location, position: Batch | None) -> int | None:
    """The newest version of a table that has nothing after a position; None when there is no such table.

    Raises VersionGone when the log holds only newer ones.
    """
    there = versions(table)
    if not there:
        return None
    newest = there[-1]
    for version in reversed(there):
        try:
            entry = read_commit(table, version).entry
        except FileNotFoundError:  # cleaned up since the folder was listed
            if newest <= version:
                raise VersionGone from None
            break
        if entry is None or entry.kind not in ("batch", "publish", "fence"):
            continue
        if position is not None and (entry.generation, entry.batch) <= position:
            break
        newest = version - 1
    if newest < there[0] and there[0] > 0:
        raise VersionGone
    return max(newest, there[0])


def still(table: Location, version: int) -> int | None:
    """The version that was noted before the topics were read; None for -1, which means no table.

    Raises VersionGone when the log no longer has it.
    """
    there = versions(table)
    if there and 0 <= version < there[0]:
        raise VersionGone
    return version if version >= 0 else None


@dataclass
class Examination:
    """The state of one stream's verification: coverage, position, the version of the primary table, and outcomes."""

    subject: Subject
    tables: Location
    topics: Mapping[str, CommittedTopic]
    coverage: Coverage
    beside: StateEvidence | None
    position: Batch | None
    version: int
    refusals: Refusals | None
    found: list[Comparison] = field(default_factory=list)
    lost: list[Span] = field(default_factory=list)
    doubled: list[Span] = field(default_factory=list)

    def tell(self, table: str, what: str, verdict: ComparisonOutcome, text: str) -> None:
        self.found.append(Comparison(table, what, verdict, text))

    def accepted(self, table: str) -> bool:
        """True if a foreign commit has changed the rows of that table, and was accepted."""
        return self.beside is not None and self.beside.changed(table)

    def slices(self, table: str) -> list[ChangedRows]:
        return self.beside.slices_of(table) if self.beside is not None else []

    def redriven(self, table: str) -> list[ChangedRows]:
        """What redrives have changed in that table."""
        return self.beside.redriven_into(table) if self.beside is not None else []

    @property
    def redrives(self) -> tuple[Redriven, ...]:
        """The committed redrives of the stream since its last recovery."""
        generation = self.position[0] if self.position else None
        every = self.beside.redriven if self.beside is not None else ()
        return tuple(each for each in every if not uncounted((), each.parts, generation))

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
