"""The report of a running stream: `<state>/<stream>/status.json`, replaced at least once per second.

It is a report, not the truth: the lease shows if a driver runs, the ledger which batches are done.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from datetime import UTC, datetime
from typing import Any, Literal, TypedDict

import structlog

from streaming_jobs.errors import PreflightRefused, RecourseError
from streaming_jobs.ledger.entry import LedgerEntry, Txn
from streaming_jobs.platform.failures import ErrorReport
from streaming_jobs.settings import Settings
from streaming_jobs.state import stream_record
from streaming_jobs.state.ledger_file import LedgerFile
from streaming_jobs.state.records import json_bytes
from streaming_jobs.state.stream_folder import StreamFolder, stream_names

# The totals of a stream over all its sessions: records, rows, dead letters, late records.
#
# The status file has them, together with the last batch that they include. Batches that a kill kept out of the
# status file are added from the ledger beside the state, so no batch is missed or counted twice.

_MOST = 200_000
"""Most ledger lines that are counted if the status file, of an earlier version, has no totals yet."""


@dataclass(frozen=True)
class Totals:
    """Counts of all batches up to `generation` and `batch` since `since` (seconds since 1970).

    Batches that a recovery replayed were written again, and count again.
    """

    since: float
    generation: int = 0
    batch: int = -1
    records: int = 0
    rows_written: int = 0
    dead_letters: int = 0
    late_rows: int = 0
    quarantined: int = 0
    dropped: int = 0
    broken: Mapping[str, int] = field(default_factory=dict)
    """Rows by table and broken rule, such as `orders.price_between`."""
    broken_at: Mapping[str, float] = field(default_factory=dict)
    """The time of the newest batch in which a rule was broken, seconds since 1970."""

    @classmethod
    def of(cls, value: Mapping[str, Any] | None) -> Totals | None:
        """The totals of a status file; None if it has none."""
        try:
            return cls(**value) if value else None
        except TypeError:  # of another version
            return None

    def plus(self, entry: LedgerEntry, at: float) -> Totals:
        """The totals with one batch more, which was done `at`; unchanged if the batch is counted already."""
        if entry.txn <= Txn(self.generation, self.batch):
            return self
        return Totals(
            self.since,
            entry.generation,
            entry.batch,
            self.records + entry.records,
            self.rows_written + entry.rows_written,
            self.dead_letters + entry.dead_letters,
            self.late_rows + entry.late_rows,
            self.quarantined + entry.quarantined,
            self.dropped + entry.dropped,
            _sum(self.broken, broken := broken_rules(entry)),
            {**self.broken_at, **dict.fromkeys(broken, at)} if broken else self.broken_at,
        )


def broken_rules(entry: LedgerEntry) -> dict[str, int]:
    """The rows of a batch by table and broken rule."""
    return {f"{table}.{rule}": rows for table, rules in entry.rules.items() for rule, rows in rules.items()}


def _sum(first: Mapping[str, int], second: Mapping[str, int]) -> Mapping[str, int]:
    if not second:
        return first
    return {name: first.get(name, 0) + second.get(name, 0) for name in {**first, **second}}


def totals_from(file: LedgerFile, stream: str, known: Totals | None, now: float) -> Totals:
    """The totals now: those `known`, and the later batches in the ledger file."""
    after = Txn(known.generation, known.batch) if known else None
    lines = sorted(file.after(stream, after, at_most=_MOST), key=lambda line: line.entry.txn)
    totals = known or Totals(lines[0].at if lines else now)
    for line in lines:
        totals = totals.plus(line.entry, line.at)
    return totals


@dataclass(frozen=True)
class TableAge:
    """When a table last got rows, in seconds since 1970; `since`, when the stream began to note that.

    `fresh_within_s` is the table's freshness objective in seconds, as the running code declares it.
    """

    since: float
    rows_at: float | None = None
    fresh_within_s: float | None = None

    def seconds(self, now: float) -> float:
        """The age of the newest rows; of a table without any noted rows, the time without them."""
        return max(now - (self.since if self.rows_at is None else self.rows_at), 0.0)

    def is_stale(self, now: float) -> bool:
        """True if the newest rows are older than the objective; never without one."""
        return self.fresh_within_s is not None and self.seconds(now) > self.fresh_within_s

    @classmethod
    def of(cls, value: Any) -> dict[str, TableAge]:
        """The tables of a status file; none if another version has written it."""
        try:
            return {name: cls(**table) for name, table in value.items()}
        except (AttributeError, TypeError):
            return {}


State = Literal["starting", "running", "idle", "failing", "stopping", "stopped", "failed"]

PHASES = ("plan", "read", "decode", "function", "write", "commit")
"""The phases of a batch, in order; docs/metrics.md says what is in which, and what cannot be told apart.

