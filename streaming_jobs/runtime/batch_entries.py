"""The ledger entries of one batch: what they count, and what the repeat of a batch that was killed must equal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from streaming_jobs.errors import LedgerConflict
from streaming_jobs.ledger.entry import DROPPED, LedgerEntry, Txn
from streaming_jobs.ledger.positions import OffsetRange, WrittenRange
from streaming_jobs.sinks.base import PendingWrite, Sink, SinkSet
from streaming_jobs.sources.base import Source
from streaming_jobs.text import commands


@dataclass
class BatchCounts:
    """The counts of one batch, collected table by table."""

    rows: dict[str, int] = field(default_factory=dict)
    rules: dict[str, Mapping[str, int]] = field(default_factory=dict)

    def onto(self, entry: LedgerEntry) -> LedgerEntry:
        return replace(entry, rows=self.rows, rules=self.rules)

    def of_commit(self, counted_as: str, done: LedgerEntry) -> None:
        """Take over the counts of a table that has the batch already."""
        self.rows |= {name: n for name, n in done.rows.items() if name.startswith(DROPPED)}
        self.rows[counted_as] = done.rows_written
        self.rules |= done.rules

    def of_dropped(self, numbers: Mapping[str, int]) -> None:
        """Count what the stream's error policy drops, beside what rules have dropped."""
        for name, number in numbers.items():
            self.rows[name] = self.rows.get(name, 0) + number

    def of_write(self, table: str, counted_as: str, pending: PendingWrite) -> None:
        """Count the prepared rows of a table, and the rows that its rules have removed."""
        self.rows[counted_as] = pending.rows
        if pending.outcome.dropped:
            self.rows[f"{DROPPED}{table}"] = pending.outcome.dropped
        if pending.outcome.broken:
            self.rules[table] = dict(pending.outcome.broken)


def rows_read(sources: Sequence[Source], ranges: Sequence[OffsetRange]) -> dict[str, int]:
    """The records of each source in its range, by the source's name."""
    by_name = {source.name: source for source in sources}
    return {each.topic: by_name[each.topic].rows(each) for each in ranges}


def own_entry(batch: LedgerEntry, table: str, pending: PendingWrite) -> LedgerEntry:
    """The entry of a table's own commit of the batch."""
    counts = BatchCounts()
    counts.of_write(table, "written", pending)
    return replace(batch, table=table, rows=counts.rows, rules=counts.rules)


def entry_of(
    sink: Sink, batch: LedgerEntry, staged: Mapping[str, PendingWrite], sinks: SinkSet, pending: PendingWrite
) -> LedgerEntry:
    """The entry of a sink's own commit of the batch; that of dead letters counts the rows that each topic refused."""
    own = own_entry(batch, sink.name, pending)
    if sink is not sinks.dead_letters:
        return own
    refused = {sink.name: number for sink in sinks.external if (number := _refused(staged.get(sink.name)))}
    return replace(own, rows={**own.rows, **refused})


def refuse_other_letters(
    done: LedgerEntry | None, staged: Mapping[str, PendingWrite], sinks: SinkSet, batch: LedgerEntry
) -> None:
    """Raise LedgerConflict if a repeated batch has other rows for a topic than those beside its dead letters.

    Topics or their limits have changed since the driver was killed: a row would be in a topic and a dead letter too, or
    neither.
    """
    if done is None:
        return
    for sink in sinks.external:
        if sink.name in staged and (now := _refused(staged[sink.name])) != (then := done.rows.get(sink.name, 0)):
            raise LedgerConflict(
                f"{sink.name} refused {then} rows of {batch.txn} before the driver ended, and refuses {now} now",
                "undo what has changed since: a topic that was made or deleted, a limit of its records, the code",
            )


def _refused(pending: PendingWrite | None) -> int:
    return 0 if pending is None or pending.rejected is None else int(pending.rejected.num_rows)


def refuse_other_rows(done: LedgerEntry | None, pending: PendingWrite | None, batch: LedgerEntry) -> None:
    """Raise LedgerConflict if a quarantine has other rows of the batch than the rules set aside now.

    Other code wrote them, before it was killed: a row that is set aside only now would be in no table, and one that is
    written now in two.
    """
    now = 0 if pending is None else pending.rows
    if done is not None and (then := done.rows_written) != now:
        raise LedgerConflict(
            f"the quarantine {done.table} has {then} rows of {batch.txn}, by code {done.code.hash}; by code "
            f"{batch.code.hash} they are {now}",
            f"let code {done.code.hash} finish the batch; or rebuild from before it: "
            f"{commands.plan(batch.stream, to_batch=batch.batch - 1)}",
        )


def range_words(entry: LedgerEntry) -> str:
    return ", ".join(f"{r.topic} {dict(r.start)} to {dict(r.end)}" for r in entry.offsets)


def written(topics: Sequence[Sink], txn: Txn) -> tuple[WrittenRange, ...]:
    """Where a batch lies in the topics that have it."""
    entries = [entry for sink in topics if (entry := sink.newest_entry()) is not None and entry.txn == txn]
    return tuple(each for entry in entries for each in entry.written)
