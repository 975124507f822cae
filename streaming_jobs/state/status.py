"""The report of a running stream: `<state>/<stream>/status.json`, replaced at least once per second.

It is a report, not the truth: the lease shows if a driver runs, the ledger which batches are done.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from datetime import UTC, datetime
from typing import Any, Literal, cast

from streaming_jobs.failures import ErrorReport
from streaming_jobs.files import overwritten, write_json
from streaming_jobs.log_stream import disk_is_full
from streaming_jobs.settings import Settings
from streaming_jobs.state.stream_folder import StreamFolder
from streaming_jobs.state.totals import Totals

State = Literal["starting", "running", "idle", "failing", "stopping", "stopped", "failed"]


@dataclass
class Status:
    """One stream's state. Times are seconds since 1970, rates records per second, `state_mb` is MB.

    Each group of figures has its time: `committed_at` for those of the last batch, `progress_at` for Spark's figures
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
    """The moment up to which everything that came to the topics has been read."""
    watermark: str | None = None
    watermark_delay_s: float | None = None
    watermark_ahead_s: float = 0.0
    """Seconds from the newest record's timestamp to a later watermark: records on time are then late."""
    state_rows: int | None = None
    state_mb: float | None = None
    rows_written: int = 0
    dead_letters: int = 0
    quarantined: int = 0
    """Rows that row rules have set aside."""
    dropped: int = 0
    """Rows that row rules have dropped."""
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
    """The time from which the files on disk are other ones than those that run."""
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
    """Who asked for the end of the session that left the stream stopped, if it was not a stop request."""
    last_error: ErrorReport | None = None
    """The newest error, with the time `at`; it stays after the stream has recovered and after a restart."""

    @property
    def last_start(self) -> float:
        """The time of the last start, seconds since 1970: of the query, or of the session that could not start it."""
        return max(self.started_at, self.begun_at or 0.0)

    def not_ahead(self, now: float) -> None:
        """Replace times in the future, from before the clock was set back, by now."""
        self.started_at = min(self.started_at, now)
        for name in ("begun_at", "committed_at", "progress_at"):
            if (stamp := getattr(self, name)) is not None:
                setattr(self, name, min(stamp, now))

    def set_error(self, error: ErrorReport) -> None:
        """Note the error with which the stream failed."""
        self.error = error
        self.last_error = {**error, "at": datetime.now(UTC).isoformat(timespec="seconds")}


def write_status(settings: Settings, status: Status) -> None:
    """Replace the stream's status file; a power cut may lose it.

    If the disk is full, the file is overwritten in the blocks that it has, so that a failure for lack of space is
    recorded; raises OSError if it does not fit there either.
    """
    path = StreamFolder.of(settings, status.stream).make().status
    try:
        write_json(path, asdict(status), durable=False)
    except OSError as error:
        if not (disk_is_full(error) and overwritten(path, json.dumps(asdict(status)))):
            raise


def read_status(settings: Settings, stream: str) -> Status | None:
    """The newest status, or None if the stream has never run here."""
    try:
        value: dict[str, Any] = json.loads(StreamFolder.of(settings, stream).status.read_text(encoding="utf-8"))
    except (FileNotFoundError, ValueError):
        return None
    known = {f.name for f in fields(Status)}
    status = Status(**{key: item for key, item in value.items() if key in known})
    status.totals = Totals.of(value.get("totals"))
    status.error, status.last_error = _error_report(value.get("error")), _error_report(value.get("last_error"))
    return status


def _error_report(value: dict[str, Any] | None) -> ErrorReport | None:
    """The error as read; older files have "true" and "false" where a new one has a boolean."""
    if value is None:
        return None
    flags = {name: value[name] in (True, "true") for name in ("permanent", "lasting") if name in value}
    return cast("ErrorReport", {**value, **flags})


def update(status: Status, progress: dict[str, Any]) -> None:
    """Take over the figures of one of Spark's progress reports (`StreamingQueryProgress`).

    A batch's records per second are left out: Spark counts the pause after the batch (`pace.py`) as part of it.
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
        status.state_rows = sum(o.get("numRowsTotal", 0) for o in operators)
        status.state_mb = round(sum(o.get("memoryUsedBytes", 0) for o in operators) / 2**20, 2)


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