A status of an earlier version has `compute` for those from `read` to `function`. The pause after a batch is in none.
"""

ENDED: tuple[State, ...] = ("stopped", "failed")
"""The states in which a session leaves the status of a stream that it no longer runs."""


class StateSize(TypedDict):
    """The state of one operator."""

    name: str
    rows: int
    mb: float


@dataclass
class Status:
    """One stream's state. Times are seconds since 1970, rates records per second, `state_mb` is MB.

    Each group of figures has its time: `committed_at` for the last batch, `progress_at` for Spark's figures
    (rates, watermark, state), `lag_at` for the lag. The counters here began with the session, at `started_at`;
    `totals` outlive sessions.
    """

    stream: str
    state: State = "starting"
    pid: int = 0
    run_id: str | None = None
    generation: int = 0
    batch: int | None = None
    """The last batch that is in the tables, also of a session before this one."""
    heartbeat: float = 0.0
    started_at: float = 0.0
    begun_at: float | None = None
    """The time at which this session last started the query."""
    committed_at: float | None = None
    batch_ms: int | None = None
    batch_records: int | None = None
    batches: int = 0
    phase_s: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PHASES, 0.0))
    """Seconds that `batches` have taken, by phase (`PHASES`)."""
    tables: dict[str, TableAge] = field(default_factory=dict)
    """The tables of its sinks, by name."""
    trigger: str = ""
    batch_every_s: float = 0.0
    """Seconds that the trigger leaves between two batches."""
    progress_at: float | None = None
    input_rows_per_s: float | None = None
    processed_rows_per_s: float | None = None
    """Of the last batch that read records: `batch_records` by `batch_ms`, without the pause after it."""
    lag_at: float | None = None
    """The time of the last comparison of the position with the end of the topics."""
    lag_records: int | None = None
    """Records between the last batch and the end of the topics then."""
    lag_s: float | None = None
    """Everything that was in the topics this many seconds before `lag_at` has been read; 0 at the end."""
    lag_partitions: dict[str, dict[str, int]] = field(default_factory=dict)
    """`lag_records` by topic and partition."""
    blocked: dict[str, dict[str, float]] = field(default_factory=dict)
    """Topic -> partition -> since when its next record is of a transaction that another program has not ended."""
    read_up_to: float | None = None
    """The moment up to which the stream has read everything that arrived in its topics."""
    watermark: str | None = None
    watermark_delay_s: float | None = None
    watermark_ahead_s: float = 0.0
    """Seconds from the newest record's timestamp to a later watermark: records on time are then late."""
    state_rows: int | None = None
    state_mb: float | None = None
    state_skew: float | None = None
    """Keys in the fullest partition of an operator's state, divided by those of an average one."""
    state_operators: list[StateSize] = field(default_factory=list)
    """The same by operator, in the order of Spark's reports."""
    rows_written: int = 0
    dead_letters: int = 0
    quarantined: int = 0
    """Rows that row rules have set aside."""
    dropped: int = 0
    """Rows that row rules or the error policy have dropped."""
    broken: dict[str, int] = field(default_factory=dict)
    """Rows by table and broken rule, such as `orders.price_between`."""
    late_rows: int = 0
    """Records behind the watermark, of the batches whose state dropped some of them."""
    late_rows_dropped: int = 0
    """Spark's own figure of what was dropped: result rows after partial aggregation, not records."""
    totals: Totals | None = None
    restarts: int = 0
    failures: int = 0
    """Failures in a row that the stream has not recovered from by ten good batches or ten minutes."""
    code_version: str = ""
    disk_code: str | None = None
    """The hash of the stream's code on disk, where it is another one than that of the running code."""
    disk_code_since: float | None = None
    """The time since which the code on disk differs from the running code."""
    disk_code_error: str | None = None
    """The reason why the code on disk cannot be loaded."""
    disk_settings: bool = False
    """True if the stream has other settings on disk than those it runs with."""
    committer: str | None = None
    path: str | None = None
    next_try: float | None = None
    """The time of the next try of a stream that is `failing`."""
    warnings: list[str] = field(default_factory=list)
    error: ErrorReport | None = None
    """The reason of the failure, while the stream is failed or waits for its next try."""
    ended_by: str = ""
    """Who requested the end of the session that left the stream stopped, if it was not a stop request."""
    last_error: ErrorReport | None = None
    """The newest error, with the time `at`; it stays after the stream has recovered and after a restart."""

    @property
    def last_start(self) -> float:
        """The time of the last start, seconds since 1970: of the query, or of the session that could not start it."""
        return max(self.started_at, self.begun_at or 0.0)

    @property
    def code_hash(self) -> str:
        """The hash of the code that the session runs, or ran last."""
        return self.code_version.partition(" ")[0]

    def not_ahead(self, now: float) -> None:
        """Replace times in the future, from before the clock was set back, by now."""
        self.started_at = min(self.started_at, now)
        for name in ("begun_at", "committed_at", "progress_at"):
            if (stamp := getattr(self, name)) is not None:
                setattr(self, name, min(stamp, now))

    def set_error(self, error: ErrorReport) -> None:
        self.error = error
        self.last_error = {**error, "at": datetime.now(UTC).isoformat(timespec="seconds")}


