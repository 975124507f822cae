"""One stream inside a session: preflight, start, watch, stop, and start again after a passing fault."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import structlog

from streaming_jobs import generation as generations
from streaming_jobs.batch import Attempts, BatchPipeline, BatchReport, StopAtBorder
from streaming_jobs.code_version import code_version
from streaming_jobs.durations import milliseconds, parse_duration
from streaming_jobs.errors import ConfigurationError, OffsetsLost, PermanentError, PreflightRefused, TransientError
from streaming_jobs.failures import classify
from streaming_jobs.generation import BoundTable, BoundTopic, StreamRecord
from streaming_jobs.lease import Lease
from streaming_jobs.plan import state_fingerprint, traits
from streaming_jobs.preflight import World, enforce, verdicts
from streaming_jobs.progress import Status
from streaming_jobs.settings import Settings, StreamSettings
from streaming_jobs.sinks.delta import ensure_sink
from streaming_jobs.sinks.upkeep import Upkeep
from streaming_jobs.sources.kafka import KafkaSource
from streaming_jobs.sources.topics import Topics
from streaming_jobs.stream import Stream
from streaming_jobs.world import all_tables, gather, ledger_file

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming import DataStreamWriter, StreamingQuery

log = structlog.get_logger()

_FIRST_DELAY, _LONGEST_DELAY = 1.0, 60.0
_HEALTHY_AFTER = 600.0
_IDLE_BEFORE_STOP = 1.0
_TOPIC_CHECK_EVERY = 1.0


@dataclass
class Connection:
    """How a session reaches the cluster: Spark's options, and two clients (`quick` gives up after 2 s)."""

    spark_options: Mapping[str, str]
    topics: Topics
    quick: Topics


class BoundQuery:
    """The running query, once there is one: the pipeline's first batch can come before `start` returns."""

    def __init__(self) -> None:
        self._ready = threading.Event()
        self._query: StreamingQuery | None = None

    def bind(self, query: StreamingQuery) -> None:
        """Tell which query it is."""
        self._query = query
        self._ready.set()

    def bad_records(self, observation: str) -> int:
        """Bad records of one source in the plan that ran last (`Dataset.observe`)."""
        if not self._ready.wait(30) or self._query is None:
            raise TransientError("the query did not report itself within 30 s")
        found = self._query._jsq.streamingQuery().lastExecution().observedMetrics().get(observation)
        return int(found.get().getLong(0)) if found.isDefined() else 0


