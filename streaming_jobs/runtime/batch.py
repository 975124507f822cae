"""The path of one batch from Kafka to the tables, exactly once. The heart of Recourse; read `BatchPipeline.__call__`.

Spark has logged the batch's offsets (`offsets/N`) and calls the pipeline; after it returns, Spark writes `commits/N`.
A crash anywhere in between repeats the batch with the same offsets, and the ledger in the tables' own commits shows
which tables have it already. Secondary tables commit first, then topics, then the primary table: if the primary has a
batch, all of them have it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor, wait
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING

import structlog

from streaming_jobs.errors import FunctionRaised, LedgerConflict
from streaming_jobs.ledger.entry import LATE, READ, CodeVersion, LedgerEntry, Txn
from streaming_jobs.ledger.positions import OffsetRange
from streaming_jobs.platform.failures import classify
from streaming_jobs.runtime.batch_entries import (
    BatchCounts,
    entry_of,
    range_words,
    refuse_other_letters,
    refuse_other_rows,
    rows_read,
    written,
)
from streaming_jobs.runtime.batch_hooks import (
    BatchFiles,
    BatchHooks,
    BatchReport,
    Pause,
    Query,
    Route,
    StopAtBorder,
    choose_path,
    fits_the_driver,
    phases,
)
from streaming_jobs.runtime.failed_records import FailedRecords
from streaming_jobs.runtime.isolation import Isolated, Isolation, unreported
from streaming_jobs.runtime.output_frames import fitted_outputs, run
from streaming_jobs.runtime.shared_plan import SharedPlan
from streaming_jobs.runtime.spark_plan import PlanTraits
from streaming_jobs.settings import StreamSettings
from streaming_jobs.sinks.base import BatchOfRows, Companion, PendingWrite, Sink, SinkSet, Upkeep
from streaming_jobs.sources.base import Source
from streaming_jobs.sources.planner import FIRST
from streaming_jobs.state.checkpoint import CheckpointSync
from streaming_jobs.stream import Stream

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from streaming_jobs.runtime.late_records import LateRecords
    from streaming_jobs.sources.base import SourceCounts
    from streaming_jobs.table_sources.lookups import LookupFrames


log = structlog.get_logger()


@dataclass
class BatchPipeline:
    """The function that Spark calls for each batch of one stream (`foreachBatch`)."""

    stream: Stream
    generation: int
    topic_ids: Mapping[str, str]
    sources: Sequence[Source]
    sinks: SinkSet
    files: BatchFiles
    hooks: BatchHooks
    code: CodeVersion
    settings: StreamSettings
    traits: PlanTraits
    upkeep: Sequence[Upkeep] = ()
    query: Query | None = None
    pause: Pause | None = None
    shared: SharedPlan | None = None
    """What several outputs share that keep state or join: a batch's frame has its rows."""
    isolation: Isolation | None = None
    """Sets aside records on which the function raises, and counts failures against the error budget."""
    late: Mapping[str, LateRecords] = field(default_factory=dict)
    """What finds the late records of each table that keeps them."""
    lookups: LookupFrames | None = None
    """The tables that the function looks up, at one version per batch."""
    ends_when_quiet: bool = False
    """Spark would plan batches for ever: end the query after a batch without records, rows or due timers."""
    failure: BaseException | None = field(default=None, init=False)
    stopped_at_border: bool = field(default=False, init=False)
    replanned: bool = field(default=False, init=False)
    in_batch: bool = field(default=False, init=False)
    unfinished: LedgerEntry | None = field(default=None, init=False)
    """The ledger entry, with the offsets, of the batch that runs now or that failed."""
    _bytes_per_record: float = field(default=512.0, init=False)
    _read: dict[str, int] = field(default_factory=dict, init=False)
    _seen: dict[str, SourceCounts] = field(default_factory=dict, init=False)
    _writes: list[PendingWrite] = field(default_factory=list, init=False)
    """The writes of the batch that runs now, or ran last."""
    _on_disk: CheckpointSync = field(init=False)
    _quiet: bool = field(default=False, init=False)
    _other_thread: Executor = field(default_factory=partial(ThreadPoolExecutor, 1, "beside a batch"), init=False)

    def __post_init__(self) -> None:
        self._on_disk = CheckpointSync(self.files.checkpoint)

    def __call__(self, frame: DataFrame, batch: int) -> None:
        """Run one batch. An exception is stored in `failure` too, since Spark passes on only its text."""
        self.in_batch = True
        try:
            self.hooks.at("batch_committed", self.stream.name, batch - 1)
            if self.hooks.stop.is_set():
                raise StopAtBorder
            self.hooks.check_lease()
            self._replan(batch)
            if self._quiet and not self._records(batch):
                raise StopAtBorder
            self.hooks.between(batch - 1)
            started = time.monotonic()
            self._run(frame, batch)
            self.unfinished = None
            self._pause(started)
        except StopAtBorder:
            self.stopped_at_border = True
            raise
        except BaseException as error:
            self.failure = error
            raise
        finally:
            self.in_batch = False
        if self.lookups is not None:
            self.lookups.plan_anew()

    def _replan(self, batch: int) -> None:
        """End the query if the batch has to end at other offsets; a batch that a table has already is left as it is."""
        txn = Txn(self.generation, batch)
        replan = self.hooks.replan
        if replan is None or self._is_in_a_table(txn):
            return
        if replan(self.files.checkpoint, batch):
            self.replanned = True
            raise StopAtBorder

    def _is_in_a_table(self, txn: Txn) -> bool:
        """True if at least one of the stream's tables or topics has the batch."""
        return any((at := sink.position) is not None and at >= txn for sink in self.sinks)

    def _run(self, frame: DataFrame, batch: int) -> None:
        began = time.monotonic()
        self.hooks.at("batch_started", self.stream.name, batch)
        entry = LedgerEntry(
            "batch",
            self.stream.name,
            self.sinks.primary.name,
            self.generation,
            batch,
            self._ranges(batch),
            code=self.code,
        )
        self.unfinished = entry
        if (done := self._done(self.sinks.primary, entry)) is not None:
            self._read = {"": done.records}
            self._repeat_state(frame, entry, done)
            self._on_disk.state()
            self.hooks.report(replace(self._report(done, began, "driver", "direct", None), skipped=True))
            return
        self._read = rows_read(self.sources, entry.offsets)
        records = sum(self._read.values())
        path = choose_path(
            self.settings,
            self.traits,
            records=records,
            bytes_per_record=self._bytes_per_record,
            died_before=self.files.attempts.died(entry.txn),
        )
        if path == "driver":
            self.files.attempts.begin(entry.txn)
        with ExitStack() as held:
            beside = [self._beside(held, self._on_disk.planned, batch), self._beside(held, self.hooks.before_commit)]
            staged, counts = self._staged(frame, entry, path, held)
            if self.lookups is not None:  # whose scans have been planned by now
                entry = replace(entry, lookups=self.lookups.pins.noted(batch))
            computed, prepared_s = time.monotonic(), self._write_s
            primary = staged[self.sinks.primary.name]
            self._learn(staged.get(self.sinks.first.name, primary), records)
            self._seen = self._counts() if counts is None else dict(counts)
            self.hooks.at("staged", self.stream.name, batch)
            for each in beside:
                each.result()
            self.hooks.check_lease()
            self.hooks.before_commit()  # of a batch that took long
            if path == "driver":  # tasks of the executors' path may run anew, and write their state's files anew
                beside.append(self._beside(held, self._on_disk.state))
            failed = self._failed(entry, staged)
            failed.check(frame.sparkSession, entry, self.sources, self.isolation)
            entry = self._commit_others(frame.sparkSession, entry, staged, failed, path, held)
            self.hooks.at("secondary_committed", self.stream.name, batch)
            late, newest_record = self._late(frame.sparkSession, entry)
            entry = replace(entry, rows={**entry.rows, **late, **({READ: records} if self.stream.tables_read else {})})
            version = primary.commit(entry)
            assert self.query is not None
            times = self.query.read_times()
            phase_s = phases(times, computed - began, prepared_s, time.monotonic() - computed, self._write_s)
            wrote = records or any(pending.rows for pending in staged.values())
            self._quiet = self.ends_when_quiet and not wrote and not self._advances(batch)
        if version is None:  # it was not in the primary at the top: another writer has committed it since
            raise LedgerConflict(
                f"{entry.txn} appeared in table {self.sinks.primary.name} while this driver was writing it",
                "look for a second driver with another state folder on the same tables",
            )
        self.hooks.at("primary_committed", self.stream.name, batch)
        for each in beside:
            each.result()
        self._on_disk.state()
        report = self._report(entry, began, path, primary.committer, version)
        self.hooks.report(
            replace(report, newest_record=newest_record, phase_s=phase_s, read_in_plan_s=times.planner.sum)
        )
        for upkeep in self.upkeep:
            upkeep.after_commit()

    def _beside(self, held: ExitStack, call: Callable[..., None], *arguments: object) -> Future[None]:
        """Run a call in the pipeline's second thread, in the order of submission.

        The batch does not end before it, even if it fails.
        """
        begun = self._other_thread.submit(call, *arguments)
        held.callback(wait, [begun])
        return begun

    def _staged(
        self, frame: DataFrame, entry: LedgerEntry, path: Route, held: ExitStack
    ) -> tuple[Mapping[str, PendingWrite], Mapping[str, SourceCounts] | None]:
        """The prepared rows; if records had to be set aside, those of the other records, with their counts."""
        try:
            if self._search is not None and self.query is not None:
                self.query.count_failed_rows(path == "driver")
            with unreported() if self._search else nullcontext():
                return self._stage_all(self._frames(frame, held), entry, path, held), None
        except Exception as error:  # noqa: BLE001 - raised again unless records are set aside
            isolated = self._isolated(frame, entry, error, path, held)
        return isolated.staged, isolated.counts

    @property
    def _search(self) -> Isolation | None:
        """What finds records on which the function raises; None: such a record stops the stream."""
        return None if self.stream.errors.function == "fail" else self.isolation

    def _isolated(
        self, frame: DataFrame, entry: LedgerEntry, error: Exception, path: Route, held: ExitStack
    ) -> Isolated[dict[str, PendingWrite]]:
        """Set aside the records on which the function raised `error`, and prepare the rows of the others.

        Raises `error` if none is set aside. A batch that a table has already is not searched: its records there are
        those of the run that wrote them. With state, Spark's plan of the batch runs again without the records; where it
        cannot, the query begins again, and so does its state.
        """
        if (search := self._search) is None or self._is_in_a_table(entry.txn):
            raise error
        if not isinstance(raised := classify(error), FunctionRaised):
            raise error

        in_driver = path == "driver"
        counted = self.query.rows_counted() if in_driver and self.query is not None else None

        def note_attempt() -> None:
            """Anew: the failure has removed the note, and the search or the repeated batch may kill the driver, too."""
            if in_driver:
                self.files.attempts.begin(entry.txn)

        def repeat(frames: Sequence[DataFrame]) -> dict[str, PendingWrite]:
            note_attempt()
            outputs = {sink.name: frame for sink, frame in zip(self.sinks.outputs, frames, strict=True)}
            return self._stage_all(self._by_sink(outputs), entry, path, held)

        def again(records: Mapping[str, DataFrame]) -> dict[str, PendingWrite] | None:
            if self.query is None or not self.query.send_anew(records):
                return None
            note_attempt()
            frame.unpersist()  # rows of the first run
            try:
                with unreported():
                    return self._stage_all(self._frames(frame, held), entry, path, held)
            except Exception as another:
                if isinstance(classify(another), FunctionRaised):
                    return None  # the query that begins again searches anew
                raise

        keeps_state = self.traits.may_keep_state
        note_attempt()
        with self.files.attempts.watched():
            isolated = search.isolate(
                frame.sparkSession,
                entry,
                raised,
                held,
                self.hooks.check_lease,
                in_driver=in_driver,
                counted=counted,
                repeat=None if keeps_state else repeat,
                again=again if keeps_state else None,
            )
        self.hooks.at("set_aside", self.stream.name, entry.batch)
        if isolated is None:
            self.files.attempts.forget()
            self.replanned = True
            raise StopAtBorder
        self.sources = search.sources
        without = {source.name: source for source in search.sources}
        self.late = {table: replace(each, source=without[each.source.name]) for table, each in self.late.items()}
        return isolated

    def _frames(self, frame: DataFrame, held: ExitStack) -> dict[str, DataFrame]:
        """The frames of a batch by the sinks that take them, made of Spark's frame of the batch.

        With one output, it is that of the sink. With several, it has the records or what the outputs share, computed
        once for all.
        """
        if len(self.stream.output_names) == 1:
            return {self.sinks.primary.name: frame, self.sinks.first.name: frame}
        held.callback(frame.unpersist)
        rows = frame.persist()
        if self.shared is None:
            return self._made_of({next(iter(self.stream.sources)): rows})
        return {self.sinks.primary.name: rows, **self.shared.outputs_of(rows)}

    def _made_of(self, records: Mapping[str, DataFrame]) -> dict[str, DataFrame]:
        """The frames that the function makes of records of a batch; of a stream without state."""
        outputs = self.stream.outputs(**records, **({} if self.lookups is None else self.lookups.frames))
        fitted = fitted_outputs(self.stream, self.sinks, outputs, [source.name for source in self.sources])
        return self._by_sink(fitted)

    def _by_sink(self, outputs: Mapping[str, DataFrame]) -> dict[str, DataFrame]:
        """The frames by the sinks that take them, made of the outputs in the columns of their sinks."""
        return {self.sinks.primary.name: outputs[self.sinks.first.name], **outputs}

    def _failed(self, entry: LedgerEntry, staged: Mapping[str, PendingWrite]) -> FailedRecords:
        raised = {} if self.isolation is None else self.isolation.aside_of(entry.txn)
        drops = self.isolation is not None and self.isolation.aside.action == "drop"
        return FailedRecords.of(self.stream.errors, self.sources, self._seen, staged, raised, drops_raised=drops)

    def _records(self, batch: int) -> int:
        return sum(offsets.records for offsets in self._ranges(batch))

    def _advances(self, batch: int) -> bool:
        """True if the batch has another watermark than the one before it, so that its timers may be due."""
        marks = [
            self.files.checkpoint.metadata(at).get("batchWatermarkMs") for at in range(max(batch - 1, 0), batch + 1)
        ]
        return len(set(marks)) > 1

    def _pause(self, started: float) -> None:
        """Wait while few records arrive; a stop request ends the wait.

        The wait comes before Spark writes `commits/N`, so the next batch is planned after it and takes all records that
        arrived meanwhile. If it were planned before, a record that arrives during the wait would wait a second time.
        After a kill during the wait, the ledger shows that the batch is done.
        """
        if self.pause is not None and not self.hooks.stop.is_set():
            share = self.settings.max_offsets_per_trigger // len(self.sources)
            seconds = self.pause.after(sum(self._read.values()), started)
            # A source that was read up to the bound has more records waiting.
            if not any(records >= max(min(share, FIRST), 1) for records in self._read.values()):
                self.hooks.stop.wait(seconds)

    def _repeat_state(self, frame: DataFrame, entry: LedgerEntry, done: LedgerEntry) -> None:
        """Compute the state again: the batch's rows are in the tables, but its state may not be in the checkpoint."""
        log.info("batch is in the tables already", stream=self.stream.name, batch=entry.batch)
        if self.traits.may_keep_state:
            run(frame)
            if done.code != entry.code:
                log.warning(
                    "mixed batch: its rows are of an earlier version of the code, its state of this one",
                    stream=self.stream.name,
                    batch=entry.batch,
                )

    def _ranges(self, batch: int) -> tuple[OffsetRange, ...]:
        start, end = self.files.checkpoint.start(batch), self.files.checkpoint.end(batch)
        return tuple(
            OffsetRange(topic, self.topic_ids[topic], dict(start.get(topic, {})), dict(ends))
            for topic, ends in end.items()
        )

    def _done(self, sink: Sink, entry: LedgerEntry) -> LedgerEntry | None:
        """The batch's entry in a table, if it is there; raises LedgerConflict if it read other offsets."""
        sink.refresh()
        at = sink.position
        if at is None or at < entry.txn or at.generation > entry.generation:
            return None
        committed = sink.newest_entry()
        if committed is None or committed.txn != entry.txn:
            raise LedgerConflict(
                f"table {sink.name} is at {at}, but its log does not show what {entry.txn} read",
                "put the table and the checkpoint back from one copy",
            )
        if not committed.same_offsets(entry):
            raise LedgerConflict(
                f"{entry.txn} is in table {sink.name} with offsets {range_words(committed)}, "
                f"the checkpoint has {range_words(entry)}",
                "put the checkpoint back that belongs to the table",
            )
        sink.sync()  # the file system may still hold it in memory only, after a driver was killed
        return committed

    def _stage_all(
        self, frames: Mapping[str, DataFrame], entry: LedgerEntry, path: Route, held: ExitStack
    ) -> dict[str, PendingWrite]:
        """Prepare the rows of every table that does not have this batch yet."""
        topics = [source.name for source in self.sources]
        others = (*self.sinks.secondary, *self.sinks.external)
        waiting = [sink for sink in others if self._done(sink, replace(entry, table=sink.name)) is None]
        if self.sinks.batches_only and not waiting:
            run(frames[self.sinks.primary.name])
        staged = {}
        first_read = self.hooks.first_read(entry.offsets)
        for sink in (self.sinks.primary, *waiting):
            rows = BatchOfRows(self.generation, entry.batch, path == "driver", topics, first_read)
            with self.files.attempts.watched(), fits_the_driver(self.settings, entry.batch):
                staged[sink.name] = sink.prepare(frames[sink.name], rows)
            held.callback(staged[sink.name].close)
        self._writes = [*staged.values()]
        held.callback(self._writes.clear)  # they hold the batch's rows
        return staged

    def _commit_others(
        self,
        spark: SparkSession,
        entry: LedgerEntry,
        staged: Mapping[str, PendingWrite],
        failed: FailedRecords,
        path: Route,
        held: ExitStack,
    ) -> LedgerEntry:
        """Commit the secondary tables that have rows and lack this batch; returns the primary entry with their txns."""
        counts, mixed = BatchCounts(), []
        for sink, done, pending in self._others(spark, entry, staged, failed, path, held):
            counted_as = self.sinks.counted_as(sink)
            if done is not None:
                counts.of_commit(counted_as, done)
                mixed += [sink.name] if done.code != entry.code else []
            elif pending is not None:
                counts.of_write(sink.name, counted_as, pending)
                if pending.rows:
                    pending.commit(entry_of(sink, entry, staged, self.sinks, pending))
        note = None
        if mixed:
            note = f"mixed batch: {', '.join(mixed)} was written by an earlier version of the code"
            log.warning(note, stream=self.stream.name, batch=entry.batch)
        txns = {sink.name: at.version for sink in self.sinks.others() if (at := sink.position) is not None}
        counts.of_write(entry.table, "written", staged[entry.table])
        counts.of_dropped(failed.dropped(self.sinks))
        return replace(counts.onto(entry), txns=txns, note=note, written=written(self.sinks.external, entry.txn))

    def _others(
        self,
        spark: SparkSession,
        entry: LedgerEntry,
        staged: Mapping[str, PendingWrite],
        failed: FailedRecords,
        path: Route,
        held: ExitStack,
    ) -> Iterator[tuple[Sink, LedgerEntry | None, PendingWrite | None]]:
        """Yields each other sink with its entry if it has the batch, else with its pending rows, if there are any.

        Dead letters are first, then the companions of tables, then tables, then topics."""
        letters = self.sinks.dead_letters
        done = self._done(letters, replace(entry, table=letters.name))
        refuse_other_letters(done, staged, self.sinks, entry)
        yield letters, done, self._stage_letters(spark, entry, failed, path, held) if done is None else None
        for companion in self.sinks.companions:
            sink = companion.sink
            done, pending = self._done(sink, replace(entry, table=sink.name)), None
            if companion.kind == "late":
                pending = self._stage_late(spark, entry, companion, path, held) if done is None else None
            elif companion.table in staged:
                pending = next((write for write in staged[companion.table].before if write.name == sink.name), None)
                if companion.kind == "quarantine":
                    refuse_other_rows(done, pending, entry)
            yield sink, done, pending
        for sink in (*self.sinks.secondary, *self.sinks.external):
            pending = staged.get(sink.name)
            yield sink, self._done(sink, replace(entry, table=sink.name)) if pending is None else None, pending

    def _counts(self) -> dict[str, SourceCounts]:
        """The counts of each source with records in this batch; a source without any still shows older counts."""
        assert self.query is not None
        observed = self.query.observed
        return {s.observation: observed(s.observation) for s in self.sources if self._read.get(s.name)}

    def _late(self, spark: SparkSession, entry: LedgerEntry) -> tuple[dict[str, int], int | None]:
        """Late records, if the stream's state dropped any, and the newest timestamp.

        Spark's own figure counts result rows after partial aggregation, not records. So the range is read once more,
        and only if that figure is not zero: to count the records at or behind the watermark, or to keep those that are
        too late for a window.
        """
        ranges = {r.topic: r for r in entry.offsets}
        newest = [seen.newest for source in self._timed if (seen := self._seen[source.observation]).newest is not None]
        newest_record = max(newest, default=None)
        if self.late:
            late = max((number for name, number in entry.rows.items() if name.startswith(LATE)), default=0)
        elif (watermark := self._dropped_behind(entry)) is not None:
            late = sum(source.late_records(spark, ranges[source.name], watermark) for source in self._timed)
        else:
            late = 0
        return ({"late": late} if late else {}), newest_record

    @property
    def _timed(self) -> list[Source]:
        """The sources with a watermark and with good records in the batch."""
        seen = [(each, self._seen.get(each.observation)) for each in self.sources if each.lateness is not None]
        return [source for source, counts in seen if counts is not None and counts.newest is not None]

    def _dropped_behind(self, entry: LedgerEntry) -> int | None:
        """The watermark (ms) behind which the stream's state has dropped rows of the batch; None if it dropped none."""
        assert self.query is not None
        if not self.traits.stateful or not self._timed:
            return None
        if not int(self.files.checkpoint.metadata(entry.batch).get("batchWatermarkMs", 0)):
            return None
        return self.query.dropped_behind()

    def _stage_late(
        self, spark: SparkSession, entry: LedgerEntry, companion: Companion, path: Route, held: ExitStack
    ) -> PendingWrite | None:
        """The records of the batch that came too late for a window of a table; None if there are none."""
        if (watermark := self._dropped_behind(entry)) is None:
            return None
        (offsets,) = entry.offsets
        with self.files.attempts.watched(), fits_the_driver(self.settings, entry.batch):
            rows = BatchOfRows(self.generation, entry.batch, path == "driver")
            late = self.late[companion.table].prepared(spark, companion.sink, offsets, watermark, rows, held)
        if late is not None:
            held.callback(late.close)
            self._writes.append(late)
        return late

    def _stage_letters(
        self, spark: SparkSession, entry: LedgerEntry, failed: FailedRecords, path: Route, held: ExitStack
    ) -> PendingWrite | None:
        """The batch's dead letters: records refused while decoding or set aside, and output rows without their key."""
        ranges = {r.topic: r for r in entry.offsets}
        refused = [(s, ranges[s.name], number) for s in self.sources if (number := failed.letters_of(s.name))]
        rejected = failed.rejected_letters
        if not refused and not rejected:
            return None
        with self.files.attempts.watched(), fits_the_driver(self.settings, entry.batch):
            rows = BatchOfRows(self.generation, entry.batch, path == "driver")
            letters = self.sinks.dead_letters.prepare_letters(spark, refused, rejected, rows)
        held.callback(letters.close)
        self._writes.append(letters)
        return letters

    def _learn(self, staged: PendingWrite, records: int) -> None:
        table = getattr(staged, "table", None)
        if table is not None and records >= 1000 and not self.traits.stateful:
            self._bytes_per_record = max(table.nbytes / records, 1.0)

    def _report(
        self, entry: LedgerEntry, began: float, path: Route, committer: str, version: int | None
    ) -> BatchReport:
        """Append the batch to the ledger file, and return its report."""
        self.files.ledger.append(entry, {sink.name: sink.version for sink in self.sinks}, time.monotonic() - began)
        return BatchReport(entry, path, committer, int((time.monotonic() - began) * 1000), version)

    @property
    def _write_s(self) -> float:
        """The seconds of writing so far, in all of the batch's writes."""
        return sum(each.write_s for write in self._writes for each in (write, *write.before))
