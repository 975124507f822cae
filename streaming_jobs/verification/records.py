"""The comparison of a topic's records with the rows of a table whose plan makes one row per record.

Records are compared by place (partition and offset) if the rows have it, otherwise by number. A record without a row
may be a dead letter, or the table may be unable to hold its row. Records that the topic no longer holds are not
compared: between them there may be offsets without a record, such as transaction markers.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from streaming_jobs.platform import table_rows
from streaming_jobs.storage.locations import Location, delta_table
from streaming_jobs.text.spelling import counted
from streaming_jobs.verification.dead_letters import OF_ROWS
from streaming_jobs.verification.delta_log import Entry
from streaming_jobs.verification.examination import Examination, VersionGone
from streaming_jobs.verification.offset_ranges import (
    Packed,
    Span,
    merged,
    packed,
    place_of,
    shown,
    total,
    unpacked,
    within,
)
from streaming_jobs.verification.state_evidence import ACCEPTED, PlanOutput
from streaming_jobs.verification.subject import DROPPED, QUARANTINED, StreamTable
from streaming_jobs.verification.topic import CommittedTopic

_LETTERS_CHANGED = "a change of somebody else to the dead letters was accepted"


@dataclass(frozen=True)
class Made:
    """The rows that the plans of the covered batches make of a record; `position` are the columns with its place."""

    outputs: Mapping[str, PlanOutput]
    unknown: int
    position: tuple[str, str] | None

    @classmethod
    def of(cls, recorded: Mapping[str, Mapping[str, PlanOutput]], entries: Iterable[Entry], table: str) -> Made:
        """The outputs of the codes that wrote these batches, from the `recorded` ones of all codes and tables."""
        codes = {entry.code for entry in entries}
        outputs = {code: recorded[code][table] for code in codes if table in recorded.get(code, {})}
        positions = {output.position for output in outputs.values()}
        return cls(outputs, len(codes - outputs.keys()), positions.pop() if len(positions) == 1 else None)

    @property
    def one_row_at_most(self) -> bool:
        """True if no record makes two rows, in any of the batches."""
        return not self.unknown and all(output.one_row_at_most for output in self.outputs.values())

    def spans(self, exam: Examination, *, exactly: bool) -> list[Span]:
        """The ranges of the entries whose plan makes exactly one row of each record, or one at most."""
        entries = self._entries(exam, exactly=exactly)
        return list(merged(span for entry in entries for span in _spans(entry, exam.subject.topic)))

    def _entries(self, exam: Examination, *, exactly: bool) -> Iterator[Entry]:
        for entry in exam.coverage.entries:
            output = self.outputs.get(entry.code)
            if output is not None and (output.one_row if exactly else output.one_row_at_most):
                yield entry

    @property
    def nodes(self) -> str:
        """The plan nodes that do more than make one row per record."""
        plain = {"Project", "SubqueryAlias", "EventTimeWatermark", "View"}
        return ", ".join(sorted({node for output in self.outputs.values() for node in output.nodes} - plain))


def compare_records(exam: Examination, table: StreamTable, made: Made, rows: pa.Table, columns: list[str]) -> None:
    """Compare a table with the records, by place if its rows have it, else by number; `columns` are the table's."""
    if not made.outputs:
        text = "what the stream's plan makes of a record is not recorded yet; the stream's next start does it"
        exam.tell(table.name, "records", "not compared", text)
        return
    if exam.subject.others:
        exam.tell(table.name, "records", "not compared", "the stream reads several topics")
        return
    exactly, at_most = made.spans(exam, exactly=True), made.spans(exam, exactly=False)
    topic = exam.topics.get(exam.subject.topic)
    if topic is None:
        exam.tell(table.name, "records", "not compared", "the topic does not exist")
    elif not at_most:
        text = f"the plan makes other rows than one per record ({made.nodes})"
        exam.tell(table.name, "records", "not compared", text)
    elif exam.accepted(table.name) or exam.replaced(table.name):
        _accepted(exam, table, made, rows, at_most)
    elif made.position is None and (
        table.keys or made.unknown or exam.coverage.missing or total(exactly) < total(at_most)
    ):
        text = "no column is a plain copy of _source.partition and of _source.offset"
        exam.tell(table.name, "records", "not compared", text)
    else:
        try:
            letters = Letters.of(exam, made.position)
            taken = RemovedByRules.of(exam, table, made.position)
        except VersionGone as gone:
            exam.tell(table.name, "records", "unproved", f"dead letters or quarantine cannot be read: {gone}")
            return
        compared = _ComparedRecords(exam, table, made, topic, exactly, at_most, letters, taken)
        if made.position is not None:
            compared.by_place(rows, *made.position)
        else:
            compared.by_number(rows.num_rows, frozenset(columns))


