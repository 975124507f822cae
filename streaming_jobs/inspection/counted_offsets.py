"""The proof by the rows: every offset is counted in a table that keeps the partitions and offsets of its records."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from streaming_jobs.errors import UsageError
from streaming_jobs.inspection.coverage import RECREATED
from streaming_jobs.inspection.findings import InspectionFinding
from streaming_jobs.inspection.judgement import JudgedTable
from streaming_jobs.platform.table_rows import rows
from streaming_jobs.storage.locations import Location
from streaming_jobs.text.spelling import counted, instead
from streaming_jobs.verification.offset_ranges import Span, merged, of_spans, packed, total, unpacked


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


def count_offsets(table: Location, columns: OffsetColumns, judged: JudgedTable) -> list[InspectionFinding]:
    """What the rows say of the offsets that the checkpoints have passed; takes the place of what the log makes likely.

    Raises UsageError for a column that the table lacks, and for a topic column that is needed and was not named.
    """
    name = judged.history.name
    passed = list(merged(judged.read))
    topics = sorted({span.topic for span in passed})
    if any(topic.endswith(RECREATED) for topic in topics):
        raise UsageError(
            "the offsets of a topic have gone back, so an offset stands for two records", "leave --offset-columns out"
        )
    if len(topics) > 1 and columns.topic is None:
        raise UsageError(f"the job reads {len(topics)} topics", "name the column of the topic as the third one")
    found: list[InspectionFinding] = []
    for topic, partitions, offsets in _places(table, columns, topics):
        places = np.sort(packed(partitions, offsets))
        once, times = np.unique(places, return_counts=True)
        expected = of_spans(span for span in passed if span.topic == topic)
        known = once[np.isin(once, expected)]
        doubled = unpacked(topic, map(int, once[times > 1]))
        absent = unpacked(topic, map(int, np.setdiff1d(expected, known)))
        if absent:
            lacking = counted(total(absent), "offset")
            words = f"the rows lack {lacking} of topic {topic} that the job has passed"
            explained = _explained(absent, judged)
            found.append(
                InspectionFinding(
                    "missing" if explained else "unknown",
                    "certain" if explained else "unclear",
                    "counted",
                    name,
                    words
                    if explained
                    else f"{words}: filtered by the job, transaction markers, or passed over by "
                    "failOnDataLoss=false after Kafka had deleted them",
                    "read these offsets once by a batch job, and append them" if explained else "",
                    spans=tuple(absent),
                )
            )
        if doubled:
            found.append(
                InspectionFinding(
                    "doubled",
                    "certain",
                    "counted",
                    name,
                    f"{counted(total(doubled), 'offset')} of topic {topic} are in more than one row",
                    "delete all rows but one of each offset, if the job writes one row for each record",
                    spans=tuple(doubled),
                )
            )
    return found


def _explained(absent: Sequence[Span], judged: JudgedTable) -> bool:
    """True if the log explains the first absent offset too, so that a filter of the job is not the reason."""
    return any(
        span.topic == one.topic and span.partition == one.partition and span.start < one.end and one.start < span.end
        for finding in judged.findings
        if finding.kind == "missing"
        for span in finding.spans
        for one in absent
    )


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
    by_topic: dict[str, list[int]] = defaultdict(list)
    for index, topic in enumerate(data.column(columns.topic).to_pylist()):
        by_topic[str(topic)].append(index)
    return [(topic, partitions[by_topic[topic]], offsets[by_topic[topic]]) for topic in topics]
