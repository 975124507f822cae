"""The seam between a batch (`runtime/batch.py`) and the tables, or other outputs, that it writes to.

A sink takes the rows of each batch once. It prepares them (nothing is visible), then commits them together with the
batch's ledger entry. If the batch is repeated, nothing is committed. `sinks/delta/sink.py` is the sink of a
Delta table, `streaming_jobs.testing` has one in memory.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar, Literal, Protocol

from streaming_jobs.errors import Fenced
from streaming_jobs.ledger.entry import LATE, QUARANTINED, LedgerEntry, Txn
from streaming_jobs.ledger.positions import OffsetRange

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import DataFrame, SparkSession

    from streaming_jobs.sources.base import Source

Committer = Literal["direct", "spark"]


class WriteLease(Protocol):
    """The lease under which a driver writes a stream's tables, as far as tables know it (`state/lease.py`)."""

    fenced: set[tuple[str, int]]
    """Ids of tables, each with an epoch that it is in by a fence of this lease."""

    @property
    def epoch(self) -> int:
        """The number of the acquisition: each one of the stream's lease has a greater number than all before it."""

    @property
    def expires(self) -> bool:
        """True if an earlier holder may still run: its lease ends by time, not with its process."""

    def check(self) -> None:
        """Raise LeaseLost if the lease has run out, or another holder has it. Reads no file."""

    def exceed(self, epoch: int) -> None:
        """Make the lease's epoch greater than this one; raises LeaseLost if another holder has it."""


def refuse_later_epoch(table: str, epoch: int, lease: WriteLease | None) -> None:
    """Raise Fenced if a table is in a later epoch than the lease, LeaseLost if the lease has run out."""
    if lease is None:
        return
    lease.check()
    if epoch > lease.epoch:
        raise Fenced(
            f"table {table} is in epoch {epoch}, the lease of this driver is of epoch {lease.epoch}",
            "let this driver end; the session that took the lease over continues without it",
        )


@dataclass(frozen=True)
class BatchOfRows:
    """The batch that rows belong to and their topics; `driver` is true if they may pass through the driver's memory.

    `first_read` is set where a replay repeats the batch: when its records were first read, in ms since 1970.
    """

    generation: int
    batch: int
    driver: bool
    topics: Sequence[str] = ()
    first_read: int | None = None


@dataclass(frozen=True)
class RuleOutcome:
    """What row rules found in a batch's rows for a table: rule -> rows that break it; `dropped` are written nowhere."""

    broken: Mapping[str, int] = field(default_factory=dict)
    dropped: int = 0


NOTHING_BROKEN = RuleOutcome()


@dataclass(kw_only=True)
class PendingWrite(ABC):
    """Rows of one batch for one sink, computed and not yet visible.

    `rejected` rows become dead letters instead of being written: rows that the sink cannot hold, and null keys.
    `before` are writes to companions of the table that are committed before this one; each has rows.
    """

    committer: ClassVar[Committer] = "direct"
    rejected: pa.Table | None = None
    before: Sequence[PendingWrite] = ()
    outcome: RuleOutcome = NOTHING_BROKEN
    write_s: float = 0.0
    """Seconds that writing its files has taken so far; of tasks that write at the same time, their mean."""

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Count the time as `write_s`."""
        began = time.monotonic()
        try:
            yield
        finally:
            self.write_s += time.monotonic() - began

    @property
    @abstractmethod
    def name(self) -> str:
        """The name of the sink."""

    @property
    @abstractmethod
    def rows(self) -> int:
        """The number of prepared rows."""

    @abstractmethod
    def commit(self, entry: LedgerEntry) -> int | None:
        """Make the rows visible once, with the entry; the sink's version, or None if the batch is in it already."""

    def close(self) -> None:  # noqa: B027 - most hold none
        """Free the resources that the rows hold."""


class Sink(Protocol):
    """One output of one stream. Not for two threads at once."""

    @property
    def name(self) -> str:
        """The name of the sink in ledger entries."""

    @property
    def position(self) -> Txn | None:
        """The newest batch in it, as of the last `refresh` or commit; None if there is none."""

    @property
    def version(self) -> int:
        """The number of its last commit."""

    def refresh(self) -> None:
        """Read newer commits."""

    def newest_entry(self) -> LedgerEntry | None:
        """The stream's newest ledger entry in it; None if it no longer shows one."""

    def sync(self) -> None:
        """Sync every commit to disk, also commits of an earlier driver that was killed before it synced them."""

    def fit(self, output: DataFrame, topics: Sequence[str]) -> DataFrame:
        """A stream's output in the sink's columns; `topics` are the stream's. Nothing is computed.

        Spark plans a streaming query's frame once per batch, and a frame that is made inside a batch once more.
        So this is done before the query starts, where the query has one output.
        """

    def prepare(self, frame: DataFrame, rows: BatchOfRows) -> PendingWrite:
        """Compute the rows of a frame that `fit` made; raises RuleBroken for rows that stop the stream."""


class DeadLetterSink(Sink, Protocol):
    def prepare_letters(
        self,
        spark: SparkSession,
        refused: Sequence[tuple[Source, OffsetRange, int]],
        rejected: Sequence[pa.Table],
        rows: BatchOfRows,
    ) -> PendingWrite:
        """Prepare dead letters: refused records, read again with their reasons, and rejected output rows.

        `refused` holds per source the batch's range and the number of refused records in it.
        """


class Upkeep(Protocol):
    """The maintenance that keeps one sink fast and small between batches. A failure in it never ends the stream."""

    @property
    def name(self) -> str:
        """The name of the sink that it maintains."""

    @property
    def put_off(self) -> Mapping[str, str]:
        """Tasks that failed when they were last tried: name -> a sentence with the reason."""

    def after_commit(self) -> None:
        """Called after each of the stream's batches."""


@dataclass(frozen=True)
class Companion:
    """A table that takes rows, or late records, of another table's batch, and is committed before that table."""

    sink: Sink
    table: str
    """The name of the table that it belongs to."""
    kind: Literal["deletes", "quarantine", "late"]


@dataclass(frozen=True)
class SinkSet:
    """The sinks of one stream.

    `external` are outside of the store of the tables: topics, and tables of a database. They commit after every table
    but the primary one. With `batches_only`, the primary table only says what they have. `companions` are in the order
    of their commits.
    """

    primary: Sink
    secondary: Sequence[Sink]
    dead_letters: DeadLetterSink
    companions: Sequence[Companion] = ()
    external: Sequence[Sink] = ()
    batches_only: bool = False

    @property
    def first(self) -> Sink:
        """The sink of the function's first output: the primary one, if the stream writes Delta tables of its own."""
        return self.external[0] if self.batches_only else self.primary

    @property
    def outputs(self) -> Sequence[Sink]:
        """The sinks of the function's outputs, in the order of `Stream.output_names`."""
        return self.external if self.batches_only else (self.primary, *self.secondary, *self.external)

    def counted_as(self, sink: Sink) -> str:
        """The name under which the primary table's entry counts the rows of another sink."""
        if sink is self.dead_letters:
            return "dead_letters"
        prefixes = {"quarantine": QUARANTINED, "late": LATE}
        named = (f"{prefixes[c.kind]}{c.table}" for c in self.companions if c.sink is sink and c.kind in prefixes)
        return next(named, sink.name)

    def others(self) -> Iterator[Sink]:
        """All but the primary one."""
        yield from (*self.secondary, *(each.sink for each in self.companions), self.dead_letters, *self.external)

    def __iter__(self) -> Iterator[Sink]:
        yield self.primary
        yield from self.others()