def _accepted(exam: Examination, table: StreamTable, made: Made, rows: pa.Table, at_most: list[Span]) -> None:
    """Compare a table with an accepted foreign commit, or slices of other code: no record may be in two of its rows."""
    if made.position is not None:
        _, twice = _once(rows, made.position, at_most)
        exam.doubled += (spans := unpacked(exam.subject.topic, twice.tolist()))
        if spans:
            text = f"{counted(len(twice), 'offset', 'is', 'are')} in more than one row: {shown(spans)}"
            exam.tell(table.name, "records", "wrong", text)
            return
    reason = ACCEPTED if exam.accepted(table.name) else "slices of it were rebuilt by other code"
    exam.tell(table.name, "records", "not compared", reason)


def _once(rows: pa.Table, position: tuple[str, str], at_most: list[Span]) -> tuple[Packed, Packed]:
    """The positions of the rows, each once, and positions that occur twice although a record makes one row at most."""
    partition, offset = position
    rows = rows.filter(pc.is_valid(rows[offset]))
    unique, counts = np.unique(packed(rows[partition], rows[offset]), return_counts=True)
    twice = unique[counts > 1]
    return unique, twice[within(twice, at_most)]


@dataclass(frozen=True)
class _ComparedRecords:
    """A table and the records of its one topic; plans make one row of those in `exactly`, one at most in `at_most`."""

    exam: Examination
    table: StreamTable
    made: Made
    topic: CommittedTopic
    exactly: list[Span]
    at_most: list[Span]
    letters: Letters
    taken: RemovedByRules

    def by_place(self, rows: pa.Table, partition: str, offset: str) -> None:
        """Compare the rows, which name their records in these columns."""
        exam, table, made, topic = self.exam, self.table, self.made, self.topic
        letters, taken = self.letters, self.taken
        without = rows[offset].null_count
        unique, twice = _once(rows, (partition, offset), self.at_most)
        due = np.array([], dtype=np.int64) if table.keys else np.setdiff1d(_held(topic, self.exactly), letters.placed)
        missing = np.setdiff1d(np.setdiff1d(due, unique), taken.places)
        dropped = dropped_of(exam, table, missing)
        missing = np.setdiff1d(missing, dropped)
        redriven = np.intersect1d(missing, np.union1d(*redriven_without_row(exam)))
        missing = np.setdiff1d(missing, redriven)
        due = np.intersect1d(due, unique)
        extra = unique[~within(unique, (span for span in exam.coverage.spans if span.topic == topic.name))]
        maybe = _excused(exam, missing, letters)
        missing = missing[: 0 if maybe else len(missing)]
        faults = []
        for places, what in (
            (missing, "covered by an entry and in no row"),
            (twice, "in more than one row"),
            (extra, "in a row and covered by no entry"),
        ):
            if len(places):
                which = shown(unpacked(topic.name, places.tolist()))
                faults.append(f"{counted(len(places), 'offset', 'is', 'are')} {what}: {which}")
        if without:
            faults.append(f"{counted(without, 'row', 'names', 'name')} no record")
        exam.lost += unpacked(topic.name, missing.tolist())
        exam.doubled += unpacked(topic.name, twice.tolist())
        if faults:
            exam.tell(table.name, "records", "wrong", "; ".join(faults))
            return
        if maybe:
            exam.tell(table.name, "records", "unproved", maybe)
            return
        notes = []
        if len(due):
            notes.append(f"{counted(len(due), 'record', 'is', 'are')} each in exactly one row")
        if taken.quarantined or len(dropped):
            notes.append(f"without a row are {taken.quarantined:,} (in the quarantine) and {len(dropped):,} (dropped)")
        if len(redriven):
            notes.append(f"without a row are {counted(len(redriven), 'record')} that the code of a redrive left out")
        if total(self.at_most) > total(self.exactly) or table.keys:
            why = "a later row of its key replaces it" if table.keys else f"the plan leaves some out ({made.nodes})"
            notes.append(f"no record is in two rows ({why}: which ones are there is not compared)")
        if made.unknown or exam.coverage.missing:
            notes.append("batches whose plan or entry is not known are left out")
        if not table.keys and _expired(topic, self.exactly):
            notes.append("which records are there that the topic no longer holds is not compared")
        exam.tell(table.name, "records", "ok", f"by {partition} and {offset}: {'; '.join(notes)}")

    def by_number(self, rows: int, columns: frozenset[str]) -> None:
        """Compare the number of rows, which do not name their records."""
        exam, table, letters, taken = self.exam, self.table, self.letters, self.taken
        if _expired(self.topic, exam.coverage.proved):
            exam.tell(table.name, "records", "unproved", "the topic no longer holds the first records")
            return
        most = len(np.setdiff1d(_held(self.topic, self.exactly), letters.whole))
        refused = letters.fitting(columns)
        left_out, unknown = redriven_without_row(exam)
        due = most - refused - taken.rows - len(left_out)
        less = f" ({refused:,} of which the table cannot hold)" if refused else ""
        less += f" ({taken.quarantined:,} quarantined and {taken.dropped:,} dropped)" if taken.rows else ""
        should = f"{counted(most, 'record', 'makes', 'make')} one row each{less}, and"
        if due == rows:
            exam.tell(table.name, "records", "ok", f"{should} as many rows are there")
        elif exam.accepted(exam.subject.dead_letters):
            exam.tell(table.name, "records", "not compared", _LETTERS_CHANGED)
        elif len(unknown):
            exam.tell(table.name, "records", "not compared", "how many rows redriven records have made is not known")
        elif most - len(letters.rows) <= rows + taken.rows <= most and exam.subject.outputs > 1:
            text = f"{should} {counted(rows, 'row', 'is', 'are')} there; which table's rows were refused is not known"
            exam.tell(table.name, "records", "unproved", text)
        else:
            exam.tell(table.name, "records", "wrong", f"{should} {counted(rows, 'row', 'is', 'are')} there")


