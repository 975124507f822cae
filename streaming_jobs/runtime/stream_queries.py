"""The queries of a session's streams: preflight, start, and the ends of their topics.

`Queries` is the seam between a session and Spark with Kafka: `SparkQueries` is the one that runs,
`streaming_jobs.testing` has queries without Spark.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from importlib import import_module
from typing import TYPE_CHECKING, Any, Protocol

import structlog

from streaming_jobs.errors import BrokerUnreachable, OffsetsLost, TransientError
from streaming_jobs.ledger.positions import TopicOffsets, ends_of
from streaming_jobs.platform.broker import bootstrap_servers
from streaming_jobs.preflight.findings import enforce
from streaming_jobs.preflight.rules import check_start
from streaming_jobs.preflight.snapshot import StreamSnapshot, folders, start_over, take_snapshot
from streaming_jobs.preflight.truncated_files import repair
from streaming_jobs.runtime.batch_hooks import BatchReport, Replan
from streaming_jobs.runtime.group_offsets import GroupOffsets
from streaming_jobs.runtime.lag import EndOffsets, Ends, position_in
from streaming_jobs.settings import Settings
from streaming_jobs.sinks.base import WriteLease
from streaming_jobs.sources.base import TopicReader
from streaming_jobs.sources.connection import Connection, NoBroker, client_file, remove_client_file
from streaming_jobs.sources.topics import UNKNOWN_FOR, Topics
from streaming_jobs.state.stream_record import StreamRecord
from streaming_jobs.storage.locations import Location
from streaming_jobs.stream import Stream
from streaming_jobs.table_sources.archives import Archives
from streaming_jobs.table_sources.topics import SourceEnds, end_names

if TYPE_CHECKING:
    from pyspark.sql import SparkSession
    from pyspark.sql.streaming.query import StreamingQuery

    from streaming_jobs.runtime.batch import BatchPipeline
    from streaming_jobs.runtime.query_handle import BuiltQuery
    from streaming_jobs.runtime.stream_sinks import ExternalSinks
    from streaming_jobs.table_sources.lookups import LookupHistory

log = structlog.get_logger()

_BUILDER = "streaming_jobs.runtime.query_builder"
_QUICK = timedelta(seconds=2)
_TOPIC_CHECK_EVERY, _TABLE_CHECK_EVERY = 1.0, 10.0


class RunningQuery(Protocol):
    """The part of Spark's `StreamingQuery` that a session uses; the names are Spark's."""

    @property
    def isActive(self) -> bool:  # noqa: N802
        """False once a stop was requested, or the query has failed or ended."""

    def reports(self, after: int) -> Sequence[Mapping[str, Any]]:
        """Spark's reports (`StreamingQueryProgress`) of batches after this one, and the newest one in any case.

        The oldest come first; reports of earlier batches may be among them. Empty before the first batch.
        """

    @property
    def ended(self) -> bool:
        """True once its thread in Spark has ended; `isActive` is False before that."""

    def exception(self) -> BaseException | None:
        """The failure that ended it, or None."""

    def stop(self) -> None:
        """End it; raises if its thread does not end in time."""


@dataclass(frozen=True)
class SparkQuery:
    query: StreamingQuery

    @property
    def isActive(self) -> bool:  # noqa: N802
        """As Spark reports; False as soon as a stop was requested (MicroBatchExecution.stop)."""
        return self.query.isActive

    def reports(self, after: int) -> Sequence[Mapping[str, Any]]:
        """In at most four calls of the JVM; PySpark makes six for each report, and holds the interpreter meanwhile."""
        from pyspark import SparkContext

        if (newest := self.query._jsq.lastProgress()) is None:
            return []
        if newest.batchId() <= after + 1:
            return [json.loads(newest.json())]
        jvm = SparkContext._jvm
        assert jvm is not None
        text = jvm.scala.runtime.ScalaRunTime.stringOf(self.query._jsq.recentProgress())  # Array({...}, {...})
        return list(json.loads(f"[{text.removeprefix('Array(').removesuffix(')')}]"))

    @property
    def ended(self) -> bool:
        """True if the query's thread has ended; `awaitTermination` is merely the opposite of `isActive`."""
        return not self.query._jsq.streamingQuery().queryExecutionThread().isAlive()

    def exception(self) -> BaseException | None:
        return self.query.exception()

    def stop(self) -> None:
        """As Spark does: it waits for the thread for `spark.sql.streaming.stopTimeout`, and raises after it."""
        self.query.stop()


_LOOK_EVERY = 0.01


