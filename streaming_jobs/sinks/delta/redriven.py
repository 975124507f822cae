"""A Delta table that takes part in redrives (`sinks/redriven.py`).

Each redrive is one commit with a transaction identifier of its own, which stays in the table even if its log is
cleaned up: so no kill and no second operator can apply it twice. The stream's position stays as it is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import pyarrow as pa
from deltalake import CommitProperties, DeltaTable
from deltalake.exceptions import DeltaError

from streaming_jobs.declare.columns import POSITION_COLUMN
from streaming_jobs.ledger.entry import LedgerEntry
from streaming_jobs.platform.failures import classify
from streaming_jobs.platform.table_rows import dataset
from streaming_jobs.sinks.delta import column_bounds
from streaming_jobs.sinks.delta.pending_writes import ArrowAppend, ArrowMerge, DeltaWrite
from streaming_jobs.sinks.delta.sink import DeltaSink
from streaming_jobs.sinks.redriven import PLACE, Kind, RedrivenRecord, RedriveOutdated
from streaming_jobs.text.spelling import counted


class DeltaRedriven:
    def __init__(self, sink: DeltaSink) -> None:
        self.sink = sink

    def has(self, entry: LedgerEntry) -> bool:
        return self.sink.holds(entry)

    def check(self, kind: Kind, records: Sequence[RedrivenRecord]) -> None:
        columns = [*PLACE[kind], *(["reason"] if kind == "dead letters" else [])]
        self.sink.update()
        rows = dataset(self.sink.handle, self.sink.path).to_table(columns=columns).to_pylist()
        there = {tuple(row.values()) for row in rows}
        gone = [each for each in records if _identity(kind, each) not in there]
        if gone:
            raise RedriveOutdated(
                f"{counted(len(gone), 'record', 'is', 'are')} no longer set aside in table {self.sink.name}, the first "
                f"at offset {gone[0].offset} of topic {gone[0].topic}, partition {gone[0].partition}"
            )

    def check_rows(self, rows: pa.Table) -> None:
        known = set(self.sink.schema.fieldNames())
        if unknown := [name for name in rows.column_names if name not in known]:
            raise RedriveOutdated(
                f"table {self.sink.name} has no column {', '.join(unknown)}: the code of today has not run yet",
                "start the stream once, then redrive again",
            )

    def add(self, rows: pa.Table, entry: LedgerEntry) -> int | None:
        by_position = POSITION_COLUMN in rows.column_names
        write = ArrowMerge(self.sink, rows, by_position) if self.sink.declared.keys else ArrowAppend(self.sink, rows)
        return _committed(write, entry)

    def take_out(self, kind: Kind, records: Sequence[RedrivenRecord], entry: LedgerEntry) -> int | None:
        return _committed(_TakeOut(self.sink, kind, records), entry)


def _committed(write: DeltaWrite, entry: LedgerEntry) -> int | None:
    try:
        return write.commit(entry)
    except DeltaError as error:
        raise classify(error) from error


def _identity(kind: Kind, record: RedrivenRecord) -> tuple[object, ...]:
    return (*record.place, record.reason) if kind == "dead letters" else record.place


_SOURCE = pa.schema(
    [
        ("topic", pa.string()),
        ("partition", pa.int32()),
        ("offset", pa.int64()),
        ("reason", pa.string()),
        ("reason_now", pa.string()),
        ("detail_now", pa.string()),
    ]
)


@dataclass
class _TakeOut(DeltaWrite):
    """Rows that leave the table of what was set aside; a dead letter that is dead again gets its new reason."""

    kind: Kind
    records: Sequence[RedrivenRecord]

    @property
    def rows(self) -> int:
        return len(self.records)

    def commit(self, entry: LedgerEntry) -> int | None:
        letters = self.kind == "dead letters"
        values = [{name: getattr(each, name) or None for name in _SOURCE.names} for each in self.records]
        for value, record in zip(values, self.records, strict=True):
            value |= {"partition": record.partition, "offset": record.offset}
        source = pa.Table.from_pylist(values, schema=_SOURCE)
        names = zip(PLACE[self.kind], PLACE["dead letters"], strict=True)
        same = " AND ".join(f"t.`{column}` = s.`{name}`" for column, name in names)

        def write(handle: DeltaTable, properties: CommitProperties) -> None:
            merge = handle.merge(
                source,
                predicate=f"{same} AND t.`reason` = s.`reason`" if letters else same,
                source_alias="s",
                target_alias="t",
                writer_properties=column_bounds.writer_properties(self.sink.schema),
                commit_properties=properties,
            ).when_matched_delete("s.`reason_now` IS NULL")
            if letters:
                merge = merge.when_matched_update({"`reason`": "s.`reason_now`", "`detail`": "s.`detail_now`"})
            merge.execute()

        return self.sink.commit(entry, write)
