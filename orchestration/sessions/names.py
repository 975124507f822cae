"""Names in Dagster: keys of assets, and names of jobs, steps, sensors, schedules, pools and resources.

An instance, and with `build_defs` a code location, may have definitions of others, or Recourse twice. So every key and
every name passes through this module, which puts `dagster.key_prefix` before it.
"""

from __future__ import annotations

import dagster as dg

from streaming_jobs.declare.names import cluster_of, kafka_name
from streaming_jobs.settings_services import DagsterSettings

TOPICS, POSTGRES = "kafka", "postgres"


def asset_key(settings: DagsterSettings, *path: str) -> dg.AssetKey:
    return dg.AssetKey([*settings.key_prefix, *path])


def table_key(settings: DagsterSettings, table: str) -> dg.AssetKey:
    return asset_key(settings, table)


def topic_key(settings: DagsterSettings, topic: str) -> dg.AssetKey:
    """The asset of a topic; under `kafka`, so that a table may have the same name, and there under its cluster."""
    cluster = cluster_of(topic)
    return asset_key(settings, TOPICS, *([cluster] if cluster else []), kafka_name(topic))


def postgres_key(settings: DagsterSettings, table: str) -> dg.AssetKey:
    """The asset of a table of PostgreSQL; under `postgres`, so that a Delta table may have the same name."""
    return asset_key(settings, POSTGRES, table)


def table_of(key: dg.AssetKey) -> str:
    """The table of an asset key that `table_key` made."""
    return key.path[-1]


def named(settings: DagsterSettings, name: str) -> str:
    """The name of a job, step, sensor, schedule, pool, group or resource in Dagster, which takes no `/` in it."""
    return "_".join([*settings.key_prefix, name])