def ended_alone(query: RunningQuery, goes_on: Callable[[], bool], ends_within: float) -> bool:
    """Wait for the end of a query, and stop it once `goes_on` is False; True if it ended without that.

    Raises TransientError if it has not ended `ends_within` seconds after the stop: then it still uses its folders.
    """
    while query.isActive or not query.ended:
        if not goes_on():
            break
        time.sleep(_LOOK_EVERY)
    else:
        return True
    deadline = time.monotonic() + ends_within
    try:
        query.stop()
    except Exception as error:  # noqa: BLE001 - it waits stopTimeout at most, and the thread may still end in time
        log.warning("the query has not stopped yet", reason=str(error)[:200])
    while not query.ended:
        if time.monotonic() > deadline:
            raise TransientError(f"the query does not end within {ends_within:g} s", "its log says what it waits for")
        time.sleep(_LOOK_EVERY)
    return False


@dataclass(frozen=True)
class QueryHooks:
    """A stream's part in its query: the trigger, the stop request, and the functions that a query calls.

    `built` gets the pipeline before the query starts, since its first batch can come before the start returns;
    `report` gets each batch's report. `lease` is the one under which the tables are written; a trial has none.
    """

    trigger: str
    stop: threading.Event
    built: Callable[[BatchPipeline], None]
    report: Callable[[BatchReport], None]
    lease: WriteLease | None = None


@dataclass(frozen=True)
class Preflight:
    """The stream's files, tables and topics at the moment of a preflight that passed, and its warnings."""

    snapshot: StreamSnapshot
    warnings: list[str]


@dataclass(frozen=True)
class LaunchedQuery:
    """A running query; its generation begins at `starts`."""

    query: RunningQuery
    generation: int
    starts: TopicOffsets


class Queries(Protocol):
    def open(self, streams: Iterable[Stream]) -> None:
        """Get ready for these streams; called once, before anything else."""

    def preflight(self, stream: Stream) -> Preflight:
        """Look at checkpoint, tables and topics; raises PreflightRefused or OffsetsLost."""

    def launch(self, spark: SparkSession, stream: Stream, snapshot: StreamSnapshot, hooks: QueryHooks) -> LaunchedQuery:
        """Start the stream's query from where the snapshot says; its pipeline goes to `hooks.built` before that."""

    def ends(self, stream: Stream) -> Ends | None:
        """The newest known ends of the stream's topics; None before they were seen."""

    def close(self) -> None:
        """Release what `open` has taken."""


@dataclass
class SparkQueries:
    """Queries of Spark over Kafka topics. A `connection` that is not given is made by `open`, from the settings.

    `archives` have records that topics no longer have; the default is the settings' archives.
    With `until`, queries with the trigger available-now end at these offsets instead of at their topics' ends, and read
    no record past them. Sources end batches at the `steps`. `shown`: the consumer groups that show the streams'
    offsets, if there are any.
    """

    settings: Settings
    replan: Replan | None = None
    connection: Connection | None = None
    archives: Archives | None = None
    until: TopicOffsets | None = None
    steps: Sequence[TopicOffsets] = ()
    external: ExternalSinks | None = None
    shown: GroupOffsets | None = None
    lookups: LookupHistory | None = None
    """Of a replay: what its stream's first run has looked up."""
    _ends: EndOffsets | None = field(default=None, init=False)
    _client: Location | None = field(default=None, init=False)

    def open(self, streams: Iterable[Stream]) -> None:
        """Find the cluster, and look at the ends of the streams' topics from now on."""
        streams = list(streams)
        if self.connection is None:
            self.connection = self._connected(streams)
            self._client = self.connection.client
        # What builds a query imports Arrow and NumPy, for a fifth of a second: meanwhile Spark starts.
        threading.Thread(target=import_module, args=[_BUILDER], name="imports", daemon=True).start()
        ends = SourceEnds.of(self._archives.settings, self.connection.quick, streams)
        self._ends = EndOffsets(ends, (name for stream in streams for name in end_names(stream))).start()

    def _connected(self, streams: Sequence[Stream]) -> Connection:
        """A connection to the cluster; without a broker one that has no topics, if no stream reads or writes any."""
        kafka = self.settings.kafka
        try:
            bootstrap = bootstrap_servers(self.settings)
        except BrokerUnreachable as error:
            if any(stream.topics or stream.topic_sinks for stream in streams):
                raise
            return Connection(client_file(self.settings, ""), NoBroker(error), NoBroker(error))
        return Connection(
            client=client_file(self.settings, bootstrap),
            topics=Topics.of(kafka, bootstrap),
            quick=Topics.of(kafka, bootstrap, _QUICK),
        )

    def preflight(self, stream: Stream) -> Preflight:
        """Repair files that a power cut has truncated, take the snapshot, and check it."""
        repair(self.settings, stream)
        snapshot = take_snapshot(self.settings, stream, self._archives.added_to(self._reach.topics, stream))
        has_external = stream.topic_sinks or stream.postgres_tables
        if has_external and (seen := self.external_sinks.look(self.settings, stream, self._reach)) is not None:
            snapshot = replace(snapshot, topic_sinks=seen.topics, postgres_tables=seen.postgres, external_known=True)
        return Preflight(snapshot, enforce(check_start(snapshot)))

    def launch(self, spark: SparkSession, stream: Stream, snapshot: StreamSnapshot, hooks: QueryHooks) -> LaunchedQuery:
        """Build the query and start it in a scheduler pool of its own."""
        from streaming_jobs.runtime.query_builder import QueryBuilder

        built = QueryBuilder(
            stream=stream,
            settings=self.settings,
            connection=self._reach,
            trigger=hooks.trigger,
            stop=hooks.stop,
            before_commit=self.before_commit(stream),
            report=self._reporting(stream, hooks.report, position_in(snapshot)),
            replan=self.replan,
            archives=self._archives,
            until=self.until,
            steps=self.steps,
            external=self.external_sinks,
            lease=hooks.lease,
            lookups=self.lookups,
        ).assemble(spark, snapshot)
        spark.sparkContext.setLocalProperty("spark.scheduler.pool", stream.name)
        return start(built, hooks)

    def _reporting(
        self, stream: Stream, report: Callable[[BatchReport], None], position: TopicOffsets | None
    ) -> Callable[[BatchReport], None]:
        """`report`; the offsets of the start and of each batch are shown too."""
        if (shown := self.shown) is None:
            return report
        if position is not None:
            shown.show(stream, position)

        def report_and_show(done: BatchReport) -> None:
            report(done)
            shown.show(stream, ends_of(done.entry.offsets))

        return report_and_show

    def before_commit(self, stream: Stream) -> Callable[[StreamRecord], None]:
        """The check of each batch: the topics are still the same."""
        return TopicIdCheck(stream, self.settings, self._archives.added_to(self._reach.quick, stream))

    def ends(self, stream: Stream) -> Ends | None:
        """The ends in the newest look of the thread."""
        return self._ends.newest(end_names(stream)) if self._ends is not None else None

    @property
    def external_sinks(self) -> ExternalSinks:
        """The sinks outside of the store of tables; their clients are made when the first one is opened."""
        if self.external is None:
            from streaming_jobs.runtime.stream_sinks import ConnectedSinks

            self.external = ConnectedSinks()
        return self.external

    def close(self) -> None:
        """Stop the thread that samples the topics, and remove the files that the processes of Spark read."""
        if self.external is not None:
            self.external.close()
        if self.shown is not None:
            self.shown.close()
        if self._ends is not None:
            self._ends.close()
        if self._client is not None:
            remove_client_file(self._client)
            self._client = self.connection = None

    @property
    def _archives(self) -> Archives:
        return self.archives or Archives(self.settings)

    @property
    def _reach(self) -> Connection:
        assert self.connection is not None
        return self.connection


