"""The ledger of a table against what its commits did: rows per batch, their sum, and offsets from batch to batch.

| table           | rows of one commit                                   | sum                                      |
|-----------------|------------------------------------------------------|------------------------------------------|
| append          | rows of the files that it added = rows in the ledger | growth of the table = rows in the ledger |
| upsert (`keys`) | growth of the table at most the rows in the ledger   | none: a merge rewrites files             |

Rows of files are those of their statistics (`numRecords`). Offsets are compared on the primary table only, back to the
oldest batch that the ledger beside the state has: each topic and partition continues where the batch before ended. A
recovery opens a generation and goes back on purpose, so nothing is compared across two generations.

The rows themselves are not read, and Kafka is not asked: `recourse verify` does both.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from urllib.parse import unquote

import pyarrow as pa
from deltalake import DeltaTable
from deltalake.exceptions import DeltaError

from quality.table_checks.base import Check, CheckedTable, in_words
from quality.validation import CheckOutcome, Severity
from streaming_jobs.ledger.entry import LedgerEntry
from streaming_jobs.ledger.positions import Place, by_place, ends_of, starts_of
from streaming_jobs.sinks.stored import Commit
from streaming_jobs.state.provenance import Change, rows_of
from streaming_jobs.state.stream_record import load
from streaming_jobs.text.spelling import counted


@dataclass(frozen=True)
class Reconciled(Check):
    """Rows and offsets in the ledger are those of the table's commits; the module's text says what is compared.

    The number is that of the contradictions; the text names the first ones by batch.
    """

    severity: Severity = "critical"

    kind = "reconciled"

    def _judge(self, checked: CheckedTable) -> CheckOutcome:
        record = load(checked.settings, checked.stream.name)
        accepted = record.accepts(checked.declared.name) if record is not None else frozenset()
        rows = _Rows(checked, accepted)
        faults = [*rows.faults()]
        compared = [f"rows of {counted(rows.compared, 'commit')}", *rows.sums]
        if checked.is_primary:
            entries = [entry for _, entry in reversed(checked.batches)]
            faults += offset_faults(entries, complete_from=_first_logged(checked))
            compared.append(f"offsets of {counted(len(entries), 'batch')}")
        text = in_words(faults) if faults else f"compared: {', '.join(compared)}"
        if rows.unknown:
            text += f"; {counted(rows.unknown, 'commit')} without row counts in the statistics not compared"
        return self.outcome(passed=not faults, observed=text, number=float(len(faults)))


class _Rows:
    """The comparison of rows; `compared` and `unknown` commits are counted while `faults` is read."""

    def __init__(self, checked: CheckedTable, accepted: frozenset[int]) -> None:
        self.checked, self.accepted = checked, accepted
        self.compared = self.unknown = 0
        self.sums: list[str] = []
        self._known = self._rows_of_files()

    def faults(self) -> Iterator[str]:
        """Yields the contradictions, oldest first, then that of the sum."""
        name, stream = self.checked.declared.name, self.checked.stream.name
        for commit in reversed(self.checked.commits):
            entry = commit.entry
            if commit.foreign_to(stream):
                if commit.version not in self.accepted:
                    operation = commit.operation or "unknown operation"
                    yield f"version {commit.version} ({operation}) changed rows of {name} without the stream"
            elif entry is not None and entry.kind == "batch":
                yield from self._fault(commit, entry)
        if self.checked.declared.mode == "append":
            yield from self._sum()

    def _fault(self, commit: Commit, entry: LedgerEntry) -> Iterator[str]:
        change, said = self.checked.change(commit.version), self.checked.written(entry)
        where = f"{entry.txn} (version {commit.version})"
        added = _sum(_added_rows(change).values())
        if self.checked.declared.mode == "append":
            if added is None:
                self.unknown += 1
                return
            self.compared += 1
            if added != said:
                yield f"{where} wrote {said:,} rows by the ledger, its files have {added:,}"
            if (removed := change.removed | change.gone) and commit.changes_data:
                yield f"{where} removed {counted(len(removed), 'file')} of a table that only grows"
            return
        growth = self._growth(change)
        if growth is None:
            self.unknown += 1
            return
        self.compared += 1
        if abs(growth) > said:
            grew = "grew" if growth > 0 else "shrank"
            yield f"{where} upserted {said:,} rows by the ledger, the table {grew} by {abs(growth):,}"

    def _growth(self, change: Change) -> int | None:
        added = _sum(_added_rows(change).values())
        removed = _sum(self._known.get(path) for path in change.removed | change.gone)
        return None if added is None or removed is None else added - removed

    def _rows_of_files(self) -> Mapping[str, int | None]:
        """The rows of every file that a commit of the log adds, or that its oldest version has."""
        known: dict[str, int | None] = {}
        if not self.checked.commits or self.checked.declared.mode == "append":
            return known
        if (oldest := self._at(self.checked.commits[-1].version)) is not None:
            files = pa.table(oldest.get_add_actions())
            paths = map(unquote, files["path"].to_pylist())
            known.update(zip(paths, files["num_records"].to_pylist(), strict=True))
        for commit in reversed(self.checked.commits):
            known.update(_added_rows(self.checked.change(commit.version)))
        return known

    def _sum(self) -> Iterator[str]:
        """Yields the contradiction between the table's growth and the ledger since the last commit that breaks sums."""
        commits = self.checked.commits
        base = next((c for c in commits if c.changes_data and (c.entry is None or c.entry.kind != "batch")), None)
        begin = base if base is not None else (commits[-1] if commits else None)
        before = self._at(begin.version) if begin is not None else None
        if begin is None or before is None:
            return
        then, now = _table_rows(before), _table_rows(self.checked.table)
        if then is None or now is None:
            return
        said = sum(
            self.checked.written(c.entry)
            for c in commits
            if c.version > begin.version and c.entry is not None and c.entry.kind == "batch"
        )
        self.sums.append(f"{counted(said, 'row')} since version {begin.version}")
        if now - then != said:
            yield f"the table has {now - then:,} rows more than in version {begin.version}, the ledger says {said:,}"

    def _at(self, version: int) -> DeltaTable | None:
        try:
            return self.checked.at_version(version)
        except (DeltaError, OSError, ValueError):  # the log has the commit, and no longer what is before it
            return None


