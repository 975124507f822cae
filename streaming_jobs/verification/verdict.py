"""The verdict of a verification: on each stream, and on all of them together."""

from __future__ import annotations

from dataclasses import dataclass, field

from streaming_jobs.verification.ledger_chain import Fault
from streaming_jobs.verification.lineage import Coverage
from streaming_jobs.verification.offset_ranges import Span, total
from streaming_jobs.verification.subject import Comparison


@dataclass(frozen=True)
class StreamVerdict:
    """The verdict on one stream; all offsets are those that the topics hold now.

    `verified` are in exactly one range, `unproved` belong to entries that are gone, for the reason `why`; `unread` come
    after the stream's last batch, `skipped` were left out by a recovery. `log_from` is the oldest version in the log
    of the table. `coverage` has the offsets that the rows were made from, up to `position` (generation and batch).
    `accepted` are the tables with an accepted foreign commit. `begun`: the stream has state or tables here.
    """

    stream: str
    table: str
    version: int
    log_from: int
    batches: int
    rows: int
    verified: int
    lost: tuple[Span, ...]
    doubled: tuple[Span, ...]
    unproved: int
    unread: int
    faults: tuple[Fault, ...]
    why: str = ""
    skipped: int = 0
    comparisons: tuple[Comparison, ...] = ()
    coverage: Coverage = field(default_factory=Coverage, repr=False)
    position: tuple[int, int] | None = None
    accepted: frozenset[str] = frozenset()
    begun: bool = True

    @property
    def ok(self) -> bool:
        """True if nothing is wrong; `whole` adds that all of it was proved."""
        return not (self.lost or self.doubled or self.faults) and all(c.verdict != "wrong" for c in self.comparisons)

    @property
    def whole(self) -> bool:
        """True if every offset up to the stream's position was judged, and no comparison was lacking evidence.

        Without a position no batch is known, so nothing is proved.
        """
        judged = self.position is not None and not self.unproved
        return self.ok and judged and all(c.verdict != "unproved" for c in self.comparisons)


@dataclass(frozen=True)
class Verdict:
    """The verdict on all streams; `records` is the number of records in their topics."""

    records: int
    streams: tuple[StreamVerdict, ...]

    @property
    def ok(self) -> bool:
        """True if nothing is wrong with any stream."""
        return all(stream.ok for stream in self.streams)

    @property
    def whole(self) -> bool:
        """True if nothing is wrong, and nothing was left unjudged."""
        return all(stream.whole for stream in self.streams)

    @property
    def begun(self) -> bool:
        """True if at least one of the streams has ever run."""
        return any(stream.begun for stream in self.streams)

    @property
    def verified(self) -> int:
        """Offsets that are in exactly one range, over all streams."""
        return sum(stream.verified for stream in self.streams)

    @property
    def lost(self) -> int:
        """Offsets lost, over all streams."""
        return sum(total(stream.lost) for stream in self.streams)

    @property
    def doubled(self) -> int:
        """Offsets doubled, over all streams."""
        return sum(total(stream.doubled) for stream in self.streams)

    @property
    def unread(self) -> int:
        """Offsets after the last batch, over all streams."""
        return sum(stream.unread for stream in self.streams)