def _excused(exam: Examination, missing: Packed, letters: Letters) -> str:
    """The reason why missing records may not be lost, in words; empty if they are lost."""
    if not len(missing):
        return ""
    which = shown(unpacked(exam.subject.topic, missing.tolist()))
    without_row = f"{counted(len(missing), 'record', 'has', 'have')} no row: {which}"
    if exam.accepted(exam.subject.dead_letters):
        return f"{without_row}; {_LETTERS_CHANGED}"
    if len(missing) <= letters.unplaced:
        rows = counted(letters.unplaced, "row", "was", "were")
        return (
            f"{without_row}; {rows} refused by a version of the code that did not record which record a row comes from"
        )
    return ""


def held(topic: CommittedTopic) -> Packed:
    """Places of the records that a topic holds, in order."""
    parts = [packed(np.full(len(c.offsets), number), c.offsets) for number, c in topic.partitions.items()]
    return np.sort(np.concatenate([packed([], []), *parts]))


def _held(topic: CommittedTopic, spans: list[Span]) -> Packed:
    """Places of the records that a topic holds in some ranges; offsets without a record are not among them."""
    places = held(topic)
    return places[within(places, spans)]


def _expired(topic: CommittedTopic, spans: list[Span]) -> bool:
    """True if the topic no longer holds some of the ranges."""
    return any(span.start < topic.low.get(span.partition, 0) for span in spans if span.topic == topic.name)


# The dead letters that explain why a record has no row in a table: the record was refused, or its row was.
#
# The dead letter of a refused row names its record where the output has `_source`, or where the row itself has the
# record's place. Older versions of the code recorded no place for the rows of append tables.

LETTERS = ("topic", "partition", "offset", "reason")
"""The columns of dead letters that are read."""
_NOT_HELD = sorted(OF_ROWS - {"null_key"})
"""Reasons of rows that a table cannot hold; a row without its key is one of an upsert, where no record is missed."""


@dataclass(frozen=True)
class RowLetter:
    """A refused row: the topic and place of its record where these are known, and the row's columns."""

    topic: str | None
    place: int | None
    columns: frozenset[str]


