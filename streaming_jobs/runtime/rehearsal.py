"""A rehearsal of a start: the stream's code on some of its newest records, in folders that are removed at the end.

The first batch in a Spark that has run none takes seconds: classes are loaded, plans compiled, Python workers started.
A session that stands by has the time for that before it is needed. Nothing is written but scratch files.
"""

from __future__ import annotations

import shutil
import threading
import time
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import structlog

from streaming_jobs.platform.failures import classify
from streaming_jobs.runtime.stream_queries import QueryHooks, SparkQueries
from streaming_jobs.runtime.stream_sinks import DiscardedSinks
from streaming_jobs.settings import Settings
from streaming_jobs.state import stream_record
from streaming_jobs.state.stream_record import BoundTopic
from streaming_jobs.storage.files import scratch
from streaming_jobs.stream import Stream
from streaming_jobs.table_sources.archives import Archives

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

log = structlog.get_logger()

RECORDS = 200
"""The newest records of each partition that are read."""
_TAKES = 15.0
"""Seconds after which a rehearsal is given up."""
_LOOK_EVERY = 0.05


def rehearse(settings: Settings, streams: Iterable[Stream], spark: SparkSession, stop: threading.Event) -> None:
    """Rehearse the starts of streams that read topics alone, until `stop` is set; a failure is logged.

    What is wrong with the code shows at the start itself, which is refused as any other.
    """
    for stream in streams:
        if stream.tables_read or stop.is_set():
            continue
        folder, began = scratch(settings.home, "rehearsal").folder / stream.name, time.monotonic()
        try:
            _rehearse(settings, stream, folder, spark, stop)
        except Exception as error:  # noqa: BLE001 - the user's code may raise anything
            log.warning("the start of the stream was not rehearsed", stream=stream.name, reason=classify(error).found)
        else:
            log.info("the start of the stream was rehearsed", stream=stream.name, s=round(time.monotonic() - began, 1))
        finally:
            shutil.rmtree(folder, ignore_errors=True)


def _rehearse(settings: Settings, stream: Stream, folder: Path, spark: SparkSession, stop: threading.Event) -> None:
    own = settings.for_replay(stream.name, folder / "state", folder / "tables", max_restarts=0)
    queries = SparkQueries(own, archives=Archives(settings), external=DiscardedSinks())
    queries.open([stream])
    try:
        assert queries.connection is not None
        topics = queries.connection.topics
        bounds = {name: topics.offsets(name) for name in (topic.name for topic in stream.topics)}
        queries.until = {name: dict(each.latest) for name, each in bounds.items()}
        starts = []
        for name, each in bounds.items():
            start = {p: max(each.earliest[p], end - RECORDS) for p, end in each.latest.items()}
            topic = topics.describe(name)
            starts.append(BoundTopic(name, topic.id if topic is not None else "", start))
        (folder / "tables").mkdir(parents=True)
        stream_record.save(own, replace(stream_record.first(stream.name), topics=tuple(starts)))
        hooks = QueryHooks("available-now", threading.Event(), lambda _: None, lambda _: None)
        query = queries.launch(spark, stream, queries.preflight(stream).snapshot, hooks).query
        deadline = time.monotonic() + _TAKES
        while not query.ended and not stop.is_set() and time.monotonic() < deadline:
            time.sleep(_LOOK_EVERY)
        if not query.ended:
            hooks.stop.set()
            query.stop()
        elif (failure := query.exception()) is not None:
            raise failure
    finally:
        queries.close()
