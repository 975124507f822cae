"""Asset events of a running session for Dagster: one event per table and minute, none of them in the run.

The event is a materialisation if rows were committed since the last one, because an asset's overview shows the figures
of the newest materialisation and nothing else; otherwise an observation, so that plots continue. A stream that is not
running (starting, stopping, failed, silent) is not reported: old figures would look like new ones. `health.py` reports
what is wrong with it.

Figures, materialisations and verdicts are reported without a run, for three reasons: they would bury the few useful
lines of a run's log; Dagster counts a check for the newest materialisation only if both belong to one run (or to
none); and it shows a table of a run in progress as "Materializing", whatever its checks say.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any

import dagster as dg
import sqlalchemy as sql
import structlog
from dagster._core.definitions.metadata import normalize_metadata
from dagster._core.events import AssetMaterializationPlannedData
from dagster._core.storage.asset_check_execution_record import AssetCheckExecutionRecordStatus
from dagster._core.storage.event_log.schema import AssetCheckExecutionsTable
from dagster._core.storage.event_log.sql_event_log import SqlEventLogStorage

from orchestration.sessions.names import table_key
from reprocessing.timeline.marks import Mark, events_of
from streaming_jobs.settings import DagsterSettings, Settings
from streaming_jobs.state.status import Status, read_status
from streaming_jobs.state.stream_history import Deploy
from streaming_jobs.stream import Stream
from streaming_jobs.text import commands
from streaming_jobs.text.durations import format_duration
from streaming_jobs.text.spelling import instant_words

if TYPE_CHECKING:
    from streaming_jobs.runtime.lag import Unread


log = structlog.get_logger()

NO_RUN = ""
"""The run id of events without a run."""
LogEvent = Callable[[dg.AssetObservation | dg.AssetMaterialization], None]

AT_WORK = ("running", "idle")
"""States in which a stream's figures are current."""
PLOTTED_DELAY = 86_400.0
"""Watermark delay (s) beyond which the data is historic: shown as text, not plotted."""

_LAG = ("lag_records", "lag_s")
MOST_PARTITIONS = 64
"""Partitions up to which the lag of each is shown."""
_RECENT_EVENTS, _LONGEST_EVENT = 8, 160
"""Number of events in a table of what has happened lately, and characters of each."""


def belongs_to_no_run(instance: dg.DagsterInstance, check: dg.AssetCheckKey, run: str) -> None:
    """Record the verdict of a run's step as a verdict without a run; the run keeps its own event."""
    storage, checks = instance.event_log_storage, AssetCheckExecutionsTable.c
    if isinstance(storage, SqlEventLogStorage):
        given = sql.and_(
            checks.asset_key == check.asset_key.to_string(),
            checks.check_name == check.name,
            checks.run_id == run,
            checks.execution_status != AssetCheckExecutionRecordStatus.PLANNED.value,
        )
        with storage.index_connection() as connection:
            connection.execute(AssetCheckExecutionsTable.update().where(given).values(run_id=NO_RUN))


def not_being_made(instance: dg.DagsterInstance, tables: Iterable[dg.AssetKey]) -> None:
    """Withdraw Dagster's plan that a run materialises the tables once, at its end: a session does so all the time."""
    for table in tables:
        instance.report_dagster_event(
            dg.DagsterEvent(
                dg.DagsterEventType.ASSET_MATERIALIZATION_PLANNED.value,
                job_name=NO_RUN,
                event_specific_data=AssetMaterializationPlannedData(table, partition=None, partitions_subset=None),
            ),
            run_id=NO_RUN,
        )


def shown(values: Mapping[str, Any]) -> dict[str, dg.MetadataValue]:
    """Values as metadata: texts, and numbers, which Dagster plots; None is left out."""
    return dict(normalize_metadata({name: value for name, value in values.items() if value is not None}))


def at(moment: float | None) -> dg.MetadataValue | None:
    """A time (seconds since 1970) for `shown`."""
    return None if moment is None else dg.MetadataValue.timestamp(moment)


