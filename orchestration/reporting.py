"""What a session tells Dagster while it runs: observations about each minute, materialisations now and then.

Numbers are plotted on the asset's page under the keys of `figures`. Every event stays in Dagster's event log
(about 9 kB each), so dead-letter tables, which seldom change, are observed only when they did.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from datetime import datetime

import dagster as dg

from orchestration.reasons import failure_text
from streaming_jobs.progress import Status
from streaming_jobs.settings import DagsterSettings
from streaming_jobs.stream import Stream

LogEvent = Callable[[dg.AssetObservation | dg.AssetMaterialization], None]

_NUMBERS = (
    "input_rows_per_s",
    "processed_rows_per_s",
    "lag_records",
    "batch_ms",
    "state_rows",
    "state_mb",
    "watermark_delay_s",
    "dead_letters",
    "late_rows_dropped",
    "restarts",
    "rows_written",
)


def figures(status: Status) -> dict[str, dg.MetadataValue]:
    """The status as metadata: numbers where Spark gave one, the watermark as a time."""
    found: dict[str, dg.MetadataValue] = {}
    if status.batch is not None:
        found["batch_id"] = dg.MetadataValue.int(status.batch)
    for key in _NUMBERS:
        value = getattr(status, key)
        if isinstance(value, bool) or value is None:
            continue
        found[key] = dg.MetadataValue.int(value) if isinstance(value, int) else dg.MetadataValue.float(float(value))
    if status.watermark:
        found["watermark"] = dg.MetadataValue.timestamp(datetime.fromisoformat(status.watermark.replace("Z", "+00:00")))
    found["generation"] = dg.MetadataValue.int(status.generation)
    found["state"] = dg.MetadataValue.text(status.state)
    if status.code_version:
        found["code_version"] = dg.MetadataValue.text(status.code_version)
    return found


@dataclass
class _Told:
    """What Dagster has been told of one stream in this session."""

    observed_at: float = float("-inf")
    materialized_at: float = float("-inf")
    materialized_batch: int | None = None
    dead_letters: int | None = None
    failed: bool = False


@dataclass
class Reporter:
    """Turns the status files of one session into asset events. `clock` gives seconds, for tests."""

    streams: Iterable[Stream]
    settings: DagsterSettings
    log_event: LogEvent
    log_error: Callable[[str], None]
    clock: Callable[[], float] = time.monotonic
    _told: dict[str, _Told] = field(default_factory=dict)

    def report(self, statuses: Mapping[str, Status | None]) -> None:
        """Say what is due; `statuses` are this session's own (None: the stream has said nothing yet)."""
        now = self.clock()
        for stream in self.streams:
            status = statuses.get(stream.name)
            if status is None:
                continue
            told = self._told.setdefault(stream.name, _Told())
            if status.state == "failed" and not told.failed:
                told.failed = True
                self.log_error(failure_text(status))
            committed = status.committed_at is not None
            if committed and self._materialization_due(told, status, now):
                self._materialize(stream, status, told, now)
            known = status.batch is not None or status.state == "failed"
            if known and now - told.observed_at >= self.settings.observe_every.total_seconds():
                self._observe(stream, status, told, now)

    def finish(self, statuses: Mapping[str, Status | None]) -> None:
        """The session's last word: a materialisation of everything committed since the last one."""
        for stream in self.streams:
            status, told = statuses.get(stream.name), self._told.setdefault(stream.name, _Told())
            if status is None:
                continue
            if status.state == "failed" and not told.failed:
                told.failed = True
                self.log_error(failure_text(status))
            if status.committed_at is not None and status.batch != told.materialized_batch:
                self._materialize(stream, status, told, self.clock())

    def _materialization_due(self, told: _Told, status: Status, now: float) -> bool:
        if status.batch == told.materialized_batch:
            return False
        return now - told.materialized_at >= self.settings.materialize_every.total_seconds()

    def _materialize(self, stream: Stream, status: Status, told: _Told, now: float) -> None:
        # The dead-letter table is materialised with the others: "complete up to this batch" holds for it too.
        for table in (*(sink.name for sink in stream.sinks.values()), stream.dead_letters):
            self.log_event(dg.AssetMaterialization(asset_key=table_key(table), metadata=figures(status)))
        told.materialized_at, told.materialized_batch = now, status.batch

    def _observe(self, stream: Stream, status: Status, told: _Told, now: float) -> None:
        tables = [sink.name for sink in stream.sinks.values()]
        if status.dead_letters != told.dead_letters:
            tables.append(stream.dead_letters)
        for table in tables:
            self.log_event(dg.AssetObservation(asset_key=table_key(table), metadata=figures(status)))
        told.observed_at, told.dead_letters = now, status.dead_letters


def table_key(table: str) -> dg.AssetKey:
    """The asset of a table."""
    return dg.AssetKey([table])


def topic_key(topic: str) -> dg.AssetKey:
    """The asset of a topic; under `kafka`, so that a table may have the same name."""
    return dg.AssetKey(["kafka", topic])
