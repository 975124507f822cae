"""The code location made from one bundle: the definitions of all areas, merged, as Dagster accepts them."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import dagster as dg
import structlog

from orchestration import preview, sensors
from orchestration.bundle import last_good
from orchestration.bundle.job import Bundle
from orchestration.quality import definitions as quality
from orchestration.recoveries import definitions as recoveries
from orchestration.redrives import definitions as redrives
from orchestration.sessions import definitions as sessions
from orchestration.sessions.assets import table_keys
from orchestration.sessions.child_run import session_executor
from orchestration.sessions.configuration import FOUND, Configuration, beside
from orchestration.sessions.health import HealthChecks
from orchestration.sessions.retention import Owned
from orchestration.sessions.supervisor import Command
from orchestration.slices import definitions as slices
from orchestration.slices import late
from streaming_jobs.catalog.topology import Topology
from streaming_jobs.errors import ConfigurationError
from streaming_jobs.runtime.session_options import session_command
from streaming_jobs.settings import Settings


def build_defs(
    settings: str | os.PathLike[str] | None = None,
    *,
    values: Mapping[str, object] | None = None,
    key_prefix: str | Sequence[str] | None = None,
    jobs: Collection[str] | None = None,
    executor: dg.ExecutorDefinition | None = None,
) -> dg.Definitions:
    """The definitions of a project's streams, for `Definitions.merge` with those of a team.

    `settings` names the configuration file; its relative paths, its job YAML and its modules are then those of its
    folder. None: the file that every command finds. `values` are single settings by dotted name, as `--set` takes them.

    `key_prefix` comes before the key of every asset and, joined by `_`, before the name of every job, step, sensor,
    schedule, pool, group and resource. `jobs` are the jobs of the job YAML that belong here, with their streams and
    tables; None: all. `executor` is that of these jobs, by default one without a process between run worker and child.
    The location's executor, which runs launched from the page of a table have, is left to the team.

    Starts no JVM and contacts no broker. Raises RecourseError where streams or job YAML cannot be used.
    """
    given = dict(values or {})
    if key_prefix is not None:
        given["dagster.key_prefix"] = [key_prefix] if isinstance(key_prefix, str) else list(key_prefix)
    origin = Configuration(values=given) if settings is None else beside(Path(settings), given)
    loaded = origin.load()
    structlog.get_logger().info("code location", **loaded.sources)
    return definitions(loaded.settings, origin=origin, jobs=jobs, executor=executor or session_executor)


def definitions(
    settings: Settings,
    command: Command = session_command,
    *,
    origin: Configuration = FOUND,
    jobs: Collection[str] | None = None,
    executor: dg.ExecutorDefinition = session_executor,
) -> dg.Definitions:
    """The definitions of the present job YAML, or of the last good one; as `build_defs`, for settings of `origin`."""
    topology = Topology.of_settings(settings)
    make = partial(
        location, topology=topology, settings=settings, command=command, origin=origin, jobs=jobs, executor=executor
    )
    fault = last_good.PresentFault(settings, topology, make)
    return last_good.use(settings, topology, partial(make, fault=fault))


def location(
    bundle: Bundle,
    topology: Topology,
    settings: Settings,
    command: Command = session_command,
    fault: Callable[[], ConfigurationError | None] = lambda: None,
    suites_and_rules: quality.QualityDeclarations | None = None,
    *,
    origin: Configuration = FOUND,
    jobs: Collection[str] | None = None,
    executor: dg.ExecutorDefinition = session_executor,
) -> dg.Definitions:
    """The definitions of a bundle; raises ConfigurationError, or Dagster's own error for what Dagster refuses.

    `fault` returns what is wrong with the job YAML now; the sensors that report it call it at each tick.
    `suites_and_rules` defaults to the declarations in the settings' modules.
    """
    of_home = sessions.sessions(bundle, topology, settings, command, origin)
    declared = suites_and_rules or quality.declared(settings, topology)
    if jobs is not None:
        bundle, topology = _chosen(bundle, topology, jobs)
        declared = declared.of_streams(topology)
    specs = [spec for spec in of_home if spec.job in bundle.jobs]
    health = HealthChecks(list(topology.streams.values()), specs, settings, fault)
    others = [job for job in bundle.jobs if job.session is None]
    tables = table_keys(topology, settings)
    areas = dg.Definitions.merge(
        sessions.definitions(specs, topology, settings, fault, others, origin, executor),
        health.definitions(),
        quality.definitions(declared, topology, settings, bundle, health.keys, executor),
        preview.definitions(topology, settings, bundle, origin=origin, executor=executor),
        recoveries.definitions(settings, tables, bundle, origin=origin, executor=executor),
        slices.definitions(settings, topology, executor),
        late.definitions(settings, topology, bundle, executor),
        redrives.definitions(settings, topology, bundle, executor),
        sensors.definitions(topology, settings),
    )
    retention = sessions.retention_sensor(of_home, settings, _owned(areas))
    merged = dg.Definitions.merge(areas, dg.Definitions(sensors=[retention]))
    dg.Definitions.validate_loadable(merged)  # Dagster resolves jobs and names late: errors in them come only here
    return merged


def _chosen(bundle: Bundle, topology: Topology, names: Collection[str]) -> tuple[Bundle, Topology]:
    """These jobs and their streams; raises ConfigurationError for a job that the bundle does not have."""
    known = [job.key for job in bundle.jobs]
    if unknown := sorted(set(names) - set(known)):
        raise ConfigurationError(
            f"{bundle.file} has no job named {', '.join(unknown)}", f"its jobs are: {', '.join(known) or 'none'}"
        )
    jobs = tuple(job for job in bundle.jobs if job.key in names)
    streams = {name for job in jobs for name in job.streams}
    return replace(bundle, jobs=jobs), Topology({n: s for n, s in topology.streams.items() if n in streams})


def _owned(areas: dg.Definitions) -> Owned:
    keys: list[dg.AssetKey] = []
    for asset in areas.assets or ():
        assert isinstance(asset, dg.AssetSpec | dg.AssetsDefinition)
        keys += [asset.key] if isinstance(asset, dg.AssetSpec) else asset.keys
    return Owned(keys, [key for checks in areas.asset_checks or () for key in checks.check_keys])
