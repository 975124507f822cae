"""What a verification has found: of each stream, and of all of them together."""

from __future__ import annotations

from dataclasses import dataclass, field

from streaming_jobs.verification.ledger_chain import Fault
from streaming_jobs.verification.lineage import Coverage
from streaming_jobs.verification.offset_ranges import Span, total
from streaming_jobs.verification.subject import Comparison


@dataclass(frozen=True)
class StreamVerdict:
    """What was found about one stream; all offsets are those that the topics hold now.

    `verified` are in exactly one range, `unproved` belong to entries that are gone, for the reason `why`; `unread` come
    after the stream's last batch, `skipped` were left out by a recovery. `log_from` is the oldest version in the log
    of the table. `coverage` is what the rows were made from, up to `position` (generation and batch). `accepted` are
    the tables of which a change of somebody else was accepted. `begun`: it has state or tables here.
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
        """Nothing is wrong. Whether all of it could be proved is `whole`."""
        return not (self.lost or self.doubled or self.faults) and all(c.verdict != "wrong" for c in self.comparisons)

    @property
    def whole(self) -> bool:
        """Every offset of the topics up to the stream's position was judged, and no comparison was lacking evidence.

        Without a position no batch is known, so nothing is proved.
        """
        judged = self.position is not None and not self.unproved
        return self.ok and judged and all(c.verdict != "unproved" for c in self.comparisons)


@dataclass(frozen=True)
class Verdict:
    """What was found about all streams; `records` are the topics'."""

    records: int
    streams: tuple[StreamVerdict, ...]

    @property
    def ok(self) -> bool:
        """Nothing is wrong with any stream."""
        return all(stream.ok for stream in self.streams)

    @property
    def whole(self) -> bool:
        """Nothing is wrong, and nothing was left unjudged."""
        return all(stream.whole for stream in self.streams)

    @property
    def begun(self) -> bool:
        """At least one of the streams has ever run."""
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
