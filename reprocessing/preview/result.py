"""The result of a preview: the verdict, its exit code, and everything that its texts are made of."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any

from reprocessing.preview.compare import TableChange
from reprocessing.preview.replay import Failure
from streaming_jobs.ledger.entry import CodeVersion, Txn
from streaming_jobs.ledger.positions import TopicOffsets, by_place


class Verdict(StrEnum):
    """What a preview has found out about the code on disk."""

    equal = "equal"
    different = "different"
    broken = "broken"
    cannot_start = "cannot start"

    @property
    def exit_code(self) -> int:
        """0 equal, 10 different, 1 for code that must not be deployed."""
        return {"equal": 0, "different": 10}.get(self.value, 1)


@dataclass(frozen=True)
class Edge:
    """An end of the previewed range: the batch (None: before the first one), its time in seconds, its offsets."""

    txn: Txn | None
    at: float
    ends: TopicOffsets


@dataclass(frozen=True)
class Counts:
    """Figures of the batches of one side: batches, and by name rows written, dead letters, rows that broke a rule."""

    batches: int = 0
    named: Mapping[str, int] | None = None


@dataclass(frozen=True)
class Preview:
    """One preview. `code` is on disk, `published_code` wrote the published batches of the range, newest last.

    `savepoint` None: from the stream's start; `why` says why there. `seconds`: by part, and in all.
    """

    stream: str
    made_at: float
    code: CodeVersion
    published_code: tuple[CodeVersion, ...]
    savepoint: str | None
    why: str
    begin: Edge
    end: Edge
    records: int
    tables: tuple[TableChange, ...] = ()
    before: Counts = Counts()
    after: Counts = Counts()
    suites: tuple[tuple[str, tuple[str, ...]], ...] = ()
    failure: Failure | None = None
    notes: tuple[str, ...] = ()
    seconds: Mapping[str, float] | None = None

    @property
    def verdict(self) -> Verdict:
        """The verdict; what must not be deployed is never only `different`."""
        if self.failure is not None:
            return Verdict.broken if self.failure.starts else Verdict.cannot_start
        if any(table.misfits for table in self.tables):
            return Verdict.cannot_start
        if any(failing for _, failing in self.suites):
            return Verdict.broken
        if all(table.equal for table in self.tables):
            return Verdict.equal
        return Verdict.different

    @property
    def same_code(self) -> bool:
        """True if the code on disk wrote all of the published rows of the range."""
        return all(each.same_code(self.code) for each in self.published_code)

    def counted(self) -> list[tuple[str, int, int]]:
        """Figures of both sides, by name: published, then rebuilt."""
        before, after = self.before.named or {}, self.after.named or {}
        return [(name, before.get(name, 0), after.get(name, 0)) for name in sorted({*before, *after})]

    def ranges(self) -> list[tuple[str, int, int, int]]:
        """(topic, partition, first offset, the one after the last) of what was replayed."""
        begins = by_place(self.begin.ends)
        ends = sorted(by_place(self.end.ends).items())
        return [(topic, partition, begins.get((topic, partition), 0), end) for (topic, partition), end in ends]

    def value(self) -> dict[str, Any]:
        """The preview as JSON values; rows of a sample may have values that still have to become text."""
        return {
            "stream": self.stream,
            "verdict": self.verdict.value,
            "exit_code": self.verdict.exit_code,
            "reasons": reasons(self),
            "made_at": self.made_at,
            "code": self.code._asdict(),
            "published_code": [each._asdict() for each in self.published_code],
            "savepoint": self.savepoint,
            "why": self.why,
            "from": _edge(self.begin),
            "to": _edge(self.end),
            "records": self.records,
            "ranges": [list(each) for each in self.ranges()],
            "tables": [_table(each) for each in self.tables],
            "counts": {name: {"published": old, "rebuilt": new} for name, old, new in self.counted()},
            "batches": {"published": self.before.batches, "rebuilt": self.after.batches},
            "suites": {name: list(failing) for name, failing in self.suites},
            "failure": None if self.failure is None else asdict(self.failure),
            "notes": list(self.notes),
            "seconds": dict(self.seconds or {}),
        }


def reasons(preview: Preview) -> list[str]:
    """Why the code must not be deployed, in words; empty if it may be."""
    found = []
    if (failure := preview.failure) is not None:
        found.append(f"{failure.found}{f'; next: {failure.next_step}' if failure.next_step else ''}")
    for table in preview.tables:
        found += [f"{misfit}; next: give the column back, or a new name to the new one" for misfit in table.misfits]
    found += [f"suite {name}: {failing}" for name, each in preview.suites for failing in each]
    return found


def _edge(edge: Edge) -> dict[str, Any]:
    txn = edge.txn
    return {
        "generation": None if txn is None else txn.generation,
        "batch": None if txn is None else txn.batch,
        "at": edge.at,
        "offsets": {topic: dict(each) for topic, each in edge.ends.items()},
    }


def _table(change: TableChange) -> dict[str, Any]:
    d = change.difference
    return {
        "table": d.table,
        "equal": change.equal,
        "published_rows": d.old_rows,
        "rebuilt_rows": d.new_rows,
        "corrected": d.corrected,
        "new": d.new,
        "gone": d.gone,
        "read": dict(zip(("published", "rebuilt"), d.read or (d.old_rows, d.new_rows), strict=True)),
        "new_columns": list(change.new_columns),
        "misfits": list(change.misfits),
        "sums": {name: {"published": old, "rebuilt": new} for name, (old, new) in d.totals.items()},
        "sample": _samples(d.sample),
    }


def _samples(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    return [dict(row) for row in rows]
