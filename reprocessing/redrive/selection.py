"""What a stream has set aside: its dead letters and its quarantined rows, and the choice of some of them."""

from __future__ import annotations

import re
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from streaming_jobs.errors import UsageError
from streaming_jobs.ledger.entry import Txn
from streaming_jobs.platform.table_rows import dataset, plain_text
from streaming_jobs.preflight.snapshot import ledger_file
from streaming_jobs.settings import Settings
from streaming_jobs.sinks.redriven import PLACE, Kind, Place
from streaming_jobs.sinks.stored import StoredTable
from streaming_jobs.sinks.tables import dead_letters, open_table, quarantines
from streaming_jobs.stream import Stream
from streaming_jobs.text.durations import parse_duration
from streaming_jobs.text.spelling import instead
from streaming_jobs.verification.dead_letters import OF_ROWS

_RANGE = re.compile(r"(?P<topic>[^/:]+)(?:/(?P<partition>\d+)(?::(?P<first>\d+)(?:-(?P<last>\d+))?)?)?")


@dataclass(frozen=True)
class OffsetChoice:
    """A topic, a partition of it, or a range of its offsets, the last one among them."""

    topic: str
    partition: int | None = None
    first: int = 0
    last: int | None = None

    @classmethod
    def parse(cls, text: str) -> OffsetChoice:
        """TOPIC, TOPIC/PARTITION, TOPIC/PARTITION:OFFSET or TOPIC/PARTITION:FIRST-LAST; raises UsageError."""
        if (found := _RANGE.fullmatch(text)) is None:
            raise UsageError(f"'{text}' is no range of offsets", "write TOPIC, TOPIC/PARTITION or TOPIC/0:100-199")
        if found["first"] is None:
            return cls(found["topic"], None if found["partition"] is None else int(found["partition"]))
        first = int(found["first"])
        return cls(found["topic"], int(found["partition"]), first, int(found["last"] or first))

    def has(self, place: Place) -> bool:
        topic, partition, offset = place
        return (
            topic == self.topic
            and self.partition in (None, partition)
            and self.first <= offset
            and (self.last is None or offset <= self.last)
        )


@dataclass(frozen=True)
class Choice:
    """Conditions that all hold for what is chosen; ages in seconds. `offsets`: one of them.

    The age is that of the record by its timestamp, or for a quarantined row that of its batch.
    """

    older_than: float | None = None
    newer_than: float | None = None
    reason: str | None = None
    rule: str | None = None
    error: str | None = None
    offsets: tuple[OffsetChoice, ...] = ()

    def has(self, row: SetAside, now: float) -> bool:
        age = None if row.at is None else now - row.at
        return (
            (self.older_than is None or age is None or age > self.older_than)
            and (self.newer_than is None or (age is not None and age < self.newer_than))
            and self.reason in (None, row.reason)
            and (self.rule is None or self.rule in row.rules)
            and (self.error is None or self.error.lower() in f"{row.reason} {row.detail}".lower())
            and (not self.offsets or (row.place is not None and any(each.has(row.place) for each in self.offsets)))
        )


def choice(
    older_than: str | None,
    newer_than: str | None,
    reason: str | None,
    rule: str | None,
    error: str | None,
    offsets: Sequence[str] | None,
) -> Choice:
    """A choice from what a person writes, ages as durations; empty and None: any."""
    before, since = (parse_duration(text).total_seconds() if text else None for text in (older_than, newer_than))
    ranges = tuple(map(OffsetChoice.parse, offsets or ()))
    return Choice(before, since, reason or None, rule or None, error or None, ranges)


@dataclass(frozen=True)
class SetAside:
    """A dead letter, or a quarantined row of table `of`; `at` in seconds since 1970. `place` is None if it names none.

    `values` are the columns of its table; for a dead letter of a whole record, those of the record.
    """

    of: str
    place: Place | None
    reason: str
    detail: str
    rules: tuple[str, ...]
    at: float | None
    values: Mapping[str, Any]

    @property
    def is_whole(self) -> bool:
        """True if no row was made of the record: it was refused itself."""
        return not self.rules and self.reason not in OF_ROWS


def set_aside(
    settings: Settings, stream: Stream, kind: Kind, chosen: Choice, *, table: str | None = None
) -> list[SetAside]:
    """What is set aside and chosen, in the order of topic, partition and offset. `table`: of the quarantine of which.

    Raises UsageError for a stream without a quarantine, or with several if `table` names none.
    """
    read = _letters(settings, stream) if kind == "dead letters" else _quarantined(settings, stream, table)
    now = time.time()
    found = [row for row in read if chosen.has(row, now)]
    return sorted(found, key=lambda row: row.place or ("", -1, -1))


def quarantined_table(stream: Stream, table: str | None) -> str:
    """The table of whose quarantine a command speaks."""
    names = list(stream.quarantines)
    if not names:
        raise UsageError(f"stream {stream.name} has no quarantine", "its row rules set no rows aside")
    if table is None and len(names) > 1:
        raise UsageError(f"tables {', '.join(names)} have a quarantine", f"name one: --table {names[0]}")
    if table is not None and table not in names:
        raise UsageError(f"table {table} has no quarantine", instead(table, names))
    return table or names[0]


