"""A rehearsal of a start: the stream's code on some of its newest records, in folders that are removed at the end.

The first batch in a Spark that has run none takes seconds: classes are loaded, plans compiled, Python workers started.
A session that stands by has the time for that before it is needed. Nothing is written but scratch files.
"""

from __future__ import annotations

import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import structlog

from streaming_jobs.errors import TransientError
from streaming_jobs.platform.failures import classify
from streaming_jobs.runtime.stream_queries import QueryHooks, RunningQuery, SparkQueries, ended_alone
from streaming_jobs.runtime.stream_sinks import DiscardedSinks
from streaming_jobs.settings import Settings
from streaming_jobs.sources.base import TopicReader
from streaming_jobs.state import stream_record
from streaming_jobs.state.stream_record import BoundTopic
from streaming_jobs.storage.files import scratch
from streaming_jobs.stream import Stream
from streaming_jobs.table_sources.archives import Archives

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

log = structlog.get_logger()

NEWEST = 200
"""The records of each partition that are read."""
_TAKES = 10.0
"""Seconds after which the rehearsals of all streams are over: a recovery waits for the session no longer than 30."""
_ENDS_WITHIN = 5.0


def rehearse(
    settings: Settings, streams: Iterable[Stream], spark: SparkSession, wanted: Callable[[Stream], bool]
) -> None:
    """Rehearse the starts of streams that read topics alone, while each is `wanted`; a failure is logged.

    What is wrong with the code shows at the start itself, which is refused as any other.
    """
    deadline = time.monotonic() + _TAKES
    for stream in streams:

        def goes_on(stream: Stream = stream) -> bool:
            return time.monotonic() < deadline and wanted(stream)

        if stream.tables_read or not goes_on():
            continue
        began = time.monotonic()
        try:
            _rehearse(settings, stream, spark, goes_on)
        except Exception as error:  # noqa: BLE001 - the user's code may raise anything
            log.warning("the start of the stream was not rehearsed", stream=stream.name, reason=classify(error).found)
        else:
            log.info("the start of the stream was rehearsed", stream=stream.name, s=round(time.monotonic() - began, 1))


def _rehearse(settings: Settings, stream: Stream, spark: SparkSession, goes_on: Callable[[], bool]) -> None:
    """Raises the failure of the query, and TransientError if it does not end: then the stream's own start waits for it,
    since a session has one query of a name, and its folder stays as long as the process.
    """
    folder = Path(tempfile.mkdtemp(prefix=f"{stream.name}-", dir=scratch(settings.home, "rehearsal").folder))
    own = settings.for_replay(stream.name, folder / "state", folder / "tables", max_restarts=0)
    queries = SparkQueries(own, archives=Archives(settings), external=DiscardedSinks())
    hooks = QueryHooks("available-now", threading.Event(), lambda _: None, lambda _: None)
    query: RunningQuery | None = None

    def wanted() -> bool:
        if not goes_on():
            hooks.stop.set()
        return not hooks.stop.is_set()

    try:
        queries.open([stream])
        assert queries.connection is not None
        _begin_near_the_end(own, stream, queries, queries.connection.topics)
        query = queries.launch(spark, stream, queries.preflight(stream).snapshot, hooks).query
        if not ended_alone(query, wanted, _ENDS_WITHIN):
            raise TransientError("it took too long, or is no longer wanted", "the stream starts without it")
        if (failure := query.exception()) is not None:
            raise failure
    finally:
        queries.close()
        if query is None or query.ended:
            shutil.rmtree(folder, ignore_errors=True)


def _begin_near_the_end(own: Settings, stream: Stream, queries: SparkQueries, topics: TopicReader) -> None:
    """Let the queries read the newest records of each partition, as far as these go now."""
    bounds = {topic.name: topics.offsets(topic.name) for topic in stream.topics}
    queries.until = {name: dict(each.latest) for name, each in bounds.items()}
    starts = []
    for name, each in bounds.items():
        topic = topics.describe(name)
        start = {p: max(each.earliest[p], end - NEWEST) for p, end in each.latest.items()}
        starts.append(BoundTopic(name, topic.id if topic is not None else "", start))
    own.tables_folder.mkdir(parents=True)
    stream_record.save(own, replace(stream_record.first(stream.name), topics=tuple(starts)))
