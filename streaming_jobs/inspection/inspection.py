"""The inspection of a job: its checkpoints and its tables are read, nothing is written, and no JVM is needed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from streaming_jobs.errors import UsageError
from streaming_jobs.inspection.checkpoint_history import CheckpointHistory, is_checkpoint, read_checkpoint
from streaming_jobs.inspection.findings import ALARMING, MEANINGS, InspectionFinding, numbers_words
from streaming_jobs.inspection.judgement import JudgedTable, judge_all, without_a_commit
from streaming_jobs.inspection.table_history import is_table, read_table
from streaming_jobs.ledger.positions import OffsetBounds
from streaming_jobs.platform.delta_log import versions_in_log
from streaming_jobs.storage.locations import Location
from streaming_jobs.text.spelling import counted
from streaming_jobs.verification.offset_ranges import merged, total

if TYPE_CHECKING:
    from streaming_jobs.inspection.counted_offsets import OffsetColumns

_ORDER = {kind: index for index, kind in enumerate(MEANINGS)}
_CERTAINTIES = ("certain", "likely", "unclear")


@dataclass(frozen=True)
class TopicNow:
    """A partition as the broker has it, beside the position of the newest checkpoint.

    `position` is the first offset whose rows the next start has to write, `planned` the end of the last planned batch.
    """

    topic: str
    partition: int
    position: int
    planned: int
    earliest: int | None
    latest: int | None

    @property
    def unread(self) -> int | None:
        return None if self.latest is None else max(self.latest - self.position, 0)

    @property
    def lost(self) -> int:
        """Records at the position that Kafka has deleted."""
        return max((self.earliest or 0) - self.position, 0)


@dataclass(frozen=True)
class Inspection:
    """All that was found out; `topics` are empty if no broker was asked."""

    checkpoints: tuple[CheckpointHistory, ...]
    tables: tuple[JudgedTable, ...]
    topics: tuple[TopicNow, ...] = ()

    @property
    def findings(self) -> list[InspectionFinding]:
        """All findings, the gravest first."""
        found = [finding for table in self.tables for finding in table.findings]
        found += _without_a_commit(self)
        found += _of_topics(self.topics)
        return sorted(
            found, key=lambda f: (not f.alarming, _ORDER[f.kind], _CERTAINTIES.index(f.certainty), f.versions)
        )

    @property
    def alarming(self) -> bool:
        return any(finding.alarming for finding in self.findings)

    @property
    def verdict(self) -> str:
        """The sentence of the inspection."""
        found = [finding for finding in self.findings if finding.alarming]
        if not found:
            if unclear := sum(finding.kind in ALARMING for finding in self.findings):
                return f"no loss and no double is certain or likely; {counted(unclear, 'finding')} may be one"
            partly = any(finding.kind in ("unknown", "damaged") for finding in self.findings)
            return "no loss and no double was found" + (", as far as checkpoint and log still tell" if partly else "")
        parts = []
        for kind in dict.fromkeys(finding.kind for finding in found):
            of_kind = [finding for finding in found if finding.kind == kind]
            places = {(f.table, span) for f in of_kind if not f.within for span in f.spans}
            tables = {table for table, _ in places}
            exact = sum(total(merged(span for each, span in places if each == table)) for table in tables)
            some = any(finding.within or not finding.spans for finding in of_kind)
            count = counted(exact, "record") if exact else "records"
            parts.append(f"{count}{' and more' if some and exact else ''} {_VERBS[kind]}")
        return ", ".join(parts)

    def as_json(self) -> dict[str, Any]:
        return {
            "verdict": self.verdict,
            "alarming": self.alarming,
            "checkpoints": [_checkpoint_json(each) for each in self.checkpoints],
            "tables": [_table_json(each) for each in self.tables],
            "topics": [{**vars(each), "unread": each.unread, "lost": each.lost} for each in self.topics],
            "findings": [finding.as_json() for finding in self.findings],
        }


_VERBS: Mapping[str, str] = {
    "missing": "missing",
    "doubled": "doubled",
    "will_lose": "would be lost by the next start",
    "will_double": "would be doubled by the next start",
}


def inspect(
    checkpoints: Sequence[Location], tables: Sequence[Location], columns: OffsetColumns | None = None
) -> Inspection:
    """Inspect a job: every checkpoint that it has had, as far as they are still there, and every table it writes.

    With `columns`, the rows are counted too. Raises UsageError for a path that is neither.
    """
    for place in checkpoints:
        if not is_checkpoint(place):
            raise UsageError(
                f"{place} is not a checkpoint of Spark: it has neither a file metadata nor a folder offsets",
                "name the folder that the job has as checkpointLocation",
            )
    for place in tables:
        if not is_table(place):
            raise UsageError(f"{place} is not a Delta table: it has no folder _delta_log", "name the table's folder")
    settled = [max(versions_in_log(place), default=0) for place in tables]  # the job may run meanwhile
    histories = tuple(map(read_checkpoint, checkpoints))
    judged = judge_all([read_table(place) for place in tables], histories, settled)
    if columns is not None:
        from streaming_jobs.inspection.counted_offsets import confirmed

        judged = [
            replace(each, findings=confirmed(place, columns, each)) for place, each in zip(tables, judged, strict=True)
        ]
    return Inspection(histories, tuple(judged))


def beside_topics(inspection: Inspection, bounds: Mapping[str, OffsetBounds | None]) -> Inspection:
    """The inspection with the topics as the broker has them; None for a topic that does not exist."""
    newest = max(
        (each for each in inspection.checkpoints if each.batches),
        key=lambda each: each.in_order[-1].planned,
        default=None,
    )
    if newest is None:
        return inspection
    last = newest.in_order[-1]
    done = last.committed or _has_rows(inspection, newest, last.number)
    begin = last.end if done or last.start is None else last.start
    now = [
        TopicNow(topic, p, begin.get(topic, {}).get(p, 0), planned, *_bounds(bounds.get(topic), p))
        for topic, each in sorted(last.end.items())
        for p, planned in sorted(each.items())
    ]
    return replace(inspection, topics=tuple(now))


def _has_rows(inspection: Inspection, checkpoint: CheckpointHistory, number: int) -> bool:
    """True if the rows of a batch are in each table that its checkpoint writes."""
    tables = [each for each in inspection.tables if each.attribution.how(checkpoint) is not None]
    writes = [(each.history, each.attribution.of(checkpoint).get(number, [])) for each in tables]
    return bool(writes) and all(any(all(map(h.alive, w.versions)) for w in made) for h, made in writes)


def _bounds(bounds: OffsetBounds | None, partition: int) -> tuple[int | None, int | None]:
    return (None, None) if bounds is None else (bounds.earliest.get(partition), bounds.latest.get(partition))


def _without_a_commit(inspection: Inspection) -> Iterator[InspectionFinding]:
    """Checkpoints whose records are in none of the tables, by the logs: other tables may have them."""
    names = [each.history.name for each in inspection.tables]
    for each in without_a_commit(inspection.checkpoints, [table.attribution for table in inspection.tables]):
        committed = [batch for batch in each.in_order if batch.committed]
        if any(batch.start is None or batch.spans for batch in committed):
            words = (
                f"checkpoint {each.name} has committed {numbers_words([b.number for b in committed], 'batch')}, and no "
                f"commit of it is in the log of {', '.join(names)}"
            )
            step = "inspect each checkpoint with the tables that it writes"
            table = names[0] if len(names) == 1 else ""
            yield InspectionFinding("unknown", "certain", "no_commit", words, step, table=table, checkpoint=each.folder)


def _of_topics(topics: Sequence[TopicNow]) -> list[InspectionFinding]:
    found = []
    for each in topics:
        place = f"partition {each.partition} of topic {each.topic}"
        if each.latest is None:
            words = f"{place} does not exist any more; the job has read it up to offset {each.position}"
            found.append(InspectionFinding("unknown", "certain", "topic_gone", words, table=each.topic))
        elif each.planned > each.latest:
            words = f"{place} ends at offset {each.latest}, the job is at {each.planned}: the topic was created again"
            found.append(InspectionFinding("will_lose", "certain", "topic_recreated", words, table=each.topic))
        elif each.lost:
            words = (
                f"{place} begins at offset {each.earliest}, the job is at {each.position}: Kafka has deleted the rest"
            )
            found.append(InspectionFinding("will_lose", "certain", "past_retention", words, table=each.topic))
    return found


def _checkpoint_json(each: CheckpointHistory) -> dict[str, Any]:
    return {
        "folder": each.folder,
        "query_id": each.query_id,
        "sources": list(each.sources),
        "stateful": each.stateful,
        "batches": [
            {
                "batch": batch.number,
                "planned": batch.planned,
                "committed": batch.committed,
                "start": batch.start,
                "end": batch.end,
            }
            for batch in each.in_order
        ],
    }


def _table_json(each: JudgedTable) -> dict[str, Any]:
    return {
        "table": each.history.name,
        "location": each.history.location,
        "first_version": each.history.first,
        "versions": len(each.history.commits),
        "writes": [
            {
                "batch": write.batch,
                "checkpoint": write.checkpoint.folder if write.checkpoint is not None else None,
                "by": write.how,
                "versions": list(write.versions),
                "in_table": all(each.history.alive(version) for version in write.versions),
            }
            for write in each.attribution.writes
        ],
    }
