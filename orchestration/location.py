"""The code location made from one bundle: the definitions of all areas, merged, as Dagster accepts them."""

from __future__ import annotations

from collections.abc import Callable

import dagster as dg

from orchestration import event_sensor, lineage_sensor, preview, topic_sensor
from orchestration.bundle.job import Bundle
from orchestration.quality import definitions as quality
from orchestration.recoveries import definitions as recoveries
from orchestration.sessions import definitions as sessions
from orchestration.sessions.child_run import session_executor
from orchestration.sessions.health import HealthChecks
from orchestration.sessions.retention import Owned
from orchestration.sessions.supervisor import Command
from orchestration.slices import definitions as slices
from streaming_jobs.catalog.topology import Topology
from streaming_jobs.errors import ConfigurationError
from streaming_jobs.runtime.session_options import session_command
from streaming_jobs.settings import Settings


def location(
    bundle: Bundle,
    topology: Topology,
    settings: Settings,
    command: Command = session_command,
    fault: Callable[[], ConfigurationError | None] = lambda: None,
    suites_and_rules: quality.QualityDeclarations | None = None,
) -> dg.Definitions:
    """The definitions of a bundle; raises ConfigurationError, or Dagster's own error for what Dagster refuses.

    `fault` returns what is wrong with the job YAML now; the sensors that report it call it at each tick.
    `suites_and_rules` defaults to the declarations in the settings' modules.
    """
    specs = sessions.sessions(bundle, topology, settings, command)
    health = HealthChecks(list(topology.streams.values()), specs, settings, fault)
    declared = suites_and_rules or quality.declared(settings, topology)
    areas = dg.Definitions.merge(
        sessions.definitions(specs, topology, settings, fault, [job for job in bundle.jobs if job.session is None]),
        health.definitions(),
        quality.definitions(declared, topology, settings, bundle, health.keys),
        preview.definitions(topology, settings, bundle),
        recoveries.definitions(settings, sessions.table_keys(topology), bundle),
        slices.definitions(settings, topology),
        topic_sensor.definitions(topology, settings),
        event_sensor.definitions(topology, settings),
        lineage_sensor.definitions(topology, settings),
    )
    retention = sessions.retention_sensor(specs, settings, _owned(areas))
    merged = dg.Definitions.merge(areas, dg.Definitions(sensors=[retention], executor=session_executor))
    dg.Definitions.validate_loadable(merged)  # Dagster resolves jobs and names late: errors in them come only here
    return merged


def _owned(areas: dg.Definitions) -> Owned:
    keys: list[dg.AssetKey] = []
    for asset in areas.assets or ():
        assert isinstance(asset, dg.AssetSpec | dg.AssetsDefinition)
        keys += [asset.key] if isinstance(asset, dg.AssetSpec) else asset.keys
    return Owned(keys, [key for checks in areas.asset_checks or () for key in checks.check_keys])
