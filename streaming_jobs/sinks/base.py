"""What a batch asks of the tables, or whatever else, that it writes to: the seam between `runtime/batch.py` and sinks.

A sink takes the rows of each batch once. It prepares them (nothing is visible), then commits them together with the
batch's ledger entry; when it is asked again it says that it has them. `sinks/delta/output.py` is a Delta table seen
that way, `streaming_jobs.testing` has one in memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar, Literal, Protocol

from streaming_jobs.ledger import LedgerEntry, Txn
from streaming_jobs.positions import OffsetRange

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import DataFrame, SparkSession

    from streaming_jobs.sources.base import Source

Committer = Literal["direct", "spark"]


@dataclass(frozen=True)
class BatchOfRows:
    """Of which batch the rows are, whether they may pass through the driver's memory, and the topics they come from."""

    generation: int
    batch: int
    driver: bool
    topics: Sequence[str] = ()


class PendingWrite(Protocol):
    """Rows of one batch for one sink, computed and not yet visible."""

    committer: ClassVar[Committer]

    @property
    def rows(self) -> int:
        """How many rows are prepared."""

    @property
    def null_keys(self) -> pa.Table | None:
        """Rows that are not written but dead letters: those that the sink cannot hold, and null keys."""

    @property
    def deletes(self) -> PendingWrite | None:
        """What the table that remembers the deletes takes, to be committed before this is."""

    def commit(self, entry: LedgerEntry) -> int | None:
        """Make them visible once, with the entry; the sink's version, or None if the batch is in it already."""

    def close(self) -> None:
        """Free what is held."""


class Sink(Protocol):
    """One output of one stream. Not for two threads at once."""

    @property
    def name(self) -> str:
        """The name that ledger entries have for it."""

    @property
    def position(self) -> Txn | None:
        """The newest batch in it, as of the last `refresh` or commit; None if there is none."""

    @property
    def version(self) -> int:
        """The number of its last commit."""

    def refresh(self) -> None:
        """Take note of what was committed since."""

    def newest_entry(self) -> LedgerEntry | None:
        """The stream's newest ledger entry in it; None if it no longer shows one."""

    def sync(self) -> None:
        """Have every commit on disk, also those that a driver before this one has left in memory only."""

    def prepare(self, frame: DataFrame, rows: BatchOfRows) -> PendingWrite:
        """Compute the frame's rows."""


class DeadLetterSink(Sink, Protocol):
    """Where refused records go."""

    def prepare_letters(
        self,
        spark: SparkSession,
        refused: Sequence[tuple[Source, OffsetRange, int]],
        null_keys: Sequence[pa.Table],
        rows: BatchOfRows,
    ) -> PendingWrite:
        """Read the refused records again, (source, the batch's range, how many), and judge them and the null keys."""


class Named(Protocol):
    """A thing with a name."""

    @property
    def name(self) -> str:
        """The name."""


class Upkeep(Protocol):
    """The work that keeps one sink quick and small between batches. None of it ends a stream."""

    @property
    def sink(self) -> Named:
        """The sink that it is for."""

    @property
    def put_off(self) -> Mapping[str, str]:
        """What did not succeed when it was tried last, each in a sentence with the reason."""

    def after_commit(self) -> None:
        """Called after each of the stream's batches."""


@dataclass(frozen=True)
class SinkSet:
    """The sinks of one stream. `deletes` are those that remember deletes, by the name of the table they are of."""

    primary: Sink
    secondary: Sequence[Sink]
    dead_letters: DeadLetterSink
    deletes: Mapping[str, Sink] = field(default_factory=dict)

    def others(self) -> Iterator[Sink]:
        """All but the primary one."""
        yield from (*self.secondary, *self.deletes.values(), self.dead_letters)

    def __iter__(self) -> Iterator[Sink]:
        yield self.primary
        yield from self.others()