def start(built: BuiltQuery, hooks: QueryHooks) -> LaunchedQuery:
    hooks.built(built.pipeline)
    return LaunchedQuery(SparkQuery(built.start()), built.record.generation, built.record.starts)


@dataclass
class TopicIdCheck:
    """A check before a commit, at most once per second: the topics are still the same as at the stream's start.

    The id of a table costs a reading of its log, so a stream that reads tables checks every ten seconds. A topic that
    the broker does not know was deleted only if it stays unknown for `UNKNOWN_FOR`.
    """

    stream: Stream
    settings: Settings
    topics: TopicReader
    monotonic: Callable[[], float] = time.monotonic
    _checked: float | None = field(default=None, init=False)
    _unknown_since: float | None = field(default=None, init=False)

    def __call__(self, record: StreamRecord) -> None:
        """Raise OffsetsLost for a topic that was deleted, or recreated, while the stream was reading it."""
        every = _TABLE_CHECK_EVERY if self.stream.tables_read else _TOPIC_CHECK_EVERY
        if self._checked is not None and self.monotonic() - self._checked < every:
            return
        began = self.monotonic()
        for topic in record.topics:
            try:
                info = self.topics.describe(topic.name)
            except TransientError:  # the broker is away; the records were read while it was there
                log.info("topic could not be checked: no broker", topic=topic.name)
                return
            if info is None and self._kind(topic.name) == "topic" and not self._long_unknown():
                log.info("topic could not be checked: the broker does not know it", topic=topic.name)
                return
            if info is None or info.id != topic.topic_id:
                raise OffsetsLost(
                    f"{self._kind(topic.name)} {topic.name} was deleted{'' if info is None else ' and made anew'} "
                    f"while stream {self.stream.name} was reading it",
                    start_over(self.stream.name, folders(self.settings, self.stream)),
                )
        self._checked, self._unknown_since = began, None

    def _long_unknown(self) -> bool:
        """True if a topic has been unknown at each check of the last `UNKNOWN_FOR` seconds."""
        now = self.monotonic()
        if self._unknown_since is None:
            self._unknown_since = now
        return now - self._unknown_since >= UNKNOWN_FOR

    def _kind(self, name: str) -> str:
        return "table" if any(table.name == name for table in self.stream.tables_read) else "topic"
