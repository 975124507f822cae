"""The check `health` of each table: red when its stream is dead, stuck, failing, failed or late, green when it is well.

Beside it `freshness` of each table with an objective (`fresh_within`): red while its newest rows are older, for
whatever reason. It causes no alert: `health` is red or yellow for the cause, and `stale` if there is no other.

The verdicts come from the streams' files (`streaming_jobs.state.health`: no Spark, no broker).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from typing import Any

import dagster as dg

from orchestration.bundle.job import Continuous, Rule, Timed
from orchestration.sessions.decisions import RunSeen, missed, passed, should_run
from orchestration.sessions.names import table_key
from orchestration.sessions.reporting import NO_RUN, at, health_figures, not_being_made, shown
from orchestration.sessions.runs import runs_by_session
from orchestration.sessions.supervisor import SessionSpec
from orchestration.sessions.verdicts import AGAIN_AFTER, LOOK_EVERY, CheckVerdict, CheckVerdicts, checks_from_files
from streaming_jobs.errors import ConfigurationError
from streaming_jobs.settings import Settings
from streaming_jobs.state.health import Health, HealthLimits, Reason, judge, look
from streaming_jobs.state.status import ENDED, Status, read_status
from streaming_jobs.state.stream_history import deploys
from streaming_jobs.stream import Stream
from streaming_jobs.text.durations import format_duration

HEALTH = "health"
"""The name of the check of a stream's tables that says whether the stream is well."""
FRESHNESS = "freshness"
"""The name of the check of a table with a freshness objective."""
NO_ALERT = ("stopped", "recovering", "restarting", "starting", "yellow: disk", "red: disk")
"""Marks of verdicts without alerts: intended by an operator, not settled yet, or reported once for all streams."""
STARTING = "starting"
"""The mark of a stream that was not green before its start, and has not shown yet that it works."""
OVERDUE_AFTER = 300.0
"""Deadline for the run of a schedule's tick (s); Dagster's daemon ticks about once a minute."""


def verdict(health: Health, *, continuous: bool, broken: str = "") -> CheckVerdict:
    """The verdict on a stream: red is an error. A disk that fills up, stopped by a person, in recovery, and a broken
    configuration are warnings.

    A stream of a job that is not `continuous` may be stopped and well. `broken` says what is wrong with the job YAML.
    """
    details = [reason.text for reason in (*health.reasons, *health.warnings)] or list(health.notes)
    text = f"{health.stream} is {health.state}" + (f": {'; '.join(details)}" if details else "")
    if health.red:
        words = ", ".join(sorted(reason.word for reason in health.reasons))
        return CheckVerdict(False, dg.AssetCheckSeverity.ERROR, f"red: {words}", text)
    if health.warnings:
        words = ", ".join(reason.word for reason in health.warnings)
        return CheckVerdict(False, dg.AssetCheckSeverity.WARN, f"yellow: {words}", text)
    if broken:
        return CheckVerdict(False, dg.AssetCheckSeverity.WARN, f"job YAML: {broken}", f"{text}; {broken}")
    if health.state in ("recovering", "restarting") or (health.state == "stopped" and continuous):
        return CheckVerdict(False, dg.AssetCheckSeverity.WARN, health.verdict, text)
    return CheckVerdict(True, dg.AssetCheckSeverity.ERROR, health.verdict, text)


def freshness(table: str, seen: Status | None, now: float) -> CheckVerdict:
    """The verdict on a table with an objective, as far as the running code has it. Its text changes with it alone."""
    age = None if seen is None else seen.tables.get(table)
    if age is None:
        return CheckVerdict(
            False, dg.AssetCheckSeverity.WARN, "never started", f"nothing has been written to {table} yet"
        )
    if age.fresh_within_s is None:
        text = f"{table} has its objective from the next start of its stream on"
        return CheckVerdict(True, dg.AssetCheckSeverity.ERROR, "no objective yet", text)
    within = format_duration(timedelta(seconds=age.fresh_within_s))
    stale = age.is_stale(now)
    text = f"the newest rows of {table} are {'older' if stale else 'not older'} than {within}"
    figures = shown(
        {
            "age_s": round(age.seconds(now), 1),
            "objective_s": age.fresh_within_s,
            "newest_rows": at(age.rows_at),
        }
    )
    return CheckVerdict(not stale, dg.AssetCheckSeverity.ERROR, "stale" if stale else "fresh", text, figures)


