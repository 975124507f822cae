"""One batch's way from Kafka to the tables, exactly once. This module is the heart; read `BatchPipeline.__call__`.

Spark has logged the batch's offsets (`offsets/N`) and calls the pipeline; after it returns, Spark writes `commits/N`.
A crash anywhere in between repeats the batch with the same offsets, and the ledger in the tables' own commits says
what of it is done. Secondary tables come first and the primary last, so a batch that is in the primary is in all.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Protocol

import structlog

from streaming_jobs.checkpoint import Checkpoint
from streaming_jobs.crash import crash_point
from streaming_jobs.errors import LedgerConflict, TransientError
from streaming_jobs.ledger import CodeVersion, LedgerEntry, OffsetRange, Txn, newest
from streaming_jobs.ledger_file import LedgerFile
from streaming_jobs.plan import PlanTraits
from streaming_jobs.settings import StreamSettings
from streaming_jobs.sinks.dead_letters import stage_dead_letters
from streaming_jobs.sinks.delta import DeltaSink
from streaming_jobs.sinks.staged import Staged, stage
from streaming_jobs.sinks.upkeep import Upkeep
from streaming_jobs.stream import Stream

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from streaming_jobs.sources.kafka import KafkaSource

log = structlog.get_logger()

Route = Literal["driver", "executor"]


class StopAtBorder(Exception):
    """Raised at the top of a batch when a stop is asked for: the one graceful way to end a query."""


class Query(Protocol):
    """What the pipeline asks of the running query: counts taken ahead of the stream's function."""

    def bad_records(self, observation: str) -> int:
        """Bad records of one source in the batch whose plan has just run."""


@dataclass(frozen=True)
class BatchReport:
    """What one batch did; times in ms."""

    batch: int
    records: int
    rows: int
    dead_letters: int
    path: Route
    committer: str
    milliseconds: int
    version: int | None
    skipped: bool = False
    warning: str | None = None


@dataclass
class Attempts:
    """Remembers on disk that a large batch is going through the driver, so that its repetition does not."""

    file: Path
    floor: int = 10_000

    def died(self, txn: Txn) -> bool:
        """Whether this batch was begun on the driver path before and never finished."""
        try:
            return self.file.read_text() == str(txn.version)
        except FileNotFoundError:
            return False

    def begin(self, txn: Txn, records: int) -> None:
        """Note that the batch goes through the driver, if it is large enough to matter."""
        if records >= self.floor:
            self.file.write_text(str(txn.version))

    def done(self) -> None:
        """Forget the note."""
        self.file.unlink(missing_ok=True)


def choose_path(
    settings: StreamSettings, traits: PlanTraits, *, records: int, bytes_per_record: float, died_before: bool
) -> Route:
    """Through the driver, or through the executors.

    The number of records is known from the offsets before the batch runs. State can emit any number of rows;
    there the session's cap on result size stops a batch that does not fit, and its repetition takes the executors.
    """
    if settings.path != "auto":
        return settings.path
    if died_before or (traits.multiplies and records > 10_000):
        return "executor"
    fits = records * bytes_per_record <= settings.driver_path_max_mb << 20
    return "driver" if traits.stateful or fits else "executor"


