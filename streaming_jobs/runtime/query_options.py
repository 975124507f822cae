"""The options of a query: where it starts in a topic, and when it makes a batch."""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import TYPE_CHECKING

from streaming_jobs.durations import milliseconds, parse_duration
from streaming_jobs.errors import ConfigurationError
from streaming_jobs.sources.base import TopicReader

if TYPE_CHECKING:
    from pyspark.sql.streaming.readwriter import DataStreamWriter


def resolve_start(start: str, topics: TopicReader, topic: str) -> dict[int, int]:
    """Offsets for `earliest`, `latest`, or an ISO time with zone; raises ConfigurationError for anything else."""
    if start in ("earliest", "latest"):
        return dict(getattr(topics.offsets(topic), start))
    try:
        at = datetime.fromisoformat(start)
    except ValueError:
        at = None
    if at is None or at.tzinfo is None:
        raise ConfigurationError(
            f"start position '{start}' is not earliest, latest or a time with zone", "write 2026-11-21T08:00:00+00:00"
        )
    return topics.offsets_for_time(topic, int(at.timestamp() * 1000))


def triggered(writer: DataStreamWriter, trigger: str, at_least: timedelta) -> DataStreamWriter:
    """The writer with its trigger, batches at least `at_least` apart; raises ConfigurationError for an unknown one."""
    if trigger == "continuous":
        return writer.trigger(processingTime=f"{max(milliseconds(at_least), 1)} milliseconds")
    if trigger == "available-now":
        return writer.trigger(availableNow=True)
    if trigger.startswith("every "):
        interval = max(parse_duration(trigger.removeprefix("every ")), at_least)
        return writer.trigger(processingTime=f"{milliseconds(interval)} milliseconds")
    raise ConfigurationError(
        f"'{trigger}' is not a trigger", "use continuous, available-now, or 'every' and a duration"
    )
