"""What a recovery has corrected, for programs that have read the wrong rows: `recourse recover corrections PLAN`.

It is made of plan, journal and the records of topics, and needs neither a broker nor the tables. docs/recover.md
describes it; a change that its readers would notice gets a new number in `SCHEMA`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from reprocessing.plan.journal import Journal, journal_of
from reprocessing.plan.plan import RecoveryPlan, StreamRecoveryPlan
from reprocessing.plan.registry import undone_by
from reprocessing.replay.difference import Difference
from reprocessing.report.facts import facts_of
from streaming_jobs.ledger.positions import by_place, decode
from streaming_jobs.settings import Settings
from streaming_jobs.state import topic_records

SCHEMA = "recourse.corrections/1"


def corrections(settings: Settings, plan: RecoveryPlan) -> dict[str, Any]:
    """The document, of values that JSON has; a table is in it once the rebuilt rows were published to it."""
    journal = journal_of(settings, plan.id)
    differences = {each.table: each for each in facts_of(plan, journal).differences}
    return {
        "schema": SCHEMA,
        "plan": plan.id,
        "undoes": plan.undoes,
        "undone_by": undone_by(settings, plan),
        "outcome": journal.outcome,
        "target": plan.target,
        "streams": [_stream(settings, each, journal.of(each.stream), differences) for each in plan.streams],
    }


def _stream(
    settings: Settings, plan: StreamRecoveryPlan, journal: Journal, differences: Mapping[str, Difference]
) -> dict[str, Any]:
    switched = any(journal.done(stage) is not None for stage in ("switch_generation", "continue_generation", "skip"))
    published = [line for line in journal.lines() if line.is_of("publish") and line.state == "done"]
    at = [line.at for line in published if line.stream in (None, plan.stream)]
    return {
        "stream": plan.stream,
        "generation": {"before": plan.saw.generation, "after": plan.generation if switched else None},
        "published_at": at[-1] if at else None,
        "tables": [
            _table(settings, table, differences.get(table["table"]))
            for table in (journal.done("publish") or {}).get("tables", ())
        ],
        "topics": [*_topics(settings, plan, journal)],
        "replayed": [*_replayed(plan, journal)],
        "skipped": [_range(*each) for each in plan.skipped()] if switched else [],
    }


def _table(settings: Settings, published: Mapping[str, Any], difference: Difference | None) -> dict[str, Any]:
    """One table. The version before the publish has the rows from before: only fence and upkeep lie between."""
    name, version = published["table"], published["version"]
    compared = difference is not None and not difference.unknown
    touched = difference.touched if difference is not None else None
    return {
        "table": name,
        "location": str(settings.tables / name),
        "version": {"before": version - 1, "after": version},
        "rows": dict(difference.figures) if difference is not None and compared else None,
        "key_columns": [*touched.columns] if touched is not None else [],
        "keys": None if touched is None or touched.keys is None else [[*key] for key in touched.keys],
        "ranges": {} if touched is None else {name: [*ends] for name, ends in touched.ranges.items()},
    }


def _topics(settings: Settings, plan: StreamRecoveryPlan, journal: Journal) -> Iterator[dict[str, Any]]:
    """The topics in which the plan has declared offsets void, with those of the records in their place."""
    ends = by_place(decode((journal.done("void_records") or {}).get("ends", {})))
    appended = by_place(decode((journal.done("replay") or {}).get("appended", {})))
    names = dict.fromkeys([*plan.wrong_from, *(topic for topic, _ in ends)])
    for topic in names:
        record = topic_records.load(settings, topic)
        void = [each for each in record.void if each.plan == plan.id] if record is not None else []
        if not void:
            continue
        yield {
            "topic": topic,
            "void": [_range(topic, each.partition, each.begin, each.end) for each in void],
            "replaced_by": [
                _range(topic, partition, begin, appended[topic, partition])
                for (name, partition), begin in sorted(ends.items())
                if name == topic and appended.get((topic, partition), begin) > begin
            ],
        }


def _replayed(plan: StreamRecoveryPlan, journal: Journal) -> Iterator[dict[str, Any]]:
    """The records of the stream's sources whose rows were rebuilt."""
    reached = by_place(decode((journal.done("replay") or {}).get("ends", {})))
    for topic, partition, begin, _ in plan.ranges():
        if (end := reached.get((topic, partition), begin)) > begin:
            yield _range(topic, partition, begin, end)


def _range(topic: str, partition: int, begin: int, end: int) -> dict[str, Any]:
    """Offsets from `begin` up to `end`, which is not one of them."""
    return {"topic": topic, "partition": partition, "begin": begin, "end": end}