@dataclass
class BatchPipeline:
    """The function that Spark calls for each batch of one stream (`foreachBatch`)."""

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
    upkeep: Sequence[Upkeep]
    ledger_file: LedgerFile
    attempts: Attempts
    stop: threading.Event
    before_commit: Callable[[], None]
    report: Callable[[BatchReport], None]
    query: Query | None = None
    failure: BaseException | None = None
    stopped_at_border: bool = False
    in_batch: bool = False
    _bytes_per_record: float = field(default=512.0)

    def __call__(self, frame: DataFrame, batch: int) -> None:
        """Run one batch. Whatever is raised is kept in `failure`, since Spark passes on its text only."""
        self.in_batch = True
        try:
            crash_point("batch_committed", batch - 1)
            if self.stop.is_set():
                raise StopAtBorder
            self._run(frame, batch)
        except StopAtBorder:
            self.stopped_at_border = True
            raise
        except BaseException as error:
            self.failure = error
            raise
        finally:
            self.in_batch = False

    def _run(self, frame: DataFrame, batch: int) -> None:
        began = time.monotonic()
        crash_point("batch_started", batch)
        entry = LedgerEntry(
            "batch", self.stream.name, self.primary.name, self.generation, batch, self._ranges(batch), code=self.code
        )
        if (done := self._done(self.primary, entry)) is not None:
            log.info("batch is in the tables already", batch=batch)
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
            self.attempts.begin(entry.txn, records)
        spark_commits = self.settings.committer == "spark" or not self.primary.direct
        outputs = self._outputs(frame)
        try:
            staged = self._stage(self.primary, outputs[self.primary.name], path, spark_commits, batch)
            try:
                self._learn(staged, records)
                crash_point("staged", batch)
                self.before_commit()
                entry = self._commit_secondary(frame.sparkSession, entry, outputs, staged, path)
                crash_point("secondary_committed", batch)
                entry = replace(entry, rows={**entry.rows, "written": staged.rows})
                version = staged.commit(entry)
            finally:
                staged.close()
        finally:
            if len(outputs) > 1:
                frame.unpersist()
        if version is None:  # the primary was asked at the top: somebody else has written this batch since
            raise LedgerConflict(
                f"{entry.txn} appeared in table {self.primary.name} while this driver was writing it",
                "look for a second driver with another state folder on the same tables",
            )
        crash_point("primary_committed", batch)
        self.attempts.done()
        self._finish(entry, began, path, staged.committer, version)
        for upkeep in self.upkeep:
            upkeep.after_commit()

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
        return found

    def _outputs(self, frame: DataFrame) -> dict[str, DataFrame]:
        """The frame of each table. With one sink the stream's function is in the plan already."""
        if len(self.stream.sinks) == 1:
            return {self.primary.name: frame}
        parameter = next(iter(self.stream.sources))
        outputs = self.stream.outputs(**{parameter: frame.persist()})
        return {self.stream.sinks[name].name: output for name, output in outputs.items()}

    def _stage(self, sink: DeltaSink, frame: DataFrame, path: Route, spark_commits: bool, batch: int) -> Staged:
        try:
            return stage(
                sink,
                frame,
                driver=path == "driver",
                spark_commits=spark_commits,
                batch=(self.generation, batch),
            )
        except Exception as error:
            if "spark.driver.maxResultSize" in str(error):
                raise TransientError(
                    f"batch {batch} did not fit the driver; it is repeated through the executors",
                    "lower max_offsets_per_trigger if this comes often",
                ) from error
            raise

    def _commit_secondary(
        self,
        spark: SparkSession,
        entry: LedgerEntry,
        outputs: Mapping[str, DataFrame],
        primary: Staged,
        path: Route,
    ) -> LedgerEntry:
        """Commit every other table that has rows in this batch; the entry then names each one's transaction."""
        ranges = {r.topic: r for r in entry.offsets}
        assert self.query is not None
        refused = [
            (source, ranges[source.topic.name], count)
            for source in self.sources
            if ranges[source.topic.name].records and (count := self.query.bad_records(source.observation))
        ]
        null_keys = primary.null_keys if primary.null_keys is not None and primary.null_keys.num_rows else None
        rows: dict[str, int] = {}
        mixed = []
        for sink in self.secondary:
            own = replace(entry, table=sink.name)
            found = self._done(sink, own)
            if found is None:
                spark_commits = self.settings.committer == "spark" or not sink.direct
                staged = self._stage(sink, outputs[sink.name], path, spark_commits, entry.batch)
                try:
                    if staged.rows:
                        staged.commit(replace(own, rows={"written": staged.rows}))
                    rows[sink.name] = staged.rows
                finally:
                    staged.close()
            else:
                rows[sink.name] = found.rows.get("written", 0)
                mixed += [sink.name] if found.code != entry.code else []
        if refused or null_keys is not None:
            own = replace(entry, table=self.dead_letters.name)
            found = self._done(self.dead_letters, own)
            if found is None:
                staged = stage_dead_letters(
                    self.dead_letters, spark, refused, null_keys, batch=(self.generation, entry.batch)
                )
                staged.commit(replace(own, rows={"written": staged.rows}))
                staged.close()
                rows["dead_letters"] = staged.rows
            else:
                rows["dead_letters"] = found.rows.get("written", 0)
        note = None
        if mixed:
            note = f"mixed batch: {', '.join(mixed)} was written by an earlier version of the code"
            log.warning(note, batch=entry.batch)
        txns = {s.name: p.version for s in (*self.secondary, self.dead_letters) if (p := s.position) is not None}
        return replace(entry, rows=rows, txns=txns, note=note)

    def _learn(self, staged: Staged, records: int) -> None:
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
    ) -> None:
        tables = (self.primary, *self.secondary, self.dead_letters)
        self.ledger_file.append(entry, {t.name: t.handle.version() for t in tables})
        self.report(
            BatchReport(
                batch=entry.batch,
                records=sum(r.records for r in entry.offsets),
                rows=entry.rows.get("written", 0),
                dead_letters=entry.rows.get("dead_letters", 0),
                path=path,
                committer=committer,
                milliseconds=int((time.monotonic() - began) * 1000),
                version=version,
                skipped=skipped,
                warning=entry.note,
            )
        )


def _words(entry: LedgerEntry) -> str:
    return ", ".join(f"{r.topic} {dict(r.start)} to {dict(r.end)}" for r in entry.offsets)
