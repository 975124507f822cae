"""One batch's way from Kafka to the tables, exactly once. This module is the heart; read `BatchPipeline.__call__`.

Spark has logged the batch's offsets (`offsets/N`) and calls the pipeline; after it returns, Spark writes `commits/N`.
A crash anywhere in between repeats the batch with the same offsets, and the ledger in the tables' own commits says
what of it is done. Secondary tables come first and the primary last, so a batch that is in the primary is in all.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Protocol

import structlog

from streaming_jobs.errors import LedgerConflict, PermanentError, TransientError
from streaming_jobs.failures import larger_than_the_driver_takes
from streaming_jobs.ledger import CodeVersion, LedgerEntry, OffsetRange, Txn
from streaming_jobs.runtime.batch_path import DriverPathAttempts, Route, choose_path
from streaming_jobs.runtime.crash_points import crash_point
from streaming_jobs.runtime.pace import Pace
from streaming_jobs.runtime.query_plan import PlanTraits
from streaming_jobs.settings import StreamSettings
from streaming_jobs.sinks.dead_letters import stage_dead_letters
from streaming_jobs.sinks.delta.log import newest
from streaming_jobs.sinks.delta.maintenance import TableMaintenance
from streaming_jobs.sinks.delta.sink import DeltaSink
from streaming_jobs.sinks.delta.writers import PendingWrite, prepare_write
from streaming_jobs.state.checkpoint import Checkpoint
from streaming_jobs.state.checkpoint_sync import CheckpointSync
from streaming_jobs.state.ledger_file import LedgerFile
from streaming_jobs.stream import Stream

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from streaming_jobs.sources.kafka import KafkaSource, Observed

log = structlog.get_logger()


class StopAtBorder(Exception):
    """Raised at the top of a batch when a stop is asked for: the one graceful way to end a query."""


class Replan(Protocol):
    """Asked before each batch, once Spark has planned it and nothing of it is done."""

    def __call__(self, checkpoint: Checkpoint, batch: int) -> bool:
        """Whether the batch's entry was written anew: the query then begins again, with the batch as it says now."""


class Query(Protocol):
    """What the pipeline asks of the running query about the batch whose plan has just run."""

    def observed(self, observation: str) -> Observed:
        """What was counted of one source, ahead of the stream's function."""

    def dropped_behind(self) -> int | None:
        """The watermark (ms since 1970) behind which state operators dropped rows; None if they dropped none."""


@dataclass(frozen=True)
class BatchReport:
    """What one batch did, as its ledger `entry` says and beyond; times in ms."""

    entry: LedgerEntry
    path: Route
    committer: str
    milliseconds: int
    version: int | None
    skipped: bool = False
    newest_record: int | None = None
    """The largest record timestamp of sources with an event time, in microseconds since 1970."""

    @property
    def batch(self) -> int:
        """Its number."""
        return self.entry.batch

    @property
    def records(self) -> int:
        """Offsets it read."""
        return sum(r.records for r in self.entry.offsets)

    @property
    def rows(self) -> int:
        """Rows it wrote to the primary table."""
        return self.entry.rows.get("written", 0)

    @property
    def dead_letters(self) -> int:
        """Dead letters it wrote."""
        return self.entry.rows.get("dead_letters", 0)

    @property
    def late(self) -> int:
        """Records behind the watermark, if the stream's function dropped any of them."""
        return self.entry.rows.get("late", 0)