@dataclass(frozen=True)
class Letters:
    """`whole` are the places of refused records, `rows` the refused rows."""

    whole: Packed
    rows: tuple[RowLetter, ...]

    @classmethod
    def of(cls, exam: Examination, position: tuple[str, str] | None) -> Letters:
        """The dead letters of a topic at the stream's position; `position` are a row's columns with its record's place.

        Raises VersionGone.
        """
        name, topic = exam.subject.dead_letters, exam.subject.topic
        version = exam.version_of(name)
        if version is None:
            return cls(packed([], []), ())
        path = exam.tables / name
        rows = table_rows.rows(path, version, LETTERS)
        mine = pc.and_(pc.equal(rows["topic"], topic), pc.is_valid(rows["offset"]))
        whole = rows.filter(pc.and_(mine, pc.invert(pc.is_in(rows["reason"], pa.array(sorted(OF_ROWS))))))
        return cls(packed(whole["partition"], whole["offset"]), tuple(refused_rows(path, version, topic, position)))

    @property
    def placed(self) -> Packed:
        """Places of all records that were refused, or of which a row was."""
        rows = np.array([row.place for row in self.rows if row.place is not None], dtype=np.int64)
        return np.union1d(self.whole, rows)

    @property
    def unplaced(self) -> int:
        """Number of refused rows whose record is not known."""
        return sum(1 for row in self.rows if row.place is None)

    def fitting(self, columns: frozenset[str]) -> int:
        """Number of refused rows that have only columns of a table, given by name."""
        return sum(1 for row in self.rows if row.columns <= columns)


def refused_rows(path: Location, version: int, topic: str, position: tuple[str, str] | None) -> Iterator[RowLetter]:
    """The refused rows among the dead letters; for a letter without a place, it is taken from the row's columns."""
    letters = table_rows.dataset(delta_table(path, version), path)
    columns = [name for name in (*LETTERS, "value") if name in letters.schema.names]
    for row in letters.to_table(columns=columns, filter=pc.field("reason").isin(_NOT_HELD)).to_pylist():
        value = _value(row)
        if row["topic"] is not None and row["offset"] is not None:
            yield RowLetter(row["topic"], place_of(row["partition"], row["offset"]), frozenset(value))
            continue
        place = None
        if position is not None:
            partition, offset = (value.get(name) for name in position)
            if isinstance(partition, int) and isinstance(offset, int):
                place = place_of(partition, offset)
        yield RowLetter(topic if place is not None else None, place, frozenset(value))


def _value(row: Mapping[str, Any]) -> dict[str, Any]:
    """The refused row, which its dead letter holds as JSON."""
    try:
        value = json.loads(row.get("value") or b"{}")
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}


# Rows that row rules have taken out of a table, and the equation of each batch.
#
# For a stream whose plan makes one row of each record, with one append table, every batch has
#
#     records = written rows + quarantined rows + dropped rows + dead letters
#
# where the records are those that the topic holds in the batch's ranges, and the other numbers are those of its
# entry. That the entries' numbers are those of the tables, `row counts` says. With an upsert, several outputs, a
# filter, a generator, a join or state there is no such equation: rows are not records there.

_SHOWN = 3


@dataclass(frozen=True)
class RemovedByRules:
    """`places` of the records of quarantined rows, the number of these rows, and of dropped ones by the entries."""

    places: Packed
    quarantined: int
    dropped: int

    @classmethod
    def of(cls, exam: Examination, table: StreamTable, position: tuple[str, str] | None) -> RemovedByRules:
        """The rows taken out of a table; `position` are its columns with the record's place. Raises VersionGone."""
        none = packed([], [])
        dropped = sum(entry.rows.get(f"{DROPPED}{table.name}", 0) for entry in exam.coverage.entries)
        version = exam.version_of(table.quarantine) if table.quarantine else None
        if version is None:
            return cls(none, 0, dropped)
        partition, offset = position or ("_partition", "_offset")
        rows = table_rows.rows(exam.tables / table.quarantine, version, (partition, offset))
        placed = rows.filter(pc.is_valid(rows[offset]))
        return cls(packed(placed[partition], placed[offset]), int(rows.num_rows), dropped)

    @property
    def rows(self) -> int:
        return self.quarantined + self.dropped


def dropped_of(exam: Examination, table: StreamTable, missing: Packed) -> Packed:
    """Those of the missing records that were dropped: in no batch more than its entry says.

    Which records they were, nothing says.
    """
    explained = [packed([], [])]
    for entry in exam.coverage.entries:
        if number := entry.rows.get(f"{DROPPED}{table.name}", 0):
            of_batch = missing[within(missing, _spans(entry, exam.subject.topic))]
            if len(of_batch) <= number:
                explained.append(of_batch)
    return np.concatenate(explained)


