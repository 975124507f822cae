"""One Delta table of what happened to all streams of a home, to query: `<tables_dir>/recourse_events`.

The table is a copy: sessions, deploys, recoveries, slices and savepoints are noted by whoever does them, in files of
the state folder, and alerts by the sensors that tell of them; outcomes of suites are in their history. `synchronise`
appends what the table does not have yet. Dagster calls it every few minutes, `recourse events` before it prints.
Nothing depends on the table; if it is removed, the next call makes it again, from what the files still have.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, fields
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING

from orchestration.quality.told_alerts import told_alerts
from quality.history import history, newest_before
from reprocessing.timeline.marks import Mark, marks_of
from streaming_jobs.platform.append_table import AppendTable
from streaming_jobs.settings import Settings

if TYPE_CHECKING:
    import pyarrow as pa

TABLE = "recourse_events"
KINDS = ("session", "deploy", "code", "recovery", "slice", "savepoint", "check", "alert")
_APPLICATION = "recourse:events"
_OVERLAP = timedelta(days=2)
"""Events are looked for from so long before the newest one in the table: a file may get its line late."""
_KEPT = timedelta(days=400)
_TRIES = 10
_LONGEST_TEXT = 500


@dataclass(frozen=True)
class Event:
    """Something that happened, at a time in UTC: `what` in a word (`failed`), `text` for people.

    `table` is that of a check or an alert, `plan` that of a recovery. `id` is made of the other fields but the text, so
    that the same event, found again, is known.
    """

    at: datetime
    kind: str
    stream: str
    what: str
    text: str
    table: str = ""
    plan: str = ""

    @property
    def id(self) -> str:
        parts = (f"{self.at.timestamp():.3f}", self.kind, self.stream, self.what, self.table, self.plan)
        return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:20]


def event_table(settings: Settings) -> AppendTable:
    return AppendTable(settings.tables / TABLE, _schema(), "at", _KEPT)


def synchronise(settings: Settings, streams: Iterable[str]) -> int:
    """Append the events of these streams that the table does not have; their number.

    Of two processes that do so at the same time one commits, and the other one looks again.
    """
    import pyarrow as pa

    table, names = event_table(settings), list(streams)
    for _ in range(_TRIES):
        number = (table.transaction(_APPLICATION) or 0) + 1
        there = table.newest()
        since = there - _OVERLAP if there is not None else datetime.fromtimestamp(0, UTC)
        known = {event.id for event in rows(settings, since=since)}
        missing = [event for event in found(settings, names, since) if event.id not in known]
        if not missing:
            return 0
        new = [{**asdict(event), "id": event.id} for event in sorted(missing, key=lambda event: event.at)]
        if table.append(pa.Table.from_pylist(new, schema=_schema()), _APPLICATION, number):
            return len(new)
    return 0  # others add events all the while: theirs and ours are the same


def found(settings: Settings, streams: Iterable[str], since: datetime) -> Iterator[Event]:
    """The events since a time that the files of the home have, in no order."""
    for stream in streams:
        for mark in marks_of(settings, stream):
            if mark.at >= since.timestamp() and (mark.kind, mark.what) != ("savepoint", "time"):
                yield _of_mark(stream, mark)
    yield from _checks(settings, since)
    yield from _alerts(settings, since)


def rows(settings: Settings, *, since: datetime) -> list[Event]:
    """The events in the table since a time, oldest first."""
    import pyarrow.dataset as ds

    read = event_table(settings).read(ds.field("at") >= since)
    if read is None:
        return []
    ordered = read.sort_by([("at", "ascending"), ("id", "ascending")])
    return [Event(**row) for row in ordered.drop_columns(["id"]).to_pylist()]


def _of_mark(stream: str, mark: Mark) -> Event:
    at = datetime.fromtimestamp(mark.at, UTC)
    return Event(at, mark.kind, stream, mark.what, mark.text, plan=mark.plan or "")


def _checks(settings: Settings, since: datetime) -> Iterator[Event]:
    """The outcomes of suites that differ from the one before, which may be older than that time."""
    recent = history(settings, since=since)
    before = newest_before(settings, since, {(one.suite, one.expectation) for one in recent}) if recent else {}
    for outcome in reversed(recent):
        key = (outcome.suite, outcome.expectation)
        last, before[key] = before.get(key), outcome
        if last is not None and last.word != outcome.word:
            text = f"{outcome.expectation} of suite {outcome.suite}: {last.word} -> {outcome.word}"
            more = outcome.error or outcome.observed
            words = f"{text}: {more}"[:_LONGEST_TEXT] if more else text
            yield Event(outcome.started_at, "check", outcome.stream, outcome.word, words, table=outcome.table)


def _alerts(settings: Settings, since: datetime) -> Iterator[Event]:
    for one in told_alerts(settings):
        at = datetime.fromtimestamp(one.at, UTC)
        if at >= since:
            yield Event(at, "alert", one.stream, f"{one.check} {one.state}", one.text[:_LONGEST_TEXT], table=one.table)


def _schema() -> pa.Schema:
    import pyarrow as pa

    kinds = {"at": pa.timestamp("us", "UTC")}
    return pa.schema([("id", pa.string()), *((each.name, kinds.get(each.name, pa.string())) for each in fields(Event))])
