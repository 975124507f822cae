"""The comparison of a topic's records with the rows of a table whose plan makes one row per record.

Records are compared by place (partition and offset) if the rows have it, otherwise by number. A record without a row
may be a dead letter, or its row may be one that the table cannot hold. Records that the topic no longer holds are not
compared: between them there may be offsets without a record, such as transaction markers.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from streaming_jobs.text.spelling import counted
from streaming_jobs.verification.beside_tables import ACCEPTED, Output
from streaming_jobs.verification.delta_log import Entry
from streaming_jobs.verification.judged import Judged
from streaming_jobs.verification.offset_ranges import Span, merged, total
from streaming_jobs.verification.position import VersionGone
from streaming_jobs.verification.refused_rows import Letters
from streaming_jobs.verification.subject import Table
from streaming_jobs.verification.table_rules import Packed, packed, shown, unpacked, within
from streaming_jobs.verification.taken_out import TakenOut, dropped_of
from streaming_jobs.verification.topic import TopicContent

_LETTERS_CHANGED = "a change of somebody else to the dead letters was accepted"


@dataclass(frozen=True)
class Made:
    """The rows that the plans of the covered batches make of a record; `position` are the columns with its place."""

    outputs: Mapping[str, Output]
    unknown: int
    position: tuple[str, str] | None

    @classmethod
    def of(cls, recorded: Mapping[str, Mapping[str, Output]], entries: Iterable[Entry], table: str) -> Made:
        """The outputs of the codes that wrote these batches, from the `recorded` ones of all codes and tables."""
        codes = {entry.code for entry in entries}
        outputs = {code: recorded[code][table] for code in codes if table in recorded.get(code, {})}
        positions = {output.position for output in outputs.values()}
        return cls(outputs, len(codes - outputs.keys()), positions.pop() if len(positions) == 1 else None)

    @property
    def one_row_at_most(self) -> bool:
        """True if no record makes two rows, in any of the batches."""
        return not self.unknown and all(output.one_row_at_most for output in self.outputs.values())

    def spans(self, judged: Judged, *, exactly: bool) -> list[Span]:
        """The ranges of the entries whose plan makes exactly one row of each record, or one at most."""
        return list(merged(_of_entries(judged.subject.topic, self._entries(judged, exactly=exactly))))

    def _entries(self, judged: Judged, *, exactly: bool) -> Iterator[Entry]:
        for entry in judged.coverage.entries:
            output = self.outputs.get(entry.code)
            if output is not None and (output.one_row if exactly else output.one_row_at_most):
                yield entry

    @property
    def nodes(self) -> str:
        """The plan nodes that do more than make one row per record."""
        plain = {"Project", "SubqueryAlias", "EventTimeWatermark", "View"}
        return ", ".join(sorted({node for output in self.outputs.values() for node in output.nodes} - plain))


def compare_records(judged: Judged, table: Table, made: Made, rows: pa.Table, columns: list[str]) -> None:
    """Compare a table with the records, by place if its rows have it, else by number; `columns` are the table's."""
    if not made.outputs:
        text = "what the stream's plan makes of a record is not recorded yet; the stream's next start does it"
        judged.tell(table.name, "records", "not compared", text)
        return
    if judged.subject.others:
        judged.tell(table.name, "records", "not compared", "the stream reads several topics")
        return
    exactly, at_most = made.spans(judged, exactly=True), made.spans(judged, exactly=False)
    topic = judged.topics.get(judged.subject.topic)
    if topic is None:
        judged.tell(table.name, "records", "not compared", "the topic does not exist")
    elif not at_most:
        text = f"the plan makes other rows than one per record ({made.nodes})"
        judged.tell(table.name, "records", "not compared", text)
    elif judged.accepted(table.name) or judged.replaced(table.name):
        _accepted(judged, table, made, rows, at_most)
    elif made.position is None and (
        table.keys or made.unknown or judged.coverage.missing or total(exactly) < total(at_most)
    ):
        text = "no column is a plain copy of _source.partition and of _source.offset"
        judged.tell(table.name, "records", "not compared", text)
    else:
        try:
            letters = Letters.of(judged, made.position)
            taken = TakenOut.of(judged, table, made.position)
        except VersionGone as gone:
            judged.tell(table.name, "records", "unproved", f"dead letters or quarantine cannot be read: {gone}")
            return
        if made.position is not None:
            _places(judged, table, made, rows, exactly, at_most, topic, letters, taken)
        else:
            _number(judged, table, rows.num_rows, exactly, topic, letters, taken, frozenset(columns))


def _accepted(judged: Judged, table: Table, made: Made, rows: pa.Table, at_most: list[Span]) -> None:
    """Compare a table with an accepted foreign commit, or slices of other code: no record may be in two rows of it."""
    if made.position is not None:
        _, twice = _once(rows, made.position, at_most)
        judged.doubled += (spans := unpacked(judged.subject.topic, twice.tolist()))
        if spans:
            text = f"{counted(len(twice), 'offset', 'is', 'are')} in more than one row: {shown(spans)}"
            judged.tell(table.name, "records", "wrong", text)
            return
    reason = ACCEPTED if judged.accepted(table.name) else "slices of it were rebuilt by other code"
    judged.tell(table.name, "records", "not compared", reason)


