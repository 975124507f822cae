"""Checks that rebuilt rows have to pass before they are published; the audit walks the list of them.

A new kind of check is a new class here, and a line in `checks_of`.

Tables are compared with the published ones. Of a topic, the records that counted before the recovery and those that
count afterwards are written to tables in staging, decoded by the topic's format, and compared in the same way. Of a
topic with the changes of an aggregation (`emit="update"`) the last record of each key is compared: how many changes
there are between depends on where batches end.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Protocol

import pyarrow as pa
import pyarrow.compute as pc
from deltalake import DeltaTable, write_deltalake

from reprocessing.plan.conditions import broken, quoted
from reprocessing.plan.plan import StreamRecoveryPlan, Until, opened_by
from reprocessing.plan.plan_file import compared_folder
from reprocessing.plan.void_records import first_changed, path_of, path_with
from reprocessing.replay.difference import Difference, compare, compare_stored, compared_tables, not_compared
from reprocessing.stages.bounded import combined_settings, rows_until, unequal_later_rows
from reprocessing.stages.publish import incompatible, misfit
from reprocessing.stages.recovery import RebuiltTables, RecoveryContext, RunSuite, no_suites
from reprocessing.stages.replay import kept_table
from reprocessing.stages.staged_records import rows_of, written_until
from streaming_jobs.declare.table import DeclaredTable
from streaming_jobs.declare.topic_sink import KafkaSink
from streaming_jobs.ledger.positions import decode, decode_partitions
from streaming_jobs.platform.table_rows import QueryFailed, opened
from streaming_jobs.registry.schemas import StoredSchemas
from streaming_jobs.sinks.stored import StoredTable
from streaming_jobs.sinks.tables import all_tables
from streaming_jobs.sources.base import Span
from streaming_jobs.sources.record_blocks import RECORD, RecordBlocks, SourceRecords
from streaming_jobs.sources.void_ranges import NO_VOID, VoidRanges
from streaming_jobs.state import topic_records
from streaming_jobs.text.spelling import counted


@dataclass(frozen=True)
class RebuiltStream:
    """One stream that was rebuilt: its published and its staging tables by name, opened once.

    The staging tables of a bounded recovery are not those to publish: they end with the last batch to correct.
    """

    context: RecoveryContext
    published: Mapping[str, StoredTable]
    staged: Mapping[str, StoredTable]

    @classmethod
    def of(cls, context: RecoveryContext) -> RebuiltStream:
        return cls(context, context.published(), context.staged())

    @cached_property
    def differences(self) -> list[Difference]:
        """The differences of every topic, and of every table with rows of its own; computed when first asked for."""
        stream = self.context.stream
        batches = stream.primary.name if stream.batches_only else None  # its rows are the batches themselves
        compared = [declared for declared in compared_tables(stream) if declared.name != batches]
        return [*_topic_differences(self.context), *map(self._difference, compared)]

    def _difference(self, declared: DeclaredTable) -> Difference:
        """The difference of a table; a lack of memory or disk does not end the recovery."""
        folder = compared_folder(self.context.settings, self.context.plan)
        try:
            return compare_stored(
                self.context.replay_settings, folder, declared, self.context.stream.name, *self._compared(declared)
            )
        except QueryFailed as error:
            return not_compared(declared.name, error.found)

    def _compared(self, declared: DeclaredTable) -> tuple[StoredTable, StoredTable]:
        """The published and the rebuilt rows, as of the same records."""
        if self.context.plan.until is not None:
            return rows_until(self.context, declared), self.staged[declared.name]
        rebuilt = kept_table(self.context, declared) or self.staged[declared.name]
        return self.published[declared.name], rebuilt


class AuditCheck(Protocol):
    def words(self) -> str:
        """The check as a part of the plan's text; empty for a check that every plan has."""

    def refusals(self, rebuilt: RebuiltStream) -> Iterator[str]:
        """The reasons why the rows may not be published, in words; none if they pass."""


@dataclass(frozen=True)
class EveryRow:
    """A condition in SQL holds for every row of the primary table."""

    rule: str

    def words(self) -> str:
        return f"every row: {self.rule}"

    def refusals(self, rebuilt: RebuiltStream) -> Iterator[str]:
        staged = rebuilt.staged[rebuilt.context.stream.primary.name]
        rows = broken(staged.readable(), self.rule)
        if rows.rows:
            yield rows.words(self.rule)


