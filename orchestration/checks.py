"""The check `health` of each table: red when its stream is dead, stuck, failing, failed or late, green when it is well.

A sensor looks at the streams' files (`streaming_jobs.state.health`: no Spark, no broker) and reports every change of a
verdict to Dagster. Unchanged verdicts are reported again from time to time, so that their age shows that the sensor
still runs.

(No postponed annotations here: Dagster looks at the type of a step's `context`.)
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import dagster as dg

from orchestration.bundle.job import Continuous
from orchestration.bundle.last_good import Fault
from orchestration.sessions.decisions import RunSeen, should_run
from orchestration.sessions.events import NO_RUN, not_being_made
from orchestration.sessions.reporting import table_key
from orchestration.sessions.runs import session_runs
from orchestration.sessions.supervisor import SessionSpec
from orchestration.sessions.verdicts import AGAIN_AFTER, HEALTH, Verdict, to_tell
from streaming_jobs.settings import Settings
from streaming_jobs.state.health import Health, health
from streaming_jobs.state.status import Status, read_status
from streaming_jobs.stream import Stream

NAME = HEALTH
LOOK_EVERY = 15
"""Seconds between two ticks of the sensor."""


def verdict(health: Health, *, continuous: bool, broken: str = "") -> Verdict:
    """The verdict on a stream: red is an error; stopped by a person, in recovery, or a broken configuration a warning.

    A stream of a job that is not `continuous` may be stopped and well. `broken` says what is wrong with the job YAML.
    """
    details = [reason.text for reason in health.reasons] or list(health.notes)
    text = f"{health.stream} is {health.state}" + (f": {'; '.join(details)}" if details else "")
    if health.red:
        words = ", ".join(sorted(reason.word for reason in health.reasons))
        return Verdict(False, dg.AssetCheckSeverity.ERROR, f"red: {words}", text)
    if broken:
        return Verdict(False, dg.AssetCheckSeverity.WARN, f"job YAML: {broken}", f"{text}; {broken}")
    if health.state == "recovering" or (health.state == "stopped" and continuous):
        return Verdict(False, dg.AssetCheckSeverity.WARN, health.verdict, text)
    return Verdict(True, dg.AssetCheckSeverity.ERROR, health.verdict, text)


def check_key(table: str) -> dg.AssetCheckKey:
    """The check of a table."""
    return dg.AssetCheckKey(table_key(table), NAME)


@dataclass(frozen=True)
class HealthChecks:
    """All streams' checks. `sessions` are the jobs' own; `fault` says what is wrong with the job YAML, if anything."""

    streams: Sequence[Stream]
    sessions: Sequence[SessionSpec]
    settings: Settings
    fault: Callable[[], Fault | None] = lambda: None

    def definitions(self) -> list[dg.AssetChecksDefinition]:
        """The checks of all tables but those of dead letters; executing one in the UI looks at once."""
        stream_of = self._stream_of()
        if not stream_of:
            return []

        @dg.multi_asset_check(
            name=NAME,
            specs=[
                dg.AssetCheckSpec(
                    NAME,
                    asset=key.asset_key,
                    description=f"Red when stream {name} is dead, stuck, failing, failed or late; evaluated every "
                    f"{LOOK_EVERY} seconds.",
                )
                for key, name in stream_of.items()
            ],
            can_subset=True,
        )
        def look(context: dg.AssetCheckExecutionContext) -> Iterator[dg.AssetCheckResult]:
            verdicts = self.verdicts(context.instance, time.time())
            for key in context.selected_asset_check_keys:
                yield verdicts[key].result(key)

        return [look]

    def sensor(self) -> dg.SensorDefinition:
        """The sensor that looks at the streams and reports to Dagster what has changed."""

        @dg.sensor(
            name="stream_health",
            minimum_interval_seconds=LOOK_EVERY,
            default_status=dg.DefaultSensorStatus.RUNNING,
            description=f"Evaluates the check `{NAME}` of every table from the streams' files: reports each change "
            f"at once, and the rest every {AGAIN_AFTER // 60:.0f} minutes.",
        )
        def tick(context: dg.SensorEvaluationContext) -> dg.SensorResult:
            now = time.time()
            verdicts = self.verdicts(context.instance, now)
            events = to_tell(context.instance, verdicts, now)
            _show_red(context.instance, verdicts)
            red = sorted({verdict.text for verdict in verdicts.values() if not verdict.passed})
            # Dagster shows a skip reason also beside reported events: it carries the summary of the tick.
            return dg.SensorResult(asset_events=events, skip_reason="; ".join(red) or "every stream is well")

        return tick

    def verdicts(self, instance: dg.DagsterInstance, now: float) -> dict[dg.AssetCheckKey, Verdict]:
        """The verdict on every table now."""
        expected = self._should_run(instance, now)
        fault = self.fault()
        continuous = {name for session in self.sessions if _continuous(session) for name in session.job.streams}
        verdicts = {
            stream.name: verdict(
                health(self.settings, stream.name, should_run=stream.name in expected),
                continuous=stream.name in continuous,
                broken=f"the last good job YAML is used, because of {fault.found}" if fault else "",
            )
            for stream in self.streams
        }
        return {key: verdicts[name] for key, name in self._stream_of().items()}

    @property
    def keys(self) -> list[dg.AssetCheckKey]:
        """The checks."""
        return list(self._stream_of())

    def _stream_of(self) -> dict[dg.AssetCheckKey, str]:
        return {check_key(sink.name): stream.name for stream in self.streams for sink in stream.sinks.values()}

    def _should_run(self, instance: dg.DagsterInstance, now: float) -> set[str]:
        """The streams that keepalive is expected to keep running; one of them that ended and was not restarted is red.

        This includes a stream that ended while the session of its job continues with the others.
        """
        if not self.settings.dagster.keepalive:
            return set()
        patience = self.settings.dagster.stale_after.total_seconds()
        expected: set[str] = set()
        for session in self.sessions:
            if not _continuous(session):
                continue
            runs, streams = session_runs(instance, session), session.job.streams
            if should_run(runs, now, patience=patience):
                expected.update(streams)
            else:  # a session that restarts itself needs the time that it is given to stop
                longer = patience + session.patience
                statuses = {name: read_status(self.settings, name) for name in streams}
                expected.update(name for name, at in statuses.items() if left_behind(runs, at, now, patience=longer))
        return expected


def _continuous(session: SessionSpec) -> bool:
    return isinstance(session.job.trigger, Continuous) and not session.job.trigger.paused


def left_behind(runs: Sequence[RunSeen], status: Status | None, now: float, *, patience: float) -> bool:
    """True if a stream ended more than `patience` seconds ago while a session of its continuous job runs."""
    session = next((run for run in runs if run.status == "STARTED"), None)
    if session is None or session.started is None or status is None or status.trigger == "available-now":
        return False
    return status.state == "stopped" and now - max(session.started, status.heartbeat) > patience


def _show_red(instance: dg.DagsterInstance, verdicts: Mapping[dg.AssetCheckKey, Verdict]) -> None:
    """Clear the "materializing" mark of red tables: Dagster shows it in place of the check while a run is queued."""
    for key, verdict in verdicts.items():
        if verdict.passed or verdict.severity is not dg.AssetCheckSeverity.ERROR:
            continue
        planned = instance.get_latest_planned_materialization_info(key.asset_key)
        if planned is not None and planned.run_id != NO_RUN:
            not_being_made(instance, [key.asset_key])