@dataclass
class RunningStream:
    """A stream of this session. All methods are called from the session's main thread."""

    stream: Stream
    settings: Settings
    connection: Connection | None
    lease: Lease
    trigger: str | None
    status: Status
    own: StreamSettings = field(init=False)
    stop_requested: threading.Event = field(default_factory=threading.Event)
    query: StreamingQuery | None = None
    pipeline: BatchPipeline | None = None
    _stop_since: float = 0.0
    _not_in_batch_since: float = 0.0
    _failures: int = 0
    _restart_at: float | None = None
    _healthy_since: float = 0.0
    _topics_checked: float = 0.0
    _seen_batch: int = -1

    def __post_init__(self) -> None:
        self.own = self.settings.for_stream(self.stream.name)

    @property
    def ended(self) -> bool:
        """Whether the stream is over in this session."""
        return self.status.state in ("stopped", "failed")

    @property
    def reach(self) -> Connection:
        """The connection, which is there from preflight on."""
        assert self.connection is not None
        return self.connection

    def preflight(self) -> World:
        """Look at checkpoint, tables and topics; raises PreflightRefused or OffsetsLost."""
        world = gather(self.settings, self.stream, self.reach.topics)
        self.status.warnings = enforce(verdicts(world))
        for warning in self.status.warnings:
            log.warning(warning, stream=self.stream.name)
        return world

    def start(self, spark: SparkSession) -> None:
        """Start the query, or record why not; a passing fault is tried again later by `poll`."""
        self._restart_at = None
        try:
            self._start(spark)
        except Exception as error:
            self.fail(classify(error))

    def poll(self, spark: SparkSession) -> None:
        """Look after the query: its end, its restart, its stop."""
        if self.ended:
            return
        if self.query is None:
            if self.stop_requested.is_set():
                self._stopped()
            elif self._restart_at is not None and time.monotonic() >= self._restart_at:
                self.status.restarts += 1
                self.start(spark)
            return
        if not self.query.isActive:
            self._query_ended()
            return
        if self.stop_requested.is_set():
            self._press_stop()
            return
        if self._failures and time.monotonic() - self._healthy_since > _HEALTHY_AFTER:
            self._failures = 0

    def request_stop(self) -> None:
        """Ask for a stop at the next batch border."""
        if not self.stop_requested.is_set() and not self.ended:
            self.stop_requested.set()
            self._stop_since = time.monotonic()
            self.status.state = "stopping"
            log.info("stop requested", stream=self.stream.name)

    def refresh_status(self) -> None:
        """Bring the status up to date with Spark's newest progress report."""
        self.status.heartbeat = time.time()
        if self.query is None or self.ended:
            return
        self._take_progress(self.query)
        if self.status.state in ("running", "idle", "starting") and self.status.batch is not None:
            recent = time.time() - (self.status.committed_at or 0) < max(5.0, 3 * self._interval())
            self.status.state = "running" if recent else "idle"

    def _take_progress(self, query: StreamingQuery) -> None:
        """Every report since the last look: the newest for the figures, all of them for what is summed up."""
        newest = query.lastProgress
        if newest is None:
            return
        fresh = [newest] if newest.batchId <= self._seen_batch + 1 else query.recentProgress
        for report in fresh:
            if report.batchId > self._seen_batch:
                self._seen_batch = report.batchId
                self.status.late_rows_dropped += late_rows(json.loads(report.json))
        update(self.status, json.loads(newest.json))

    def _start(self, spark: SparkSession) -> None:
        name = self.stream.name
        world = self.preflight()
        record = world.record or generations.first(name)
        if world.record is None:
            generations.save(self.settings, record)
        sources = self._sources()
        starts = self._starts(record, world)
        frames = {
            s.parameter: s.stream(
                spark, start=starts[s.topic.name], max_offsets=self.own.max_offsets_per_trigger // len(sources)
            )
            for s in sources
        }
        outputs = self.stream.outputs(**frames)
        plan_traits = traits(next(iter(outputs.values())))
        if len(outputs) > 1 and (any(traits(f).stateful for f in outputs.values()) or len(sources) > 1):
            raise ConfigurationError(
                f"stream {name} has several sinks and keeps state or joins sources",
                "split it: one stream for the state, and one for each further table",
            )
        code = code_version(self.stream, self.settings.flows)
        record = self._bind(record, world, starts, outputs, code_batch=(world.checkpoint.planned or -1) + 1)
        tables = {
            declared.name: ensure_sink(
                self.settings, declared, name, _schema(declared.name, outputs, self.stream), generation=record.generation
            )
            for declared, _ in all_tables(self.stream)
        }
        roles = {declared.name: role for declared, role in all_tables(self.stream)}
        bound = tuple(BoundTable(t.name, t.table_id, roles[t.name]) for t in tables.values())
        record = replace(record, tables=bound)
        if record != world.record:
            generations.save(self.settings, record)
        checkpoint = generations.checkpoint(self.settings, name, record.generation)
        handle = BoundQuery()
        letters = tables.pop(self.stream.dead_letters)
        primary, *secondary = tables.values()
        self.pipeline = BatchPipeline(
            stream=self.stream,
            generation=record.generation,
            checkpoint=checkpoint,
            topic_ids={t.name: t.topic_id for t in record.topics},
            sources=sources,
            primary=primary,
            secondary=secondary,
            dead_letters=letters,
            code=code,
            settings=self.own,
            traits=plan_traits,
            upkeep=[Upkeep(sink, self.settings.table, record.generation) for sink in (primary, *secondary, letters)],
            ledger_file=ledger_file(self.settings, name),
            attempts=Attempts(generations.folder(self.settings, name) / "attempt"),
            stop=self.stop_requested,
            before_commit=lambda: self._check_topics(record),
            report=self._report,
            query=handle,
        )
        spark.sparkContext.setLocalProperty("spark.scheduler.pool", name)
        frame = next(iter(outputs.values())) if len(outputs) == 1 else next(iter(frames.values()))
        upsert_state = plan_traits.stateful and primary.declared.mode == "upsert"
        writer: DataStreamWriter = (
            frame.writeStream.queryName(name)
            .outputMode("update" if upsert_state else "append")
            .option("checkpointLocation", str(checkpoint.folder))
            .foreachBatch(self.pipeline)
        )
        self.query = _triggered(writer, self.trigger or self.own.trigger, self.own).start()
        handle.bind(self.query)
        self._healthy_since = time.monotonic()
        self.status.generation = record.generation
        self.status.code_version = f"{code.hash} ({code.package})"
        self.status.error = None
        self.status.state = "running" if self.status.batch is not None else "starting"
        log.info("stream started", stream=name, generation=record.generation, code=code.hash)

    def _sources(self) -> list[KafkaSource]:
        lateness = self.own.lateness
        return [
            KafkaSource(parameter, topic, self.reach.spark_options, lateness or topic.delay)
            for parameter, topic in self.stream.sources.items()
        ]

    def _starts(self, record: StreamRecord, world: World) -> dict[str, dict[int, int]]:
        """Where each topic begins: what the record says, or the start position resolved to offsets now."""
        if world.checkpoint.planned is not None:
            return {t.name: {int(p): o for p, o in t.start.items()} for t in record.topics}
        return {
            topic.name: resolve_start(self.own.start, self.reach.topics, topic.name)
            for topic in self.stream.sources.values()
        }

    def _bind(
        self,
        record: StreamRecord,
        world: World,
        starts: Mapping[str, Mapping[int, int]],
        outputs: Mapping[str, DataFrame],
        *,
        code_batch: int,
    ) -> StreamRecord:
        """The record with its topics, code and state fingerprint; raises PreflightRefused if state would not fit."""
        if not record.topics or world.checkpoint.planned is None:
            topics = tuple(
                BoundTopic(t.name, t.topic_id or "", {str(p): o for p, o in starts[t.name].items()})
                for t in world.topics
            )
            record = replace(record, topics=topics)
        fingerprint = state_fingerprint(next(iter(outputs.values())))
        if world.checkpoint.committed is not None and record.state_fingerprint != fingerprint:
            raise PreflightRefused(
                f"the state of stream {self.stream.name} was built by another aggregation: "
                f"{dict(record.state_fingerprint)} then, {fingerprint} now",
                "take the change back, or start the stream over: move its state folder and its tables away",
            )
        record = replace(record, state_fingerprint=fingerprint)
        return record.with_code(code_version(self.stream, self.settings.flows), code_batch)

    def _check_topics(self, record: StreamRecord) -> None:
        """Before a commit, at most once a second: the topics are still the ones the stream began with."""
        if time.monotonic() - self._topics_checked < _TOPIC_CHECK_EVERY:
            return
        for topic in record.topics:
            try:
                info = self.reach.quick.describe(topic.name)
            except TransientError:  # the broker is away; the records were read while it was there
                log.info("topic could not be checked: no broker", topic=topic.name)
                return
            if info is None or info.id != topic.topic_id:
                raise OffsetsLost(
                    f"topic {topic.name} was deleted{'' if info is None else ' and made anew'} while stream "
                    f"{self.stream.name} was reading it",
                    "start the stream over: move its state folder and its tables away",
                )
        self._topics_checked = time.monotonic()

    def _report(self, done: BatchReport) -> None:
        status = self.status
        status.batch, status.batch_ms, status.batch_records = done.batch, done.milliseconds, done.records
        status.path, status.committer = done.path, done.committer
        status.committed_at = time.time()
        if not done.skipped:
            status.rows_written += done.rows
            status.dead_letters += done.dead_letters
        if done.warning:
            status.warnings = [*status.warnings, done.warning][-10:]
        log.info(
            "batch",
            stream=self.stream.name,
            batch=done.batch,
            records=done.records,
            rows=done.rows,
            dead_letters=done.dead_letters,
            ms=done.milliseconds,
            path=done.path,
            committer=done.committer,
        )

    def _press_stop(self) -> None:
        """A busy stream ends itself at the border. An idle one gets no batch, so it is stopped from here."""
        assert self.query is not None and self.pipeline is not None
        now = time.monotonic()
        if self.pipeline.in_batch:
            self._not_in_batch_since = 0.0
        elif not self._not_in_batch_since:
            self._not_in_batch_since = now
        idle = self._not_in_batch_since and now - self._not_in_batch_since > max(_IDLE_BEFORE_STOP, self._interval())
        if idle or now - self._stop_since > self.own.stop_deadline.total_seconds():
            self.query.stop()

    def _query_ended(self) -> None:
        assert self.query is not None and self.pipeline is not None
        query, pipeline, self.query = self.query, self.pipeline, None
        self._take_progress(query)
        failure: BaseException | None = pipeline.failure or query.exception()
        if pipeline.stopped_at_border or self.stop_requested.is_set() or failure is None:
            self._stopped()
        elif not isinstance(failure, StopAtBorder):
            self.fail(self._explained(classify(failure)))

    def _explained(self, error: Exception) -> Exception:
        """For records that are gone: the exact range, from the same rules as at start."""
        if isinstance(error, OffsetsLost):
            try:
                self.preflight()
            except (PermanentError, TransientError) as better:
                return better
        return error

    def _stopped(self) -> None:
        self.status.state = "stopped"
        log.info("stream stopped", stream=self.stream.name, batch=self.status.batch)

    def fail(self, error: Exception) -> None:
        """Record a failure: the stream is over, or, for one that may pass, tried again by `poll`."""
        code = getattr(error, "code", "REC-000")
        self.status.error = {
            "code": code,
            "found": getattr(error, "found", str(error)),
            "next": getattr(error, "next_step", ""),
            "permanent": str(isinstance(error, (PermanentError, ConfigurationError))).lower(),
        }
        self._failures += 1
        if isinstance(error, TransientError) and self._failures <= self.own.max_restarts:
            delay = min(_FIRST_DELAY * 2 ** (self._failures - 1), _LONGEST_DELAY)
            self._restart_at = time.monotonic() + delay
            log.warning("stream failed, will try again", stream=self.stream.name, error=str(error), seconds=delay)
            return
        self.status.state = "failed"
        log.error("stream failed", stream=self.stream.name, error=str(error), exc_info=error)

    def _interval(self) -> float:
        trigger = self.trigger or self.own.trigger
        every = parse_duration(trigger.removeprefix("every ")) if trigger.startswith("every ") else None
        return (every or self.own.min_commit_interval).total_seconds()


