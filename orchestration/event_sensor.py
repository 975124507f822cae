"""The sensor that keeps the table of events up to date."""

from __future__ import annotations

import dagster as dg

from orchestration.event_table import TABLE, synchronise
from orchestration.sessions.names import named
from streaming_jobs.catalog.topology import Topology
from streaming_jobs.settings import Settings

EVERY = 300
"""Seconds between two looks at the files of all streams."""


def definitions(topology: Topology, settings: Settings) -> dg.Definitions:
    @dg.sensor(
        name=named(settings.dagster, "event_table"),
        minimum_interval_seconds=EVERY,
        default_status=dg.DefaultSensorStatus.RUNNING,
        description=f"Appends sessions, failures, deploys, recoveries, slices and changed checks to the table {TABLE}.",
    )
    def tick() -> dg.SkipReason:
        return dg.SkipReason(f"{synchronise(settings, topology.streams)} new events")

    return dg.Definitions(sensors=[tick])
