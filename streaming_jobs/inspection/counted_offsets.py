"""The proof by the rows: every offset is counted in a table that keeps the partitions and offsets of its records."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from streaming_jobs.errors import UsageError
from streaming_jobs.inspection.coverage import RECREATED
from streaming_jobs.inspection.findings import InspectionFinding, Kind
from streaming_jobs.inspection.judgement import JudgedTable
from streaming_jobs.platform.table_rows import rows
from streaming_jobs.storage.locations import Location
from streaming_jobs.text.spelling import counted, instead
from streaming_jobs.verification.offset_ranges import Span, cut, merged, of_spans, packed, total, unpacked


@dataclass(frozen=True)
class OffsetColumns:
    """The columns that have a row's place in its topic; without `topic`, all rows are of the job's one topic."""

    partition: str
    offset: str
    topic: str | None = None

    @classmethod
    def parse(cls, text: str) -> OffsetColumns:
        """From `partition,offset` or `partition,offset,topic`; raises UsageError for anything else."""
        names = [name.strip() for name in text.split(",")]
        if len(names) not in (2, 3) or not all(names):
            raise UsageError(f"--offset-columns '{text}'", "such as partition,offset or partition,offset,topic")
        return cls(*names)


def confirmed(table: Location, columns: OffsetColumns, judged: JudgedTable) -> tuple[InspectionFinding, ...]:
    """The findings about a table, after its rows were counted.

    The rows decide what is missing or doubled: a finding of the log keeps the offsets that they confirm, and is certain
    then. An unclear loss stays unclear if batches in the table lack offsets too: the job may have filtered all of them.
    What the log does not explain becomes a finding of its own. The columns are read into memory.
    Raises UsageError for a column that the table lacks, and for a topic column that is needed and was not named.
    """
    name, found = judged.history.name, list(judged.findings)
    topics = sorted({span.topic for span in judged.read})
    if why := _uncountable(judged, topics):
        return (
            *found,
            InspectionFinding("unknown", "certain", "not_counted", f"the rows were not counted: {why}", table=name),
        )
    if len(topics) > 1 and columns.topic is None:
        raise UsageError(f"the job reads {len(topics)} topics", "name the column of the topic as the third one")
    absent, doubled = _counted(table, columns, judged, topics)
    rows_for_all = not cut(judged.covered, absent)[0]
    kept, left_absent = _agreeing(found, "missing", absent, rows_for_all)
    kept, left_doubled = _agreeing(kept, "doubled", doubled, True)
    if left_absent:
        words = (
            f"the rows lack {counted(total(left_absent), 'offset')} of batches that are in the table: filtered by the "
            "job, transaction markers, or passed over by failOnDataLoss=false after Kafka had deleted them"
        )
        kept.append(InspectionFinding("unknown", "unclear", "counted", words, table=name, spans=left_absent))
    if left_doubled:
        words = f"{counted(total(left_doubled), 'offset')} are in more than one row"
        step = "delete all rows but one of each offset, if the job writes one row for each record"
        kept.append(InspectionFinding("doubled", "certain", "counted", words, step, table=name, spans=left_doubled))
    return tuple(kept)


def _uncountable(judged: JudgedTable, topics: Sequence[str]) -> str:
    """Why the rows cannot be counted; empty if they can."""
    if judged.history.missing_files:
        return "files of the table are missing"
    if any(topic.endswith(RECREATED) for topic in topics):
        return "a topic was created again, so that an offset stands for two records"
    return "" if topics else "no offsets of a checkpoint are known"


def _agreeing(
    found: Sequence[InspectionFinding], kind: Kind, places: Sequence[Span], decides: bool
) -> tuple[list[InspectionFinding], list[Span]]:
    """The findings, those of a kind only with the offsets that the rows confirm; and the offsets that are left.

    `decides`: the rows make an unclear finding certain too.
    """
    kept: list[InspectionFinding] = []
    left = list(places)
    for each in found:
        if each.kind != kind or not each.spans:
            kept.append(each)
            continue
        agreed, _ = cut(each.spans, places)
        if not agreed:
            continue
        _, left = cut(left, agreed)
        if decides or each.certainty != "unclear":
            kept.append(replace(each, certainty="certain", within=False, spans=tuple(agreed), counted=True))
        else:
            kept.append(replace(each, spans=tuple(agreed)))
    return kept, left


def _counted(
    table: Location, columns: OffsetColumns, judged: JudgedTable, topics: Sequence[str]
) -> tuple[list[Span], list[Span]]:
    """The offsets that the checkpoints have passed and that no row has, and those that several rows have."""
    absent: list[Span] = []
    doubled: list[Span] = []
    for topic, partitions, offsets in _places(table, columns, topics):
        once, times = np.unique(packed(partitions, offsets), return_counts=True)
        expected = of_spans(merged(span for span in judged.read if span.topic == topic))
        absent += unpacked(topic, map(int, np.setdiff1d(expected, once)))
        doubled += unpacked(topic, map(int, once[(times > 1) & (once >= 0)]))
    return absent, doubled


def _places(table: Location, columns: OffsetColumns, topics: Sequence[str]) -> list[tuple[str, np.ndarray, np.ndarray]]:
    from streaming_jobs.storage.locations import delta_table

    names = [name for name in (columns.partition, columns.offset, columns.topic) if name is not None]
    there = [field.name for field in delta_table(table).schema().fields]
    for name in names:
        if name not in there:
            raise UsageError(f"table {table} has no column '{name}'", instead(name, there))
    data = rows(table, columns=names).drop_null()
    partitions, offsets = (data.column(name).to_numpy() for name in names[:2])
    if columns.topic is None:
        return [(topics[0] if topics else "", partitions, offsets)]
    of_row = pc.cast(data.column(columns.topic), pa.string())
    chosen = ((topic, pc.equal(of_row, topic).to_numpy()) for topic in topics)
    return [(topic, partitions[rows], offsets[rows]) for topic, rows in chosen]