def redriven_without_row(exam: Examination) -> tuple[Packed, Packed]:
    """Places of redriven records of which the redrive's code made no row, and of those of which that is not known."""
    topic = exam.subject.topic

    def packed_of(places: Iterable[tuple[str, int, int]]) -> Packed:
        return np.array([place_of(p, o) for t, p, o in places if t == topic], dtype=np.int64)

    left_out = packed_of(place for each in exam.redrives for place in each.without_row)
    unknown = packed_of(place for each in exam.redrives for place in each.unknown)
    return left_out, unknown


def compare_batches(exam: Examination, table: StreamTable, outputs: dict[str, PlanOutput]) -> None:
    """Check the equation of every batch whose records the topic still holds."""
    if table.name != exam.subject.table or table.keys or exam.subject.others or exam.subject.outputs > 1:
        return
    topic = exam.topics.get(exam.subject.topic)
    entries = [e for e in exam.coverage.entries if (made := outputs.get(e.code)) is not None and made.one_row]
    if topic is None or not entries or exam.accepted(exam.subject.dead_letters):
        return
    offsets = {number: np.sort(content.offsets) for number, content in topic.partitions.items()}
    sums: dict[str, int] = {}
    faults, checked, fewer = [], 0, 0
    for entry in entries:
        if (records := _records(entry, topic, offsets)) is None:
            continue
        checked += 1
        parts = _parts(entry, table.name)
        if records < sum(parts.values()):  # compaction takes records from between others
            fewer += 1
        elif records > sum(parts.values()):
            faults.append(f"{entry}: {counted(records, 'record')}, {_sum(parts)}")
        for name, number in (("records", records), *parts.items()):
            sums[name] = sums.get(name, 0) + number
    if faults:
        more = f" and {len(faults) - _SHOWN:,} more batches" if len(faults) > _SHOWN else ""
        exam.tell(table.name, "equation", "wrong", "; ".join(faults[:_SHOWN]) + more)
    elif fewer:
        text = f"of {fewer:,} of {checked:,} batches the topic holds fewer records than were read: is it compacted?"
        exam.tell(table.name, "equation", "unproved", text)
    elif checked:
        records = sums.pop("records")
        batches = "its one batch" if checked == 1 else f"each of {checked:,} batches"
        text = f"in {batches}; in all {records:,} records = {_sum(sums)}"
        exam.tell(table.name, "equation", "ok", f"{text}{_after_redrives(exam, table, sums)}")


def _after_redrives(exam: Examination, table: StreamTable, sums: Mapping[str, int]) -> str:
    """The numbers with those of the redrives, in words; empty without any, or if a redrive's code makes other rows.

    A redriven record is a row, or quarantined, or left out, and no dead letter any more.
    """
    names = {"written": table.name, "quarantined": table.quarantine, "dead letters": exam.subject.dead_letters}
    moved = {word: sum(one.after - one.before for one in exam.redriven(name)) for word, name in names.items()}
    left_out, unknown = redriven_without_row(exam)
    moved["dropped"] = len(left_out)
    every = exam.beside.redriven if exam.beside is not None else ()
    if not every or len(exam.redrives) < len(every) or len(unknown) or sum(moved.values()):
        return ""
    now = {word: number + moved[word] for word, number in sums.items()}
    return f"; after {counted(len(exam.redrives), 'redrive')} {_sum(now)}"


def _parts(entry: Entry, table: str) -> dict[str, int]:
    """The numbers of an entry that should add up to its records."""
    names = {
        "written": "written",
        "quarantined": f"{QUARANTINED}{table}",
        "dropped": f"{DROPPED}{table}",
        "dead letters": "dead_letters",
    }
    return {word: entry.rows.get(name, 0) for word, name in names.items()}


def _sum(parts: dict[str, int]) -> str:
    return " + ".join(f"{number:,} {name}" for name, number in parts.items())


def _records(entry: Entry, topic: CommittedTopic, offsets: dict[int, Packed]) -> int | None:
    """The number of records in an entry's ranges; None if the topic no longer holds all of them."""
    records = 0
    for span in _spans(entry, topic.name):
        if span.start < topic.low.get(span.partition, 0):
            return None
        known = offsets.get(span.partition, packed([], []))
        records += int(np.searchsorted(known, span.end) - np.searchsorted(known, span.start))
    return records


def _spans(entry: Entry, topic: str) -> Iterator[Span]:
    """The offsets of a topic that a batch read."""
    return (span for span in entry.spans if span.topic == topic and span.offsets > 0)
