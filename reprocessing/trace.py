"""What became of records, and what rows came from: through batches, tables and topics of several streams.

Everything is read from the ledger files beside the streams' state, and from the tables: no Spark, no broker. A batch
says which offsets it read, at which versions its tables were after it, and where it lies in the topics that it wrote.
So the records of a batch are known; its rows of one record are known where the function passes the place on
(`_source.partition` and `_source.offset` as columns), and those of a window or another state are not.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

from reprocessing.plan.history import has_present_rows
from reprocessing.plan.journal import journal_of
from reprocessing.sample import sample
from streaming_jobs.catalog.topology import Topology
from streaming_jobs.errors import UsageError
from streaming_jobs.ledger.entry import DROPPED, LATE, QUARANTINED, Txn, taken_out
from streaming_jobs.ledger.positions import WrittenRange
from streaming_jobs.platform.delta_log import changes_rows, read_kept_commit
from streaming_jobs.preflight.snapshot import ledger_file
from streaming_jobs.settings import Settings
from streaming_jobs.state import stream_record
from streaming_jobs.state.ledger_file import LineFields, RawLine
from streaming_jobs.state.redrive_requests import RedriveRequests
from streaming_jobs.stream import Stream
from streaming_jobs.verification.state_evidence import outputs_of

MOST = 500
"""Batches at most of one trace."""
_ROWS = 100
_PLACE = re.compile(r"(?P<name>[^/:]+)(?:/(?P<partition>\d+))?:(?P<first>\d+)")


@dataclass(frozen=True)
class Records:
    """Some records of a topic's partition, `end` not among them; or some versions of a table, whose partition is 0."""

    name: str
    partition: int
    first: int
    end: int

    @classmethod
    def parse(cls, text: str) -> Records:
        """A record as `orders/0:1234`, or a version of a table as `totals:57`; raises UsageError for anything else."""
        found = _PLACE.fullmatch(text)
        if found is None:
            raise UsageError(
                f"'{text}' is no record", "write TOPIC/PARTITION:OFFSET, such as orders/0:1234, or TABLE:VERSION"
            )
        first = int(found["first"])
        return cls(found["name"], int(found["partition"] or 0), first, first + 1)

    def __str__(self) -> str:
        last = "" if self.end == self.first + 1 else f"-{self.end - 1}"
        return f"{self.name}/{self.partition}:{self.first}{last}"

    def within(self, first: int, end: int) -> Records | None:
        """The part of them from `first` on and before `end`; None if there is none."""
        begin, stop = max(self.first, first), min(self.end, end)
        return replace(self, first=begin, end=stop) if begin < stop else None


@dataclass(frozen=True)
class TracedBatch:
    """A batch that read some of the records, and what it made of all its records.

    `present`: its rows are those of the tables now; otherwise a recovery has replaced them. `rows` counts by table, and
    what was taken out; `versions` are those of the tables after it, without those that a replay wrote, and `files` the
    data files that these added, by table, as far as the tables' logs reach. Of a batch of a replay, `published` are the
    versions with which the recovery has published its rows, and `rebuilt` those at which streams of the same recovery
    have read them. `of_record` has the rows of the one record that was asked for, by table, if `placed` tables have the
    record's place; `redriven` has the redrives of it, and what became of it.
    """

    stream: str
    txn: Txn
    at: float
    code: str
    read: Records
    present: bool
    rows: Mapping[str, int]
    versions: Mapping[str, int]
    written: tuple[Records, ...]
    primary: str
    placed: tuple[str, ...] = ()
    of_record: Mapping[str, Sequence[Mapping[str, Any]]] | None = None
    redriven: tuple[tuple[str, str], ...] = ()
    files: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    rebuilt: Mapping[str, int] = field(default_factory=dict)
    published: Mapping[str, int] = field(default_factory=dict)

    @property
    def taken_out(self) -> Mapping[str, int]:
        """Records and rows of the batch that are in none of its tables, by what happened to them."""
        counts = {
            "dead letters": self.rows.get("dead_letters", 0),
            "late": self.rows.get("late", 0),
            "quarantined": taken_out(self.rows, QUARANTINED),
            "dropped": taken_out(self.rows, DROPPED),
        }
        return {name: count for name, count in counts.items() if count}

    def rows_of(self, table: str) -> int | None:
        """The rows that it wrote to a table."""
        return self.rows.get("written" if table == self.primary else table)


@dataclass(frozen=True)
class Trace:
    """Batches in the order in which the records reached them; `complete` is False if there are more than `MOST`."""

    start: Records
    batches: tuple[TracedBatch, ...]
    complete: bool = True


