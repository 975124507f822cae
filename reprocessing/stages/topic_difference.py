"""The difference that a recovery makes to a topic: the records that counted before, and those that count afterwards.

Both are written to tables in staging, decoded by the topic's format, and compared as tables are. Of a topic with the
changes of an aggregation (`emit="update"`) the last record of each key is compared: how many changes there are
between depends on where batches end.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
from deltalake import DeltaTable, write_deltalake

from reprocessing.plan.conditions import quoted
from reprocessing.plan.void_records import first_changed, path_of
from reprocessing.replay.difference import Difference, compare
from reprocessing.stages.recovery import RecoveryContext
from streaming_jobs.declare.topic_sink import KafkaSink
from streaming_jobs.ledger.positions import decode, decode_partitions
from streaming_jobs.platform.table_rows import opened
from streaming_jobs.sources.base import Span
from streaming_jobs.sources.record_blocks import RECORD, RecordBlocks, RecordDeclaration, SourceRecords
from streaming_jobs.sources.void_ranges import VoidRanges
from streaming_jobs.state import topic_records

_KEY, _PARTITION, _OFFSET = "record key", "_partition", "_offset"
_ROWS_AT_ONCE = 200_000


def topic_differences(context: RecoveryContext) -> list[Difference]:
    """The difference of each topic to which the stream's replay has appended."""
    if not context.plan.wrong_from:
        return []
    sinks = {sink.name: sink for sink in context.stream.topic_sinks.values()}
    return [_difference(context, sinks[topic]) for topic in context.result("void_records")["topics"] if topic in sinks]


def _difference(context: RecoveryContext, sink: KafkaSink) -> Difference:
    settled, record = context.result("void_records"), topic_records.load(context.settings, sink.name)
    assert record is not None  # settle has written it
    before, after = record.holding(path_of(context.record)), record.holding()
    begins = first_changed(decode_partitions(settled["begins"][sink.name]), before, after)
    ends = decode_partitions(settled["ends"][sink.name])
    appended = decode(context.result("replay")["appended"])[sink.name]
    folder = context.beside("_topics") / sink.name
    keyed = sink.emit == "update" and sink.key is not None
    counted = {
        "published": _table(context, sink, folder / "published", _spans(begins, ends), before, keyed=keyed),
        "rebuilt": _table(context, sink, folder / "rebuilt", _spans(begins, appended), after, keyed=keyed),
    }
    keys = [_KEY] if keyed else []
    return compare(f"topic {sink.name}", counted["published"], counted["rebuilt"], keys, folder / "_compared")


def _spans(begins: Mapping[int, int], ends: Mapping[int, int]) -> dict[int, Span]:
    return {p: (begins.get(p, end), end) for p, end in ends.items()}


def _table(
    context: RecoveryContext, sink: KafkaSink, path: Path, spans: Mapping[int, Span], void: VoidRanges, *, keyed: bool
) -> DeltaTable:
    """The records that are not void as a new table, with their fields; keyed, the last one of each key."""
    blocks = RecordBlocks(RecordDeclaration.of(sink.topic), "all", recovered=True)
    schema = _rows(blocks, None, keyed=keyed).schema
    write_deltalake(path, schema.empty_table(), mode="overwrite", schema_mode="overwrite")
    waiting: list[pa.Table] = []
    for records in context.written.blocks(sink.name, void.clipped(spans)):
        waiting.append(_rows(blocks, void.kept(records), keyed=keyed))
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
