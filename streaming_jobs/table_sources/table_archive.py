"""The archive of one topic as a source reads it (`sources/base.py`): what it covers, and its records.

It is pickled into the processes that read, so it has paths only: the folder of the table, and the archive's record. The
offsets that it covers are the offsets that its ledger records as read. A gap among them is one of Kafka's own:
markers and aborted records of transactions, compacted records.

DataFusion reads the table: the log says which files have a partition and a range of offsets, and Parquet's page index
which pages of them. So a part of a range costs only its own pages, and the rows are in the order of offsets, even
after a compaction that joined files in another order.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.compute as pc

from streaming_jobs.errors import PermanentError, TransientError
from streaming_jobs.sources.base import Span
from streaming_jobs.sources.record_blocks import HEADERS_ARROW, ArchivedRecords
from streaming_jobs.storage.locations import Location, delta_table
from streaming_jobs.storage.object_files import ObjectHandle

if TYPE_CHECKING:
    from deltalake import DeltaTable


_READ = 'SELECT "offset", "timestamp_ms", "timestamp_type", "key", "value", "headers" FROM archive'
_FIRST = 'SELECT min("offset") AS "first" FROM archive'
_MOST_ROWS = 50_000
_MOST_BYTES = 16 << 20
"""Rows, and bytes of files, of one query, about: what it sorts is in memory. Compressed files are several times larger
in memory."""
_SAMPLE = 2_000
_ROW = pa.schema(
    [
        ("offset", pa.int64()),
        ("timestamp_ms", pa.int64()),
        ("timestamp_type", pa.string()),
        ("key", pa.binary()),
        ("value", pa.binary()),
        ("headers", HEADERS_ARROW),
    ]
)


@dataclass(frozen=True)
class TableArchive:
    """The archive `stream` of one topic: its table's folder, its record, and the id of the topic that is read."""

    stream: str
    topic: str
    topic_id: str
    table: Location
    record: ObjectHandle

    @property
    def name(self) -> str:
        return self.stream

    def bounds(self) -> dict[int, Span]:
        """By partition the first offset that it covers and the one after the last; none that its ledger does not say.

        Nothing is covered by the archive of another topic of this name, or by a table in which somebody else has
        changed rows, even if that was accepted: what is left is not known. A range that was skipped is a hole: what
        comes after the last hole is covered. Raises TransientError between a recovery's publish and its end.
        """
        from streaming_jobs.sinks.delta.log import walk
        from streaming_jobs.state import stream_record

        record = stream_record.read(self.record)
        bound = record.topic(self.topic) if record is not None else None
        if record is None or bound is None or bound.topic_id != self.topic_id or record.accepts(self.stream):
            return {}
        for commit in walk(self.table):
            if commit.foreign_to(self.stream):
                return {}
            entry = commit.entry
            if entry is None or not commit.moves(self.stream) or entry.kind == "fence":
                continue
            if entry.generation != record.generation and entry.kind == "publish":
                raise TransientError(
                    f"archive {self.stream} is being recovered by plan {entry.plan}", "wait for its end, or finish it"
                )
            ends = next((r.end for r in entry.offsets if r.topic == self.topic), {})
            return _covered(bound.start, ends, record.void_ranges, self.topic)
        return {}

    def read(self, partition: int, span: Span, most: int) -> Iterator[ArchivedRecords]:
        """Yields the records of a range in the order of offsets, at most `most` at a time."""
        table, (start, end) = self._opened(), span
        step = self._step(table, partition, span)
        for first in range(start, end, step):
            last = min(first + step, end)
            wanted = f'"partition" = {partition:d} AND "offset" >= {first:d} AND "offset" < {last:d}'
            for rows in _query(table, f'{_READ} WHERE {wanted} ORDER BY "offset"', self.stream):
                columns = [pc.cast(rows[field.name], field.type) for field in _ROW]
                made = pa.RecordBatch.from_arrays(columns, schema=_ROW)
                for at in range(0, made.num_rows, most):
                    yield ArchivedRecords(partition, made.slice(at, most))

    def first_at(self, ms: int, spans: Mapping[int, Span]) -> dict[int, int]:
        """By partition the first offset of a range whose timestamp is at or after `ms`; those without one are left out.

        As Kafka answers it: the least offset, though a later one may have an earlier time.
        """
        found: dict[int, int] = {}
        for partition, (start, end) in spans.items():
            wanted = f'"partition" = {partition:d} AND "offset" >= {start:d} AND "offset" < {end:d}'
            sql = f'{_FIRST} WHERE {wanted} AND "timestamp_ms" >= {ms:d}'
            for rows in _query(self._opened(), sql, self.stream):
                found.update((partition, first) for first in rows["first"].to_pylist() if first is not None)
        return found

    def mean_size(self, starts: Mapping[int, int]) -> float | None:
        """Bytes of key and value of an average record, from the first ones at `starts`; None without any."""
        total, count = 0, 0
        for partition, start in starts.items():
            for records in islice(self.read(partition, (start, start + _SAMPLE), _SAMPLE), 1):
                columns = (records.column("key"), records.column("value"))
                total += sum(pc.sum(pc.binary_length(column)).as_py() or 0 for column in columns)
                count += len(records)
        return total / count if count else None

    def _opened(self) -> DeltaTable:
        from deltalake.exceptions import DeltaError

        try:
            return delta_table(self.table)
        except DeltaError as error:
            raise PermanentError(
                f"the table of archive {self.stream} cannot be read: {str(error)[:300]}", "put it back from a copy"
            ) from error

    def _step(self, table: DeltaTable, partition: int, span: Span) -> int:
        """Offsets of one query, by the mean size of the rows in the files that it reads."""
        files = pa.table(table.get_add_actions(flatten=True))
        here = files.filter(pc.equal(files["partition.partition"], partition))
        if "min.offset" in here.column_names:
            apart = pc.or_(pc.greater_equal(here["min.offset"], span[1]), pc.less(here["max.offset"], span[0]))
            here = here.filter(pc.invert(pc.fill_null(apart, False)))
        means = [s / max(n, 1) for s, n in zip(_list(here, "size_bytes"), _list(here, "num_records"), strict=True) if n]
        return max(1, min(_MOST_ROWS, int(_MOST_BYTES / max([*means, 1.0]))))


def _list(table: pa.Table, column: str) -> list[Any]:
    return list(table[column].to_pylist())


def _covered(
    start: Mapping[int, int], ends: Mapping[int, int], voids: tuple[Mapping[str, Any], ...], topic: str
) -> dict[int, Span]:
    """The offsets from the start, or from the last range that was skipped, to the ends; without empty ones."""
    covered = {}
    for partition, end in ends.items():
        skipped = [int(v["to"]) for v in voids if v["topic"] == topic and int(v["partition"]) == partition]
        begin = max([start.get(partition, 0), *skipped])
        if begin < end:
            covered[partition] = (begin, end)
    return covered


def _query(table: DeltaTable, sql: str, name: str) -> Iterator[pa.RecordBatch]:
    """The rows of a query; raises TransientError if it fails: a compaction may have removed a file under it."""
    from deltalake import QueryBuilder

    try:
        for rows in QueryBuilder().register("archive", table).execute(sql):
            yield pa.record_batch(rows)
    except Exception as error:  # deltalake raises a plain one while a query runs
        raise TransientError(
            f"archive {name} could not be read: {str(error).splitlines()[-1][:300]}", "it is read again"
        ) from error