@dataclass(frozen=True)
class FitsTheTable:
    """The rebuilt files can replace the published files: columns, types and partitions are the same.

    An undo goes back to rows from before a column that the undone recovery may have added: it is null in them.
    """

    def words(self) -> str:
        """Empty: every plan has this check."""
        return ""

    def refusals(self, rebuilt: RebuiltStream) -> Iterator[str]:
        """The columns and partitions that differ; a combined table has also the columns of the later rows."""
        reasons = misfit if rebuilt.context.whole.undoes is None else incompatible
        for name, table in rebuilt.published.items():
            yield from reasons(table, rebuilt.staged[name])


@dataclass(frozen=True)
class AtMostChanged:
    """At most a share of the rows of any published table changes, appears or vanishes."""

    share: float

    def words(self) -> str:
        return f"at most {self.share:.1%} of the rows change"

    def refusals(self, rebuilt: RebuiltStream) -> Iterator[str]:
        for difference in rebuilt.differences:
            if difference.unknown:
                yield f"whether more than {self.share:.1%} of the rows of {difference.table} change is not known: " + (
                    difference.unknown
                )
            elif difference.share > self.share:
                yield f"{difference.share:.1%} of the rows of {difference.table} change, at most {self.share:.1%} may"


@dataclass(frozen=True)
class SuitePasses:
    suite: str
    run: RunSuite

    def words(self) -> str:
        return f"suite {self.suite}"

    def refusals(self, rebuilt: RebuiltStream) -> Iterator[str]:
        published = RebuiltTables(combined_settings(rebuilt.context), rebuilt.context.stream)
        for words in self.run(published, self.suite):
            yield f"suite {self.suite}: {words}"


@dataclass(frozen=True)
class LaterRowsUnchanged:
    """The rows after the end of a bounded recovery are the same as before, in every table."""

    until: Until

    def words(self) -> str:
        return f"the rows after batch {self.until.batch} are the same as before"

    def refusals(self, rebuilt: RebuiltStream) -> Iterator[str]:
        for declared, _ in all_tables(rebuilt.context.stream):
            if rows := unequal_later_rows(rebuilt.context, declared):
                yield (
                    f"{counted(rows, 'row')} of table {declared.name} after batch {self.until.batch} would not be the "
                    "same as before"
                )


def checks_of(plan: StreamRecoveryPlan, run_suite: RunSuite = no_suites) -> tuple[AuditCheck, ...]:
    bound = plan.checks.max_changed
    return (
        *(EveryRow(rule) for rule in plan.checks.rules),
        *(SuitePasses(suite, run_suite) for suite in plan.checks.suites),
        FitsTheTable(),
        *([] if plan.until is None else [LaterRowsUnchanged(plan.until)]),
        *(AtMostChanged(share) for share in ([] if bound is None else [bound])),
    )


_KEY, _PARTITION, _OFFSET = "record key", "_partition", "_offset"
_ROWS_AT_ONCE = 200_000


def _topic_differences(context: RecoveryContext) -> list[Difference]:
    """The difference of each topic to which the stream's replay has appended, or which it has staged records for."""
    if not context.plan.wrong_from:
        return []
    sinks = {sink.name: sink for sink in context.stream.topic_sinks.values()}
    if (settled := context.journal.done("void_records")) is None:
        return [_staged_difference(context, sinks[topic]) for topic in context.plan.wrong_from if topic in sinks]
    return [_topic_difference(context, sinks[topic]) for topic in settled["topics"] if topic in sinks]


def _topic_difference(context: RecoveryContext, sink: KafkaSink) -> Difference:
    settled, record = context.result("void_records"), topic_records.load(context.settings, sink.name)
    assert record is not None  # settle has written it
    before, after = record.holding(path_of(context.record)), record.holding()
    begins = first_changed(decode_partitions(settled["begins"][sink.name]), before, after)
    ends = decode_partitions(settled["ends"][sink.name])
    appended = decode(context.result("replay")["appended"])[sink.name]
    return _records_differ(context, sink, (_spans(begins, ends), before), (_spans(begins, appended), after))


def _staged_difference(context: RecoveryContext, sink: KafkaSink) -> Difference:
    """As of the batch up to which the replay has followed: no record is void yet, and no corrected one is appended."""
    wrong, record = context.plan.wrong_from[sink.name], topic_records.load(context.settings, sink.name)
    before = after = NO_VOID
    if record is not None:
        before = record.holding(path_of(context.record))
        after = record.holding(path_with(context.record, opened_by(context.plan)))
    begins = first_changed(wrong, before, after)
    ends = {**wrong, **written_until(context, sink.name)}
    since = dict.fromkeys(ends, 0)  # a partition that came since the plan has records of wrong batches alone
    published, right = (_spans({**since, **begins}, ends), before), (_spans(begins, wrong), after)
    return _records_differ(context, sink, published, right, rows_of(context, sink))