def broken_rules(
    rules: Sequence[Rule], status: Status | None, runs: Sequence[RunSeen], now: float, *, continuous: bool
) -> list[str]:
    """The rules of a job's `health` that its stream or its newest run breaks, in words.

    The session of a continuous job lasts by design: a limit of its duration is not judged.
    """
    begun = next((run.started for run in runs if run.status == "STARTED" and run.started), None)
    working = status is not None and status.state not in ENDED
    figures = {
        "RUN_DURATION_SECONDS": None if begun is None or continuous else now - begun,
        "STREAMING_BACKLOG_RECORDS": status.lag_records if working and status else None,
        "STREAMING_BACKLOG_SECONDS": status.lag_s if working and status else None,
    }
    seen = [(rule, figures.get(rule.metric)) for rule in rules]
    return [
        f"{rule.metric} is {figure:,.0f}, above {rule.value:,} (health.rules of its job)"
        for rule, figure in seen
        if figure is not None and figure > rule.value
    ]


def settling(now: CheckVerdict, before: dg.AssetCheckEvaluation | None) -> CheckVerdict:
    """The verdict on a stream that has started and shown nothing yet: not green again if it was not green before."""
    if not now.passed or before is None or before.passed:
        return now
    mark, text = before.metadata.get("verdict"), before.description or ""
    after = text if mark is not None and mark.value == STARTING else f"{now.text}; before it {text}"
    return replace(now, passed=False, severity=dg.AssetCheckSeverity.WARN, mark=STARTING, text=after)


