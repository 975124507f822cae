"""The check `health` of each table: red when its stream is dead, stuck, failing, failed or late, green when it is well.

A sensor looks at the streams' files (`streaming_jobs.state.health`: no Spark, no broker) and reports every change of a
verdict to Dagster, and each verdict now and then, so that its age shows that somebody still looks. The last report is
read from Dagster's own storage, not remembered: after somebody else executed the check, or wiped the asset, it is
reported again.

(No postponed annotations here: Dagster looks at the type of a step's `context`.)
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import dagster as dg

from orchestration.bundle.job_yaml import Continuous
from orchestration.bundle.last_good import Fault
from orchestration.sessions.decisions import RunSeen, should_run
from orchestration.sessions.events import NO_RUN, not_being_made
from orchestration.sessions.reporting import table_key
from orchestration.sessions.runs import session_runs
from orchestration.sessions.supervisor import SessionSpec
from streaming_jobs.settings import Settings
from streaming_jobs.state.health import Health, health
from streaming_jobs.state.status import Status, read_status
from streaming_jobs.stream import Stream

NAME = "health"
LOOK_EVERY = 15
"""Seconds between two looks."""
AGAIN_AFTER = 900.0
"""Seconds after which a verdict that has not changed is told again."""


@dataclass(frozen=True)
class Verdict:
    """What the check of a stream's tables says. `mark` stays the same as long as it says the same."""

    passed: bool
    severity: dg.AssetCheckSeverity
    mark: str
    text: str

    def evaluation(self, key: dg.AssetCheckKey) -> dg.AssetCheckEvaluation:
        """The verdict on one table, as it is stored."""
        return dg.AssetCheckEvaluation(
            asset_key=key.asset_key,
            check_name=key.name,
            passed=self.passed,
            severity=self.severity,
            description=self.text,
            metadata={"verdict": dg.MetadataValue.text(self.mark)},
        )

    def result(self, key: dg.AssetCheckKey) -> dg.AssetCheckResult:
        """The verdict on one table, as a step returns it."""
        told = self.evaluation(key)
        return dg.AssetCheckResult(
            asset_key=key.asset_key,
            check_name=key.name,
            passed=told.passed,
            severity=told.severity,
            description=told.description,
            metadata=told.metadata,
        )


