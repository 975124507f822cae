"""The bounds on a batch of one source, from the stream's settings and its trigger."""

from __future__ import annotations

from datetime import timedelta

from streaming_jobs.durations import parse_duration
from streaming_jobs.settings import StreamSettings
from streaming_jobs.sources.batch_size import FIRST
from streaming_jobs.sources.planner import Limits

_WAIT = 0.1
"""Seconds that the planner of an idle stream waits for a record, before Spark asks again."""


def batch_limits(own: StreamSettings, sources: int, trigger: str, commit_interval: timedelta) -> Limits:
    """The bounds for each of so many sources. With several of them none waits for records: another may have some.

    At least one record: Spark would take 0 for no limit, or make no progress.
    """
    share = max(1, own.max_offsets_per_trigger // sources)
    apart, often = commit_interval, not trigger.startswith("every ")
    if not often:
        apart = max(apart, parse_duration(trigger.removeprefix("every ")))
    return Limits(
        seconds=max(own.batch_seconds, apart).total_seconds(),
        records=share,
        bytes=max(1, (own.max_batch_mb << 20) // sources),
        wait=_WAIT if sources == 1 else 0.0,
        first=FIRST if often else share,
    )
