"""One replay: an ordinary session of a stream on folders of its own, from the checkpoint there to an end.

Recoveries and previews run the same `ReplaySession`. Each chooses where it starts (`staging.fill`) and ends
(`border.py`), which topics it writes, and what a failure means; a slice, which has no state, reads one batch instead.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from streaming_jobs.errors import OutputMismatch, PermanentError, PreflightRefused, RecourseError, TransientError
from streaming_jobs.ledger.entry import LedgerEntry
from streaming_jobs.ledger.positions import TopicOffsets, by_place, ends_of
from streaming_jobs.platform import spark
from streaming_jobs.platform.runtime import LocalSpark
from streaming_jobs.platform.spark import Launched
from streaming_jobs.runtime.batch_hooks import Replan
from streaming_jobs.runtime.stream_queries import SparkQueries
from streaming_jobs.runtime.stream_runner import StreamRunner
from streaming_jobs.session import Session
from streaming_jobs.settings import Settings
from streaming_jobs.sinks.stored import entries
from streaming_jobs.sinks.tables import store_of
from streaming_jobs.stream import Stream
from streaming_jobs.table_sources.archives import Archives

if TYPE_CHECKING:
    from streaming_jobs.runtime.stream_sinks import TopicSinks

_LOOK_EVERY = 1.0

Watch = Callable[[StreamRunner, int | None], None]
"""Called once per second with the running stream and its newest committed batch (None before the first).

A RecourseError that it raises ends the session, and `ReplaySession.run` raises it again.
"""


@dataclass(frozen=True)
class ReplayFailure:
    """Why a replay did not reach its end. `starts` is False if the code cannot start on the stream's state at all."""

    code: str
    found: str
    next_step: str
    permanent: bool = True
    starts: bool = True

    def error(self, next_step: str) -> RecourseError:
        kind = PermanentError if self.permanent else TransientError
        return kind(f"the replay failed: {self.code} {self.found}", next_step)


@dataclass(frozen=True)
class ReplayResult:
    """The ledger entry of the replay's last batch, or why the replay failed."""

    last: LedgerEntry | None
    failure: ReplayFailure | None = None

    @property
    def reached(self) -> TopicOffsets:
        return ends_of(self.last.offsets) if self.last is not None else {}


@dataclass(frozen=True)
class ReplaySession:
    """A replay of `stream` under `settings`, whose state and tables must exist and belong to the replay alone.

    `ends` are the offsets that the replay has to reach on its way to its topics' ends; if it is `bounded`, sources read
    nothing past them. `replan` checks each batch before it runs. `topic_sinks` None: corrected records are written.
    `name` is the name of Spark's log file, if it is not the stream's.
    """

    settings: Settings
    stream: Stream
    archives: Archives
    ends: TopicOffsets
    bounded: bool = False
    replan: Replan | None = None
    topic_sinks: TopicSinks | None = None
    name: str | None = None

    def run(self, watch: Watch) -> ReplayResult:
        until = self.ends if self.bounded else None
        queries = SparkQueries(
            self.settings, self.replan, archives=self.archives, until=until, topic_sinks=self.topic_sinks
        )
        runtime = None if self.name is None else LocalSpark(self.settings, launch=partial(_launch, self.name))
        session = Session(self.settings, [self.stream], trigger="available-now", queries=queries, runtime=runtime)
        over, raised = threading.Event(), list[RecourseError]()
        watcher = threading.Thread(target=_watch, args=(session, watch, over, raised), daemon=True)
        watcher.start()
        try:
            code = session.run()
        finally:
            over.set()
            watcher.join()
        if raised:
            raise raised[0]
        if code:
            return ReplayResult(None, failure_of(session.running[0] if session.running else None))
        last = last_entry(self.settings, self.stream)
        return ReplayResult(last, missed_end(ends_of(last.offsets), self.ends, exactly=self.bounded))


def _watch(session: Session, watch: Watch, over: threading.Event, raised: list[RecourseError]) -> None:
    while not raised and not over.wait(_LOOK_EVERY):
        for running in list(session.running):
            if running.pipeline is None:
                continue
            try:
                watch(running, running.status.batch)
            except RecourseError as error:
                raised.append(error)
                session.stop_all.set()


def _launch(log_name: str, settings: Settings, **options: Any) -> Launched:
    """As `spark.launch`, which a session gives the name of its stream: the replay's log file has another name."""
    return spark.launch(settings, **{**options, "name": log_name})


def failure_of(running: StreamRunner | None) -> ReplayFailure:
    """The failure of a session, from the status of its stream (None: the stream was never started)."""
    error = (running.status.error if running is not None else None) or {}
    code, never_began = error.get("code", ""), running is None or running.pipeline is None
    return ReplayFailure(
        code,
        error.get("found", "see its log"),
        error.get("next", ""),
        permanent=error.get("permanent", False),
        starts=not never_began and code not in (PreflightRefused.code, OutputMismatch.code),
    )


def last_entry(settings: Settings, stream: Stream) -> LedgerEntry:
    """The ledger entry of a replay's last batch, by the replay's settings; raises PermanentError if there is none."""
    newest = entries(store_of(stream.primary).commits(settings, stream.primary), 1)
    if not newest or newest[0][1].batch < 0:
        raise PermanentError("the replay wrote no batch", "the topic holds no records; abort the plan")
    return newest[0][1]


def missed_end(reached: TopicOffsets, wanted: TopicOffsets, *, exactly: bool) -> ReplayFailure | None:
    """The failure of a replay that ended before (`exactly`: or after) its end in a partition; None if none did.

    A bounded replay has to end exactly at its end: a later record would be in the tables twice.
    """
    at, ends = by_place(reached), by_place(wanted)
    short = [place for place, end in ends.items() if at.get(place, 0) < end]
    beyond = [place for place, end in ends.items() if exactly and at.get(place, 0) > end]
    for place in (*short, *beyond):
        (topic, partition), how = place, "before" if short else "after"
        return ReplayFailure(
            PreflightRefused.code,
            f"the replay ended at {at.get(place, 0)} of topic {topic}, partition {partition}, {how} where it was to "
            f"end, {ends[place]}{': records are missing from the topic' if short else ''}",
            "see whether the topic still has these records",
        )
    return None


def replay_settings(settings: Settings, stream: str, state: Path, tables: Path, **stream_options: Any) -> Settings:
    """The settings of a replay: those of the stream, on folders of its own, without periodic savepoints."""
    every = settings.savepoint.every * 0
    own = settings.with_stream(stream, require_deploy=False, **stream_options).with_tables(tables)
    return own.model_copy(
        update={"state_dir": state, "savepoint": settings.savepoint.model_copy(update={"every": every})}
    )
