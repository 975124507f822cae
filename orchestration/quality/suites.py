"""The check of each suite on the table that it is about, and the run that evaluates them.

    check          named as its suite, on the table's asset; executing it runs the suite
    job `quality`  all of them, or those that are named; its runs are those of the launchpad and of the schedule, which
                   ticks about each `quality.every`, and starts one run for all suites that are due: table checks such
                   as freshness fail when nothing happens, so a suite is run whether its table was written or not
    session        Spark's, for suites that need it, one for each run (`spark_session.py`)

An outcome is made to count as one without a run: Dagster counts the outcome of a run only until the table is
materialised again, which a stream does each minute, and then shows the check as if it had never been executed. And the
job has no check in its plan: Dagster shows a planned check as being executed instead of red, from the queue on.

(No postponed annotations here: Dagster looks at the type of a step's `context`.)
"""

import math
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import dagster as dg
import structlog
from dagster._core.storage.asset_check_execution_record import (
    AssetCheckExecutionRecord,
    AssetCheckExecutionRecordStatus,
)
from dagster._core.storage.dagster_run import NOT_FINISHED_STATUSES
from pydantic import Field

from orchestration.recoveries.launchpad import LAUNCHPAD, Launchpad
from orchestration.sessions.child_run import session_executor
from orchestration.sessions.names import named, table_key, table_of
from orchestration.sessions.ownership import QUALITY_KIND, claim, job_tags
from orchestration.sessions.reporting import belongs_to_no_run, shown
from orchestration.sessions.verdicts import CheckVerdict
from quality.suites import Suite
from quality.validation import MOST_ROWS, CheckOutcome, FirstFailing, Validation
from streaming_jobs.errors import ConfigurationError, RecourseError
from streaming_jobs.platform.processes.child import lower_priority
from streaming_jobs.settings import Settings
from streaming_jobs.storage.files import private_folder
from streaming_jobs.storage.locks import lock

log = structlog.get_logger()

JOB, OP = "quality", "run_suites"
"""The job of suites, and its op."""
PLANNED = AssetCheckExecutionRecordStatus.PLANNED
EARLY = 0.9
"""Times `every`: a suite that was run so long ago is due (ticks vary by seconds)."""
STEP = "suites"
"""The step of checks that are executed from their pages."""
RUN_TAGS = {"dagster/priority": "-10", "dagster/max_runtime": "3600"}
"""Sessions go first in the queue; a run that hangs is ended after an hour, so that it does not block the others."""
SPARK = "quality_spark"
"""The resource."""
ERROR, WARN = dg.AssetCheckSeverity.ERROR, dg.AssetCheckSeverity.WARN
MOST_TABLES = 10
"""Failing expectations whose rows are shown: an event of Dagster is stored whole."""
MOST_NAMED = 5
"""Failing expectations that the description names."""
COMMAND = "command to put it right"
"""Metadata with the command that plans the repair."""
_MOST_COLUMNS, _LONGEST_CELL = 10, 40
"""What is wider makes the whole page wider, and its text runs out of the window."""
_LONGEST_TEXT = 2000
_EXACT = 2**53
"""JavaScript, so the UI, rounds integers above it."""


def of_validation(validation: Validation, *, launchpad: Launchpad = LAUNCHPAD, show_rows: bool = True) -> CheckVerdict:
    """The verdict of a suite's run; only warnings failed: a warning, anything else that failed: an error.

    `launchpad` is that of recoveries. Without `show_rows`, failing rows are left out: Dagster keeps
    events for long, and its UI shows them to everybody.
    """
    failed = [outcome for outcome in validation.outcomes if not outcome.passed]
    severity = WARN if failed and all(_only_warns(outcome) for outcome in failed) else ERROR
    figures = _metadata(validation, failed, launchpad, show_rows)
    return CheckVerdict(validation.passed, severity, "", _in_words(validation, failed), figures)


