"""What the code location has of quality: the checks of suites and row rules, their runs, and alerts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import dagster as dg

from orchestration.quality import rules, when
from orchestration.quality.alerts import CheckAlerts
from orchestration.quality.rules import RuleChecks, RuleCount, RuleCounts, RuledTable
from orchestration.quality.suites import STEP, RunSuite, SparkFactory, SuiteChecks
from orchestration.quality.when import JOB, OP
from orchestration.sessions.ownership import job_tags
from orchestration.sessions.tags import QUALITY_KIND
from quality.suite_set import SuiteSet
from quality.suites import Suite
from quality.validation import Validation
from streaming_jobs.catalog.topology import Topology
from streaming_jobs.errors import ConfigurationError
from streaming_jobs.settings import Settings
from streaming_jobs.state.status import read_status


@dataclass(frozen=True)
class Declared:
    """What is declared of quality, and what evaluates it; tests put others in the place of all of these."""

    run: RunSuite
    counts: RuleCounts
    suites: Sequence[Suite] = ()
    ruled: Sequence[RuledTable] = ()


def declared(settings: Settings, topology: Topology) -> Declared:
    """The suites and row rules of the settings' modules, with what runs and counts them."""
    suites = SuiteSet.of_settings(settings, topology)

    def run(suite: Suite, spark: SparkFactory, /) -> Validation:
        from quality.runs.runner import RunRequest, run_suite

        return run_suite(settings, topology, suite, RunRequest(spark=spark))

    def counts(_: Settings, stream: str, table: str, /) -> Mapping[str, RuleCount]:
        return rules.counts_in(read_status(settings, stream), table, topology[stream].rules_of(table))

    ruled = [
        RuledTable(stream.name, sink.name, tuple(rule.name for rule in stream.rules_of(sink.name).rules))
        for stream in topology.streams.values()
        for sink in stream.sinks.values()
        if stream.rules_of(sink.name)
    ]
    return Declared(run, counts, list(suites.suites.values()), ruled)


@dataclass(frozen=True)
class QualityParts:
    """The parts as `location.py` puts them together."""

    asset_checks: Sequence[dg.AssetChecksDefinition]
    sensors: Sequence[dg.SensorDefinition]
    jobs: Sequence[Any] = ()
    schedules: Sequence[dg.ScheduleDefinition] = ()
    resources: Mapping[str, Any] = field(default_factory=dict)
    keys: Sequence[dg.AssetCheckKey] = ()


def parts(
    found: Declared, topology: Topology, settings: Settings, jobs: Sequence[str], health: Sequence[dg.AssetCheckKey]
) -> QualityParts:
    """All of them; `jobs` are those of the bundle, `health` the checks that there are besides.

    Raises ConfigurationError for a suite that fits no table, and for a job YAML with a job `quality`.
    """
    writer = {table: stream.name for stream in topology.streams.values() for table in stream.table_names}
    suites = SuiteChecks(found.suites, settings, found.run)
    suites.refuse_misfits(list(writer), taken=[rules.NAME, *{key.name for key in health}])
    ours = {JOB, OP, STEP} if found.suites else set()
    if taken := sorted(ours & set(jobs)):
        raise ConfigurationError(f"resources.jobs.{taken[0]}: this name is that of the suites' job", "rename the job")
    row_rules = RuleChecks(found.ruled, settings, found.counts)
    keys = list(suites.by_key)
    all_keys = [*health, *keys, *(ruled.key for ruled in found.ruled)]
    alerts = CheckAlerts({key: writer[key.asset_key.to_user_string()] for key in all_keys}, settings)
    return QualityParts(
        asset_checks=[*suites.definitions(), *row_rules.definitions()],
        sensors=[*row_rules.sensors(), alerts.sensor()],
        jobs=[suites.job()] if keys else [],
        schedules=[when.schedule(keys, settings.quality.every, settings.tables, job_tags(settings, QUALITY_KIND))]
        if keys
        else [],
        resources=suites.resources(),
        keys=[*keys, *(ruled.key for ruled in found.ruled)],
    )