def verdict(found: Health, *, continuous: bool, broken: str = "") -> Verdict:
    """Red as an error; what a person has stopped or recovers, and a broken configuration, as a warning.

    A stream of a job that is not `continuous` may be stopped and well. `broken` says what is wrong with the job YAML.
    """
    said = [reason.text for reason in found.reasons] or list(found.notes)
    text = f"{found.stream} is {found.state}" + (f": {'; '.join(said)}" if said else "")
    if found.red:
        words = ", ".join(sorted(reason.word for reason in found.reasons))
        return Verdict(False, dg.AssetCheckSeverity.ERROR, f"red: {words}", text)
    if broken:
        return Verdict(False, dg.AssetCheckSeverity.WARN, f"job YAML: {broken}", f"{text}; {broken}")
    if found.state == "recovering" or (found.state == "stopped" and continuous):
        return Verdict(False, dg.AssetCheckSeverity.WARN, found.verdict, text)
    return Verdict(True, dg.AssetCheckSeverity.ERROR, found.verdict, text)


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
                    description=f"Red when stream {name} is dead, stuck, failing, failed or late; looked at each "
                    f"{LOOK_EVERY} seconds.",
                )
                for key, name in stream_of.items()
            ],
            can_subset=True,
        )
        def look(context: dg.AssetCheckExecutionContext) -> Iterator[dg.AssetCheckResult]:
            found = self.verdicts(context.instance, time.time())
            for key in context.selected_asset_check_keys:
                yield found[key].result(key)

        return [look]

    def sensor(self) -> dg.SensorDefinition:
        """Looks at the streams and tells Dagster what has changed."""

        @dg.sensor(
            name="stream_health",
            minimum_interval_seconds=LOOK_EVERY,
            default_status=dg.DefaultSensorStatus.RUNNING,
            description=f"Evaluates the check `{NAME}` of every table from the streams' files: tells each change "
            f"at once, and the rest each {AGAIN_AFTER // 60:.0f} minutes.",
        )
        def tick(context: dg.SensorEvaluationContext) -> dg.SensorResult:
            now = time.time()
            found = self.verdicts(context.instance, now)
            told = to_tell(context.instance, found, now)
            _show_red(context.instance, found)
            red = sorted({verdict.text for verdict in found.values() if not verdict.passed})
            # A tick that reports something is kept like one that did nothing, so it says what there is to say.
            return dg.SensorResult(asset_events=told, skip_reason="; ".join(red) or "every stream is well")

        return tick

    def verdicts(self, instance: dg.DagsterInstance, now: float) -> dict[dg.AssetCheckKey, Verdict]:
        """The verdict on every table now."""
        expected = self._should_run(instance, now)
        fault = self.fault()
        continuous = {name for session in self.sessions if _continuous(session) for name in session.job.streams}
        found = {
            stream.name: verdict(
                health(self.settings, stream.name, should_run=stream.name in expected),
                continuous=stream.name in continuous,
                broken=f"the last good job YAML is used, because of {fault.found}" if fault else "",
            )
            for stream in self.streams
        }
        return {key: found[name] for key, name in self._stream_of().items()}

    def _stream_of(self) -> dict[dg.AssetCheckKey, str]:
        return {check_key(sink.name): stream.name for stream in self.streams for sink in stream.sinks.values()}

    def _should_run(self, instance: dg.DagsterInstance, now: float) -> set[str]:
        """Streams that keepalive keeps running: one that ended and is not started again is red as well.

        So is one that ended while the session of its job goes on with the others.
        """
        if not self.settings.dagster.keepalive:
            return set()
        patience = self.settings.dagster.stale_after.total_seconds()
        found: set[str] = set()
        for session in self.sessions:
            if not _continuous(session):
                continue
            runs, streams = session_runs(instance, session), session.job.streams
            if should_run(runs, now, patience=patience):
                found.update(streams)
            else:  # a session that starts itself again needs the time that it is given to stop
                longer = patience + session.patience
                statuses = {name: read_status(self.settings, name) for name in streams}
                found.update(name for name, at in statuses.items() if left_behind(runs, at, now, patience=longer))
        return found


def _continuous(session: SessionSpec) -> bool:
    return isinstance(session.job.trigger, Continuous) and not session.job.trigger.paused


def left_behind(runs: Sequence[RunSeen], status: Status | None, now: float, *, patience: float) -> bool:
    """True if a stream ended more than `patience` seconds ago while a session of its continuous job is at work."""
    session = next((run for run in runs if run.status == "STARTED"), None)
    if session is None or session.started is None or status is None or status.trigger == "available-now":
        return False
    return status.state == "stopped" and now - max(session.started, status.heartbeat) > patience


def to_tell(
    instance: dg.DagsterInstance, verdicts: Mapping[dg.AssetCheckKey, Verdict], now: float
) -> list[dg.AssetCheckEvaluation]:
    """The verdicts that Dagster does not know yet, or was told of long ago."""
    known: Any = instance.event_log_storage.get_latest_asset_check_execution_by_key(list(verdicts))
    return [found.evaluation(key) for key, found in verdicts.items() if not _is_known(known.get(key), found, now)]


def _show_red(instance: dg.DagsterInstance, verdicts: Mapping[dg.AssetCheckKey, Verdict]) -> None:
    """A table whose next session is only queued or starting is shown as being made, whatever its check says."""
    for key, found in verdicts.items():
        if found.passed or found.severity is not dg.AssetCheckSeverity.ERROR:
            continue
        planned = instance.get_latest_planned_materialization_info(key.asset_key)
        if planned is not None and planned.run_id != NO_RUN:
            not_being_made(instance, [key.asset_key])


def _is_known(record: Any, found: Verdict, now: float) -> bool:
    if record is None:
        return found.mark == "never started"  # nothing to say of a stream that nobody has ever started
    evaluation = record.evaluation
    if record.run_id != NO_RUN or evaluation is None:
        return False  # executed by a person: it would not count for the next materialisation
    mark = evaluation.metadata.get("verdict")
    return mark is not None and mark.value == found.mark and now - record.create_timestamp < AGAIN_AFTER
