"""The result of a preview: the verdict, its exit code, and the same as JSON, as text and as a page."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import Any

from reprocessing.replay.difference import Difference
from reprocessing.replay.session import ReplayFailure
from reprocessing.replay.words import difference_lines
from reprocessing.report.page import FIGURES, SECTIONS, difference_section, figures
from streaming_jobs.ledger.entry import CodeVersion, Txn
from streaming_jobs.ledger.positions import TopicOffsets, by_place
from streaming_jobs.page import macros, render_page
from streaming_jobs.runtime.state_changes import StateChange
from streaming_jobs.text.spelling import counted, instant_words

_CHARACTERS = 400
_PARTITIONS = 24
_RANGES = 200


@dataclass(frozen=True)
class TableChange:
    """One table: the difference of its rows, columns that the code adds, and why its rows would not fit the table."""

    difference: Difference
    new_columns: tuple[str, ...] = ()
    misfits: tuple[str, ...] = ()

    @property
    def rows(self) -> int:
        return sum(self.difference.counts)

    @property
    def equal(self) -> bool:
        """True if the change leaves rows and columns as they are."""
        return not self.rows and not self.new_columns and not self.misfits


class PreviewVerdict(StrEnum):
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
    named: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Preview:
    """One preview. `code` is on disk, `published_code` wrote the published batches of the range, newest last.

    `savepoint` None: from the stream's start; `why` says why there. `change` is None if the replay failed without
    showing what the code means for the stream's state. `seconds`: by part, and in all.
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
    failure: ReplayFailure | None = None
    notes: tuple[str, ...] = ()
    seconds: Mapping[str, float] = field(default_factory=dict)
    change: StateChange | None = None

    @property
    def verdict(self) -> PreviewVerdict:
        """The verdict; what must not be deployed is never only `different`."""
        if self.failure is not None:
            return PreviewVerdict.broken if self.failure.starts else PreviewVerdict.cannot_start
        if any(table.misfits for table in self.tables):
            return PreviewVerdict.cannot_start
        if any(failing for _, failing in self.suites):
            return PreviewVerdict.broken
        if all(table.equal for table in self.tables):
            return PreviewVerdict.equal
        return PreviewVerdict.different

    @property
    def same_code(self) -> bool:
        """True if the code on disk wrote all of the published rows of the range."""
        return all(each.same_code(self.code) for each in self.published_code)

    def counted(self) -> list[tuple[str, int, int]]:
        """Figures of both sides, by name: published, then rebuilt."""
        before, after = self.before.named, self.after.named
        return [(name, before.get(name, 0), after.get(name, 0)) for name in sorted({*before, *after})]

    def ranges(self) -> list[tuple[str, int, int, int]]:
        """(topic, partition, first offset, the one after the last) of what was replayed."""
        begins = by_place(self.begin.ends)
        ends = sorted(by_place(self.end.ends).items())
        return [(topic, partition, begins.get((topic, partition), 0), end) for (topic, partition), end in ends]

    def value(self) -> dict[str, Any]:
        """The preview as JSON values; rows of a sample may have values that still have to become text."""
        failure = None if self.failure is None else asdict(self.failure)
        if failure is not None:
            del failure["permanent"]
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
            "tables": [_table_json(each) for each in self.tables],
            "counts": {name: {"published": old, "rebuilt": new} for name, old, new in self.counted()},
            "batches": {"published": self.before.batches, "rebuilt": self.after.batches},
            "suites": {name: list(failing) for name, failing in self.suites},
            "failure": failure,
            "notes": list(self.notes),
            "change": None if self.change is None else asdict(self.change),
            "seconds": dict(self.seconds),
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


def _table_json(change: TableChange) -> dict[str, Any]:
    d = change.difference
    return {
        "table": d.table,
        "equal": change.equal,
        **d.figures,
        "read": dict(zip(("published", "rebuilt"), d.read or (d.old_rows, d.new_rows), strict=True)),
        "new_columns": list(change.new_columns),
        "misfits": list(change.misfits),
        "sums": {name: {"published": old, "rebuilt": new} for name, (old, new) in d.totals.items()},
        "sample": [dict(row) for row in d.sample],
    }


def headline(preview: Preview) -> str:
    if preview.verdict is PreviewVerdict.cannot_start:
        return f"stream {preview.stream}: cannot start on today's state: {'; '.join(reasons(preview))}"
    if preview.verdict is PreviewVerdict.broken:
        what = "the replay failed" if preview.failure is not None else "the rebuilt rows break a suite"
        return f"stream {preview.stream}: broken: {what}: {'; '.join(reasons(preview))}"
    if preview.verdict is PreviewVerdict.equal:
        return f"stream {preview.stream}: equal: the code on disk makes the same rows"
    return f"stream {preview.stream}: different: {'; '.join(filter(None, map(_changed, preview.tables)))}"