def figures(status: Status, now: float, unread: Unread | None = None) -> dict[str, dg.MetadataValue]:
    """The status as metadata: values to plot as numbers, everything else as text or time.

    Rates, lag and watermark are left out when they are older than a minute: `now` is seconds since 1970.
    `unread` is what the stream has not read, if the broker was asked.
    """
    rates = ("input_rows_per_s", "processed_rows_per_s", "state_rows", "state_mb", "state_skew", "batch_ms")
    fresh = (*(rates if _fresh(status.progress_at, now) else ()), *(_LAG if _fresh(status.lag_at, now) else ()))
    few = 0 < sum(map(len, status.lag_partitions.values())) <= MOST_PARTITIONS
    return shown(
        {
            "state": status.state,
            "as_of": at(status.heartbeat),
            "recovery_number": str(status.generation),
            "rows_since_session_start": status.rows_written,
            "dead_letters_since_session_start": status.dead_letters,
            "late_rows_since_session_start": status.late_rows,
            "quarantined_since_session_start": status.quarantined,
            "dropped_by_rules_since_session_start": status.dropped,
            **_last_batch(status),
            **{name: getattr(status, name) for name in fresh},
            "lag_by_partition": status.lag_partitions if few and _fresh(status.lag_at, now) else None,
            **(_oldest(unread) if unread is not None else {}),
            **(_watermark(status.watermark, status.watermark_delay_s) if status.watermark else {}),
            "code_version": status.code_version or None,
            **_code_on_disk(status),
        }
    )


def dead_letter_figures(status: Status) -> dict[str, dg.MetadataValue]:
    """The figures of the table of dead letters, which has none of the stream's rows."""
    return shown(
        {
            "dead_letters_since_session_start": status.dead_letters,
            "as_of": at(status.heartbeat),
            **_last_batch(status),
            "dead_letters_in_all": status.totals.dead_letters if status.totals is not None else None,
        }
    )


def health_figures(status: Status, last: Sequence[Deploy]) -> dict[str, dg.MetadataValue]:
    """The first figures that an operator needs beside the verdict; `last` has the last deploy, if any."""
    return shown(
        {
            "state": status.state,
            **{name: getattr(status, name) for name in _LAG},
            **_last_batch(status),
            "as_of": at(status.heartbeat),
            "code_version": status.code_version or "unknown",
            "last_deploy": at(last[-1].at) if last else None,
        }
    )


def _last_batch(status: Status) -> dict[str, Any]:
    batch = None if status.batch is None else str(status.batch)
    return {"last_committed_batch": batch, "last_commit": at(status.committed_at)}


def _oldest(unread: Unread) -> dict[str, Any]:
    """The oldest unread record by its timestamp; the age is plotted unless the records are historic."""
    age = unread.oldest_age
    return {
        "oldest_unread_record": at(unread.oldest) if unread.records else None,
        "oldest_unread_age_s": round(age, 1) if age is not None and age <= PLOTTED_DELAY else None,
    }


