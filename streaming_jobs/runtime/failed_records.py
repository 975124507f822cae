"""The records and rows of one batch that failed, by layer, and what the stream's error policy makes of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from streaming_jobs.declare.columns import REASON_COLUMN
from streaming_jobs.declare.error_policy import ErrorPolicy
from streaming_jobs.errors import ErrorBudgetExceeded, RecordRefused
from streaming_jobs.ledger.entry import DROPPED, LedgerEntry
from streaming_jobs.sources.base import Source, SourceCounts
from streaming_jobs.state.set_aside import REASON
from streaming_jobs.text.spelling import counted

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import SparkSession

    from streaming_jobs.runtime.isolation import Isolation
    from streaming_jobs.sinks.base import PendingWrite, SinkSet


@dataclass(frozen=True)
class FailedRecords:
    """`decode` and `raised` by source, `rejected` rows by sink; sources and sinks without any are left out.

    With `drops_raised`, records on which the function raised are dropped: their list on disk says so, and a policy that
    has changed since does not hold for them.
    """

    policy: ErrorPolicy
    decode: Mapping[str, int]
    raised: Mapping[str, int]
    rejected: Mapping[str, pa.Table]
    drops_raised: bool = False

    @classmethod
    def of(
        cls,
        policy: ErrorPolicy,
        sources: Sequence[Source],
        seen: Mapping[str, SourceCounts],
        staged: Mapping[str, PendingWrite],
        raised: Mapping[str, int],
        *,
        drops_raised: bool = False,
    ) -> FailedRecords:
        """`seen` by observation: the bad records of a source, those on which the function `raised` among them."""
        bad = {s.name: seen[s.observation].bad for s in sources if s.observation in seen}
        raised = {name: min(count, bad.get(name, 0)) for name, count in raised.items()}
        decode = {name: count - raised.get(name, 0) for name, count in bad.items()}
        rejected = {name: w.rejected for name, w in staged.items() if w.rejected is not None and w.rejected.num_rows}
        return cls(policy, {name: count for name, count in decode.items() if count}, raised, rejected, drops_raised)

    def letters_of(self, source: str) -> int:
        """The dead letters of a source's records."""
        refused = self.decode.get(source, 0) if self.policy.decode == "dead_letter" else 0
        return refused + (0 if self.drops_raised else self.raised.get(source, 0))

    @property
    def rejected_letters(self) -> list[pa.Table]:
        """The rows that become dead letters."""
        return list(self.rejected.values()) if self.policy.write == "dead_letter" else []

    def dropped(self, sinks: SinkSet) -> dict[str, int]:
        """The numbers for the ledger entry of what is dropped: a record is missing from each output."""
        records = sum(self.decode.values()) if self.policy.decode == "drop" else 0
        records += sum(self.raised.values()) if self.drops_raised else 0
        rows = {name: table.num_rows for name, table in self.rejected.items()} if self.policy.write == "drop" else {}
        numbers = {sink.name: records + rows.get(sink.name, 0) for sink in sinks.outputs}
        return {f"{DROPPED}{name}": number for name, number in numbers.items() if number}

    def check(
        self, spark: SparkSession, entry: LedgerEntry, sources: Sequence[Source], isolation: Isolation | None
    ) -> None:
        """Raise RecordRefused if a layer stops the stream, ErrorBudgetExceeded if too much failed; note the number."""
        if self.decode and self.policy.decode == "fail":
            name, count = next(iter(self.decode.items()))
            source = next(each for each in sources if each.name == name)
            offsets = next(each for each in entry.offsets if each.topic == name)
            refused = source.bad_records(spark, offsets).where(f"reason <> '{REASON}'")
            first = refused.orderBy("partition", "offset").first()
            assert first is not None
            raise RecordRefused(
                f"the format of {name} refuses {counted(count, 'record')} of batch {entry.batch}, the first in "
                f"partition {first['partition']} at offset {first['offset']}: {first['reason']} ({first['detail']})",
                'correct the format, or let such records become dead letters: errors=ErrorPolicy(decode="dead_letter")',
            )
        if self.rejected and self.policy.write == "fail":
            name, rows = next(iter(self.rejected.items()))
            raise RecordRefused(
                f"{name} cannot hold {counted(rows.num_rows, 'row')} of batch {entry.batch}, the first {_first(rows)}",
                'correct the function, or let such rows become dead letters: errors=ErrorPolicy(write="dead_letter")',
            )
        if isolation is None:
            return
        number = sum(self.raised.values())
        if isolation.counts_all:
            number += sum(self.decode.values()) + sum(rows.num_rows for rows in self.rejected.values())
        if not number:
            return
        records = entry.records
        if number > (allowed := isolation.allowed(entry.txn, records)):
            raise ErrorBudgetExceeded(
                f"{number:,} records and rows of batch {entry.batch} ({records:,} records) "
                f"failed, and the error budget leaves {allowed:,}",
                "find the cause; if it is right that so many fail, raise the budget in the stream's `errors`",
            )
        isolation.spend(entry.txn, number)


def _first(rejected: pa.Table) -> str:
    """The reason of the first rejected row, and its record's place if the plan keeps it, in words."""
    names = [name for name in (REASON_COLUMN, "__partition", "__offset") if name in rejected.column_names]
    row = rejected.select(names).slice(0, 1).to_pylist()[0]
    partition, offset = row.get("__partition"), row.get("__offset")
    record = "" if offset is None else f", made of the record in partition {partition} at offset {offset}"
    return f"with the reason {row.get(REASON_COLUMN) or 'null_key'}{record}"