@dataclass(frozen=True)
class HealthChecks:
    """All streams' checks. `sessions` are the jobs' own; `fault` says what is wrong with the job YAML, if anything."""

    streams: Sequence[Stream]
    sessions: Sequence[SessionSpec]
    settings: Settings
    fault: Callable[[], ConfigurationError | None] = lambda: None
    loaded_at: float = field(default_factory=time.time)
    """The time of loading: a job that never ran is measured from then on."""

    def definitions(self) -> dg.Definitions:
        """The checks of all tables but those of dead letters, and their sensor."""
        every = f"evaluated every {LOOK_EVERY} seconds."
        about = f"is dead, stuck, failing, failed or late; {every}"
        of_streams = {key: f"Red when stream {name} {about}" for key, name in self._stream_of().items()}
        of_tables = {
            key: f"Red when the newest rows are older than {aim}; {every}" for key, aim in self._objectives().items()
        }
        return checks_from_files(
            HEALTH,
            of_streams | of_tables,
            self.settings,
            self.verdicts,
            sensor="stream_health",
            sensor_description=f"Evaluates the checks `{HEALTH}` and `{FRESHNESS}` of tables from the streams' files: "
            f"reports each change at once, and the rest every {AGAIN_AFTER // 60:.0f} minutes.",
            all_well="every stream is well",
            seen=_show_red,
        )

    def verdicts(self, instance: dg.DagsterInstance, now: float) -> dict[dg.AssetCheckKey, CheckVerdict]:
        runs = runs_by_session(instance, self.sessions)
        expected, missing = self._should_run(runs, now), self._missed(runs, now)
        fault = self.fault()
        continuous = {name for session in self.sessions if _continuous(session) for name in session.job.streams}
        known: Any = instance.event_log_storage.get_latest_asset_check_execution_by_key(list(self._stream_of()))
        found: dict[dg.AssetCheckKey, CheckVerdict] = {}
        for stream in self.streams:
            seen = look(self.settings, stream.name)
            healthy = judge(seen, HealthLimits.of(self.settings, stream.name), should_run=expected.get(stream.name))
            if (reason := missing.get(stream.name)) is not None and healthy.state != "recovering":
                healthy = replace(healthy, reasons=(*healthy.reasons, reason))
            broken = f"the last good job YAML is used, because of {fault.found}" if fault else ""
            outcome = verdict(healthy, continuous=stream.name in continuous, broken=broken)
            if outcome.passed and (words := self._broken_rules(stream.name, seen.status, runs, now)):
                warn, text = dg.AssetCheckSeverity.WARN, f"{outcome.text}; {'; '.join(words)}"
                outcome = CheckVerdict(False, warn, "yellow: health rules", text)
            figures = health_figures(seen.status, deploys(self.settings, stream.name)[-1:]) if seen.status else {}
            for sink in stream.sinks.values():
                key = self._key(sink.name)
                before = known[key].evaluation if key in known and not healthy.settled else None
                found[key] = replace(settling(outcome, before), figures=figures)
                if sink.fresh_within:
                    found[self._key(sink.name, FRESHNESS)] = freshness(sink.name, seen.status, seen.at)
        return found

    def _broken_rules(
        self, stream: str, status: Status | None, runs: Mapping[str, Sequence[RunSeen]], now: float
    ) -> list[str]:
        job = next((session.job for session in self.sessions if stream in session.job.streams), None)
        if job is None:
            return []
        continuous = isinstance(job.trigger, Continuous)
        return broken_rules(job.rules, status, runs[job.key], now, continuous=continuous)

    @property
    def keys(self) -> list[dg.AssetCheckKey]:
        return [*self._stream_of(), *self._objectives()]

    def _objectives(self) -> dict[dg.AssetCheckKey, str]:
        sinks = (sink for stream in self.streams for sink in stream.sinks.values())
        return {self._key(sink.name, FRESHNESS): sink.fresh_within for sink in sinks if sink.fresh_within}

    def _stream_of(self) -> dict[dg.AssetCheckKey, str]:
        return {self._key(sink.name): stream.name for stream in self.streams for sink in stream.sinks.values()}

    def _key(self, table: str, check: str = HEALTH) -> dg.AssetCheckKey:
        return dg.AssetCheckKey(table_key(self.settings.dagster, table), check)

    def _should_run(self, by_session: Mapping[str, Sequence[RunSeen]], now: float) -> dict[str, bool | None]:
        """Whether each stream of a job ought to run now (`judge`); a stream without a job is left out.

        One that ended while the session of its continuous job continues with the others ought to.
        """
        patience = self.settings.dagster.stale_after.total_seconds()
        expected: dict[str, bool | None] = {}
        for session in self.sessions:
            if not _continuous(session):
                expected |= dict.fromkeys(session.job.streams, False)
                continue
            if not self.settings.dagster.keepalive:
                continue
            runs = by_session[session.job.key]
            all_of_them = should_run(runs, now, patience=patience, watched_since=self.loaded_at)
            # A session that restarts itself needs the time that it is given to stop.
            longer = patience + session.patience
            for name in session.job.streams:
                left = all_of_them is None and left_behind(runs, read_status(self.settings, name), now, patience=longer)
                expected[name] = True if left else all_of_them
        return expected

    def _missed(self, by_session: Mapping[str, Sequence[RunSeen]], now: float) -> dict[str, Reason]:
        """What the runs of scheduled jobs say against their streams."""
        found: dict[str, Reason] = {}
        for session in self.sessions:
            trigger = session.job.trigger
            if not isinstance(trigger, Timed) or trigger.paused:
                continue
            tick = trigger.latest(datetime.fromtimestamp(now, UTC))
            if tick is None:
                continue
            reason = missed(
                by_session[session.job.key],
                tick.timestamp(),
                now,
                patience=OVERDUE_AFTER,
                watched_since=self.loaded_at,
            )
            if reason is not None:
                found |= dict.fromkeys(session.job.streams, reason)
        return found


def _continuous(session: SessionSpec) -> bool:
    return isinstance(session.job.trigger, Continuous) and not session.job.trigger.paused


def left_behind(runs: Sequence[RunSeen], status: Status | None, now: float, *, patience: float) -> bool:
    """True if a stream ended more than `patience` seconds ago while a session of its continuous job runs."""
    session = next((run for run in runs if run.status == "STARTED"), None)
    if session is None or session.started is None or status is None or status.trigger == "available-now":
        return False
    return status.state == "stopped" and passed(max(session.started, status.heartbeat), now) > patience


def _show_red(instance: dg.DagsterInstance, verdicts: CheckVerdicts) -> None:
    """Clear the "materializing" mark of red tables: Dagster shows it in place of the check while a run is queued."""
    for key, verdict in verdicts.items():
        if verdict.passed or verdict.severity is not dg.AssetCheckSeverity.ERROR:
            continue
        planned = instance.get_latest_planned_materialization_info(key.asset_key)
        if planned is not None and planned.run_id != NO_RUN:
            not_being_made(instance, [key.asset_key])