@dataclass
class BatchPipeline:
    """The function that Spark calls for each batch of one stream (`foreachBatch`).

    `deletes` are the tables that remember deletes, by the table whose deletes they are.
    """

    stream: Stream
    generation: int
    checkpoint: Checkpoint
    topic_ids: Mapping[str, str]
    sources: Sequence[KafkaSource]
    primary: DeltaSink
    secondary: Sequence[DeltaSink]
    dead_letters: DeltaSink
    code: CodeVersion
    settings: StreamSettings
    traits: PlanTraits
    upkeep: Sequence[TableMaintenance]
    ledger_file: LedgerFile
    attempts: DriverPathAttempts
    stop: threading.Event
    before_commit: Callable[[], None]
    report: Callable[[BatchReport], None]
    between: Callable[[int], None]
    deletes: Mapping[str, DeltaSink] = field(default_factory=dict)
    replan: Replan | None = None
    query: Query | None = None
    pace: Pace | None = None
    failure: BaseException | None = None
    stopped_at_border: bool = False
    replanned: bool = False
    in_batch: bool = False
    unfinished: LedgerEntry | None = None
    """What the batch at work, or the one that failed, reads."""
    _bytes_per_record: float = field(default=512.0)
    _seen: dict[str, Observed] = field(default_factory=dict)
    _on_disk: CheckpointSync = field(init=False)

    def __post_init__(self) -> None:
        self._on_disk = CheckpointSync(self.checkpoint)

    def __call__(self, frame: DataFrame, batch: int) -> None:
        """Run one batch. Whatever is raised is kept in `failure`, since Spark passes on its text only."""
        self.in_batch = True
        try:
            crash_point("batch_committed", self.stream.name, batch - 1)
            if self.stop.is_set():
                raise StopAtBorder
            self._replan(batch)
            self.between(batch - 1)
            started = time.monotonic()
            self._run(frame, batch)
            self.unfinished = None
            self._pause(batch, started)
        except StopAtBorder:
            self.stopped_at_border = True
            raise
        except BaseException as error:
            self.failure = error
            raise
        finally:
            self.in_batch = False

    def _replan(self, batch: int) -> None:
        """Ask whether the batch is to end elsewhere, unless a table has it already; end the query if so."""
        txn = Txn(self.generation, batch)
        tables = (self.primary, *self.secondary, self.dead_letters, *self.deletes.values())
        if self.replan is None or any((at := table.position) is not None and at >= txn for table in tables):
            return
        if self.replan(self.checkpoint, batch):
            self.replanned = True
            raise StopAtBorder

    def _run(self, frame: DataFrame, batch: int) -> None:
        began = time.monotonic()
        crash_point("batch_started", self.stream.name, batch)
        entry = LedgerEntry(
            "batch", self.stream.name, self.primary.name, self.generation, batch, self._ranges(batch), code=self.code
        )
        self.unfinished = entry
        if (done := self._done(self.primary, entry)) is not None:
            self._repeat_state(frame, entry, done)
            self._on_disk.state()
            self._finish(done, began, "driver", "direct", None, skipped=True)
            return
        records = sum(r.records for r in entry.offsets)
        path = choose_path(
            self.settings,
            self.traits,
            records=records,
            bytes_per_record=self._bytes_per_record,
            died_before=self.attempts.died(entry.txn),
        )
        if path == "driver":
            self.attempts.begin(entry.txn)
        with ExitStack() as held:
            staged = self._stage_all(frame, entry, path, held)
            primary = staged[self.primary.name]
            self._learn(primary, records)
            self._look_at_sources(entry)
            crash_point("staged", self.stream.name, batch)
            self._on_disk.planned(batch)
            self.before_commit()
            entry = self._commit_secondary(frame.sparkSession, entry, staged, path, held)
            crash_point("secondary_committed", self.stream.name, batch)
            late, newest_record = self._late(frame.sparkSession, entry)
            entry = replace(entry, rows={**entry.rows, "written": primary.rows, **late})
            version = primary.commit(entry)
        if version is None:  # the primary was asked at the top: somebody else has written this batch since
            raise LedgerConflict(
                f"{entry.txn} appeared in table {self.primary.name} while this driver was writing it",
                "look for a second driver with another state folder on the same tables",
            )
        crash_point("primary_committed", self.stream.name, batch)
        self._on_disk.state()
        self._finish(entry, began, path, primary.committer, version, newest_record=newest_record)
        for upkeep in self.upkeep:
            upkeep.after_commit()

    def _pause(self, batch: int, started: float) -> None:
        """Wait while few records come; whoever asks for a stop ends the wait.

        Here, before Spark writes `commits/N`: the next batch is then planned after the wait and takes all that came
        meanwhile. Were it planned before, a record that comes in the wait would wait for a second one. A kill in the
        wait costs a look at the ledger, which says that the batch is done.
        """
        if self.pace is not None and not self.stop.is_set():
            ranges = self._ranges(batch)
            share = self.settings.max_offsets_per_trigger // len(ranges)
            seconds = self.pace.after(sum(r.records for r in ranges), started)
            # Spark shares the most that a batch may read out among partitions and rounds each part down: from there on
            # more is waiting, however small the batch is.
            if not any(r.records >= max(share - len(r.end), 1) for r in ranges):
                self.stop.wait(seconds)

    def _repeat_state(self, frame: DataFrame, entry: LedgerEntry, done: LedgerEntry) -> None:
        """The rows of this batch are in the tables; its state may not be in the checkpoint, so it is computed again."""
        log.info("batch is in the tables already", stream=self.stream.name, batch=entry.batch)
        if self.traits.stateful:
            frame.write.format("noop").mode("overwrite").save()
            if done.code != entry.code:
                log.warning(
                    "mixed batch: its rows are of an earlier version of the code, its state of this one",
                    stream=self.stream.name,
                    batch=entry.batch,
                )

    def _ranges(self, batch: int) -> tuple[OffsetRange, ...]:
        start, end = self.checkpoint.start(batch), self.checkpoint.end(batch)
        return tuple(
            OffsetRange(topic, self.topic_ids[topic], dict(start.get(topic, {})), dict(ends))
            for topic, ends in end.items()
        )

    def _done(self, sink: DeltaSink, entry: LedgerEntry) -> LedgerEntry | None:
        """The batch's entry in a table, if it is there; raises LedgerConflict if it read other offsets."""
        sink.refresh()
        at = sink.position
        if at is None or at < entry.txn or at.generation > entry.generation:
            return None
        commit, _ = newest(sink.path, self.stream.name)
        found = commit.entry if commit else None
        if found is None or found.txn != entry.txn:
            raise LedgerConflict(
                f"table {sink.name} is at {at}, but its log does not show what {entry.txn} read",
                "put the table and the checkpoint back from one copy",
            )
        same = len(found.offsets) == len(entry.offsets) and all(
            a.same_offsets(b) for a, b in zip(found.offsets, entry.offsets, strict=True)
        )
        if not same:
            raise LedgerConflict(
                f"{entry.txn} is in table {sink.name} with offsets {_words(found)}, the checkpoint has {_words(entry)}",
                "put the checkpoint back that belongs to the table",
            )
        sink.sync()  # a driver that was killed may have left it in memory only
        return found

    def _stage_all(self, frame: DataFrame, entry: LedgerEntry, path: Route, held: ExitStack) -> dict[str, PendingWrite]:
        """The rows of every table that has not got this batch yet. One sink's function is in the plan already."""
        if self.traits.stateful and path == "executor" and self.primary.declared.mode == "append":
            # Rows that no table can hold take a second pass, and the state may not be computed twice.
            held.callback(frame.unpersist)
            frame = frame.persist()
        frames = {self.primary.name: frame}
        if len(self.stream.sinks) > 1:
            held.callback(frame.unpersist)
            outputs = self.stream.outputs(**{next(iter(self.stream.sources)): frame.persist()})
            frames = {self.stream.sinks[name].name: output for name, output in outputs.items()}
        waiting = [sink for sink in self.secondary if self._done(sink, replace(entry, table=sink.name)) is None]
        staged = {}
        for sink in (self.primary, *waiting):
            staged[sink.name] = self._stage(sink, frames[sink.name], path, entry.batch)
            held.callback(staged[sink.name].close)
        return staged

    def _stage(self, sink: DeltaSink, frame: DataFrame, path: Route, batch: int) -> PendingWrite:
        spark_commits = self.settings.committer == "spark" or not sink.direct
        large = sink.declared.mode == "upsert" and sink.megabytes > self.settings.direct_merge_max_mb
        with self._fits_the_driver(batch):
            return prepare_write(
                sink,
                frame,
                driver=path == "driver" and not large,
                spark_commits=spark_commits,
                batch=(self.generation, batch),
                topics=[source.topic.name for source in self.sources],
                kept=self.deletes.get(sink.name),
            )

    @contextmanager
    def _fits_the_driver(self, batch: int) -> Iterator[None]:
        """Say what the session's cap on result size means: this batch's repetition takes the executors."""
        try:
            yield
        except Exception as error:
            if not larger_than_the_driver_takes(error):
                raise
            if self.settings.path == "driver":
                raise PermanentError(
                    f"batch {batch} does not fit the driver, and the setting `path` keeps it there",
                    "set path to auto, or lower max_offsets_per_trigger",
                ) from error
            raise TransientError(
                f"batch {batch} did not fit the driver; it is repeated through the executors",
                "lower max_offsets_per_trigger if this comes often",
            ) from error

    def _commit_secondary(
        self, spark: SparkSession, entry: LedgerEntry, staged: Mapping[str, PendingWrite], path: Route, held: ExitStack
    ) -> LedgerEntry:
        """Commit every other table that has rows in this batch; the entry then names each one's transaction.

        Dead letters come first, then what is remembered of deletes: both are found while a table is staged, and a
        table that has this batch already is not staged again.
        """
        rows: dict[str, int] = {}
        mixed = []
        own = replace(entry, table=self.dead_letters.name)
        if (found := self._done(self.dead_letters, own)) is not None:
            rows["dead_letters"] = found.rows.get("written", 0)
            mixed += [self.dead_letters.name] if found.code != entry.code else []
        elif (letters := self._stage_letters(spark, entry, staged, path, held)) is not None:
            letters.commit(replace(own, rows={"written": letters.rows}))
            rows["dead_letters"] = letters.rows
        for table, sink in self.deletes.items():
            own, noted = replace(entry, table=sink.name), staged[table].deletes if table in staged else None
            if (found := self._done(sink, own)) is not None:
                rows[sink.name] = found.rows.get("written", 0)
                mixed += [sink.name] if found.code != entry.code else []
            elif noted is not None and noted.rows:
                rows[sink.name] = noted.rows
                noted.commit(replace(own, rows={"written": noted.rows}))
        for sink in self.secondary:
            own = replace(entry, table=sink.name)
            if sink.name in staged:
                rows[sink.name] = staged[sink.name].rows
                if rows[sink.name]:
                    staged[sink.name].commit(replace(own, rows={"written": rows[sink.name]}))
            elif (found := self._done(sink, own)) is not None:
                rows[sink.name] = found.rows.get("written", 0)
                mixed += [sink.name] if found.code != entry.code else []
        note = None
        if mixed:
            note = f"mixed batch: {', '.join(mixed)} was written by an earlier version of the code"
            log.warning(note, stream=self.stream.name, batch=entry.batch)
        others = (*self.secondary, *self.deletes.values(), self.dead_letters)
        txns = {s.name: p.version for s in others if (p := s.position) is not None}
        return replace(entry, rows=rows, txns=txns, note=note)

    def _look_at_sources(self, entry: LedgerEntry) -> None:
        """What was counted of each source with records in this batch; of another it would be of the batch before."""
        assert self.query is not None
        read = {r.topic for r in entry.offsets if r.records}
        observed = self.query.observed
        self._seen = {s.observation: observed(s.observation) for s in self.sources if s.topic.name in read}

    def _late(self, spark: SparkSession, entry: LedgerEntry) -> tuple[dict[str, int], int | None]:
        """Records at or behind the watermark, counted when the stream's state dropped some; and the newest timestamp.

        Spark's own figure counts what partial aggregation has left of them. The range is read once more for the count,
        so it is done only where that figure says that there are any.
        """
        assert self.query is not None
        ranges = {r.topic: r for r in entry.offsets}
        timed = [s for s in self.sources if s.lateness is not None]
        seen = [(source, self._seen[source.observation]) for source in timed if source.observation in self._seen]
        newest_record = max((o.newest for _, o in seen if o.newest is not None), default=None)
        if not self.traits.stateful or not seen:
            return {}, newest_record
        with_records = [source for source, o in seen if o.newest is not None]
        possible = with_records and int(self.checkpoint.metadata(entry.batch).get("batchWatermarkMs", 0))
        if not possible or (watermark := self.query.dropped_behind()) is None:
            return {}, newest_record
        late = sum(source.late_records(spark, ranges[source.topic.name], watermark) for source in with_records)
        return ({"late": late} if late else {}), newest_record

    def _stage_letters(
        self, spark: SparkSession, entry: LedgerEntry, staged: Mapping[str, PendingWrite], path: Route, held: ExitStack
    ) -> PendingWrite | None:
        """The batch's dead letters: records refused while decoding, and output rows without their key."""
        ranges = {r.topic: r for r in entry.offsets}
        refused = [
            (source, ranges[source.topic.name], seen.bad)
            for source in self.sources
            if (seen := self._seen.get(source.observation)) is not None and seen.bad
        ]
        null_keys = [s.null_keys for s in staged.values() if s.null_keys is not None and s.null_keys.num_rows]
        if not refused and not null_keys:
            return None
        with self._fits_the_driver(entry.batch):
            letters = stage_dead_letters(
                self.dead_letters,
                spark,
                refused,
                null_keys,
                driver=path == "driver",
                batch=(self.generation, entry.batch),
            )
        held.callback(letters.close)
        return letters

    def _learn(self, staged: PendingWrite, records: int) -> None:
        table = getattr(staged, "table", None)
        if table is not None and records >= 1000 and not self.traits.stateful:
            self._bytes_per_record = max(table.nbytes / records, 1.0)

    def _finish(
        self,
        entry: LedgerEntry,
        began: float,
        path: Route,
        committer: str,
        version: int | None,
        *,
        skipped: bool = False,
        newest_record: int | None = None,
    ) -> None:
        tables = (self.primary, *self.secondary, *self.deletes.values(), self.dead_letters)
        self.ledger_file.append(entry, {t.name: t.handle.version() for t in tables}, time.monotonic() - began)
        self.report(
            BatchReport(
                entry=entry,
                path=path,
                committer=committer,
                milliseconds=int((time.monotonic() - began) * 1000),
                version=version,
                skipped=skipped,
                newest_record=newest_record,
            )
        )


def _words(entry: LedgerEntry) -> str:
    return ", ".join(f"{r.topic} {dict(r.start)} to {dict(r.end)}" for r in entry.offsets)
