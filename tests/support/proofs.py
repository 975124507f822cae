"""Small tables and their topic as the streams would have left them, and ways to spoil them."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from deltalake import CommitProperties, DeltaTable, Transaction, write_deltalake

from streaming_jobs.settings import Settings
from streaming_jobs.verification.chaos.flight_subject import FLIGHTS, JUDGED, NEWEST, SHIPPED, SPLIT
from streaming_jobs.verification.chaos.home import Home
from streaming_jobs.verification.chaos.kill_loop import home_of
from streaming_jobs.verification.chaos.version_reader import WatchedStream
from streaming_jobs.verification.delta_log import commit_file, versions
from streaming_jobs.verification.offset_ranges import Span
from streaming_jobs.verification.subject import Subject
from streaming_jobs.verification.topic import CommittedPartition, CommittedTopic, RawRecord
from streaming_jobs.verification.verifier import StreamVerdict, verify

TOPIC, TOPIC_ID = "flights", "q2Fxt25LSjKInOzlgP-Hyw"
BATCHES = 4
SIZES = {0: 10, 1: 5}
"""Records of each partition in one batch."""
CLEAN, HOURS, TOTALS = (watched.table for watched in SHIPPED)
SUBJECTS = tuple(Subject(name, name, TOPIC) for name in (CLEAN, HOURS, TOTALS))
"""The three streams without their declarations: their offsets are compared, and no rows."""

_CLEAN = pa.schema(
    [
        ("source_partition", pa.int32()),
        ("source_offset", pa.int64()),
        ("carrier", pa.string()),
        ("flight", pa.int32()),
    ]
)
_HOURS = pa.schema([("window_start", pa.timestamp("us", "UTC")), ("origin", pa.string()), ("flights", pa.int64())])
_TOTALS = pa.schema([("carrier", pa.string()), ("flights", pa.int64())])
SCHEMAS = {CLEAN: _CLEAN, HOURS: _HOURS, TOTALS: _TOTALS}


def entry(table: str, batch: int, written: int, kind: str = "batch") -> dict[str, Any]:
    """The ledger entry of a batch, as text holds it."""
    read = {
        "id": TOPIC_ID,
        "start": {p: batch * size for p, size in SIZES.items()},
        "end": {p: (batch + 1) * size for p, size in SIZES.items()},
    }
    return {
        "recourse": 1,
        "kind": kind,
        "stream": table,
        "table": table,
        "generation": 1,
        "batch": batch,
        "offsets": {TOPIC: read} if kind == "batch" else {},
        "rows": {"written": written},
        "txns": {},
        "code": {"hash": "fd2f87f71956", "package": "0.1.0"},
    }


def properties(value: Mapping[str, Any]) -> CommitProperties:
    """Commit properties that carry the entry and its transaction."""
    version = value["generation"] << 32 | (value["batch"] + 1)
    return CommitProperties(
        custom_metadata={"userMetadata": json.dumps(value)},
        app_transactions=[Transaction(f"recourse:{value['stream']}:{value['table']}", version)],
    )


def clean_rows(batch: int) -> list[dict[str, Any]]:
    """A row for each record of a batch."""
    return [
        {"source_partition": p, "source_offset": o, "carrier": f"C{p}", "flight": o}
        for p, size in SIZES.items()
        for o in range(batch * size, (batch + 1) * size)
    ]


def hour_rows(batch: int) -> list[dict[str, Any]]:
    """Two windows per batch, from the second batch on."""
    start = datetime(2013, 1, 1, tzinfo=UTC) + timedelta(hours=batch)
    return [{"window_start": start, "origin": origin, "flights": 5} for origin in ("EWR", "JFK")] if batch else []


def total_rows(batch: int) -> list[dict[str, Any]]:
    """The running totals after a batch."""
    return [{"carrier": f"C{p}", "flights": (batch + 1) * size} for p, size in SIZES.items()]


def make_tables(folder: Path) -> Path:
    """The three tables after four batches each; version N + 1 is batch N."""
    for table, make, mode in (
        (CLEAN, clean_rows, "append"),
        (HOURS, hour_rows, "append"),
        (TOTALS, total_rows, "overwrite"),
    ):
        path = folder / table
        made = {**entry(table, -1, 0, "schema")}
        DeltaTable.create(path, SCHEMAS[table], commit_properties=properties(made))
        for batch in range(BATCHES):
            rows = pa.Table.from_pylist(make(batch), schema=SCHEMAS[table])
            write_deltalake(path, rows, mode=mode, commit_properties=properties(entry(table, batch, rows.num_rows)))
    return folder


def topic(batches: int = BATCHES, low: Mapping[int, int] = {}) -> dict[str, CommittedTopic]:
    """The topic with the records of so many batches; `low` is where partitions begin now, 0 if not named."""
    partitions = {}
    for number, size in SIZES.items():
        begin, end = low.get(number, 0), batches * size
        partitions[number] = CommittedPartition(begin, end, np.arange(begin, end))
    return {TOPIC: CommittedTopic(TOPIC, TOPIC_ID, partitions)}


@dataclass(frozen=True)
class Spoiler:
    """Changes one table without a ledger entry."""

    path: Path

    def entry(self, version: int, change: Callable[[dict[str, Any]], dict[str, Any] | None]) -> None:
        """Replace a commit's entry by the result of `change`; None removes it."""

        def changed(action: dict[str, Any]) -> dict[str, Any]:
            if "commitInfo" in action:
                value = change(json.loads(action["commitInfo"].pop("userMetadata")))
                if value is not None:
                    action["commitInfo"]["userMetadata"] = json.dumps(value)
            return action

        self.actions(version, changed)

    def actions(self, version: int, change: Callable[[dict[str, Any]], dict[str, Any] | None]) -> None:
        """Rewrite a commit's actions one by one; None removes one."""
        file = commit_file(self.path, version)
        actions = [change(json.loads(line)) for line in file.read_text().splitlines() if line]
        file.write_text("\n".join(json.dumps(action) for action in actions if action is not None))

    def read(self, version: int, partition: int, *, start: int = 0, end: int = 0) -> None:
        """Move the range that a commit's entry names for a partition."""

        def moved(value: dict[str, Any]) -> dict[str, Any]:
            value["offsets"][TOPIC]["start"][str(partition)] += start
            value["offsets"][TOPIC]["end"][str(partition)] += end
            return value

        self.entry(version, moved)

    def rows(self, change: Callable[[list[dict[str, Any]]], list[dict[str, Any]]]) -> None:
        """Rewrite the newest data file of the table, and nothing in the log but its size."""
        file = Path(sorted(DeltaTable(self.path).file_uris(), key=lambda uri: Path(uri).stat().st_mtime_ns)[-1])
        rows = pq.ParquetFile(file).read()
        pq.write_table(pa.Table.from_pylist(change(rows.to_pylist()), schema=rows.schema), file)

        def sized(action: dict[str, Any]) -> dict[str, Any]:
            if "add" in action and action["add"]["path"] == file.name:
                action["add"]["size"] = file.stat().st_size
            return action

        for version in versions(self.path):
            self.actions(version, sized)


