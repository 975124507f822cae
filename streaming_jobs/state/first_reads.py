"""When a stream first read a record, from its ledger, or from the record if a replay has written it.

A replay writes records to topics a second time, later. Their readers measure `max_ahead` against the first time, which
each record of a replay has in a header, so that they refuse the same records as before.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from streaming_jobs.ledger.positions import OffsetRange
from streaming_jobs.state.ledger_file import LedgerFile

_A_DAY = 96
"""Ledger lines of a day that are looked at: with more batches the times are exact to a quarter of an hour."""


@dataclass
class FirstReads:
    """Times for the batches of one replay, which come in their order; `ledger` is that of the stream itself.

    `in_records` gives the time that the last records of a range have in their headers, None if they have none: the
    stream may read what a replay of another one has written, which its own ledger does not know.
    """

    ledger: LedgerFile
    stream: str
    in_records: Callable[[OffsetRange], int | None] = lambda _: None
    _seen: list[tuple[float, Sequence[OffsetRange]]] | None = field(default=None, init=False)
    _at: int = field(default=0, init=False)

    def __call__(self, batch: Sequence[OffsetRange]) -> int | None:
        """When all of the batch had been read once, in milliseconds since 1970; None if it had not been."""
        if self._seen is None:
            self._seen = sorted(self._since(batch), key=lambda seen: seen[0])
        while self._at < len(self._seen):
            at, ends = self._seen[self._at]
            if _covers(ends, batch):
                return int(at * 1000)
            self._at += 1
        return max((time for each in batch if (time := self.in_records(each)) is not None), default=None)

    def _since(self, batch: Sequence[OffsetRange]) -> Iterator[tuple[float, Sequence[OffsetRange]]]:
        begin = [replace(each, end=each.start) for each in batch]
        for day in self.ledger.days(self.stream):
            lines = [raw.read() for raw in day[:: max(1, len(day) // _A_DAY)]]
            yield from ((line.at, line.entry.offsets) for line in lines if line.entry.kind == "batch")
            if lines and lines[0].entry.generation == 1 and _covers(begin, lines[0].entry.offsets):
                return  # a later generation may have gone back


def _covers(read: Sequence[OffsetRange], wanted: Sequence[OffsetRange]) -> bool:
    """True if the ends of `read` are not before those of `wanted`, in each partition."""
    ends = {(each.topic, each.topic_id): each.end for each in read}
    return all(
        ends.get((each.topic, each.topic_id), {}).get(partition, 0) >= end
        for each in wanted
        for partition, end in each.end.items()
    )