def resolve_start(start: str, topics: Topics, topic: str) -> dict[int, int]:
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


def update(status: Status, progress: dict[str, Any]) -> None:
    """Take over the figures of one of Spark's progress reports (`StreamingQueryProgress`)."""
    status.input_rows_per_s = _number(progress.get("inputRowsPerSecond"))
    status.processed_rows_per_s = _number(progress.get("processedRowsPerSecond"))
    behind = [
        max(latest - end.get(partition, 0), 0)
        for source in progress.get("sources", [])
        for topic, partitions in (source.get("latestOffset") or {}).items()
        for end in [(source.get("endOffset") or {}).get(topic, {})]
        for partition, latest in partitions.items()
    ]
    status.lag_records = sum(behind)
    watermark = (progress.get("eventTime") or {}).get("watermark")
    if watermark and not watermark.startswith("1970-01-01T00:00:00"):
        status.watermark = watermark
        status.watermark_delay_s = round(time.time() - datetime.fromisoformat(watermark).astimezone(UTC).timestamp(), 1)
    operators = progress.get("stateOperators") or []
    if operators:
        status.state_rows = sum(o.get("numRowsTotal", 0) for o in operators)
        status.state_mb = round(sum(o.get("memoryUsedBytes", 0) for o in operators) / 2**20, 2)


