"""Rows that row rules have taken out of a table, and the equation of each batch.

For a stream whose plan makes one row of each record, with one append table, every batch has

    records = written rows + quarantined rows + dropped rows + dead letters

where the records are those that the topic holds in the batch's ranges, and the other numbers are those of its entry.
That the entries' numbers are those of the tables, `row counts` says. With an upsert, several outputs, a filter, a
generator, a join or state there is no such equation: rows are not records there.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import pyarrow.compute as pc

from streaming_jobs.platform import table_rows
from streaming_jobs.text.spelling import counted
from streaming_jobs.verification.beside_tables import Output
from streaming_jobs.verification.delta_log import Entry
from streaming_jobs.verification.judged import Judged
from streaming_jobs.verification.offset_ranges import Span
from streaming_jobs.verification.subject import DROPPED, QUARANTINED, Table
from streaming_jobs.verification.table_rules import Packed, packed, within
from streaming_jobs.verification.topic import TopicContent

_SHOWN = 3


@dataclass(frozen=True)
class TakenOut:
    """`places` of the records of quarantined rows, the number of these rows, and of dropped ones by the entries."""

    places: Packed
    quarantined: int
    dropped: int

    @classmethod
    def of(cls, judged: Judged, table: Table, position: tuple[str, str] | None) -> TakenOut:
        """The rows taken out of a table; `position` are its columns with the record's place. Raises VersionGone."""
        none = packed([], [])
        dropped = sum(entry.rows.get(f"{DROPPED}{table.name}", 0) for entry in judged.coverage.entries)
        version = judged.version_of(table.quarantine) if table.quarantine else None
        if version is None:
            return cls(none, 0, dropped)
        partition, offset = position or ("_partition", "_offset")
        rows = table_rows.rows(judged.tables / table.quarantine, version, (partition, offset))
        placed = rows.filter(pc.is_valid(rows[offset]))
        return cls(packed(placed[partition], placed[offset]), int(rows.num_rows), dropped)

    @property
    def rows(self) -> int:
        return self.quarantined + self.dropped


def dropped_of(judged: Judged, table: Table, missing: Packed) -> Packed:
    """Those of the missing records that rules have dropped: in no batch more than its entry says were dropped.

    Which records they were, nothing says.
    """
    explained = [packed([], [])]
    for entry in judged.coverage.entries:
        if number := entry.rows.get(f"{DROPPED}{table.name}", 0):
            spans = (Span(judged.subject.topic, *place) for place in _ranges(entry, judged.subject.topic))
            of_batch = missing[within(missing, spans)]
            if len(of_batch) <= number:
                explained.append(of_batch)
    return np.concatenate(explained)


def compare_batches(judged: Judged, table: Table, outputs: dict[str, Output]) -> None:
    """Check the equation of every batch whose records the topic still holds."""
    if table.name != judged.subject.table or table.keys or judged.subject.others or judged.subject.outputs > 1:
        return
    topic = judged.topics.get(judged.subject.topic)
    entries = [e for e in judged.coverage.entries if (made := outputs.get(e.code)) is not None and made.one_row]
    if topic is None or not entries or judged.accepted(judged.subject.dead_letters):
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
        judged.tell(table.name, "equation", "wrong", "; ".join(faults[:_SHOWN]) + more)
    elif fewer:
        text = f"of {fewer:,} of {checked:,} batches the topic holds fewer records than were read: is it compacted?"
        judged.tell(table.name, "equation", "unproved", text)
    elif checked:
        records = sums.pop("records")
        batches = "its one batch" if checked == 1 else f"each of {checked:,} batches"
        judged.tell(table.name, "equation", "ok", f"in {batches}; in all {records:,} records = {_sum(sums)}")


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


def _records(entry: Entry, topic: TopicContent, offsets: dict[int, Packed]) -> int | None:
    """The number of records in an entry's ranges; None if the topic no longer holds all of them."""
    records = 0
    for partition, start, end in _ranges(entry, topic.name):
        if start < end and start < topic.low.get(partition, 0):
            return None
        known = offsets.get(partition, packed([], []))
        records += int(np.searchsorted(known, end) - np.searchsorted(known, start))
    return records


def _ranges(entry: Entry, topic: str) -> Iterator[tuple[int, int, int]]:
    for read in entry.ranges:
        if read.topic == topic:
            yield from ((partition, read.start.get(partition, 0), end) for partition, end in read.end.items())