def of_exception(suite: str, error: BaseException) -> CheckVerdict:
    """The verdict of a run that raised: failed, never passed, because nothing is known of the table."""
    text = str(error) if isinstance(error, RecourseError) else f"{type(error).__name__}: {error}"
    text = _short(text, _LONGEST_TEXT)
    return CheckVerdict(
        False, ERROR, "", f"Suite {suite} could not be run: {text}", {"error": dg.MetadataValue.text(text)}
    )


def _only_warns(outcome: CheckOutcome) -> bool:
    """An expectation that could not be evaluated is an error, whatever its severity."""
    return outcome.severity != "critical" and not outcome.error


def _in_words(validation: Validation, failed: Sequence[CheckOutcome]) -> str:
    count, where = len(validation.outcomes), f"{_rows(validation.rows)}: {validation.slice}"
    if not failed:
        # A suite sees its slice: wrong rows that it has found before may still be in the table.
        earlier = "" if validation.since is None else " Rows that came before were not looked at again."
        return f"{count} of {count} expectations passed on {where}.{earlier}"
    named = [_failure(outcome) for outcome in _worst_first(failed)[:MOST_NAMED]]
    further = len(failed) - len(named)
    tail = f"; and {further} more" if further else ""
    return f"{len(failed)} of {count} expectations failed on {where}. {'; '.join(named)}{tail}."


def _failure(outcome: CheckOutcome) -> str:
    if outcome.error:
        return f"{outcome.expectation} could not be evaluated: {_short(outcome.error, 300)}"
    if outcome.failing is not None:
        words = f"{outcome.failing:,} of {_rows(outcome.rows or 0)}"
    else:
        words = f"observed {_short(outcome.observed, 100)}" if outcome.observed else "failed"
    kind = "" if outcome.severity == "critical" else f" ({outcome.severity})"
    return f"{outcome.expectation}{kind}: {words}"


def _worst_first(outcomes: Iterable[CheckOutcome]) -> list[CheckOutcome]:
    """Errors and critical ones first, then by the number of failing rows."""
    return sorted(outcomes, key=lambda outcome: (_only_warns(outcome), -(outcome.failing or 0)))


def _metadata(
    validation: Validation, failed: Sequence[CheckOutcome], launchpad: Launchpad, show_rows: bool
) -> dict[str, dg.MetadataValue]:
    """The page sorts metadata by name; these names put the next steps above the tables of failing rows."""
    with_rows = [outcome for outcome in _worst_first(failed) if outcome.sample and show_rows]
    since = "" if validation.since is None else f", rows that came after version {validation.since}"
    found: dict[str, Any] = {
        **(_first_failing(validation.stream, validation.first_failing, launchpad) if validation.first_failing else {}),
        **{f"failing rows: {one.expectation}": table(one.sample[:MOST_ROWS]) for one in with_rows[:MOST_TABLES]},
        "further failing": ", ".join(outcome.expectation for outcome in with_rows[MOST_TABLES:]) or None,
        "data docs": dg.MetadataValue.path(validation.docs) if validation.docs else None,
        "stream": validation.stream,
        "slice": validation.slice,
        "version": f"{validation.version}{since}",
        "files": validation.files_read,
        "engine": validation.engine,
        "expectations failed": len(failed),
        "rows": validation.rows,
        "seconds": round(validation.seconds, 3),
    }
    for outcome in validation.outcomes:
        if outcome.number is not None and math.isfinite(outcome.number):
            found[f"observed: {outcome.expectation}"] = float(outcome.number)
        elif outcome.failing is not None:  # one plot for each expectation
            found[f"failing: {outcome.expectation}"] = outcome.failing
    return shown(found)