def write_status(settings: Settings, status: Status) -> None:
    """Replace the stream's status file; a power cut may lose it.

    If the disk is full, the file is overwritten in the blocks that it has, without white space if need be, so that a
    failure for lack of space is recorded; raises OSError if it does not fit there either.
    """
    handle, value = StreamFolder.of(settings, status.stream).status, asdict(status)
    try:
        handle.put(json_bytes(value), durable=False)
    except OSError:
        handle.put(json.dumps(value).encode(), durable=False)


def streams_with_status(settings: Settings) -> list[str]:
    """The names of all streams that have ever run in this home."""
    return [name for name in stream_names(settings) if StreamFolder.of(settings, name).status.exists()]


def read_status(settings: Settings, stream: str) -> Status | None:
    """The newest status, or None if the stream has never run here."""
    found = StreamFolder.of(settings, stream).status.read()
    try:
        value: dict[str, Any] = json.loads(found.data if found is not None else "")
    except ValueError:
        return None
    known = {f.name for f in fields(Status)}
    status = Status(**{key: item for key, item in value.items() if key in known})
    status.totals = Totals.of(value.get("totals"))
    status.tables = TableAge.of(value.get("tables"))
    return status


def update(status: Status, progress: Mapping[str, Any]) -> None:
    """Take over the figures of one of Spark's progress reports (`StreamingQueryProgress`).

    A batch's records per second are left out: Spark counts the pause after the batch as part of it.
    """
    status.progress_at = time.time()
    status.input_rows_per_s = _number(progress.get("inputRowsPerSecond"))
    if "addBatch" not in (progress.get("durationMs") or {}):  # an idle moment
        status.processed_rows_per_s = _number(progress.get("processedRowsPerSecond"))
    watermark = (progress.get("eventTime") or {}).get("watermark")
    if watermark and not watermark.startswith("1970-01-01T00:00:00"):
        at = moment(watermark)
        status.watermark = watermark if at is not None else None
        status.watermark_delay_s = round(time.time() - at, 1) if at is not None else None
    operators = progress.get("stateOperators") or []
    if operators:
        sizes = [(o.get("operatorName", ""), o.get("numRowsTotal", 0), o.get("memoryUsedBytes", 0)) for o in operators]
        status.state_rows = sum(rows for _, rows, _ in sizes)
        status.state_mb = round(sum(used for *_, used in sizes) / 2**20, 2)
        status.state_operators = [{"name": name, "rows": rows, "mb": round(b / 2**20, 2)} for name, rows, b in sizes]


def moment(text: str) -> float | None:
    """A time of Spark's, in seconds since 1970; None before the year 1 or after 9999, which Python cannot represent."""
    try:
        return datetime.fromisoformat(text).replace(tzinfo=UTC).timestamp()
    except (ValueError, OverflowError):
        return None


def late_rows(progress: Mapping[str, Any]) -> int:
    """Rows that Spark dropped behind the watermark in one batch; it counts them after partial aggregation."""
    return sum(o.get("numRowsDroppedByWatermark", 0) for o in progress.get("stateOperators") or [])


def _number(value: Any) -> float | None:
    return round(value, 1) if isinstance(value, (int, float)) and value == value and abs(value) < 1e15 else None


# The status that a session begins with, from the stream's files.

log = structlog.get_logger()

_CARRIED_OVER = (
    "batch",
    "committed_at",
    "batch_ms",
    "batch_records",
    "tables",
    "progress_at",
    "lag_at",
    "lag_records",
    "lag_s",
    "lag_partitions",
    "read_up_to",
    "watermark",
    "watermark_delay_s",
    "state_rows",
    "state_mb",
    "state_skew",
    "state_operators",
    "code_version",
    "last_error",
)
"""Figures that stay valid, with their age, until this session has newer ones. Rates do not: they are per session."""


def first_status(settings: Settings, stream: str) -> Status:
    """The status of a session that begins now, in this process; preflight reports files that cannot be read."""
    now = time.time()
    run = os.environ.get("RECOURSE_RUN_ID")
    status = Status(stream, pid=os.getpid(), run_id=run, started_at=now, heartbeat=now)
    before = read_status(settings, stream)
    if before is not None:
        for name in _CARRIED_OVER:
            setattr(status, name, getattr(before, name))
        status.generation = before.generation
    try:
        record = stream_record.load(settings, stream)
    except PreflightRefused:
        record = None
    if record is not None:
        status.generation = record.generation
        status.batch = StreamFolder.of(settings, stream).checkpoint(record.generation).last_committed
    known = before.totals if before is not None else None
    try:
        file = LedgerFile(StreamFolder.of(settings, stream).ledger)
        status.totals = totals_from(file, stream, known, now)
    except (OSError, EOFError, ValueError, KeyError, RecourseError) as error:  # a missing figure must not stop a stream
        log.warning(
            "the ledger file could not be counted; totals continue without it", stream=stream, reason=repr(error)
        )
        status.totals = known or Totals(now)
    return status