@dataclass(frozen=True)
class Origin:
    """The batch that wrote some records to a topic: it made them of the records that it read, and of its state."""

    stream: str
    txn: Txn
    code: str
    records: Records
    read: tuple[Records, ...]


def trace(settings: Settings, topology: Topology, start: Records) -> Trace:
    """What became of some records; raises UsageError if no stream reads them."""
    names = sorted({source.name for stream in topology.streams.values() for source in stream.sources.values()})
    if start.name not in names:
        raise UsageError(f"no stream reads {start.name}", f"streams read {', '.join(names)}")
    found: list[TracedBatch] = []
    step, seen = [start], {start}
    while step:
        further: list[Records] = []
        for stream in topology.streams.values():
            for batch in _readings(settings, stream, step):
                if len(found) == MOST:
                    return Trace(start, tuple(found), complete=False)
                alone = step == [start] and start.end == start.first + 1
                batch = _by_recovery(settings, replace(batch, files=_files(settings, batch)))
                found.append(_with_rows(settings, topology, stream, batch) if alone else batch)
                versions = [*batch.versions.items(), *batch.rebuilt.items()]
                further += [*batch.written, *(Records(t, 0, v, v + 1) for t, v in versions)]
        step = [each for each in dict.fromkeys(further) if each not in seen and each.name in names]
        seen.update(step)
    return Trace(start, tuple(found))


def _files(settings: Settings, batch: TracedBatch) -> dict[str, tuple[str, ...]]:
    """The data files that the batch added, by table; without a table whose log has the version no more."""
    found = {}
    for table, version in batch.versions.items():
        with suppress(FileNotFoundError):
            commit = read_kept_commit(settings.tables / table, version)
            if added := tuple(add["path"] for add in commit.adds if changes_rows(add)):
                found[table] = added
    return found


def _by_recovery(settings: Settings, batch: TracedBatch) -> TracedBatch:
    """The batch, if a replay made it, with the versions that have its rows; any other one as it is."""
    record = stream_record.load(settings, batch.stream)
    opened = {each.number: each.reason for each in record.generations} if record is not None else {}
    _, recovery, plan = opened.get(batch.txn.generation, "").rpartition("recovery ")
    if not recovery or not batch.present or batch.versions:
        return batch
    journal = journal_of(settings, plan)
    fenced, published = (journal.done(stage, batch.stream) or {} for stage in ("fence", "publish"))
    versions = {each["table"]: each["version"] for each in published.get("tables", ())}
    return replace(batch, rebuilt=fenced.get("versions", {}), published=versions)


def origins(settings: Settings, topology: Topology, records: Records) -> list[Origin]:
    """The batches of this project's streams that wrote some records of a topic; none for a topic of other programs."""
    found = []
    for stream in topology.streams.values():
        if records.name not in {sink.topic.name for sink in stream.topic_sinks.values()}:
            continue
        for raw, line in _lines(settings, stream):
            for written in map(_written, line.written):
                if (written.name, written.partition) == (records.name, records.partition) and (
                    part := records.within(written.first, written.end)
                ):
                    read = tuple(
                        Records(each.topic, partition, each.start.get(partition, 0), end)
                        for each in raw.read().entry.offsets
                        for partition, end in sorted(each.end.items())
                        if each.start.get(partition, 0) < end
                    )
                    found.append(Origin(stream.name, raw.txn, line.code[0], part, read))
    return found


def places(settings: Settings, topology: Topology, table: str, where: str, most: int) -> list[Records]:
    """The records of which the rows of a table that meet a condition (SQL) were made, each once.

    Raises UsageError if the rows do not have the places of their records, and for a wrong table or condition.
    """
    stream = next((each for each in topology.streams.values() if table in each.table_names), None)
    rows = sample(settings, topology, table, rows=most, where=where).rows
    assert stream is not None, "sample refuses a table that no stream writes"
    if table in (stream.dead_letters, *stream.late_tables.values()):
        return _once(Records(r["topic"], r["partition"], r["offset"], r["offset"] + 1) for r in rows)
    columns = place_columns(settings, stream).get(table)
    if columns is None:
        raise UsageError(
            f"the rows of {table} do not say of which record each was made: they come from a state, from several "
            "topics, or without the record's place",
            "add the place in the function: _source.partition and _source.offset as columns",
        )
    (source,) = stream.sources.values()
    partition, offset = columns
    return _once(Records(source.name, r[partition], r[offset], r[offset] + 1) for r in rows if r[offset] is not None)


def _once(found: Iterator[Records]) -> list[Records]:
    return list(dict.fromkeys(found))


def _written(value: Sequence[Any]) -> Records:
    written = WrittenRange(*value)
    return Records(written.topic, written.partition, written.first, written.end)


