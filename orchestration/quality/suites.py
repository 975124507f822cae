"""The check of each suite on the table that it is about, and the run that evaluates them.

    check          named as its suite, on the table's asset; executing it runs the suite
    job `quality`  all of them, or those that are named; its runs are those of the schedule and of the launchpad
                   (`when.py`)
    session        Spark's, for suites that need it, one for each run (`spark_session.py`)

An outcome is made to count as one without a run: Dagster counts the outcome of a run only until the table is
materialised again, which a stream does each minute, and then shows the check as if it had never been executed. And the
job has no check in its plan: Dagster shows a planned check as being executed instead of red, from the queue on.

(No postponed annotations here: Dagster looks at the type of a step's `context`.)
"""

import fcntl
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import dagster as dg
import structlog
from pydantic import Field

from orchestration.quality.verdict import SuiteVerdict, of_exception, of_validation
from orchestration.quality.when import JOB, OP
from orchestration.recoveries.launchpad import LOCATION, location_of
from orchestration.sessions.events import belongs_to_no_run, report_without_run
from orchestration.sessions.ownership import claim, job_tags
from orchestration.sessions.reporting import table_key
from orchestration.sessions.tags import QUALITY_KIND
from quality.suites import Suite
from quality.validation import Validation
from streaming_jobs.errors import ConfigurationError
from streaming_jobs.platform.files import private_folder
from streaming_jobs.settings import Settings

log = structlog.get_logger()

STEP = "suites"
"""The step of checks that are executed from their pages."""
RUN_TAGS = {"dagster/priority": "-10", "dagster/max_runtime": "3600"}
"""Sessions go first in the queue; a run that hangs is ended after an hour, so that it does not block the others."""
NICENESS = 10
SPARK = "quality_spark"
"""The resource."""


class SuitesConfig(dg.Config):
    """Which suites."""

    suites: list[str] = Field(default=[], description="The suites to run; empty: all.")


SparkFactory = Callable[[], Any]
"""Returns the run's Spark session; starts it at the first call."""


class RunSuite(Protocol):
    """The evaluation of suites."""

    def __call__(self, suite: Suite, spark: SparkFactory, /) -> Validation:
        """Run the suite on its table, and return the validation; call `spark` only if a session is needed."""


def lower_priority() -> None:
    """Let the streams go first: this process, and what it starts, gets what they leave of the CPU."""
    os.setpriority(os.PRIO_PROCESS, 0, max(NICENESS, os.getpriority(os.PRIO_PROCESS, 0)))


