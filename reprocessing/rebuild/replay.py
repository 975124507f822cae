"""The replay: an ordinary session of the stream on the staging folders, from its checkpoint to the topics' end."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import structlog

from reprocessing.planning.conditions import refuse_unaskable
from reprocessing.plans.plan import StreamPlan
from reprocessing.rebuild.context import RecoveryContext, RecoveryEvents
from reprocessing.rebuild.replay_end import RowByRow, at_the_border, border_of, check_end
from reprocessing.rebuild.void import void_for
from streaming_jobs.errors import PermanentError, RecourseError, TransientError, UsageError
from streaming_jobs.ledger.entry import LedgerEntry
from streaming_jobs.ledger.positions import TopicOffsets, ends_of
from streaming_jobs.runtime.stream_queries import SparkQueries
from streaming_jobs.session import Session
from streaming_jobs.settings import Settings
from streaming_jobs.sinks.stored import entries
from streaming_jobs.sinks.tables import existing_table, store_of
from streaming_jobs.sources.void_ranges import VoidRanges
from streaming_jobs.stream import Stream
from streaming_jobs.table_sources.archives import Archives
from streaming_jobs.text import commands
from streaming_jobs.text.spelling import counted

log = structlog.get_logger()

_PATIENCE = 15.0
"""Seconds without progress after which a replay says what it waits for."""


def replay(context: RecoveryContext) -> Mapping[str, Any]:
    """Run to the topics' end, and check that the replay has reached the stream's position.

    The replay of a bounded recovery runs to the end of its last batch, and not further.

    Raises PermanentError or TransientError, as the failure of the session was.
    """
    began = time.monotonic()
    # The replay has folders of its own; archives are where the stream's tables are.
    until = context.plan.until
    archives = Archives(context.settings, void_for(context))
    topics = (topic for topic in context.plan.saw.topics if not topic.continues)
    void = {topic.name: archives.void_of(context.stream, topic.name, topic.topic_id) for topic in topics}
    queries = SparkQueries(
        context.own,
        border_of(context) if until is None else RowByRow(context.own, context.stream),
        archives=archives,
        until=None if until is None else until.ends,
    )
    session = Session(context.own, [context.stream], trigger="available-now", queries=queries)
    over = threading.Event()
    refused: list[UsageError] = []
    watcher = threading.Thread(target=_watch, args=(session, context, void, over, refused), daemon=True)
    watcher.start()
    try:
        code = session.run()
    finally:
        over.set()
        watcher.join()
    if refused:
        raise refused[0]
    if code != 0:
        error = (session.running[0].status.error or {}) if session.running else {}
        permanent = error.get("permanent", False)
        raise (PermanentError if permanent else TransientError)(
            f"the replay failed: {error.get('code', '')} {error.get('found', 'see its log')}",
            f"{commands.abort(context.plan.id)}, correct it, and plan again"
            if permanent
            else f"continue it: {commands.resume(context.plan.id)}",
        )
    last = last_entry(context.own, context.stream)
    reached = ends_of(last.offsets)
    check_end(context.plan, reached, context.kept().ends)
    return {
        "batch": last.batch,
        "seconds": round(time.monotonic() - began, 1),
        "records": _read(context.plan, void, reached),
        "since": at_the_border(context, reached) if until is None else 0,
        "ends": {topic: dict(ends) for topic, ends in reached.items()},
    }


def _watch(
    session: Session,
    context: RecoveryContext,
    void: Mapping[str, VoidRanges],
    over: threading.Event,
    refused: list[UsageError],
) -> None:
    """Look at the replay's progress once per second; end it if a rule cannot be evaluated on the table it writes."""
    rules_checked = False
    planned = context.plan.records
    progress = ReplayProgress(context.events, planned, max(planned, _present(context, void)))
    while not over.wait(1.0):
        for running in list(session.running):
            pipeline = running.pipeline
            if pipeline is not None and not rules_checked:
                rules_checked = True
                try:
                    table = existing_table(running.settings, running.stream.primary, running.stream.name)
                    refuse_unaskable(table.readable(), context.plan.checks.rules)
                except UsageError as error:
                    refused.append(error)
                    session.stop_all.set()
            if pipeline is None or running.status.batch is None:
                continue
            try:
                reached = pipeline.files.checkpoint.end(running.status.batch)
            except RecourseError:  # Spark is writing it
                continue
            progress.reached(_read(context.plan, void, reached), running.status.batch)


@dataclass
class ReplayProgress:
    """Reports the records that a replay has read when they become more; if they do not, once what it waits for.

    `planned` were there when the plan was made, `total` are there now; `clock` gives seconds.
    """

    events: RecoveryEvents
    planned: int
    total: int
    clock: Callable[[], float] = time.monotonic
    _done: int = -1
    _moved: float = 0.0
    _waits: bool = False

    def reached(self, done: int, batch: int) -> None:
        """The replay has read so many records, and committed this batch."""
        if self._done < 0 and self.total > self.planned:
            more = counted(self.total - self.planned, "record", "has", "have")
            self.events.tell(f"  replay: {more} come since the plan was made, and are read too")
        if done != self._done:
            self._done, self._moved, self._waits = done, self.clock(), False
            self.events.progress(done, max(self.total, done))
        elif not self._waits and self.clock() - self._moved >= _PATIENCE:
            self._waits = True
            what = f"the commit of batch {batch + 1}" if done < self.total else "the end of its session"
            self.events.tell(f"  replay: it waits for {what}")


def _present(context: RecoveryContext, void: Mapping[str, VoidRanges]) -> int:
    """The records that the replay will read, as its topics end now; 0 if that is not known, or bounded by the plan."""
    saw = context.plan.saw.topics
    if context.plan.until is not None or any(topic.continues for topic in saw):
        return 0
    try:
        return _read(context.plan, void, {topic.name: context.topics.latest(topic.name) for topic in saw})
    except RecourseError as error:  # the session meets it too, and says so
        log.info("the ends of the topics are not known", reason=error.found)
        return 0


def _read(plan: StreamPlan, void: Mapping[str, VoidRanges], reached: TopicOffsets) -> int:
    """The offsets from the replay's start to where it is, without void ones."""
    begins = {(topic, p): begin for topic, p, begin, _ in plan.ranges()}
    spans = {t: {p: (begins.get((t, p), 0), end) for p, end in each.items()} for t, each in reached.items()}
    return sum(end - begin for each in spans.values() for begin, end in each.values()) - sum(
        void[topic].count(each) for topic, each in spans.items() if topic in void
    )


def last_entry(settings: Settings, stream: Stream) -> LedgerEntry:
    """The ledger entry of the replay's last batch, by the replay's settings; raises PermanentError if there is none."""
    newest = entries(store_of(stream.primary).commits(settings, stream.primary), 1)
    if not newest or newest[0][1].batch < 0:
        raise PermanentError("the replay wrote no batch", "the topic holds no records; abort the plan")
    return newest[0][1]
