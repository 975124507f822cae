"""A stream on disk as a driver leaves it, without running a batch: record, tables, and Spark's checkpoint."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from deltalake.transaction import AddAction

from streaming_jobs.declare.schemas import schema_of
from streaming_jobs.ledger.entry import CodeVersion
from streaming_jobs.settings import Settings
from streaming_jobs.sinks.delta.sink import DeltaSink
from streaming_jobs.sinks.delta.store import ensure_sink
from streaming_jobs.sinks.schemas import DEAD_LETTERS
from streaming_jobs.sinks.tables import all_tables
from streaming_jobs.state import stream_record
from streaming_jobs.state.stream_folder import StreamFolder
from streaming_jobs.state.stream_record import BoundTable, BoundTopic, CodeSince
from streaming_jobs.stream import DeltaTable, Stream

ROWS = schema_of({"id": "bigint", "place": "string"})
"""The columns of every topic and table; no batch is run, so every stream's function is `unchanged`."""


def unchanged(value: Any) -> Any:
    return value


def lay_stream(settings: Settings, stream: Stream, source: BoundTopic, code: CodeVersion) -> dict[str, DeltaSink]:
    """The stream's record and its tables, which are empty; the tables by name."""
    bound, sinks = [], {}
    for declared, role in all_tables(stream):
        assert isinstance(declared, DeltaTable)
        columns = DEAD_LETTERS if declared.name == stream.dead_letters else ROWS
        sinks[declared.name] = ensure_sink(settings, declared, stream.name, columns, generation=1)
        bound.append(BoundTable(declared.name, str(sinks[declared.name].handle.metadata().id), role))
    since = (CodeSince(code.hash, code.package, 1, 0, time.time()),)
    record = replace(stream_record.first(stream.name), tables=tuple(bound), topics=(source,), code=since)
    stream_record.save(settings, record)
    return sinks


def data_file(folder: Path, number: int, place: str = "here", *, shared: Path | None = None) -> AddAction:
    """A file of one row, for a commit; the same file as in `shared`, if it is there."""
    path, row = folder / f"part-{number:06d}.parquet", {"id": number, "place": place}
    if shared is not None and (shared / path.name).exists():
        os.link(shared / path.name, path)
    else:
        pq.write_table(pa.Table.from_pylist([row]), path)
    stats = {"numRecords": 1, "minValues": row, "maxValues": row, "nullCount": {"id": 0, "place": 0}}
    return AddAction(path.name, path.stat().st_size, {}, int(time.time() * 1000), True, json.dumps(stats))


def lay_checkpoint(
    settings: Settings, stream: Stream, topic: str, batches: range, ends: Callable[[int], dict[int, int]]
) -> None:
    """Spark's checkpoint with these batches; `ends` are the offsets after a batch, those of -1 its beginning."""

    def offsets(batch: int) -> str:
        return json.dumps({topic: {str(p): end for p, end in ends(batch).items()}}, separators=(",", ":"))

    folder = Path(str(StreamFolder.of(settings, stream.name).checkpoint(1).folder))
    for part in ("offsets", "commits", "sources/0"):
        (folder / part).mkdir(parents=True)
    (folder / "metadata").write_text('{"id":"d1232a21-48ec-49aa-80a3-815ce12b0714"}')
    (folder / "sources" / "0" / "0").write_text(f"\0v1\n{offsets(-1)}")
    configuration = json.dumps({"batchWatermarkMs": 0, "batchTimestampMs": 1_795_255_789_437, "conf": {}})
    for batch in batches:
        (folder / "offsets" / str(batch)).write_text(f"v1\n{configuration}\n{offsets(batch)}")
        (folder / "commits" / str(batch)).write_text('v2\n{"nextBatchWatermarkMs":0,"stateUniqueIds":{}}')