def late_rows(progress: Mapping[str, Any]) -> int:
    """Rows that Spark says it dropped behind the watermark in one batch; counted after partial aggregation."""
    return sum(o.get("numRowsDroppedByWatermark", 0) for o in progress.get("stateOperators") or [])


def _number(value: Any) -> float | None:
    return round(value, 1) if isinstance(value, (int, float)) and value == value and abs(value) < 1e15 else None


def _schema(table: str, outputs: Mapping[str, DataFrame], stream: Stream) -> Any:
    from pyspark.sql.types import StructType

    from streaming_jobs.sinks import dead_letters
    from streaming_jobs.stream import SOURCE_COLUMN

    if table == stream.dead_letters:
        return dead_letters.SCHEMA
    frame = next(frame for name, frame in outputs.items() if stream.sinks[name].name == table)
    return StructType([f for f in frame.schema.fields if f.name != SOURCE_COLUMN])


def _triggered(writer: DataStreamWriter, trigger: str, own: StreamSettings) -> DataStreamWriter:
    if trigger == "continuous":
        return writer.trigger(processingTime=f"{max(milliseconds(own.min_commit_interval), 1)} milliseconds")
    if trigger == "available-now":
        return writer.trigger(availableNow=True)
    if trigger.startswith("every "):
        interval = max(parse_duration(trigger.removeprefix("every ")), own.min_commit_interval)
        return writer.trigger(processingTime=f"{milliseconds(interval)} milliseconds")
    raise ConfigurationError(
        f"'{trigger}' is not a trigger", "use continuous, available-now, or 'every' and a duration"
    )