def judged(
    tables: Path, table: str, topics: Mapping[str, CommittedTopic] | None = None, **options: Any
) -> StreamVerdict:
    """The verdict on one table, by its log alone."""
    verdict = verify(SUBJECTS, tables, topics if topics is not None else topic(), **options)
    return next(subject for subject in verdict.streams if subject.table == table)


def make_split(folder: Path) -> Path:
    """The stream of two tables after four batches: the offset 2 of each batch and partition is a long flight."""
    secondary = SPLIT.secondary[0].table
    for table in (secondary, SPLIT.table):
        made = entry(table, -1, 0, "schema") | {"stream": SPLIT.stream}
        DeltaTable.create(folder / table, _CLEAN, commit_properties=properties(made))
    for batch in range(BATCHES):
        write_split(folder, batch, secondary)
        write_split(folder, batch, SPLIT.table)
    return folder


def write_split(folder: Path, batch: int, table: str) -> None:
    """One batch's rows of one of the two tables."""
    rows = [row for row in clean_rows(batch) if is_long(row, batch) == (table != SPLIT.table)]
    write_deltalake(
        folder / table,
        pa.Table.from_pylist(rows, schema=_CLEAN),
        mode="append",
        commit_properties=properties(entry(table, batch, len(rows)) | {"stream": SPLIT.stream}),
    )


def write_judged(
    folder: Path,
    subject: WatchedStream,
    batch: int,
    written: list[dict[str, Any]],
    aside: list[dict[str, Any]],
    dropped: int = 0,
) -> None:
    """One batch of a stream with row rules: first its quarantine, then its table, whose entry counts the dropped rows.

    Of `NEWEST`, an upsert, `written` are all rows of the table after the batch.
    """
    name, quarantine = subject.table, subject.secondary[0].table
    counts = {"written": len(written), f"quarantined:{name}": len(aside), f"dropped:{name}": dropped}
    modes: dict[str, Literal["append", "overwrite"]] = {JUDGED.table: "append", NEWEST.table: "overwrite"}
    value = entry(name, batch, len(aside)) | {"stream": name}
    for table, rows, mode, own in (
        (quarantine, aside, "append", value | {"table": quarantine}),
        (name, written, modes[name], value | {"rows": counts}),
    ):
        content = pa.Table.from_pylist(rows, schema=_CLEAN)
        write_deltalake(folder / table, content, mode=mode, commit_properties=properties(own))


def is_long(row: Mapping[str, Any], batch: int) -> bool:
    """True if the row belongs to the second table."""
    return bool(row["source_offset"] - batch * SIZES[row["source_partition"]] == 2)


def flights_home(folder: Path) -> Home:
    """The home of a kill loop, with batches of at most 50 records."""
    return home_of(FLIGHTS, folder, Settings.load(), 50)


@dataclass(frozen=True)
class ListedRecords:
    """Records in memory, in place of a topic's reader."""

    listed: Sequence[RawRecord]

    def records(self, spans: Iterable[Span]) -> Iterator[RawRecord]:
        wanted = list(spans)
        for record in sorted(self.listed, key=lambda r: (r.topic, r.partition, r.offset)):
            if any(
                (s.topic, s.partition) == (record.topic, record.partition) and s.start <= record.offset < s.end
                for s in wanted
            ):
                yield record
