"""What of a declared table can be compared, from its declaration, the entries and the records: table by table.

| comparison | of | says |
|---|---|---|
| row counts   | tables that rows are appended to | there are as many rows as the entries say were written |
| records      | plans of one row a record        | every record is one row or a dead letter, by its place, or counted |
| keys         | upserts                          | no key twice, none that is null |
| dead letters | every stream                     | each refused record once, with its format's own reason |

Values are not compared here: that takes a truth of the user's own (`truth.py`), or Spark (`recompute.py`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from deltalake import DeltaTable
from deltalake.exceptions import DeltaError

from streaming_jobs import table_rows
from streaming_jobs.proof.beside import Beside, Output
from streaming_jobs.proof.letters import Refusals, compare_letters
from streaming_jobs.proof.lineage import Batch, Coverage
from streaming_jobs.proof.log import Entry, read_commit, versions
from streaming_jobs.proof.rules import Packed, of_spans, packed, shown, unpacked
from streaming_jobs.proof.spans import Span
from streaming_jobs.proof.subject import Comparison, Outcome, Subject, Table
from streaming_jobs.proof.topic import TopicContent
from streaming_jobs.spelling import counted

LETTERS = ("topic", "partition", "offset", "reason")
"""What is read of dead letters."""
_UNREADABLE = (DeltaError, OSError, ValueError, pa.ArrowException)


@dataclass
class Judged:
    """One stream as far as it is judged: its coverage, its position, and the version of its primary table."""

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
        """Keep one outcome."""
        self.found.append(Comparison(table, what, verdict, text))


def compare_tables(judged: Judged) -> tuple[list[Comparison], list[Span], list[Span], int]:
    """Every comparison of every table, the offsets found lost and doubled, and the rows of the primary table."""
    sizes = {}
    for table in judged.subject.tables:
        try:
            sizes[table.name] = _table(judged, table)
        except _UNREADABLE as error:
            if max(versions(judged.tables / table.name), default=-1) > judged.version:
                text = "they were rewritten and cleaned up while they were to be read: verify again"
                judged.tell(table.name, "rows", "unproved", text)
            else:
                judged.tell(table.name, "rows", "wrong", f"they cannot be read: {str(error)[:300]}")
    return judged.found, judged.lost, judged.doubled, sizes.get(judged.subject.table, 0)


def version_of(judged: Judged, table: str) -> int | None:
    """The version of a table that belongs to the primary's position: the others commit before it; None without one."""
    if table == judged.subject.table:
        return judged.version
    return version_at(judged.tables / table, judged.position)


def version_at(table: Path, position: Batch | None) -> int | None:
    """The newest version of a table that has nothing after a position; None when there is no such table."""
    there = versions(table)
    if not there:
        return None
    found = there[-1]
    for version in reversed(there):
        try:
            entry = read_commit(table, version).entry
        except FileNotFoundError:  # cleaned up since the folder was listed
            break
        if entry is None or entry.kind not in ("batch", "publish", "fence"):
            continue
        if position is not None and (entry.generation, entry.batch) <= position:
            break
        found = version - 1
    return max(found, there[0])


def _table(judged: Judged, table: Table) -> int:
    version = version_of(judged, table.name)
    if version is None:
        if table.name != judged.subject.dead_letters and table.counted:
            judged.tell(table.name, "rows", "wrong", "there is no such table")
        return 0
    handle = DeltaTable(judged.tables / table.name, version=version)
    letters = table.name == judged.subject.dead_letters
    output = None if letters or not table.counted else _Made.of(judged, table.name)
    columns = [*table.keys, *(LETTERS if letters else (output.position or ()) if output else ())]
    rows = table_rows.rows(judged.tables / table.name, version, columns or [handle.schema().fields[0].name])
    _foreign(judged, table)
    if not table.keys:
        _counts(judged, table, rows.num_rows)
    if table.keys:
        _keys(judged, table, rows)
    if output is not None:
        _records(judged, table, output, rows)
    if letters:
        _letters(judged, table, rows)
    return int(rows.num_rows)


def _foreign(judged: Judged, table: Table) -> None:
    """Commits that are not the stream's own, on the tables that the chain of batches does not look at."""
    if table.name == judged.subject.table:
        return
    accepted = judged.beside.accepted.get(table.name, frozenset()) if judged.beside is not None else frozenset()
    path = judged.tables / table.name
    for version in versions(path):
        try:
            commit = read_commit(path, version)
        except FileNotFoundError:  # cleaned up since the folder was listed
            continue
        if commit.entry is None and commit.changes_rows and version not in accepted:
            text = f"version {version} changed rows ({commit.operation}) and carries no ledger entry"
            judged.tell(table.name, "rows", "wrong", text)


def _counts(judged: Judged, table: Table, rows: int) -> None:
    written = judged.coverage.written
    if judged.beside is not None and judged.beside.accepted.get(table.name):
        judged.tell(table.name, "row counts", "not compared", "a change of somebody else was accepted")
    elif written is None:
        missing = judged.coverage.missing
        judged.tell(table.name, "row counts", "unproved", f"entries that are gone, by batches: {missing:,}")
    elif (due := written.get(table.counted, 0)) != rows:
        text = f"{counted(rows, 'row', 'is', 'are')} there, the entries say that {due:,} were written"
        judged.tell(table.name, "row counts", "wrong", text)
    else:
        judged.tell(table.name, "row counts", "ok", f"{counted(rows, 'row')}, as many as the entries say were written")


def _keys(judged: Judged, table: Table, rows: pa.Table) -> None:
    keys = list(table.keys)
    nulls = {key: count for key in keys if (count := rows[key].null_count)}
    told = [f"{counted(count, 'row', 'has', 'have')} a null in key column {key}" for key, count in nulls.items()]
    groups = rows.select(keys).group_by(keys).aggregate([([], "count_all")])
    twice = groups.filter(pc.field("count_all") > 1)
    if twice.num_rows:
        first = ", ".join(str(value) for value in twice.select(keys).slice(0, 1).to_pylist()[0].values())
        told.append(f"{counted(twice.num_rows, 'key', 'is', 'are')} in more than one row, first {first}")
    if told:
        judged.tell(table.name, "keys", "wrong", "; ".join(told))
    else:
        judged.tell(table.name, "keys", "ok", f"{rows.num_rows:,} keys, none twice and none null")


@dataclass(frozen=True)
class _Made:
    """What the plans of the covered batches make of a record; `position` are the columns that hold its place."""

    outputs: Mapping[str, Output]
    unknown: int
    position: tuple[str, str] | None

    @classmethod
    def of(cls, judged: Judged, table: str) -> _Made:
        recorded = judged.beside.outputs if judged.beside is not None else {}
        codes = {entry.code for entry in judged.coverage.entries}
        outputs = {code: recorded[code][table] for code in codes if table in recorded.get(code, {})}
        positions = {output.position for output in outputs.values()}
        return cls(outputs, len(codes - outputs.keys()), positions.pop() if len(positions) == 1 else None)

    def entries(self, judged: Judged, *, exactly: bool) -> Iterator[Entry]:
        """The entries whose plan makes exactly one row of each record, or one at most."""
        for entry in judged.coverage.entries:
            output = self.outputs.get(entry.code)
            if output is not None and (output.one_row if exactly else output.one_row_at_most):
                yield entry

    @property
    def nodes(self) -> str:
        """What the plans do besides taking row for row."""
        plain = {"Project", "SubqueryAlias", "EventTimeWatermark", "View"}
        return ", ".join(sorted({node for output in self.outputs.values() for node in output.nodes} - plain))


def _records(judged: Judged, table: Table, made: _Made, rows: pa.Table) -> None:
    """Where each record has to be, by place if the table has places, else by number."""
    if not made.outputs:
        text = "what the stream's plan makes of a record is not recorded yet; the stream's next start does it"
        judged.tell(table.name, "records", "not compared", text)
        return
    if judged.subject.others:
        judged.tell(table.name, "records", "not compared", "the stream reads several topics")
        return
    exactly = of_entries(judged.subject.topic, made.entries(judged, exactly=True))
    at_most = of_entries(judged.subject.topic, made.entries(judged, exactly=False))
    if not len(at_most):
        text = f"the plan makes other rows than one a record ({made.nodes})"
        judged.tell(table.name, "records", "not compared", text)
    elif made.position is not None:
        _places(judged, table, made, rows, exactly, at_most)
    elif table.keys or made.unknown or judged.coverage.missing or len(exactly) < len(at_most):
        text = "no column is a plain copy of _source.partition and of _source.offset"
        judged.tell(table.name, "records", "not compared", text)
    else:
        _number(judged, table, rows.num_rows, exactly)


def _places(judged: Judged, table: Table, made: _Made, rows: pa.Table, exactly: Packed, at_most: Packed) -> None:
    assert made.position is not None
    topic = judged.subject.topic
    partition, offset = made.position
    without = rows[offset].null_count
    rows = rows.filter(pc.is_valid(rows[offset]))
    unique, counts = np.unique(packed(rows[partition], rows[offset]), return_counts=True)
    known = of_spans(span for span in judged.coverage.spans if span.topic == topic)
    due = np.array([], dtype=np.int64) if table.keys else np.setdiff1d(_held(judged, exactly), _refused(judged))
    missing, twice = np.setdiff1d(due, unique), np.intersect1d(unique[counts > 1], at_most)
    extra = np.setdiff1d(unique, known)
    told = []
    for places, what in (
        (missing, "covered by an entry and in no row"),
        (twice, "in more than one row"),
        (extra, "in a row and covered by no entry"),
    ):
        if len(places):
            which = shown(unpacked(topic, places.tolist()))
            told.append(f"{counted(len(places), 'offset', 'is', 'are')} {what}: {which}")
    if without:
        told.append(f"{counted(without, 'row', 'names', 'name')} no record")
    judged.lost += unpacked(topic, missing.tolist())
    judged.doubled += unpacked(topic, twice.tolist())
    if told:
        judged.tell(table.name, "records", "wrong", "; ".join(told))
        return
    said = []
    if len(due):
        said.append(f"{counted(len(due), 'record', 'is', 'are')} each in exactly one row")
    if len(at_most) > len(exactly) or table.keys:
        why = "a later row of its key replaces it" if table.keys else f"the plan leaves some out ({made.nodes})"
        said.append(f"no record is in two rows ({why}: which ones are there is not compared)")
    if made.unknown or judged.coverage.missing:
        said.append("batches whose plan or entry is not known are left out")
    judged.tell(table.name, "records", "ok", f"by {partition} and {offset}: {'; '.join(said)}")


def _number(judged: Judged, table: Table, rows: int, exactly: Packed) -> None:
    due = len(np.setdiff1d(_held(judged, exactly), _refused(judged)))
    topic = judged.topics[judged.subject.topic]
    low = {number: part.low for number, part in topic.partitions.items()}
    if any(span.start < low.get(span.partition, 0) for span in judged.coverage.proved):
        judged.tell(table.name, "records", "unproved", "the topic no longer holds the first records")
        return
    should = f"{counted(due, 'record', 'makes', 'make')} one row each, and"
    if due != rows:
        judged.tell(table.name, "records", "wrong", f"{should} {counted(rows, 'row', 'is', 'are')} there")
    else:
        judged.tell(table.name, "records", "ok", f"{should} as many rows are there")


def of_entries(topic: str, entries: Iterator[Entry]) -> Packed:
    """Every offset of a topic in the ranges of some entries, packed and in order."""
    return np.unique(
        of_spans(
            Span(topic, partition, read.start.get(partition, 0), end)
            for entry in entries
            for read in entry.ranges
            if read.topic == topic
            for partition, end in read.end.items()
        )
    )


def _held(judged: Judged, places: Packed) -> Packed:
    """Without the offsets that hold no record (transaction markers), where the topic still knows."""
    topic = judged.topics.get(judged.subject.topic)
    if topic is None:
        return places
    parts = [packed(np.full(len(c.offsets), number), c.offsets) for number, c in topic.partitions.items()]
    records = np.concatenate([packed([], []), *parts])
    spans = [span for span in judged.coverage.spans if span.topic == topic.name]
    past = of_spans([replace(s, end=min(s.end, topic.low.get(s.partition, 0))) for s in spans])
    return np.intersect1d(places, np.union1d(records, past))


def _refused(judged: Judged) -> Packed:
    """The places of the stream's dead letters."""
    version = version_of(judged, judged.subject.dead_letters)
    if version is None:
        return packed([], [])
    rows = table_rows.rows(judged.tables / judged.subject.dead_letters, version, LETTERS)
    rows = rows.filter(pc.and_(pc.equal(rows["topic"], judged.subject.topic), pc.is_valid(rows["offset"])))
    return packed(rows["partition"], rows["offset"])


def _letters(judged: Judged, table: Table, rows: pa.Table) -> None:
    if judged.refusals is None:
        judged.tell(table.name, "dead letters", "not compared", "the records were not decoded")
        return
    covered = {
        topic: np.intersect1d(of_spans(s for s in judged.coverage.spans if s.topic == topic), _held_of(content))
        for topic, content in judged.topics.items()
        if topic in judged.subject.topics
    }
    found, places = compare_letters(table.name, rows, covered, judged.refusals)
    judged.found += found
    for topic, (missing, twice) in places.items():
        judged.lost += unpacked(topic, missing.tolist())
        judged.doubled += unpacked(topic, twice.tolist())


def _held_of(content: TopicContent) -> Packed:
    parts = [packed(np.full(len(c.offsets), number), c.offsets) for number, c in content.partitions.items()]
    return np.sort(np.concatenate([packed([], []), *parts]))