SpansToCompare = tuple[Mapping[int, Span], VoidRanges]
"""By partition the range of a topic's offsets to compare, and the void ranges to leave out."""


def _records_differ(
    context: RecoveryContext,
    sink: KafkaSink,
    published: SpansToCompare,
    rebuilt: SpansToCompare,
    staged: Iterable[SourceRecords] = (),
) -> Difference:
    """The difference of the records that count before and after; `staged` ones come after the rebuilt ranges."""
    folder = context.scratch / "_topics" / sink.name
    keyed = sink.emit == "update" and sink.key is not None
    found = _table(context, sink, folder / "published", _counting(context, sink, *published), keyed=keyed)
    right = itertools.chain(_counting(context, sink, *rebuilt), staged)
    made = _table(context, sink, folder / "rebuilt", right, keyed=keyed)
    return compare(f"topic {sink.name}", found, made, [_KEY] if keyed else [], folder / "_compared")


def _counting(
    context: RecoveryContext, sink: KafkaSink, spans: Mapping[int, Span], void: VoidRanges
) -> Iterator[SourceRecords]:
    """Yields the records of ranges that are not void."""
    return (void.kept(records) for records in context.written.blocks(sink.name, void.clipped(spans)))


def _spans(begins: Mapping[int, int], ends: Mapping[int, int]) -> dict[int, Span]:
    return {p: (begins.get(p, end), end) for p, end in ends.items()}


def _table(
    context: RecoveryContext, sink: KafkaSink, path: Path, counting: Iterable[SourceRecords], *, keyed: bool
) -> DeltaTable:
    """Records as a new table, with their fields; keyed, the last one of each key."""
    blocks = RecordBlocks(sink.topic.bound(StoredSchemas.of_settings(context.settings)), "all", recovered=True)
    schema = _rows(blocks, None, keyed=keyed).schema
    write_deltalake(path, schema.empty_table(), mode="overwrite", schema_mode="overwrite")
    waiting: list[pa.Table] = []
    for records in counting:
        waiting.append(_rows(blocks, records, keyed=keyed))
        if sum(len(each) for each in waiting) >= _ROWS_AT_ONCE:
            write_deltalake(path, pa.concat_tables(waiting), mode="append")
            waiting = []
    if waiting:
        write_deltalake(path, pa.concat_tables(waiting), mode="append")
    table = DeltaTable(path)
    return _last_of_each_key(table, path.with_name(f"{path.name}_by_key")) if keyed else table


def _rows(blocks: RecordBlocks, records: SourceRecords | None, *, keyed: bool) -> pa.Table:
    """The fields of records that are no tombstones and could be decoded, as the topic's readers see them."""
    batch = blocks.schema.empty_table() if records is None else pa.Table.from_batches([blocks.of(records)])
    batch = batch.filter(pc.invert(batch["_bad"]))
    record = batch[RECORD].combine_chunks()
    columns = dict(zip([f.name for f in record.type], record.flatten(), strict=True))
    if keyed:
        keys = [_shown(key) for key in batch["key"].to_pylist()]
        columns |= {_KEY: pa.array(keys, pa.string()), _PARTITION: batch["partition"], _OFFSET: batch["offset"]}
    return pa.table(columns)


def _shown(key: bytes | None) -> str | None:
    """A key as text; as hexadecimal digits if it is none."""
    if key is None:
        return None
    try:
        return key.decode()
    except UnicodeDecodeError:
        return f"0x{key.hex()}"


def _last_of_each_key(table: DeltaTable, path: Path) -> DeltaTable:
    names = [field.name for field in table.schema().fields if field.name not in (_PARTITION, _OFFSET)]
    shown = ", ".join(quoted(name) for name in names)
    rank = f'row_number() OVER (PARTITION BY "{_KEY}" ORDER BY "{_PARTITION}", "{_OFFSET}" DESC)'
    query = f'SELECT {shown} FROM (SELECT *, {rank} AS "_rank" FROM records) WHERE "_rank" = 1'  # noqa: S608 - quoted
    found = opened({"records": table}, path.with_name("_spill")).execute(query)
    write_deltalake(path, found, mode="overwrite", schema_mode="overwrite")
    return DeltaTable(path)