def _lines(settings: Settings, stream: Stream) -> Iterator[tuple[RawLine, LineFields]]:
    """The batches of a stream, newest first; of a batch that was repeated, the newer line."""
    seen: set[Txn] = set()
    for day in ledger_file(settings, stream.name).days(stream.name):
        for raw in reversed(day):
            if raw.txn in seen:
                continue
            seen.add(raw.txn)
            if (line := raw.fields()) is not None:
                yield raw, line


def first_reading(settings: Settings, stream: Stream, places: Collection[tuple[str, int, int]]) -> Txn | None:
    """The first of the batches with present rows that read one of these records (topic, partition, offset).

    None if the ledger files no longer have it.
    """
    record, found = stream_record.load(settings, stream.name), None
    for raw, line in _lines(settings, stream):
        if record is None or not has_present_rows(record.generations, raw.txn):
            continue
        for topic, partition, offset in places:
            offsets, number = line.offsets.get(topic), str(partition)
            if offsets is not None and offsets.start.get(number, 0) <= offset < offsets.end.get(number, 0):
                found = raw.txn if found is None else min(found, raw.txn)
                break
    return found


def _readings(settings: Settings, stream: Stream, step: Sequence[Records]) -> list[TracedBatch]:
    """The batches that read some of these records, oldest first: one pass of the ledger for all of them."""
    names = {source.name for source in stream.sources.values()}
    wanted = [records for records in step if records.name in names]
    if not wanted:
        return []
    record = stream_record.load(settings, stream.name)
    found = []
    for raw, line in _lines(settings, stream):
        for records in wanted:  # a partition that a short line leaves out has no records in it
            offsets, partition = line.offsets.get(records.name), str(records.partition)
            if offsets is None or partition not in offsets.end:
                continue
            read = records.within(offsets.start.get(partition, 0), offsets.end[partition])
            if read is not None:
                present = record is not None and has_present_rows(record.generations, raw.txn)
                found.append(_traced(stream, raw.txn, line, read, present=present))
    return sorted(found, key=lambda batch: (batch.at, batch.read.first))


def _traced(stream: Stream, txn: Txn, line: LineFields, read: Records, *, present: bool) -> TracedBatch:
    return TracedBatch(
        stream=stream.name,
        txn=txn,
        at=line.t,
        code=line.code[0] if line.code else "",
        read=read,
        present=present,
        rows=line.rows,
        versions=line.versions,
        written=tuple(map(_written, line.written)),
        primary=line.table,
    )


def place_columns(settings: Settings, stream: Stream) -> dict[str, tuple[str, str]]:
    """By table the columns of the record's partition and offset, where all versions of the code have the same."""
    if len(stream.sources) != 1 or stream.tables_read:
        return {}
    made = outputs_of(settings.state, stream.name).values()
    found: dict[str, tuple[str, str]] = {}
    for table in (sink.name for sink in stream.sinks.values()):
        positions = {tables[table].position for tables in made if table in tables}
        if len(positions) == 1 and (position := positions.pop()) is not None:
            found[table] = position
    return found


def _with_rows(settings: Settings, topology: Topology, stream: Stream, batch: TracedBatch) -> TracedBatch:
    """The batch with the rows of the record in each table whose rows have its place, its dead letters and late rows."""
    if not batch.present:
        return batch
    conditions = {
        table: f'"{partition}" = {batch.read.partition} AND "{offset}" = {batch.read.first}'
        for table, (partition, offset) in place_columns(settings, stream).items()
    }
    placed = tuple(conditions)
    quarantines = {
        kept: conditions[table]
        for table, kept in stream.quarantines.items()
        if table in conditions and batch.rows.get(f"{QUARANTINED}{table}")  # a rule may be newer than the batch
    }
    letter = f"topic = '{batch.read.name}' AND partition = {batch.read.partition} AND \"offset\" = {batch.read.first}"
    letters = {stream.dead_letters: letter} if batch.rows.get("dead_letters") else {}
    letters |= {kept: letter for table, kept in stream.late_tables.items() if batch.rows.get(f"{LATE}{table}")}
    made = {
        table: sample(settings, topology, table, rows=_ROWS, where=where).rows
        for table, where in (conditions | quarantines | letters).items()
    }
    place = batch.read.name, batch.read.partition, batch.read.first
    redriven = tuple(
        (each.id, record.outcome)
        for each in RedriveRequests.of(settings, stream.name).history()
        if each.state == "committed"
        for record in each.records
        if record.place == place
    )
    of_record = {table: rows for table, rows in made.items() if rows}
    return replace(batch, placed=placed, of_record=of_record, redriven=redriven)
