"""The definitions of quality: the checks of suites and row rules, their runs, and alerts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import dagster as dg

from orchestration.bundle.job import Bundle
from orchestration.quality.alerts import CheckAlerts
from orchestration.quality.job_notifications import job_sensors
from orchestration.quality.rules import RULES, RuleChecks, RuleCount, RuleCounts, RuledTable, counts_in
from orchestration.quality.suites import JOB, OP, STEP, RunSuite, SparkFactory, SuiteChecks
from orchestration.sessions.child_run import session_executor
from orchestration.sessions.health import FRESHNESS
from orchestration.sessions.names import table_of
from quality.suite_set import SuiteSet
from quality.suites import Suite
from quality.validation import Validation
from streaming_jobs.catalog.topology import Topology
from streaming_jobs.settings import Settings
from streaming_jobs.state.status import read_status


@dataclass(frozen=True)
class QualityDeclarations:
    """The declared suites and rules, and their evaluators; tests replace all of these."""

    run: RunSuite
    counts: RuleCounts
    suites: Sequence[Suite] = ()
    ruled: Sequence[RuledTable] = ()

    def of_streams(self, topology: Topology) -> QualityDeclarations:
        """Those about tables of these streams."""
        suites = [suite for suite in self.suites if topology.writer(suite.table)]
        return replace(self, suites=suites, ruled=[one for one in self.ruled if one.stream in topology.streams])


def declared(settings: Settings, topology: Topology) -> QualityDeclarations:
    """The suites and row rules of the settings' modules, with what runs and counts them."""
    suites = SuiteSet.of_settings(settings, topology)

    def run(suite: Suite, spark: SparkFactory, /) -> Validation:
        from quality.runs.runner import RunRequest, run_suite

        return run_suite(settings, topology, suite, RunRequest(spark=spark))

    def counts(_: Settings, stream: str, table: str, /) -> Mapping[str, RuleCount]:
        return counts_in(read_status(settings, stream), table, topology[stream].rules_of(table))

    ruled = [
        RuledTable(stream.name, sink.name, tuple(rule.name for rule in stream.rules_of(sink.name).rules))
        for stream in topology.streams.values()
        for sink in stream.sinks.values()
        if stream.rules_of(sink.name)
    ]
    return QualityDeclarations(run, counts, list(suites.suites.values()), ruled)


def definitions(
    declared: QualityDeclarations,
    topology: Topology,
    settings: Settings,
    bundle: Bundle,
    health: Sequence[dg.AssetCheckKey],
    executor: dg.ExecutorDefinition = session_executor,
) -> dg.Definitions:
    """All of them; `health` are the checks of streams and objectives, which there are besides.

    Raises ConfigurationError for a suite with the name of another check, and for a job of the bundle with the suites'.
    """
    writer = {table: stream.name for stream in topology.streams.values() for table in stream.table_names}
    suites = SuiteChecks(declared.suites, settings, declared.run, executor=executor)
    suites.refuse_names({RULES, *(key.name for key in health)})
    if declared.suites:
        bundle.refuse([JOB, OP, STEP], "the suites' job")
    watched = [key for key in health if key.name != FRESHNESS]  # its cause is a reason of `health`
    keys = [*watched, *suites.by_key, *(ruled.key(settings) for ruled in declared.ruled)]
    alerts = CheckAlerts({key: writer[table_of(key.asset_key)] for key in keys}, settings)
    return dg.Definitions.merge(
        suites.definitions(),
        RuleChecks(declared.ruled, settings, declared.counts).definitions(),
        dg.Definitions(sensors=[alerts.sensor(), *job_sensors(bundle.jobs, settings)]),
    )