def text(preview: Preview, report: str = "") -> str:
    lines = [headline(preview), *(f"  {line}" for line in _body(preview))]
    if report:
        lines.append(f"  report: {report}")
    return "\n".join(lines) + "\n"


def _body(preview: Preview) -> Iterator[str]:
    yield code_words(preview)
    if preview.change is not None:
        yield f"the change is: {preview.change.kind} ({preview.change.why})"
    yield f"{counted(preview.records, 'record')} replayed, {range_words(preview)}"
    ranges = preview.ranges()
    for topic, partition, begin, end in ranges[:_PARTITIONS]:
        yield (
            f"  {topic}/{partition}: offsets {begin:,} to {end - 1:,}"
            if end > begin
            else f"  {topic}/{partition}: none"
        )
    if len(ranges) > _PARTITIONS:
        yield f"  and {counted(len(ranges) - _PARTITIONS, 'more partition')}"
    for table in preview.tables:
        for line in difference_lines(table.difference):
            yield line[2 : _CHARACTERS + 2] + (" ..." if len(line) > _CHARACTERS + 2 else "")
        if table.new_columns:
            yield f"  only the code on disk has: {', '.join(table.new_columns)}"
    for name, before, after in preview.counted():
        if before != after and not name.startswith("written"):
            yield f"{name}: {before:,} in the published batches, {after:,} rebuilt"
    for name, failing in preview.suites:
        yield f"suite {name}: {'passes' if not failing else '; '.join(failing)}"
    yield from preview.notes
    if preview.seconds:
        yield "took " + ", ".join(f"{seconds:.1f} s {part}" for part, seconds in preview.seconds.items())


def code_words(preview: Preview) -> str:
    against = ", then ".join(map(str, preview.published_code)) or "unknown code"
    same = "; it is the same code" if preview.same_code and preview.published_code else ""
    return f"code {preview.code} on disk against {against} that wrote the published rows{same}"


def range_words(preview: Preview) -> str:
    begin = preview.begin.txn
    if begin is None:
        start = f"from the stream's start ({preview.why})"
    else:
        start = f"after {begin}, savepoint {preview.savepoint} of {instant_words(preview.begin.at)} ({preview.why})"
    return f"{start}, to {preview.end.txn} of {instant_words(preview.end.at)}"


def _changed(table: TableChange) -> str:
    parts = [f"rows: {table.difference.counts.words()}"] if table.rows else []
    if table.new_columns:
        parts.append(f"new column {', '.join(table.new_columns)}")
    return f"{table.difference.table} {'; '.join(parts)}" if parts else ""


def page(preview: Preview) -> str:
    """The report as HTML, for a reviewer of the change."""
    title = f"Preview of stream {preview.stream}: {preview.verdict.value}"
    return render_page(title, _sections(preview), [macros().text("As text", text(preview))])


def _sections(preview: Preview) -> Iterator[str]:
    parts, sections = macros(), macros(SECTIONS)
    yield sections.paragraph(headline(preview))
    facts = [
        ["made", instant_words(preview.made_at)],
        ["code", code_words(preview)],
        ["range", range_words(preview)],
        ["records", f"{preview.records:,}"],
        ["published", "nothing: the stream and its tables are as they were"],
    ]
    yield parts.table(["", ""], facts)
    if why := reasons(preview):
        yield sections.reasons(why)
    if preview.tables:
        rows = [
            [each.difference.table, *figures(each.difference), ", ".join(each.new_columns) or "none"]
            for each in preview.tables
        ]
        yield parts.table(["table", *FIGURES, "new columns"], rows, numbers=True)
    if counts := [[name, f"{before:,}", f"{after:,}"] for name, before, after in preview.counted()]:
        yield parts.heading("Figures of the batches")
        yield parts.table(["", "published", "rebuilt"], counts, numbers=True)
    if preview.suites:
        yield parts.heading("Suites")
        outcomes = [[name, "; ".join(failing) if failing else "passes"] for name, failing in preview.suites]
        yield parts.table(["suite", ""], outcomes)
    yield parts.heading("Offsets")
    ranges = [[topic, str(p), f"{begin:,}", f"{end:,}"] for topic, p, begin, end in preview.ranges()[:_RANGES]]
    yield parts.table(["topic", "partition", "from", "to"], ranges)
    if changed := [table for table in preview.tables if table.rows]:
        yield parts.heading("Rows of the code on disk against the published ones")
        yield from (difference_section(table.difference) for table in changed)