def offset_faults(entries: Sequence[LedgerEntry], *, complete_from: tuple[int, int] | None = None) -> Iterator[str]:
    """Yields gaps and overlaps between consecutive batches of one generation, oldest first.

    A batch that is missing is a fault from the position `complete_from` on, where every batch has to be known; before
    it, a crash may have lost a line of the ledger beside the state, and only overlaps can be told.
    """
    ends: dict[Place, int] = {}
    last: LedgerEntry | None = None
    for entry in entries:
        starts, now = by_place(starts_of(entry.offsets)), by_place(ends_of(entry.offsets))
        if last is not None and entry.generation == last.generation:
            skipped = entry.batch - last.batch - 1
            sure = complete_from is not None and (entry.generation, entry.batch) > complete_from
            if skipped and sure:
                yield f"{counted(skipped, 'batch')} missing between {last.txn} and {entry.txn}"
            for place in sorted(now):
                start, due = starts.get(place, 0), ends.get(place, 0)
                if start < due:
                    yield f"{entry.txn} reads {place[0]}-{place[1]} {start} to {due - 1} again, after {last.txn}"
                elif start > due and not skipped:
                    yield f"{entry.txn} leaves out {place[0]}-{place[1]} {due} to {start - 1}, after {last.txn}"
            if lost := sorted(ends.keys() - now.keys()):
                yield f"{entry.txn} reads nothing of {', '.join(f'{t}-{p}' for t, p in lost)}, which {last.txn} read"
        for place, end in now.items():
            if end < starts.get(place, 0):
                yield f"{entry.txn} ends at {end} of {place[0]}-{place[1]}, before its start {starts[place]}"
        ends, last = now, entry


def _first_logged(checked: CheckedTable) -> tuple[int, int] | None:
    """The oldest batch of the table's log: from there on every batch is known."""
    logged = [c.entry for c in checked.commits if c.entry is not None and c.entry.kind == "batch"]
    return min(((e.generation, e.batch) for e in logged), default=None)


def _added_rows(change: Change) -> dict[str, int | None]:
    """The rows of the files that a commit added, by path; None where the statistics do not say."""
    return {path: rows_of(add) for path, add in {**change.added, **change.rewritten}.items()}


def _table_rows(table: DeltaTable) -> int | None:
    counts: list[int | None] = pa.table(table.get_add_actions())["num_records"].to_pylist()
    return _sum(counts)


def _sum(counts: Iterable[int | None]) -> int | None:
    known = list(counts)
    return None if any(count is None for count in known) else sum(count or 0 for count in known)
