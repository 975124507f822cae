"""Sensors of a home as a whole: the figures of its topics, the table of events, and OpenLineage.

Topics are looked at each minute, by the only sensor that asks the broker. Their event is a materialisation if records
arrived or were read since the last tick: an asset's overview shows the figures of the newest materialisation and
nothing else; otherwise an observation. Topics are external assets, whose events make no table stale.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import dagster as dg

from orchestration.event_table import TABLE, synchronise
from orchestration.sessions.names import named, topic_key
from orchestration.sessions.reporting import shown
from streaming_jobs.catalog.topology import Topology
from streaming_jobs.declare.names import cluster_of
from streaming_jobs.errors import PreflightRefused, RecourseError
from streaming_jobs.platform.extras import require
from streaming_jobs.settings import Settings
from streaming_jobs.stream import Stream

if TYPE_CHECKING:
    from streaming_jobs.sources.topics import TopicFigures

PATIENCE = timedelta(seconds=5)
"""Time that one request to the broker may take."""
AT_LEAST_EVERY = 900.0
"""Seconds after which a topic without new records is reported again."""
EVENTS_EVERY = 300
"""Seconds between two looks at the files of all streams."""


def definitions(topology: Topology, settings: Settings) -> dg.Definitions:
    """The sensors; that of OpenLineage if the settings name a receiver."""
    sensors = [_topics(topology, settings), _events(topology, settings)]
    return dg.Definitions(sensors=[*sensors, _lineage(topology, settings)] if settings.lineage.url else sensors)


def _events(topology: Topology, settings: Settings) -> dg.SensorDefinition:
    @dg.sensor(
        name=named(settings.dagster, "event_table"),
        minimum_interval_seconds=EVENTS_EVERY,
        default_status=dg.DefaultSensorStatus.RUNNING,
        description="Appends sessions, failures, deploys, recoveries, slices, changed checks and alerts to the table "
        f"{TABLE}.",
    )
    def tick() -> dg.SkipReason:
        return dg.SkipReason(f"{synchronise(settings, topology.streams)} new events")

    return tick


def _lineage(topology: Topology, settings: Settings) -> dg.SensorDefinition:
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

    return tick


def _topics(topology: Topology, settings: Settings) -> dg.SensorDefinition:
    """End offsets, records per second, partitions, retention, and the lag of the streams that read."""

    @dg.sensor(
        name=named(settings.dagster, "topics"),
        minimum_interval_seconds=60,
        default_status=dg.DefaultSensorStatus.RUNNING,
        description="Asks the broker for the figures of each topic, and reports them: each minute while records "
        "come or are read, every 15 minutes otherwise.",
    )
    def tick(context: dg.SensorEvaluationContext) -> dg.SensorResult:
        before: dict[str, dict[str, Any]] = json.loads(context.cursor or "{}")
        figures: dict[str, TopicFigures] = {}
        unseen: dict[str, str] = {}
        for cluster in sorted({cluster_of(name) for name in topology.topics}):
            try:
                figures |= _look(settings, [name for name in topology.topics if cluster_of(name) == cluster])
            except RecourseError as error:
                unseen[cluster] = error.found
        if unseen and not figures:
            reasons = "; ".join(unseen.values())
            return dg.SensorResult(skip_reason=f"the topics could not be seen: {reasons}", cursor=context.cursor)
        events: list[dg.AssetMaterialization | dg.AssetObservation] = []
        cursor = {name: seen for name, seen in before.items() if cluster_of(name) in unseen}
        for name, each in figures.items():
            readers = [topology[stream] for stream in topology.readers(name)]
            seen, lag = before.get(name), lags(settings, readers, each)
            due = is_due(seen, each, lag)
            if due:
                event = dg.AssetMaterialization if has_changed(seen, each, lag) else dg.AssetObservation
                events.append(event(topic_key(settings.dagster, name), metadata=topic_metadata(each, seen, lag)))
            told = each.at if due or seen is None else seen["told"]
            cursor[name] = {"id": each.id, "at": each.at, "end": each.end, "lag": lag, "told": told}
        skipped = None if events else dg.SkipReason("no topic has new records")
        return dg.SensorResult(asset_events=events, cursor=json.dumps(cursor), skip_reason=skipped)

    return tick


def has_changed(seen: Mapping[str, Any] | None, now: TopicFigures, lag: Mapping[str, int]) -> bool:
    """True if records arrived or were read since the last tick, or if the topic was recreated."""
    return seen is None or (seen["id"], seen["end"], seen.get("lag")) != (now.id, now.end, lag)


def is_due(seen: Mapping[str, Any] | None, now: TopicFigures, lag: Mapping[str, int]) -> bool:
    """True if a topic is to be reported: it has changed since the last look, or was not reported for long."""
    if seen is None or has_changed(seen, now, lag):
        return True
    return not 0 <= now.at - float(seen["told"]) < AT_LEAST_EVERY


def topic_metadata(
    now: TopicFigures, seen: Mapping[str, Any] | None, lag: Mapping[str, int]
) -> dict[str, dg.MetadataValue]:
    """A topic's figures; records per second since the last look, if it was at the same topic."""
    rate = None
    if seen is not None and seen["id"] == now.id and now.at > seen["at"]:
        rate = round(max(now.end - seen["end"], 0) / (now.at - seen["at"]), 1)
    return shown(
        {
            "end_offset": now.end,
            "records": now.records,
            "partitions": now.partitions,
            "retention": now.retention,
            "cleanup_policy": now.cleanup_policy,
            "records_per_s": rate,
            **{f"lag_of_{stream}": records for stream, records in lag.items()},
        }
    )


def lags(settings: Settings, readers: Iterable[Stream], topic: TopicFigures) -> dict[str, int]:
    """Unread records of the topic by stream, from their checkpoints; also of streams that do not run."""
    from streaming_jobs.runtime.lag import position_on_disk

    found = {}
    for stream in readers:
        try:
            position = position_on_disk(settings, stream.name)
        except PreflightRefused:  # its check `health` shows it
            continue
        if position is not None and topic.name in position:
            at = position[topic.name]
            found[stream.name] = sum(max(end - at.get(p, 0), 0) for p, end in topic.latest.items())
    return found


def _look(settings: Settings, names: Iterable[str]) -> dict[str, TopicFigures]:
    from streaming_jobs.platform.broker import bootstrap_servers
    from streaming_jobs.sources.topics import Topics, look

    return look(Topics.of(settings.kafka, bootstrap_servers(settings), PATIENCE), names)
