"""The replay of a preview: an ordinary session on folders of its own, that ends exactly at the border.

The border is the end of the stream's newest committed batch when the preview began. The source reads nothing past it
(`SparkQueries.until`), and the query is stopped there (`Border`), before a batch without records could close windows
that the running stream had not closed yet.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

from reprocessing.preview.folders import Folders
from reprocessing.preview.published import Published
from reprocessing.preview.start import Start
from reprocessing.rebuild.replay import last_entry
from reprocessing.rebuild.replay_end import Border, steps_to
from reprocessing.rebuild.staging import fill
from streaming_jobs.errors import OutputMismatch, PreflightRefused, TransientError
from streaming_jobs.ledger.entry import LedgerEntry
from streaming_jobs.ledger.positions import by_place, ends_of
from streaming_jobs.platform import spark
from streaming_jobs.platform.runtime import LocalSpark
from streaming_jobs.platform.spark import Launched
from streaming_jobs.runtime.batch_hooks import StopAtBorder
from streaming_jobs.runtime.state_changes import differences
from streaming_jobs.runtime.stream_queries import SparkQueries
from streaming_jobs.runtime.stream_sinks import DiscardedTopicSinks
from streaming_jobs.session import Session
from streaming_jobs.settings import Settings
from streaming_jobs.sinks.tables import all_tables, open_table, store_of
from streaming_jobs.state import savepoints, stream_record
from streaming_jobs.state.checkpoint import Checkpoint
from streaming_jobs.state.stream_record import BoundTable, Generation, StreamRecord
from streaming_jobs.stream import Stream
from streaming_jobs.table_sources.archives import Archives
from streaming_jobs.text import commands

_LOOK_EVERY = 1.0


@dataclass(frozen=True)
class Failure:
    """Why a replay did not come to its end. `starts` is False if the code cannot even start on the stream's state."""

    code: str
    found: str
    next_step: str
    starts: bool = True


def prepare(folders: Folders, stream: Stream, record: StreamRecord, start: Start) -> None:
    """Make the state and the tables of the replay: those of the savepoint, or empty tables with today's columns.

    Raises TransientError if the savepoint is dropped meanwhile, as the running stream does with old ones.
    """
    own, savepoint = folders.own(), start.savepoint
    after = (None, -1) if savepoint is None else (savepoint.generation, savepoint.batch)
    opened = Generation(record.generation + 1, time.time(), "preview", *after)
    try:
        fill(
            folders.settings,
            own,
            stream,
            record=record,
            opened=opened,
            savepoint=savepoint,
            starts=start.ends,
            plan="preview",
        )
    except (FileNotFoundError, PreflightRefused) as error:
        if savepoint is None or savepoints.find(folders.settings, stream.name, savepoint.id) is not None:
            raise
        raise TransientError(
            f"savepoint {savepoint.id} of stream {stream.name} was dropped while the preview began", "try again"
        ) from error
    if savepoint is None:
        _empty_tables(folders.settings, own, stream, opened)


def _empty_tables(settings: Settings, own: Settings, stream: Stream, opened: Generation) -> None:
    """Make the stream's tables anew without rows, so that the code meets the columns that it would meet."""
    bound = []
    for declared, role in all_tables(stream):
        live = open_table(settings, declared, stream.name)
        if live is not None:
            entry = LedgerEntry("publish", stream.name, declared.name, opened.number, -1, plan="preview")
            made = store_of(declared).create(own, declared, stream.name, live.no_rows(), entry)
            bound.append(BoundTable(declared.name, made.table_id, role))
    begun = stream_record.load(own, stream.name)
    assert begun is not None
    stream_record.save(own, replace(begun, tables=tuple(bound)))


def replay(
    folders: Folders,
    stream: Stream,
    record: StreamRecord,
    until: Published,
    progress: Callable[[int], None],
) -> Failure | None:
    """Run the stream's code up to the border; returns why it failed, None if it reached the border.

    `progress` is called with the number of the batch that was written last, if there is a new one, once per second.
    Raises TransientError for a failure that may pass: Spark's JVM ended, or the broker is away.
    """
    own = folders.own()
    session = Session(
        own,
        [stream],
        trigger="available-now",
        queries=SparkQueries(
            own,
            _Guard(own, stream.name, record, border(own, stream, record, until)),
            archives=Archives(folders.settings),
            until=until.ends,
            topic_sinks=DiscardedTopicSinks(),
        ),
        runtime=LocalSpark(own, launch=partial(_launch, stream.name)),
    )
    over = threading.Event()
    watcher = threading.Thread(target=_watch, args=(session, over, progress), daemon=True)
    watcher.start()
    try:
        code = session.run()
    finally:
        over.set()
        watcher.join()
    if code:
        return _failure(session)
    reached = by_place(ends_of(last_entry(own, stream).offsets))
    if short := {place: end for place, end in by_place(until.ends).items() if reached.get(place) != end}:
        at = ", ".join(f"{topic}/{partition} {end}" for (topic, partition), end in sorted(short.items()))
        return Failure(
            PreflightRefused.code, f"the replay did not reach {at}", "see whether the topic still has these records"
        )
    return None


def border(own: Settings, stream: Stream, record: StreamRecord, until: Published) -> Border:
    """The end of the replay; for windows one batch of it begins where the stream's newest batch began."""
    timed = any(topic.event_time is not None for topic in stream.sources.values())
    steps, empty = steps_to(until.ends, until.begins if timed and record.state_fingerprint else None)
    return Border(steps, empty, own.for_stream(stream.name).max_offsets_per_trigger, _end_here)


def _end_here() -> None:
    raise StopAtBorder


@dataclass(frozen=True)
class _Guard:
    """The check before each batch of the replay: the border, and that the state is the one that the stream keeps.

    A replay from the stream's start has no state that could refuse another aggregation; the running stream has.
    """

    own: Settings
    stream: str
    record: StreamRecord
    border: Border

    def __call__(self, checkpoint: Checkpoint, batch: int) -> bool:
        """As `Border` answers; raises PreflightRefused for another state than the stream's."""
        begun = stream_record.load(self.own, self.stream)
        assert begun is not None
        if changes := differences(self.record.state_fingerprint, begun.state_fingerprint):
            raise PreflightRefused(
                f"the state of stream {self.stream} was built by another aggregation: {changes}",
                f"take the change back, or rebuild the tables: {commands.plan(self.stream, to_batch=-1)}",
            )
        return self.border(checkpoint, batch)


def _launch(stream: str, settings: Settings, **options: object) -> Launched:
    """Start Spark under a name of its own, since the name is that of a log file, and the stream's session has one."""
    return spark.launch(settings, **{**options, "name": f"preview-{stream}"})  # type: ignore[arg-type]


def _failure(session: Session) -> Failure:
    """Why the session failed; raises TransientError if that says nothing about the code."""
    running = session.running[0] if session.running else None
    error = (running.status.error if running is not None else None) or {}
    code = error.get("code", "")
    if not error.get("permanent", False):
        raise TransientError(f"the replay failed: {error.get('found', 'see the log')}", error.get("next", "try again"))
    never_began = running is None or running.pipeline is None
    return Failure(
        code,
        error["found"],
        error.get("next", ""),
        starts=not never_began and code not in (PreflightRefused.code, OutputMismatch.code),
    )


def _watch(session: Session, over: threading.Event, progress: Callable[[int], None]) -> None:
    reported: int | None = None
    while not over.wait(_LOOK_EVERY):
        for running in list(session.running):
            batch, pipeline = running.status.batch, running.pipeline
            if batch is None or pipeline is None or batch == reported:
                continue
            reported = batch
            progress(batch)