def _watermark(watermark: str, delay: float | None) -> dict[str, Any]:
    moment = datetime.fromisoformat(watermark.replace("Z", "+00:00")).timestamp()
    if delay is None or delay <= PLOTTED_DELAY:
        return {"watermark": at(moment), "watermark_delay_s": delay}
    days = format_duration(timedelta(days=int(delay // 86_400)))
    return {"watermark": at(moment), "watermark_delay": f"{days}: the event times are of the past"}


def _code_on_disk(status: Status) -> dict[str, Any]:
    """Shown only while code or settings on disk differ from those that run."""
    if status.disk_code_since is None:
        return {}
    other = f"{status.disk_code}: {commands.deploy(status.stream)}" if status.disk_code else "other settings"
    text = f"cannot be loaded: {status.disk_code_error}" if status.disk_code_error else other
    return {"code_on_disk": text, "code_on_disk_since": at(status.disk_code_since)}


def unread_of(settings: Settings, stream: Stream) -> Unread | None:
    """What a stream has not read; None if the driver's lag is too old, which means that no broker answers."""
    from streaming_jobs.runtime.lag import unread_now  # it loads the Kafka client

    status = read_status(settings, stream.name)
    answered = status is not None and status.lag_at is not None and time.time() - status.lag_at < 30.0
    return unread_now(settings, [stream]).get(stream.name) if answered else None


def recent_events(settings: Settings, stream: Stream) -> Mapping[str, dg.MetadataValue]:
    """The last deploys, starts and recoveries of a stream as a small table, and the command for more."""
    try:
        events = events_of(settings, stream.name)
    except (OSError, ValueError, KeyError, TypeError) as error:  # figures are reported without it
        log.info("the timeline of a stream cannot be read", stream=stream.name, reason=repr(error))
        return {}
    lines = ["| time | |", "|---|---|", *map(_line, reversed(events[-_RECENT_EVENTS:]))]
    more = f"All of it: `{commands.history(stream.name, plot='history.html')}`"
    return {"timeline": dg.MetadataValue.md("\n".join([*lines, "", more]))}


def _line(mark: Mark) -> str:
    words = " ".join(mark.text.split())[:_LONGEST_EVENT]
    for sign in "\\|`<>[]*_":
        words = words.replace(sign, f"\\{sign}")
    return f"| {instant_words(mark.at)} | {words} |"


def failure_text(status: Status) -> str:
    """One failed stream in words, with the next step."""
    error = status.error or {}
    text = f"stream {status.stream} failed: {error.get('code', '')} {error.get('found', 'no reason was written')}"
    return f"{text}\n  next: {error['next']}" if error.get("next") else text


def _fresh(moment: float | None, now: float) -> bool:
    return moment is not None and now - moment <= 60.0


@dataclass
class _Reported:
    """The newest reports about one stream in this session."""

    at: float = float("-inf")
    materialized_at: float = float("-inf")
    materialized_batch: int | None = None
    dead_letters: int | None = None
    failed_since: float | None = None
    """`started_at` of the session whose failure was reported: a session that restarts itself keeps its run."""


@dataclass
class Reporter:
    """Turns the status files of one session into asset events.

    `clock` gives seconds for the intervals, `now` seconds since 1970 for the age of figures; both for tests.
    """

    streams: Iterable[Stream]
    settings: DagsterSettings
    log_event: LogEvent
    log_error: Callable[[str], None]
    clock: Callable[[], float] = time.monotonic
    now: Callable[[], float] = time.time
    unread: Callable[[Stream], Unread | None] = lambda _: None
    """Asks the broker what a stream has not read; called before each report."""
    recent: Callable[[Stream], Mapping[str, dg.MetadataValue]] = lambda _: {}
    """What has happened to a stream lately, for its materialisations."""
    _reported: dict[str, _Reported] = field(default_factory=dict)

    def report(self, statuses: Mapping[str, Status | None]) -> None:
        """Report what is due; `statuses` are this session's (None: the stream has not written one yet)."""
        for stream, status, reported in self._each(statuses):
            since = self.clock() - reported.at
            if self._at_work(status) and since >= self.settings.observe_every.total_seconds():
                self._say(stream, status, reported)

    def finish(self, statuses: Mapping[str, Status | None]) -> None:
        """The last report of a session: a materialisation of each stopped stream that has committed since the last."""
        for stream, status, reported in self._each(statuses):
            if status.state == "stopped" and _committed(status, reported):
                self._materialize(stream, status, reported)

    def _each(self, statuses: Mapping[str, Status | None]) -> Iterator[tuple[Stream, Status, _Reported]]:
        """Yields the streams that have a status; a failure is told before."""
        for stream in self.streams:
            if (status := statuses.get(stream.name)) is not None:
                reported = self._reported.setdefault(stream.name, _Reported())
                self._say_failed(status, reported)
                yield stream, status, reported

    def _at_work(self, status: Status) -> bool:
        silent = self.now() - status.heartbeat > self.settings.stale_after.total_seconds()
        return status.state in AT_WORK and not silent and (status.lag_at or status.committed_at) is not None

    def _say_failed(self, status: Status, reported: _Reported) -> None:
        if status.state != "failed":
            reported.failed_since = None
        elif reported.failed_since != status.started_at:
            reported.failed_since = status.started_at
            self.log_error(failure_text(status))

    def _say(self, stream: Stream, status: Status, reported: _Reported) -> None:
        every = self.settings.materialize_every.total_seconds()
        if _committed(status, reported) and self.clock() - reported.materialized_at >= every:
            self._materialize(stream, status, reported)
        else:
            metadata = figures(status, self.now(), self.unread(stream))
            for sink in stream.sinks.values():
                self.log_event(dg.AssetObservation(table_key(self.settings, sink.name), metadata=metadata))
            reported.at = self.clock()

    def _materialize(self, stream: Stream, status: Status, reported: _Reported) -> None:
        metadata = {**figures(status, self.now(), self.unread(stream)), **self.recent(stream)}
        for sink in stream.sinks.values():
            self.log_event(dg.AssetMaterialization(table_key(self.settings, sink.name), metadata=metadata))
        if status.dead_letters != reported.dead_letters:
            letters = table_key(self.settings, stream.dead_letters)
            self.log_event(dg.AssetMaterialization(letters, metadata=dead_letter_figures(status)))
            reported.dead_letters = status.dead_letters
        reported.at = reported.materialized_at = self.clock()
        reported.materialized_batch = status.batch


def _committed(status: Status, reported: _Reported) -> bool:
    """True if this session has committed a batch that no materialisation has reported."""
    committed = status.committed_at is not None and status.committed_at >= status.started_at
    return committed and status.batch != reported.materialized_batch