def _letters(settings: Settings, stream: Stream) -> Iterator[SetAside]:
    table = open_table(settings, dead_letters(stream), stream.name)
    for row in () if table is None else _rows(settings, table.name, table.readable()):
        at = row["timestamp"]
        place = None if row["offset"] is None else (row["topic"], row["partition"], row["offset"])
        seconds = None if at is None else at.timestamp()
        yield SetAside("", place, row["reason"] or "", row["detail"] or "", (), seconds, row)


def _quarantined(settings: Settings, stream: Stream, table: str | None) -> Iterator[SetAside]:
    of = quarantined_table(stream, table)
    kept = open_table(settings, quarantines(stream)[of], stream.name)
    times = _times(settings, stream)
    for row in () if kept is None else _rows(settings, kept.name, kept.readable()):
        topic, partition, offset = (row[name] for name in PLACE["quarantine"])
        place = None if offset is None else (topic, partition, offset)
        at = times.get(Txn(row["_generation"], row["_batch"]))
        rules = tuple(row["_rules"] or ())
        yield SetAside(of, place, ", ".join(rules), row["_reason"] or "", rules, at, row)


def _times(settings: Settings, stream: Stream) -> dict[Txn, float]:
    """When the batches were written, as far as the ledger files reach."""
    lines = (raw for day in ledger_file(settings, stream.name).days(stream.name) for raw in day)
    return {raw.txn: fields.t for raw in lines if (fields := raw.fields()) is not None}


def _rows(settings: Settings, name: str, table: Any) -> Iterator[dict[str, Any]]:
    for batch in dataset(table, settings.tables / name).to_batches():
        yield from batch.to_pylist()


@dataclass
class _Group:
    number: int = 0
    example: str = ""
    times: list[float] = field(default_factory=list)
    """The oldest and the newest so far, in seconds since 1970."""

    def add(self, number: int, example: str | None, times: Iterable[float | None]) -> None:
        self.number += number
        self.example = min(filter(None, (self.example, example)), default="")
        known = [*self.times, *(at for at in times if at is not None)]
        self.times = [min(known), max(known)] if known else []


def by_reason(settings: Settings, stream: Stream, kind: Kind, *, table: str | None = None) -> list[dict[str, Any]]:
    """Numbers of what is set aside by reason and topic, the most first, with the times of the oldest and the newest.

    Memory has one batch of rows at a time. The example is one of the details. `table`: of the quarantine of which.
    """
    groups: dict[tuple[str, str], _Group] = defaultdict(_Group)
    if kind == "dead letters":
        kept, names = (
            open_table(settings, dead_letters(stream), stream.name),
            ["reason", "topic", "detail", "timestamp"],
        )
        for row in () if kept is None else _counted(settings, kept, names, ["timestamp"]):
            times = (None if at is None else at.timestamp() for at in (row["timestamp_min"], row["timestamp_max"]))
            groups[row["reason"] or "", row["topic"] or ""].add(row["count_all"], row["detail_min"], times)
    else:
        kept = open_table(settings, quarantines(stream)[quarantined_table(stream, table)], stream.name)
        batches, names = _times(settings, stream), ["_rules", "_topic", "_reason", "_generation", "_batch"]
        for row in () if kept is None else _counted(settings, kept, names, []):
            at = batches.get(Txn(row["_generation"], row["_batch"]))
            groups[row["_rules"] or "", row["_topic"] or ""].add(row["count_all"], row["_reason_min"], [at])

    def instant(times: list[float], which: int) -> str:
        return datetime.fromtimestamp(times[which], UTC).isoformat(" ", "seconds") if times else ""

    return [
        {
            "reason": reason,
            "topic": topic,
            "number": group.number,
            "oldest": instant(group.times, 0),
            "newest": instant(group.times, -1),
            "example": group.example,
        }
        for (reason, topic), group in sorted(groups.items(), key=lambda each: (-each[1].number, each[0]))
    ]


def _counted(
    settings: Settings, kept: StoredTable, names: list[str], ranges: Sequence[str]
) -> Iterator[dict[str, Any]]:
    """Yields groups of a batch's rows: the third column's least value, of `ranges` the least and the greatest one."""
    import pyarrow as pa
    import pyarrow.compute as pc

    figures = [([], "count_all"), (names[2], "min"), *((name, of) for name in ranges for of in ("min", "max"))]
    keys = [name for name in names if name != names[2] and name not in ranges]
    for batch in dataset(kept.readable(), settings.tables / kept.name).to_batches(columns=names):
        columns = [
            pc.binary_join(column, ", ") if pa.types.is_list(column.type) else column.cast(plain_text(column.type))
            for column in batch.columns
        ]
        yield from pa.table(columns, names).group_by(keys).aggregate(figures).to_pylist()