def _first_failing(stream: str, first: FirstFailing, launchpad: Launchpad) -> dict[str, Any]:
    path = launchpad.link_to_plan(stream, first.expectation)
    words = f"[plan the repair]({path}) opens the Launchpad, filled in; nothing happens before *Launch Run*"
    batch = f"batch {first.batch} of generation {first.generation}, by {first.expectation}"
    return {
        "batch of the first failing row": batch,
        "code that wrote it": first.code,
        COMMAND: first.command or None,
        "by one click": dg.MetadataValue.md(words) if first.command else None,
    }


def table(rows: Sequence[Mapping[str, Any]]) -> dg.TableMetadataValue:
    """Rows as a table: the first columns, a null as `null` (the page would show nothing), other values as text."""
    columns = list(dict.fromkeys(name for row in rows for name in row))[:_MOST_COLUMNS]
    records = [{name: _cell(row.get(name)) for name in columns} for row in rows]
    return dg.MetadataValue.table(
        [dg.TableRecord(record) for record in records],
        dg.TableSchema([dg.TableColumn(name, _type(record[name] for record in records)) for name in columns]),
    )


def _cell(value: Any) -> str | int | float | bool:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return value
    if isinstance(value, int) and abs(value) <= _EXACT:
        return int(value)
    if isinstance(value, float) and math.isfinite(value):
        return float(value)
    text = value.isoformat(sep=" ") if isinstance(value, datetime) else str(value)
    return _short(text, _LONGEST_CELL)


def _type(cells: Iterable[object]) -> str:
    kinds = {type(cell).__name__ for cell in cells if cell != "null"}
    return kinds.pop() if len(kinds) == 1 else "str"


def _rows(count: int) -> str:
    return f"{count:,} row" if count == 1 else f"{count:,} rows"


def _short(text: str, longest: int) -> str:
    return text if len(text) <= longest else f"{text[: longest - 3]}..."


def cron_of_interval(every: timedelta) -> str:
    """A cron expression for the interval, or the next shorter one that divides an hour or a day; a minute at least."""
    minutes = max(1, int(every.total_seconds() // 60))
    if minutes < 60:
        step = max(n for n in range(1, 31) if 60 % n == 0 and n <= minutes)
        return "* * * * *" if step == 1 else f"*/{step} * * * *"
    step = max(n for n in range(1, 25) if 24 % n == 0 and n <= max(1, minutes // 60))
    return {1: "0 * * * *", 24: "0 0 * * *"}.get(step, f"0 */{step} * * *")


def run_config(settings: Settings, suites: Sequence[str]) -> dict[str, object]:
    return {"ops": {named(settings.dagster, OP): {"config": {"suites": list(suites)}}}}


def suites_of(settings: Settings, run: dg.DagsterRun, keys: Iterable[dg.AssetCheckKey]) -> set[str]:
    """The suites that a run of the job evaluates; none of another run, whose checks are in its plan."""
    if run.job_name != named(settings.dagster, JOB):
        return set()
    config: Mapping[str, Any] = run.run_config
    chosen = config.get("ops", {}).get(named(settings.dagster, OP), {}).get("config", {}).get("suites")
    return set(chosen) if chosen else {key.name for key in keys}


def due_checks(
    instance: dg.DagsterInstance, keys: Sequence[dg.AssetCheckKey], settings: Settings, now: float
) -> list[dg.AssetCheckKey]:
    """The checks that were not executed for `quality.every` and are not waiting or running; `now` is since 1970.

    A suite that never ran waits until its stream has made the table, so that a new home does not start with failures.
    """
    known = instance.event_log_storage.get_latest_asset_check_execution_by_key(list(keys))
    unfinished = _unfinished(instance, known.values())
    tags = job_tags(settings, QUALITY_KIND)
    at_work = instance.get_runs(dg.RunsFilter(tags=dict(tags), statuses=NOT_FINISHED_STATUSES))
    running = set[str]().union(*(suites_of(settings, run, keys) for run in at_work))

    every = settings.quality.every.total_seconds()

    def is_due(key: dg.AssetCheckKey) -> bool:
        if key.name in running:
            return False
        if (record := known.get(key)) is None:
            return (settings.tables / table_of(key.asset_key) / "_delta_log").is_dir()
        return record.run_id not in unfinished and now - record.create_timestamp >= EARLY * every

    return [key for key in keys if is_due(key)]


def _unfinished(instance: dg.DagsterInstance, records: Iterable[AssetCheckExecutionRecord]) -> set[str]:
    """The runs without a result that wait or run, except sessions.

    A session that was launched from a table's page has the table's checks in its plan, for when it ends.
    """
    planned = {record.run_id for record in records if record.status is PLANNED}
    runs = instance.get_runs(dg.RunsFilter(run_ids=list(planned))) if planned else []
    return {run.run_id for run in runs if not run.is_finished and not run.asset_selection}


class SuitesConfig(dg.Config):
    suites: list[str] = Field(default=[], description="The suites to run; empty: all.")


SparkFactory = Callable[[], Any]
"""Returns the run's Spark session; starts it at the first call."""


RunSuite = Callable[[Suite, SparkFactory], Validation]
"""Runs the suite on its table, and returns the validation; calls `spark` only if a session is needed."""


@dataclass(frozen=True)
class SuiteChecks:
    """The checks of all suites. `run` evaluates one; `begin` is called once in the process of a run, before it.

    `executor` is that of the job.
    """

    suites: Sequence[Suite]
    settings: Settings
    run: RunSuite
    begin: Callable[[], None] = field(default_factory=lambda: lower_priority)
    executor: dg.ExecutorDefinition = session_executor

    @property
    def by_key(self) -> dict[dg.AssetCheckKey, Suite]:
        return {self.key(suite): suite for suite in self.suites}

    def key(self, suite: Suite) -> dg.AssetCheckKey:
        return dg.AssetCheckKey(table_key(self.settings.dagster, suite.table), suite.name)

    def _named(self, name: str) -> str:
        return named(self.settings.dagster, name)

    def refuse_names(self, taken: Collection[str]) -> None:
        """Raise ConfigurationError for a suite with the name of another check of its table."""
        for suite in self.suites:
            if suite.name in taken:
                raise ConfigurationError(
                    f"table {suite.table} has two checks named {suite.name}", "give the suite another name"
                )

    def definitions(self) -> dg.Definitions:
        """The checks, the job of all suites, its schedule, and the Spark session for them; none without suites."""
        if not self.suites:
            return dg.Definitions()
        return dg.Definitions(
            asset_checks=[self._checks()],
            jobs=[self._job()],
            schedules=[self._schedule()],
            resources={self._named(SPARK): self._spark()},
        )

    def _checks(self) -> dg.AssetChecksDefinition:
        """The checks, as one step: the suites of a run share a process and a Spark session."""

        @dg.multi_asset_check(
            name=self._named(STEP),
            specs=[
                dg.AssetCheckSpec(
                    suite.name,
                    asset=key.asset_key,
                    description=suite.description or f"Suite {suite.name} on table {suite.table}.",
                    metadata={"file": dg.MetadataValue.path(str(suite.file))} if suite.file else None,
                )
                for key, suite in self.by_key.items()
            ],
            can_subset=True,
            required_resource_keys={self._named(SPARK)},
        )
        def evaluate(context: dg.AssetCheckExecutionContext) -> Iterator[dg.AssetCheckResult]:
            run_id = context.op_execution_context.run_id
            for key, verdict in self._verdicts(context.op_execution_context, sorted(context.selected_asset_check_keys)):
                yield verdict.result(key, run_id)
                belongs_to_no_run(context.instance, key, run_id)

        return evaluate

    def _verdicts(
        self, context: dg.OpExecutionContext, keys: Sequence[dg.AssetCheckKey]
    ) -> Iterator[tuple[dg.AssetCheckKey, CheckVerdict]]:
        """Evaluates the suites of these checks, one after the other."""
        claim(context.instance, context.run_id, self.settings, QUALITY_KIND)
        spark = getattr(context.resources, self._named(SPARK))
        launchpad = Launchpad.of(self.settings, context.run)
        self.begin()
        with one_at_a_time(self.settings.home / "quality.lock", context.log.info):
            for key in keys:
                yield key, self.evaluate(self.by_key[key], lambda: spark.spark_session, launchpad)

    def evaluate(self, suite: Suite, spark: SparkFactory, launchpad: Launchpad = LAUNCHPAD) -> CheckVerdict:
        """Run one suite; if it raises, its check fails, and the other suites still run."""
        try:
            validation = self.run(suite, spark)
            return of_validation(validation, launchpad=launchpad, show_rows=self.settings.quality.show_rows)
        except (Exception, SystemExit) as error:  # whatever a suite's own code raises, its check has to be red
            log.exception("a suite could not be run", suite=suite.name, table=suite.table)
            return of_exception(suite.name, error)

    def _spark(self) -> dg.ResourceDefinition:
        """The Spark session for a run; dagster-pyspark takes half a second to import, so only runs import it."""

        @dg.resource(description="Spark for the suites that need it: started by the first, ended with the run.")
        def quality_spark(_: dg.InitResourceContext) -> Iterator[Any]:
            from orchestration.quality.spark_session import session_of_run

            yield from session_of_run(self.settings)

        return quality_spark

    def _job(self) -> dg.JobDefinition:
        """Runs suites and reports their checks; no check is in its plan."""

        @dg.op(
            name=self._named(OP),
            description="Runs suites, one after the other.",
            required_resource_keys={self._named(SPARK)},
        )
        def run_suites(context: dg.OpExecutionContext, config: SuitesConfig) -> None:
            names = {suite.name for suite in self.suites}
            if unknown := sorted(set(config.suites) - names):
                raise dg.Failure(f"no suite is named {', '.join(unknown)}; they are: {', '.join(sorted(names))}")
            chosen = [key for key in sorted(self.by_key) if not config.suites or key.name in config.suites]
            for key, verdict in self._verdicts(context, chosen):
                context.instance.report_runless_asset_event(verdict.evaluation(key, context.run_id))
                context.log.info("%s: %s: %s", key.name, "passed" if verdict.passed else "failed", verdict.text)

        @dg.job(
            name=self._named(JOB),
            description=f"Runs the suites: {', '.join(suite.name for suite in self.suites)}",
            tags=run_tags(self.settings),
            executor_def=self.executor,
        )
        def quality() -> None:
            run_suites()

        return quality

    def _schedule(self) -> dg.ScheduleDefinition:
        keys = list(self.by_key)

        @dg.schedule(
            name=self._named(f"schedule_{JOB}"),
            job_name=self._named(JOB),
            cron_schedule=cron_of_interval(self.settings.quality.every),
            default_status=dg.DefaultScheduleStatus.RUNNING,
            description="Runs the suites that have not been run for quality.every; skips those that wait or run.",
        )
        def tick(context: dg.ScheduleEvaluationContext) -> dg.RunRequest | dg.SkipReason:
            due = due_checks(context.instance, keys, self.settings, time.time())
            if not due:
                return dg.SkipReason("every suite has been run lately, or waits, or runs, or has no table yet")
            return dg.RunRequest(run_config=run_config(self.settings, [key.name for key in due]))

        return tick


def run_tags(settings: Settings) -> dict[str, str]:
    return {**job_tags(settings, QUALITY_KIND), **RUN_TAGS}


@contextmanager
def one_at_a_time(path: Path, tell: Callable[[str], object]) -> Iterator[None]:
    """Wait until no other process evaluates suites: a check executed from its page has no tag to be queued by."""
    private_folder(path.parent)
    with path.open("a") as file:
        if not lock(file.fileno(), wait=0):
            tell("another run evaluates suites; this one begins when that one has ended")
            lock(file.fileno())
        yield