def _once(rows: pa.Table, position: tuple[str, str], at_most: list[Span]) -> tuple[Packed, Packed]:
    """The places of the rows, each once, and those that occur twice although a record makes one row at most."""
    partition, offset = position
    rows = rows.filter(pc.is_valid(rows[offset]))
    unique, counts = np.unique(packed(rows[partition], rows[offset]), return_counts=True)
    twice = unique[counts > 1]
    return unique, twice[within(twice, at_most)]


def _places(
    judged: Judged,
    table: Table,
    made: Made,
    rows: pa.Table,
    exactly: list[Span],
    at_most: list[Span],
    topic: TopicContent,
    letters: Letters,
    taken: TakenOut,
) -> None:
    assert made.position is not None
    partition, offset = made.position
    without = rows[offset].null_count
    unique, twice = _once(rows, made.position, at_most)
    due = np.array([], dtype=np.int64) if table.keys else np.setdiff1d(_held(topic, exactly), letters.placed)
    missing = np.setdiff1d(np.setdiff1d(due, unique), taken.places)
    dropped = dropped_of(judged, table, missing)
    missing = np.setdiff1d(missing, dropped)
    due = np.intersect1d(due, unique)
    extra = unique[~within(unique, (span for span in judged.coverage.spans if span.topic == topic.name))]
    maybe = _excused(judged, missing, letters)
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
    judged.lost += unpacked(topic.name, missing.tolist())
    judged.doubled += unpacked(topic.name, twice.tolist())
    if faults:
        judged.tell(table.name, "records", "wrong", "; ".join(faults))
        return
    if maybe:
        judged.tell(table.name, "records", "unproved", maybe)
        return
    notes = []
    if len(due):
        notes.append(f"{counted(len(due), 'record', 'is', 'are')} each in exactly one row")
    if taken.quarantined or len(dropped):
        notes.append(f"row rules took out {taken.quarantined:,} (in the quarantine) and {len(dropped):,} (dropped)")
    if total(at_most) > total(exactly) or table.keys:
        why = "a later row of its key replaces it" if table.keys else f"the plan leaves some out ({made.nodes})"
        notes.append(f"no record is in two rows ({why}: which ones are there is not compared)")
    if made.unknown or judged.coverage.missing:
        notes.append("batches whose plan or entry is not known are left out")
    if not table.keys and _expired(topic, exactly):
        notes.append("which records are there that the topic no longer holds is not compared")
    judged.tell(table.name, "records", "ok", f"by {partition} and {offset}: {'; '.join(notes)}")


def _excused(judged: Judged, missing: Packed, letters: Letters) -> str:
    """The reason why missing records may not be lost, in words; empty if they are lost."""
    if not len(missing):
        return ""
    which = shown(unpacked(judged.subject.topic, missing.tolist()))
    without_row = f"{counted(len(missing), 'record', 'has', 'have')} no row: {which}"
    if judged.accepted(judged.subject.dead_letters):
        return f"{without_row}; {_LETTERS_CHANGED}"
    if len(missing) <= letters.unplaced:
        rows = counted(letters.unplaced, "row", "was", "were")
        return (
            f"{without_row}; {rows} refused by a version of the code that did not record which record a row comes from"
        )
    return ""


def _number(
    judged: Judged,
    table: Table,
    rows: int,
    exactly: list[Span],
    topic: TopicContent,
    letters: Letters,
    taken: TakenOut,
    columns: frozenset[str],
) -> None:
    if _expired(topic, judged.coverage.proved):
        judged.tell(table.name, "records", "unproved", "the topic no longer holds the first records")
        return
    most = len(np.setdiff1d(_held(topic, exactly), letters.whole))
    refused = letters.fitting(columns)
    due = most - refused - taken.rows
    less = f" ({refused:,} of which the table cannot hold)" if refused else ""
    less += f" ({taken.quarantined:,} quarantined and {taken.dropped:,} dropped by row rules)" if taken.rows else ""
    should = f"{counted(most, 'record', 'makes', 'make')} one row each{less}, and"
    if due == rows:
        judged.tell(table.name, "records", "ok", f"{should} as many rows are there")
    elif judged.accepted(judged.subject.dead_letters):
        judged.tell(table.name, "records", "not compared", _LETTERS_CHANGED)
    elif most - len(letters.rows) <= rows + taken.rows <= most and judged.subject.outputs > 1:
        text = f"{should} {counted(rows, 'row', 'is', 'are')} there; which table's rows were refused is not known"
        judged.tell(table.name, "records", "unproved", text)
    else:
        judged.tell(table.name, "records", "wrong", f"{should} {counted(rows, 'row', 'is', 'are')} there")


def _of_entries(topic: str, entries: Iterator[Entry]) -> Iterator[Span]:
    for entry in entries:
        for read in entry.ranges:
            if read.topic == topic:
                for partition, end in read.end.items():
                    if (start := read.start.get(partition, 0)) < end:
                        yield Span(topic, partition, start, end)


def held(topic: TopicContent) -> Packed:
    """Places of the records that a topic holds, in order."""
    parts = [packed(np.full(len(c.offsets), number), c.offsets) for number, c in topic.partitions.items()]
    return np.sort(np.concatenate([packed([], []), *parts]))


def _held(topic: TopicContent, spans: list[Span]) -> Packed:
    """Places of the records that a topic holds in some ranges; offsets without a record are not among them."""
    places = held(topic)
    return places[within(places, spans)]


def _expired(topic: TopicContent, spans: list[Span]) -> bool:
    """True if the topic no longer holds some of the ranges."""
    return any(span.start < topic.low.get(span.partition, 0) for span in spans if span.topic == topic.name)
