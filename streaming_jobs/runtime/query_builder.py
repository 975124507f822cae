"""From a declaration to a query that is ready to start: topics, plan, tables and record are brought together here.

Errors that can be seen beforehand are refused before Spark starts the query: an output that does not fit its table, a
changed aggregation on existing state, outputs that do not share their state.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING

import structlog

from streaming_jobs.errors import ConfigurationError, RecourseError, UsageError
from streaming_jobs.ledger.positions import OffsetRange, TopicOffsets, first_after
from streaming_jobs.platform.cluster import cores_file
from streaming_jobs.platform.failures import function_raised
from streaming_jobs.platform.spark import PARTITIONS
from streaming_jobs.platform.spark_on_store import hadoop_path
from streaming_jobs.preflight.snapshot import StreamSnapshot, TopicSnapshot, ledger_file
from streaming_jobs.preflight.topic_rules import primary_has
from streaming_jobs.runtime import output_plans
from streaming_jobs.runtime.batch import BatchPipeline
from streaming_jobs.runtime.batch_hooks import BatchFiles, BatchHooks, BatchReport, DriverPathAttempts, Pause, Replan
from streaming_jobs.runtime.batch_watermark import WatermarkServer
from streaming_jobs.runtime.code_version import loaded_code
from streaming_jobs.runtime.function_plan import FunctionPlan, all_set_to, emit_of, format_of_state
from streaming_jobs.runtime.isolation import Isolation
from streaming_jobs.runtime.late_records import LateRecords
from streaming_jobs.runtime.output_frames import fitted_outputs
from streaming_jobs.runtime.query_handle import BuiltQuery, QueryHandle, for_each_batch
from streaming_jobs.runtime.shared_plan import SharedPlan
from streaming_jobs.runtime.slice_commits import SliceCommits
from streaming_jobs.runtime.small_batches import WITHOUT_CLOSURES, plan_small_batches
from streaming_jobs.runtime.spark_plan import PlanTraits
from streaming_jobs.runtime.state_changes import StateChange, other_state
from streaming_jobs.runtime.stateless_part import stateless_parts
from streaming_jobs.runtime.stream_sinks import (
    ConnectedSinks,
    ExternalSinks,
    SinkOpening,
    check_external,
    check_tables,
    column_changes,
    make_tables,
    sinks_of,
    upkeep_of,
)
from streaming_jobs.runtime.used_columns import used_columns
from streaming_jobs.settings import Settings, StreamSettings
from streaming_jobs.sinks.base import SinkSet, WriteLease
from streaming_jobs.sinks.stored import StoredTable
from streaming_jobs.sinks.tables import all_tables
from streaming_jobs.sources.base import TopicReader
from streaming_jobs.sources.connection import Connection
from streaming_jobs.sources.kafka import KAFKA, KafkaSource
from streaming_jobs.sources.planner import DRIVER_SHARE, FIRST, BatchLimits
from streaming_jobs.state import checkpoint, stream_record
from streaming_jobs.state.ledger_file import FirstReads
from streaming_jobs.state.redrive_requests import RedriveRequests
from streaming_jobs.state.savepoint_retention import PeriodicSavepoints, try_take
from streaming_jobs.state.set_aside import SetAside, SetAsideFile
from streaming_jobs.state.slice_requests import SliceRequests
from streaming_jobs.state.stream_folder import StreamFolder, attempt_file
from streaming_jobs.state.stream_record import BoundTable, BoundTopic, StreamRecord
from streaming_jobs.storage.files import scratch
from streaming_jobs.storage.locations import Location
from streaming_jobs.stream import KafkaTopic, Stream
from streaming_jobs.table_sources.archives import Archives
from streaming_jobs.table_sources.lookups import LookupFrames, LookupHistory, LookupPins, Lookups
from streaming_jobs.table_sources.source import TableSource
from streaming_jobs.text.durations import milliseconds, parse_duration

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming.readwriter import DataStreamWriter


log = structlog.get_logger()

# The bounds on a batch of one source, from the stream's settings and its trigger.

_WAIT = 0.1
"""Seconds that the planner of an idle stream waits for a record, before Spark asks again."""


def batch_limits(
    stream_settings: StreamSettings, sources: int, trigger: str, commit_interval: timedelta
) -> BatchLimits:
    """The bounds for each of so many sources. With several of them none waits for records: another may have some.

    At least one record: Spark would take 0 for no limit, or make no progress.
    """
    share = max(1, stream_settings.max_offsets_per_trigger // sources)
    apart, often = commit_interval, not trigger.startswith("every ")
    if not often:
        apart = max(apart, parse_duration(trigger.removeprefix("every ")))
    return BatchLimits(
        seconds=max(stream_settings.batch_seconds, apart).total_seconds(),
        records=share,
        bytes=max(1, (stream_settings.max_batch_mb << 20) // sources),
        wait=_WAIT if sources == 1 else 0.0,
        first=FIRST if often else share,
    )


# The options of a query: where it starts in a topic, and when it makes a batch.


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


def sources_of(
    stream: Stream,
    stream_settings: StreamSettings,
    connection: Connection,
    archives: Archives,
    topic_ids: Mapping[str, str],
) -> list[KafkaSource | TableSource]:
    """The sources in the order of their declaration.

    Tables and archives lie in the folders of `archives`, also if a replay writes elsewhere.
    """
    made: list[KafkaSource | TableSource] = []
    client, clients = connection.client, connection.clients or KAFKA
    for parameter, source in stream.sources.items():
        declared = stream_settings.lateness  # zero is a lateness too
        lateness = source.delay if declared is None else declared
        if isinstance(source, KafkaTopic):
            topic_id = topic_ids.get(source.name, "")
            archive, void = archives.of(stream, source.name, topic_id), archives.void_of(stream, source.name, topic_id)
            made.append(KafkaSource(parameter, source, client, lateness, archive, void, clients))
        else:
            made.append(TableSource(parameter, source, client, lateness, archives.versions_of(stream, source.name)))
    return made


@dataclass(frozen=True)
class QueryBuilder:
    """Builds the query of one stream; `before_commit` and `report` are hooks of its pipeline, `until` bounds it."""

    stream: Stream
    settings: Settings
    connection: Connection
    trigger: str
    stop: threading.Event
    before_commit: Callable[[StreamRecord], None]
    report: Callable[[BatchReport], None]
    replan: Replan | None = None
    archives: Archives | None = None
    until: TopicOffsets | None = None
    steps: Sequence[TopicOffsets] = ()
    external: ExternalSinks = field(default_factory=ConnectedSinks)
    lease: WriteLease | None = None
    lookups: LookupHistory | None = None
    """Of a replay: what the stream's first run has looked up."""

    @property
    def stream_settings(self) -> StreamSettings:
        return self.settings.for_stream(self.stream.name)

    @property
    def _commit_interval(self) -> timedelta:
        return self.stream_settings.commit_interval(upsert=self.stream.primary.mode == "upsert")

    @property
    def _is_replay(self) -> bool:
        """True if the stream writes staging tables: what it reads lies elsewhere."""
        return self.archives is not None and self.archives.settings.tables != self.settings.tables

    @property
    def limits(self) -> BatchLimits:
        return batch_limits(self.stream_settings, len(self.stream.sources), self.trigger, self._commit_interval)

    def limits_of(self, topic: str) -> BatchLimits:
        spark, until = self.settings.spark, None if self.until is None else self.until.get(topic, {})
        steps = [step[topic] for step in self.steps if topic in step]
        if self.lookups is not None:
            steps = sorted([*steps, *self.lookups.steps(topic)], key=lambda step: sum(step.values()))
        limits = replace(self.limits, until=until, steps=steps)
        if not spark.has_executors:
            return replace(limits, tasks=spark.reading_tasks)
        return replace(
            limits,
            tasks=spark.reading_tasks,
            cores=cores_file(self.settings),
            driver_share=DRIVER_SHARE,
        )

    def _times_of(self, parameter: str) -> Path:
        """The file of the times of one source's batches: in the session's folder, on this machine."""
        return scratch(self.settings.home, "spark").folder.absolute() / f"times-{self.stream.name}-{parameter}"

    def assemble(self, spark: SparkSession, snapshot: StreamSnapshot) -> BuiltQuery:
        """Bring everything together; writes stream.json and makes or widens the tables."""
        name = self.stream.name
        record = snapshot.record or stream_record.first(name)
        if snapshot.record is None:
            record = stream_record.save(self.settings, record)
        file = SetAsideFile(StreamFolder.of(self.settings, name).set_aside)
        aside = file.load().in_generation(record.generation)
        topic_ids = {topic.name: topic.topic_id or "" for topic in snapshot.topics}
        sources = self._without(aside, self._sources(topic_ids))
        starts = self._starts(record, snapshot)
        watermarks = WatermarkServer()
        timed = watermarks.timed(sources)
        frames = {
            s.parameter: s.stream(
                spark,
                start=starts[s.name],
                limits=replace(self.limits_of(s.name), times=self._times_of(s.parameter)),
                owner=name,
                timed=timed.get(s.parameter),
            )
            for s in sources
        }
        pins = self._pins(record.generation)
        lookups = self._lookups.frames(spark, pins)
        outputs = self._outputs({**frames, **lookups})
        plan = FunctionPlan(self.stream, self.settings, outputs)
        plan_traits = plan.traits
        self._check_isolation(spark, sources, plan_traits, lookups)
        late = self._late_records(spark, sources)
        record = self._bound(spark, record, snapshot, starts, plan)
        check_external(self.stream, outputs)
        self._check_lease()  # opening them fences every other driver
        external = self.external.open(
            SinkOpening(self.settings, self.stream, record.generation, self.connection, outputs, self.lease)
        )
        tables = make_tables(self.settings, self.stream, outputs, record.generation)
        if self.lease is not None:
            for table in tables.values():
                table.under(self.lease, record.generation)
        roles = {declared.name: role for declared, role in all_tables(self.stream)}
        record = replace(record, tables=tuple(BoundTable(t.name, t.table_id, roles[t.name]) for t in tables.values()))
        if record != snapshot.record:
            stream_record.save(self.settings, record)
        by_table = {sink.name: outputs[name] for name, sink in self.stream.sinks.items() if name in outputs}
        output_plans.note(
            StreamFolder.of(self.settings, name).output_plans, record.code[-1].hash, by_table, frames.values()
        )
        handle = QueryHandle(spark, [self._times_of(s.parameter) for s in sources])
        slices = SliceCommits(SliceRequests.of(self.settings, name), RedriveRequests.of(self.settings, name), tables)
        sinks = sinks_of(self.stream, tables, self.stream_settings, external)
        isolation = Isolation.of(
            self.stream,
            file,
            aside,
            [source for source in sources if isinstance(source, KafkaSource)],
            sinks,
            lookups,
            stateful=plan_traits.may_keep_state,
            in_replay=self._is_replay,
        )
        pipeline = self._pipeline(record, sources, tables, sinks, plan_traits, handle, slices, isolation)
        pipeline.lookups, pipeline.late = None if pins is None else LookupFrames(lookups, pins), late
        checkpoint.point_to(pipeline.files.checkpoint.folder)
        if snapshot.checkpoint.planned is None:
            pipeline.files.checkpoint.begin_at(
                {topic.name: starts[topic.name] for topic in self.stream.sources.values()}
            )
        if len(outputs) == 1 or plan.shared:
            # In the tables' columns from the start, so that no batch is planned a second time.
            fitted = fitted_outputs(self.stream, sinks, outputs, [source.name for source in sources])
            frame = fitted[sinks.first.name]
            if len(outputs) > 1:
                pipeline.shared = SharedPlan.of(name, fitted)
                frame = pipeline.shared.frame
            by_name = {source.reading_name(name): source for source in sources}
            fields = {reading: source.fields for reading, source in by_name.items()}
            for reading, used in used_columns(frame, fields).items():
                by_name[reading].build_only(name, used)
        else:
            frame = next(iter(frames.values()))
        updates = plan_traits.stateful and emit_of(self.stream) == "update"
        writer: DataStreamWriter = (
            frame.writeStream.queryName(name)
            .outputMode("update" if updates else "append")
            .option("checkpointLocation", hadoop_path(pipeline.files.checkpoint.folder))
        )
        writer = for_each_batch(writer, slices.around(pipeline))
        if plan_traits.stateful and plan_traits.watermarks == len(timed) > 0:
            watermarks.listen(spark, len(timed), its_own=not plan_traits.semi_joins)
        return BuiltQuery(
            record,
            pipeline,
            triggered(writer, self.trigger, self._commit_interval),
            handle,
            self._options(spark, plan_traits, record, pipeline.files.checkpoint),
            watermarks,
        )

    def _options(
        self, spark: SparkSession, plan_traits: PlanTraits, record: StreamRecord, of: checkpoint.Checkpoint
    ) -> AbstractContextManager[None]:
        """The session's configuration while the query starts, which keeps it."""
        # Without it, a join of two streams would match rows whose keys are null.
        conf = {"spark.sql.constraintPropagation.enabled": "true"} if plan_traits.joins_streams else {}
        if plan_traits.may_keep_state:
            partitions = self._state_partitions(spark, of)
            conf[PARTITIONS] = str(partitions)
            if partitions == 1:
                plan_small_batches(spark)
                conf |= WITHOUT_CLOSURES
        if record.adopted:
            conf |= format_of_state(of)
        return all_set_to(spark, conf)

    def _state_partitions(self, spark: SparkSession, of: checkpoint.Checkpoint) -> int:
        """That of the state that is there; before it, that of the settings."""
        wanted = self.stream_settings.state_partitions
        if (fixed := of.state_partitions) is None:
            return wanted or int(spark.conf.get(PARTITIONS) or 1)
        if wanted not in (0, fixed):
            log.warning("state_partitions has no effect", stream=self.stream.name, wanted=wanted, state_has=fixed)
        return fixed

    def check(self, spark: SparkSession, record: StreamRecord, *, keeps_state: bool) -> dict[str, str]:
        """Raise what `assemble` would raise for the stream's function, or return the fingerprint of its state.

        Writes nothing, and needs no broker.
        """
        outputs = self._without_start(spark)
        plan = FunctionPlan(self.stream, self.settings, outputs)
        self._check_isolation(spark, self._sources({}), plan.traits, self._lookups.frames(spark))
        self._late_records(spark, self._sources({}))
        plan.checked_frame()
        plan.check_sources(record, StreamFolder.of(self.settings, self.stream.name).checkpoint(record.generation))
        fingerprint = plan.checked_state(record, keeps_state=keeps_state)
        check_external(self.stream, outputs)
        check_tables(self.settings, self.stream, outputs)
        return fingerprint

    def change(
        self, spark: SparkSession, record: StreamRecord, of: checkpoint.Checkpoint
    ) -> tuple[StateChange, list[str]]:
        """What the function means for the state in the checkpoint, and the columns that the tables gain or lack by it.

        Raises what calling the function raises.
        """
        outputs = self._without_start(spark)
        plan = FunctionPlan(self.stream, self.settings, outputs)
        return plan.change(spark, record, of), list(column_changes(self.settings, self.stream, outputs))

    def discarding(self, spark: SparkSession, folder: Location) -> DataStreamWriter:
        """The query of a stream with one output, on a checkpoint that has begun; its rows go nowhere."""
        [frame] = self._without_start(spark).values()
        mode = "update" if emit_of(self.stream) == "update" else "append"
        written = frame.writeStream.outputMode(mode).format("noop")
        return triggered(written.option("checkpointLocation", hadoop_path(folder)), self.trigger, self._commit_interval)

    def _without_start(self, spark: SparkSession) -> Mapping[str, DataFrame]:
        return self._outputs(
            {
                s.parameter: s.stream(spark, start={}, limits=self.limits_of(s.name), owner=self.stream.name)
                for s in self._sources({})
            }
            | self._lookups.frames(spark)
        )

    def _outputs(self, frames: Mapping[str, DataFrame]) -> Mapping[str, DataFrame]:
        """Call the stream's function; raises UsageError if it returns no frame, FunctionRaised if it raises."""
        from pyspark.errors import AnalysisException, ParseException
        from pyspark.sql import DataFrame

        function = self.stream.function
        try:
            outputs = self.stream.outputs(**frames)
        except (RecourseError, AnalysisException, ParseException):
            raise
        except Exception as error:
            raise function_raised(function, error) from error
        returned: Mapping[str, object] = outputs
        for sink, frame in returned.items():
            if not isinstance(frame, DataFrame):
                place = f"{function.__code__.co_filename}:{function.__code__.co_firstlineno}"
                raise UsageError(
                    f"the function of stream {self.stream.name} returned {type(frame).__name__} for {sink}, "
                    f"not a DataFrame ({place})",
                    "return a DataFrame, or for several sinks a mapping of each sink's name to one",
                )
        return outputs

    def _sources(self, topic_ids: Mapping[str, str]) -> list[KafkaSource | TableSource]:
        archives = self.archives or Archives(self.settings)
        return sources_of(self.stream, self.stream_settings, self.connection, archives, topic_ids)

    @property
    def _lookups(self) -> Lookups:
        """The tables that the stream looks up; those of a replay are the stream's own."""
        return Lookups(self.stream, (self.archives or Archives(self.settings)).settings)

    def _pins(self, generation: int) -> LookupPins | None:
        """What chooses the versions of the tables that the stream looks up; None if it looks up none."""
        if not self.stream.lookups:
            return None
        folder = StreamFolder.of(self.settings, self.stream.name)
        return LookupPins(
            generation,
            folder.checkpoint(generation),
            folder.lookups,
            self._lookups.tables(),
            self.lookups,
            newest=self.stream_settings.replay_lookups == "newest",
        )

    def _without(
        self, aside: SetAside, sources: Sequence[KafkaSource | TableSource]
    ) -> list[KafkaSource | TableSource]:
        """The sources without the records that are set aside."""
        drops = self.stream.errors.decode == "drop"
        return [
            replace(source, aside=aside.of_topic(source.name), drops_refused=drops)
            if isinstance(source, KafkaSource)
            else source
            for source in sources
        ]

    def _check_isolation(
        self,
        spark: SparkSession,
        sources: Sequence[KafkaSource | TableSource],
        plan_traits: PlanTraits,
        lookups: Mapping[str, DataFrame],
    ) -> None:
        """Raise ConfigurationError if records on which the function raises can not be found ahead of its state."""
        if self.stream.errors.function != "fail" and plan_traits.may_keep_state:
            records = {source.parameter: source.batch(spark, {}, {}) for source in sources}
            stateless_parts(self.stream, {**records, **lookups})

    def _late_records(
        self, spark: SparkSession, sources: Sequence[KafkaSource | TableSource]
    ) -> dict[str, LateRecords]:
        """What finds the late records of each table that keeps them; raises UsageError where none can."""
        return {table: LateRecords.of(spark, self.stream, table, sources) for table in self.stream.late_tables}

    def _starts(self, record: StreamRecord, snapshot: StreamSnapshot) -> TopicOffsets:
        """The first offsets of each topic: from the record, or resolved from `start` if the record has none."""
        if snapshot.checkpoint.planned is not None:
            return record.starts
        recovered = record.generation > 1 and bool(record.starts)  # a recovery from the very start
        return {
            t.name: self._recorded_start(record, t, recovered=recovered) or self._resolved_start(t.name)
            for t in snapshot.topics
        }

    def _recorded_start(self, record: StreamRecord, topic: TopicSnapshot, *, recovered: bool) -> dict[int, int] | None:
        """Where a first start that planned no batch, or a recovery, begins; Spark wants each partition named.

        None if no start is recorded for this topic. Where records of a first start are gone, it begins after them.
        """
        bound = record.topic(topic.name)
        start = dict(bound.start) if bound is not None else {}
        if not recovered:
            if bound is None or bound.topic_id != topic.topic_id:
                return None
            firsts = {p: first_after(offset, p, topic.earliest, topic.continues) for p, offset in start.items()}
            if gone := {p: first for p, first in firsts.items() if first is not None}:
                log.warning("records of the first start are gone", stream=self.stream.name, topic=topic.name)
                start |= gone
        return {p: start.get(p, first) for p, first in topic.earliest.items()}

    def _resolved_start(self, topic: str) -> dict[int, int]:
        topics = (self.archives or Archives(self.settings)).added_to(self.connection.topics, self.stream)
        return resolve_start(self.stream_settings.start, topics, topic)

    def _bound(
        self,
        spark: SparkSession,
        record: StreamRecord,
        snapshot: StreamSnapshot,
        starts: TopicOffsets,
        plan: FunctionPlan,
    ) -> StreamRecord:
        """The record with its topics, code and state fingerprint; raises PreflightRefused if state would not fit."""
        if snapshot.checkpoint.planned is None:
            topics = tuple(BoundTopic(t.name, t.topic_id or "", dict(starts[t.name])) for t in snapshot.topics)
            record = replace(record, topics=topics)
        before, here = record, StreamFolder.of(self.settings, self.stream.name).checkpoint(record.generation)
        plan.checked_frame()  # first: the sources of one output say nothing of outputs that are not made of one frame
        plan.check_sources(before, here)
        if changes := plan.other_sources(before, here):
            raise other_state(self.stream.name, changes, self.stream.rebuild_step())
        fingerprint = plan.checked_state(before, keeps_state=snapshot.checkpoint.committed is not None)
        record = replace(record, state_fingerprint=plan.with_input(fingerprint))
        changed = record.with_code(loaded_code(self.stream, self.settings.flows), next_batch(snapshot))
        if changed is not record and record.code and snapshot.checkpoint.committed is not None:
            change = plan.change(spark, before, here)
            if change.kind == "state has to be rebuilt":
                raise other_state(self.stream.name, change.why, self.stream.rebuild_step())
            note = f"before code {changed.code[-1].hash}"
            try_take(self.settings, self.stream, changed, snapshot.checkpoint.committed, "code", note)
        return changed

    def _pipeline(
        self,
        record: StreamRecord,
        sources: list[KafkaSource | TableSource],
        tables: Mapping[str, StoredTable],
        sinks: SinkSet,
        plan_traits: PlanTraits,
        handle: QueryHandle,
        slices: SliceCommits,
        isolation: Isolation,
    ) -> BatchPipeline:
        name = self.stream.name
        keeper = PeriodicSavepoints(self.settings, self.stream, record)
        return BatchPipeline(
            stream=self.stream,
            generation=record.generation,
            topic_ids={t.name: t.topic_id for t in record.topics},
            sources=sources,
            sinks=sinks,
            files=BatchFiles(
                StreamFolder.of(self.settings, name).checkpoint(record.generation),
                ledger_file(self.settings, name),
                DriverPathAttempts(attempt_file(self.settings, name)),
            ),
            hooks=BatchHooks(
                stop=self.stop,
                check_lease=self._check_lease,
                before_commit=lambda: self.before_commit(record),
                report=self.report,
                between=keeper.after,
                settled=keeper.settled,
                replan=self.replan,
                idle=slices.look,
                first_read=self._first_read(sources),
            ),
            code=loaded_code(self.stream, self.settings.flows),
            settings=self.stream_settings,
            traits=plan_traits,
            upkeep=upkeep_of(self.stream, tables, self.settings, record.generation, replay=self._is_replay),
            query=handle,
            pause=Pause(self.stream_settings.longest_wait) if self.trigger == "continuous" else None,
            isolation=isolation,
            ends_when_quiet=self.trigger == "available-now" and plan_traits.wall_clock,
        )

    def _check_lease(self) -> None:
        if self.lease is not None:
            self.lease.check()

    def _first_read(
        self, sources: Sequence[KafkaSource | TableSource]
    ) -> Callable[[Sequence[OffsetRange]], int | None]:
        if self.archives is None or not self._is_replay or not self.stream.topic_sinks:
            return lambda _: None
        topics = {each.name: each for each in sources if isinstance(each, KafkaSource)}

        def in_records(offsets: OffsetRange) -> int | None:
            return topics[offsets.topic].first_read(offsets) if offsets.topic in topics else None

        return FirstReads(ledger_file(self.archives.settings, self.stream.name), self.stream.name, in_records)


def next_batch(snapshot: StreamSnapshot) -> int:
    """The first batch that this start writes: the planned one if it is not done, else the one after it.

    If the primary table has the planned batch already, its rows stay those of the code that wrote them.
    """
    planned = snapshot.checkpoint.planned
    if planned is None:
        return 0
    return planned + (1 if planned == snapshot.checkpoint.committed or primary_has(snapshot, planned) else 0)
