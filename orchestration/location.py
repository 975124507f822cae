"""The code location made from one bundle: all assets, jobs, schedules, sensors and checks, as Dagster accepts them."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import dagster as dg

from orchestration.assets import (
    session_assets,
    session_job,
    session_schedule,
    sessions,
    table_keys,
    topic_assets,
    unassigned_assets,
)
from orchestration.bundle.job import Bundle, Continuous, Schedule
from orchestration.bundle.last_good import Fault
from orchestration.checks import HealthChecks
from orchestration.preview import preview_job
from orchestration.quality.parts import Declared, declared, parts
from orchestration.recoveries.job import recover_jobs
from orchestration.sensors import (
    job_yaml_sensor,
    keepalive_sensor,
    retention_sensor,
    run_failure_alert,
    stream_alert,
    watchdog_sensor,
)
from orchestration.sessions.executor import session_executor
from orchestration.sessions.retention import Owned
from orchestration.sessions.supervisor import Command
from orchestration.slices.job import SliceDefinitions
from orchestration.topic_sensor import topic_sensor
from streaming_jobs.catalog.topology import Topology
from streaming_jobs.runtime.session_options import session_command
from streaming_jobs.settings import Settings


def location(
    bundle: Bundle,
    topology: Topology,
    settings: Settings,
    command: Command = session_command,
    fault: Callable[[], Fault | None] = lambda: None,
    suites_and_rules: Declared | None = None,
) -> dg.Definitions:
    """The definitions of a bundle; raises ConfigurationError, or Dagster's own error for what Dagster refuses.

    `fault` returns what is wrong with the job YAML now; the sensors that report it call it at each tick.
    `suites_and_rules` are by default those of the settings' modules.
    """
    all_sessions = sessions(bundle, topology, settings, command)
    tables = {session.job.key: session_assets(session) for session in all_sessions}
    keepalives = [
        keepalive_sensor(session, running=settings.dagster.keepalive and not session.job.trigger.paused)
        for session in all_sessions
        if isinstance(session.job.trigger, Continuous)
    ]
    schedules = [
        session_schedule(session, session.job.trigger)
        for session in all_sessions
        if isinstance(session.job.trigger, Schedule)
    ]
    health = HealthChecks(list(topology.streams.values()), all_sessions, settings, fault)
    jobs = [job.key for job in bundle.jobs]
    quality = parts(
        suites_and_rules or declared(settings, topology),
        topology,
        settings,
        jobs=jobs,
        health=health.keys,
    )
    recoveries = recover_jobs(settings, table_keys(topology), jobs=jobs)
    slices = SliceDefinitions.of(settings, topology)
    assets: list[dg.AssetSpec | dg.AssetsDefinition] = [
        *topic_assets(topology),
        *tables.values(),
        *unassigned_assets(topology, settings, all_sessions),
        *slices.assets(),
    ]
    made = dg.Definitions(
        asset_checks=[*health.definitions(), *quality.asset_checks],
        assets=assets,
        jobs=[
            *(session_job(session, tables[session.job.key]) for session in all_sessions),
            *quality.jobs,
            *preview_job(topology, settings, jobs),
            *recoveries,
            *slices.jobs(),
        ],
        schedules=[*schedules, *quality.schedules, *slices.schedules()],
        sensors=[
            *keepalives,
            watchdog_sensor(all_sessions, settings),
            run_failure_alert(all_sessions),
            stream_alert(list(topology.streams.values()), settings),
            health.sensor(),
            job_yaml_sensor(fault),
            topic_sensor(topology, settings),
            retention_sensor(all_sessions, settings, Owned(_keys(assets), [*health.keys, *quality.keys])),
            *quality.sensors,
        ],
        resources=quality.resources,
        executor=session_executor,  # a run worker and its driver, no process between them
    )
    dg.Definitions.validate_loadable(made)  # Dagster resolves jobs and names late: errors in them come only here
    return made


def _keys(assets: Iterable[dg.AssetSpec | dg.AssetsDefinition]) -> list[dg.AssetKey]:
    return [key for each in assets for key in ([each.key] if isinstance(each, dg.AssetSpec) else each.keys)]