@dataclass(frozen=True)
class SuiteChecks:
    """The checks of all suites. `run` evaluates one; `begin` is called once in the process of a run, before it."""

    suites: Sequence[Suite]
    settings: Settings
    run: RunSuite
    begin: Callable[[], None] = field(default_factory=lambda: lower_priority)

    @property
    def by_key(self) -> dict[dg.AssetCheckKey, Suite]:
        """The suites by their checks."""
        return {check_key(suite): suite for suite in self.suites}

    def refuse_misfits(self, tables: Sequence[str], taken: Sequence[str]) -> None:
        """Raise ConfigurationError for a suite on an unknown table, or with the name of another check of its table."""
        seen: set[dg.AssetCheckKey] = set()
        for suite in self.suites:
            if suite.table not in tables:
                raise ConfigurationError(
                    f"suite {suite.name} is about table '{suite.table}', and no stream writes it",
                    f"the tables are: {', '.join(tables) or 'none'}",
                )
            if suite.name in taken or check_key(suite) in seen:
                raise ConfigurationError(
                    f"table {suite.table} has two checks named {suite.name}", "give the suite another name"
                )
            seen.add(check_key(suite))

    def definitions(self) -> list[dg.AssetChecksDefinition]:
        """The checks, as one step: the suites of a run share a process and a Spark session."""
        by_key = self.by_key
        if not by_key:
            return []

        @dg.multi_asset_check(
            name=STEP,
            specs=[
                dg.AssetCheckSpec(
                    suite.name,
                    asset=key.asset_key,
                    description=suite.description or f"Suite {suite.name} on table {suite.table}.",
                    metadata={"file": dg.MetadataValue.path(str(suite.file))} if suite.file else None,
                )
                for key, suite in by_key.items()
            ],
            can_subset=True,
            required_resource_keys={SPARK},
        )
        def evaluate(context: dg.AssetCheckExecutionContext) -> Iterator[dg.AssetCheckResult]:
            run_id = context.op_execution_context.run_id
            for key, verdict in self._verdicts(context.op_execution_context, sorted(context.selected_asset_check_keys)):
                yield verdict.result(key, run_id)
                belongs_to_no_run(context.instance, key, run_id)

        return [evaluate]

    def _verdicts(
        self, context: dg.OpExecutionContext, keys: Sequence[dg.AssetCheckKey]
    ) -> Iterator[tuple[dg.AssetCheckKey, SuiteVerdict]]:
        """Evaluates the suites of these checks, one after the other."""
        claim(context.instance, context.run_id, self.settings, QUALITY_KIND)
        spark = getattr(context.resources, SPARK)
        self.begin()
        with one_at_a_time(self.settings.home / "quality.lock", context.log.info):
            for key in keys:
                yield key, self.evaluate(self.by_key[key], lambda: spark.spark_session, location_of(context.run))

    def evaluate(self, suite: Suite, spark: SparkFactory, location: str = LOCATION) -> SuiteVerdict:
        """Run one suite; an exception of it is a failed check, and the others are still evaluated."""
        try:
            validation = self.run(suite, spark)
            return of_validation(validation, location=location, show_rows=self.settings.quality.show_rows)
        except (Exception, SystemExit) as error:  # whatever a suite's own code raises, its check has to be red
            log.exception("a suite could not be run", suite=suite.name, table=suite.table)
            return of_exception(suite.name, error)

    def resources(self) -> dict[str, Any]:
        """The Spark session for the step; dagster-pyspark takes half a second to import, so only runs import it."""
        settings = self.settings

        @dg.resource(description="Spark for the suites that need it: started by the first, ended with the run.")
        def quality_spark(_: dg.InitResourceContext) -> Iterator[Any]:
            from orchestration.quality.spark_session import session_of_run

            yield from session_of_run(settings)

        return {SPARK: quality_spark} if self.suites else {}

    def job(self) -> dg.JobDefinition:
        """Runs suites and reports their checks; no check is in its plan."""

        @dg.op(name=OP, description="Runs suites, one after the other.", required_resource_keys={SPARK})
        def run_suites(context: dg.OpExecutionContext, config: SuitesConfig) -> None:
            names = {suite.name for suite in self.suites}
            if unknown := sorted(set(config.suites) - names):
                raise dg.Failure(f"no suite is named {', '.join(unknown)}; they are: {', '.join(sorted(names))}")
            chosen = [key for key in sorted(self.by_key) if not config.suites or key.name in config.suites]
            for key, verdict in self._verdicts(context, chosen):
                report_without_run(context.instance, verdict.evaluation(key, context.run_id))
                context.log.info("%s: %s: %s", key.name, "passed" if verdict.passed else "failed", verdict.text)

        @dg.job(
            name=JOB,
            description=f"Runs the suites: {', '.join(suite.name for suite in self.suites)}",
            tags=run_tags(self.settings),
        )
        def quality() -> None:
            run_suites()

        return quality


def run_tags(settings: Settings) -> dict[str, str]:
    """The tags of a run of suites."""
    return {**job_tags(settings, QUALITY_KIND), **RUN_TAGS}


def check_key(suite: Suite) -> dg.AssetCheckKey:
    """The check of a suite."""
    return dg.AssetCheckKey(table_key(suite.table), suite.name)


@contextmanager
def one_at_a_time(path: Path, tell: Callable[[str], object]) -> Iterator[None]:
    """Wait until no other process evaluates suites: a check executed from its page has no tag to be queued by."""
    private_folder(path.parent)
    with path.open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            tell("another run evaluates suites; this one begins when that one has ended")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield
