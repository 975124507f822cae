"""The sensor that sends OpenLineage events, where the settings name a receiver."""

from __future__ import annotations

import json
from dataclasses import asdict

import dagster as dg

from orchestration.sessions.names import named
from streaming_jobs.catalog.topology import Topology
from streaming_jobs.platform.extras import require
from streaming_jobs.settings import Settings


def definitions(topology: Topology, settings: Settings) -> dg.Definitions:
    if not settings.lineage.url:
        return dg.Definitions()
    require("lineage", "the setting lineage.url")

    @dg.sensor(
        name=named(settings.dagster, "lineage"),
        minimum_interval_seconds=max(int(settings.lineage.every.total_seconds()), 15),
        default_status=dg.DefaultSensorStatus.RUNNING,
        description="Sends OpenLineage events of sessions and batches; what a receiver did not take is sent again.",
    )
    def tick(context: dg.SensorEvaluationContext) -> dg.SensorResult:
        from orchestration.lineage import Position, client, send

        taken = {name: Position(**at) for name, at in json.loads(context.cursor or "{}").items()}
        sent = send(settings, topology.streams.values(), taken, client(settings).emit)
        words = f"{sent.events} events sent, {sent.refused} refused{f'; {sent.ended}' if sent.ended else ''}"
        cursor = json.dumps({name: asdict(at) for name, at in taken.items()})
        return dg.SensorResult(skip_reason=words, cursor=cursor)

    return dg.Definitions(sensors=[tick])
