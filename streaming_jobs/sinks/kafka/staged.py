"""Records for a topic, staged in files until they are appended to it.

A replay beside a running stream writes records here instead of to the topic, encoded and checked as for the topic. Each
batch with records has one Parquet file, `g0002-b000000007.parquet`, with the ledger entry of the batch in its metadata.
The file gets this name when it is complete; a repeated batch replaces it. Once its records are in the topic,
`g0002-b000000007.json` has their ranges.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.parquet as pq

from streaming_jobs.errors import PermanentError
from streaming_jobs.ledger.entry import LedgerEntry, Txn
from streaming_jobs.ledger.positions import WrittenRange
from streaming_jobs.sinks.kafka.producer import Record
from streaming_jobs.sources.record_blocks import HEADERS_ARROW
from streaming_jobs.storage.files import private_folder, sync, write_json

if TYPE_CHECKING:
    from streaming_jobs.sinks.kafka.writer import TopicRecords

RECORDS = pa.schema(
    [
        ("topic", pa.string()),
        ("key", pa.binary()),
        ("value", pa.binary()),
        ("headers", HEADERS_ARROW),
        ("timestamp", pa.int64()),  # ms since 1970; 0: the time of writing
        ("partition", pa.int32()),  # -1: by the key
    ]
)
_ENTRY, _WRITTEN = "recourse.entry", ".json"
_BLOCK = 10_000


@dataclass(frozen=True)
class StagedBatch:
    """The records of one batch, which can be gone through again."""

    path: Path
    entry: LedgerEntry
    """As a marker would have it, without the ranges in the topic."""
    count: int

    @property
    def topics(self) -> set[str]:
        """The topics to which its records go."""
        return set(pq.read_table(self.path, columns=["topic"])["topic"].unique().to_pylist())

    def blocks(self) -> Iterator[pa.RecordBatch]:
        """The records in order, with the columns of `RECORDS`."""
        with pq.ParquetFile(self.path) as file:
            yield from file.iter_batches(_BLOCK)

    @property
    def written(self) -> tuple[WrittenRange, ...] | None:
        """Where its records are in topics; None until `note_written`."""
        noted = self.path.with_suffix(_WRITTEN)
        return _ranges(noted) if noted.exists() else None

    def note_written(self, ranges: Sequence[WrittenRange]) -> None:
        """Keep the ranges; they are on disk when this returns."""
        write_json(self.path.with_suffix(_WRITTEN), [list(astuple(each)) for each in ranges])

    def __iter__(self) -> Iterator[Record]:
        for block in self.blocks():
            topics, keys, values, headers, times, partitions = (column.to_pylist() for column in block.columns)
            pairs = ([(each["key"], each["value"]) for each in of_record or ()] for of_record in headers)
            yield from zip(topics, keys, values, pairs, times, partitions, strict=True)


@dataclass(frozen=True)
class StagedRecords:
    """The records of a staged batch for the writer of its topic; `topic_ids` and `most_bytes` as of its topics now."""

    batch: StagedBatch
    topic_ids: Mapping[str, str]
    most_bytes: int

    @property
    def count(self) -> int:
        return self.batch.count

    def __iter__(self) -> Iterator[Record]:
        return iter(self.batch)


def staged_batches(folder: Path) -> dict[Txn, StagedBatch]:
    """The batches in a folder, oldest first; none if it does not exist."""
    found = {}
    for path in sorted(folder.glob("g*.parquet")):
        metadata = pq.read_metadata(path)
        entry = LedgerEntry.decode((metadata.metadata or {}).get(_ENTRY.encode(), b"").decode())
        if entry is None:
            raise PermanentError(f"{path} has no ledger entry", "somebody has replaced it: give the plan up")
        found[entry.txn] = StagedBatch(path, entry, metadata.num_rows)
    return found


def written_below(folder: Path) -> dict[Txn, tuple[WrittenRange, ...]]:
    """By batch, where the staged records of all topics of a folder have been written so far."""
    found = dict[Txn, tuple[WrittenRange, ...]]()
    for path in sorted(folder.rglob(f"g*{_WRITTEN}")):
        generation, batch = path.stem[1:].split("-b")
        txn = Txn(int(generation), int(batch))
        found[txn] = (*found.get(txn, ()), *_ranges(path))
    return found


def _ranges(path: Path) -> tuple[WrittenRange, ...]:
    return tuple(WrittenRange(*each) for each in json.loads(path.read_text()))


@dataclass
class StagedWriter:
    """Writes the batches of one topic to a folder. The plan's lock keeps a second replay out, so nothing is fenced."""

    folder: Path
    exactly_once: bool = True
    newest: LedgerEntry | None = field(default=None, init=False)

    @property
    def position(self) -> Txn | None:
        """The newest batch in the folder; None for a topic that does not say which batches it has."""
        return self.newest.txn if self.newest is not None and self.exactly_once else None

    def open(self, generation: int) -> None:
        """Find the newest batch, of whichever session of the replay, and remove what a kill has left unfinished."""
        del generation
        for partial in self.folder.glob("*.partial"):
            partial.unlink()
        batches = staged_batches(self.folder)
        self.newest = batches[max(batches)].entry if batches else None

    def write(self, entry: LedgerEntry, records: TopicRecords) -> bool:
        """Write the batch; it is on disk when this returns. False if it is there already."""
        if self.position == entry.txn:
            return False
        private_folder(self.folder)
        path = self.folder / f"g{entry.generation:04d}-b{entry.batch:09d}.parquet"
        partial = path.with_suffix(".partial")
        with pq.ParquetWriter(partial, RECORDS) as file:
            for rows in _rows(records):
                file.write_batch(rows)
            file.add_key_value_metadata({_ENTRY: entry.encode()})
        if (written := pq.read_metadata(partial).num_rows) != records.count:
            raise PermanentError(
                f"{written} records of a batch of {records.count} were staged: the batch is not committed",
                "resume the recovery, which repeats the batch; please report it if it comes back",
            )
        sync(partial)
        partial.replace(path)
        sync(self.folder)
        self.newest = entry
        return True

    def close(self) -> None:
        """Nothing to close: each batch closes its file."""


def _rows(records: Iterable[Record]) -> Iterator[pa.RecordBatch]:
    rows = iter(records)
    while block := list(itertools.islice(rows, _BLOCK)):
        topics, keys, values, headers, times, partitions = zip(*block, strict=True)
        pairs = [[{"key": name, "value": content} for name, content in each] for each in headers]
        columns = (topics, keys, values, pairs, times, partitions)
        yield pa.RecordBatch.from_arrays(
            [pa.array(column, kind.type) for column, kind in zip(columns, RECORDS, strict=True)], schema=RECORDS
        )
