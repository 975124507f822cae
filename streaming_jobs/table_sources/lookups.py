"""The tables that a stream looks up: frames of their content, whose version is chosen anew for each batch.

For each batch, Spark plans the scan of a table after it has written `offsets/N`. The version is chosen then, and is
written to `<state>/<stream>/lookups.json`, where a repeated batch finds it. The ledger entry of the batch has it too,
so that a replay reads what the first run read:

    live, or a record that no batch has read before     the newest version
    a repeated batch                                    the version that it was planned with
    a replay                                            that of the first batch of the first run after which all records
                                                        of the replayed batch had been read

A replayed batch ends where the first run changed versions (`LookupHistory.steps`). So each record meets the version
that it met before; with several sources, whose planners do not know of each other, that version or a later one.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, NamedTuple

import pyarrow as pa
import structlog
from pyspark.sql.datasource import InputPartition
from pyspark.sql.pandas.types import to_arrow_schema

from streaming_jobs.declare.lookup import Lookup
from streaming_jobs.declare.schemas import nullable
from streaming_jobs.declare.table_source import DeltaSource
from streaming_jobs.errors import LookupVersionGone, OffsetsLost, PermanentError, TableAwaited, TransientError
from streaming_jobs.ledger.entry import TableVersion
from streaming_jobs.ledger.positions import Place, TopicOffsets, by_place
from streaming_jobs.settings import Settings
from streaming_jobs.sources.data_source import load
from streaming_jobs.state.checkpoint import Checkpoint
from streaming_jobs.state.records import parsed_record, record_bytes
from streaming_jobs.storage.object_files import AlreadyThere, Changed, Found, ObjectHandle
from streaming_jobs.stream import Stream
from streaming_jobs.table_sources.planner import FileToRead, RowBlocks, tasks
from streaming_jobs.table_sources.source import FilesPartition, TableReading
from streaming_jobs.table_sources.topics import table_info
from streaming_jobs.table_sources.versions import TableVersions, Version

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.types import StructType


log = structlog.get_logger()

_BROADCAST_BYTES = 16 << 20
"""Bytes of a table's files up to which Spark is advised to send its rows to every task, instead of a shuffle."""
_TRIES = 5
"""How often a file that another driver writes at the same time is read again."""


# The versions that earlier batches have looked up.


class LookupChange(NamedTuple):
    """The versions that the batches up to these ends have looked up, since the change before."""

    ends: TopicOffsets
    versions: Mapping[str, TableVersion]


@dataclass(frozen=True)
class LookupHistory:
    """The changes of the first run in order, the last of them where its newest batch ended."""

    changes: tuple[LookupChange, ...] = ()

    @classmethod
    def of(cls, batches: Iterable[LookupChange]) -> LookupHistory:
        """The history of batches in order: of those with the same versions, the last one counts."""
        changes: list[LookupChange] = []
        for batch in batches:
            if changes and changes[-1].versions == batch.versions:
                changes.pop()
            changes.append(batch)
        return cls(tuple(changes))

    def at(self, ends: TopicOffsets) -> dict[str, TableVersion]:
        """The versions for a batch that ends there; none for records that the first run has not read.

        A table that the first run did not look up at that time has the version in which it first did.
        """
        wanted = by_place(ends)
        first = bisect_left(
            self._reached, True, key=lambda read: all(read.get(p, 0) >= end for p, end in wanted.items())
        )
        return {**self._known_after[first], **self.changes[first].versions} if first < len(self.changes) else {}

    @cached_property
    def _reached(self) -> Sequence[Mapping[Place, int]]:
        """For each change, how far the run had read by then, also sources that it did not have just then."""
        reached: dict[Place, int] = {}
        after = list[Mapping[Place, int]]()
        for change in self.changes:
            reached = {**reached, **{p: max(end, reached.get(p, 0)) for p, end in by_place(change.ends).items()}}
            after.append(reached)
        return after

    @cached_property
    def _known_after(self) -> Sequence[Mapping[str, TableVersion]]:
        """For each change, the versions in which tables are first looked up after it."""
        known: Mapping[str, TableVersion] = {}
        after = list[Mapping[str, TableVersion]]()
        for change in reversed(self.changes):
            after.append(known)
            known = {**known, **change.versions}
        return after[::-1]

    def steps(self, source: str) -> tuple[Mapping[int, int], ...]:
        """The offsets of a source, by partition, at which a batch has to end."""
        return tuple(change.ends[source] for change in self.changes if source in change.ends)


# The choice of the versions of a batch.


@dataclass(frozen=True)
class LookedUpTable:
    """A table that a stream looks up; `table_id` as it was when the query was built."""

    stream: str
    versions: TableVersions
    table_id: str

    def newest(self) -> TableVersion:
        """Its newest version; raises TableAwaited if the table is not there."""
        if (newest := self.versions.newest()) is None:
            raise awaited(self.stream, self.versions)
        return TableVersion(newest, self.table_id)

    def content(self, version: TableVersion) -> Version:
        """Its rows at a version; raises LookupVersionGone if they can no longer be read."""
        if version.table_id != self.table_id:
            raise self._gone(version, "the table was deleted and made anew since")
        try:
            return self.versions.content(version.version)
        except OffsetsLost as error:
            raise self._gone(version, error.found) from None

    def _gone(self, version: TableVersion, why: str) -> LookupVersionGone:
        return LookupVersionGone(
            f"stream {self.stream} looked up version {version.version} of table {self.versions.name}, and needs it "
            f"again: {why}",
            f"restore its files, or look up the newest version instead: streams.{self.stream}.replay_lookups = "
            '"newest"; rows may then differ from those of the first run',
        )

    def check(self, version: TableVersion) -> None:
        """Raise LookupVersionGone if the rows at a version, or one of their files, are gone."""
        for file in self.content(version).files:
            if self.versions.on_disk(file.path) is None:
                raise self._gone(version, f"file {file.path} was deleted")

    def can_read(self, version: TableVersion) -> bool:
        try:
            self.check(version)
        except LookupVersionGone:
            return False
        return True


def awaited(stream: str, versions: TableVersions) -> TableAwaited:
    return TableAwaited(
        f"stream {stream} looks up table {versions.name}, and there is none at {versions.table}",
        "start the stream that writes the table, or correct the path of the Lookup",
    )


@dataclass(frozen=True)
class LookupPins:
    """Chooses the versions of each batch of one query, and remembers them in a file; pickled into Spark's planners.

    `first_run` is what a replay repeats. With `newest`, versions that can no longer be read are replaced by the newest.
    """

    generation: int
    checkpoint: Checkpoint
    file: ObjectHandle
    tables: Mapping[str, LookedUpTable]
    first_run: LookupHistory | None = None
    newest: bool = False

    def versions(self) -> dict[str, TableVersion]:
        """The versions of the batch that is planned, which are durable when this returns."""
        batch = self.checkpoint.last_planned
        assert batch is not None, "a batch is planned"
        for _ in range(_TRIES):
            found = self.file.read()
            noted = self._of_batch(found, batch)
            chosen = self._chosen(batch, noted)
            if chosen == noted:
                return chosen
            data = record_bytes({"generation": self.generation, "batch": batch, "versions": chosen})
            try:
                self.file.create(data) if found is None else self.file.replace(data, found.tag)
            except (AlreadyThere, Changed):  # another driver of this batch: the lease decides which of them commits
                continue
            return chosen
        raise TransientError(f"{self.file} changes all the time", "look for a second driver of the stream")

    def _chosen(self, batch: int, noted: Mapping[str, TableVersion]) -> dict[str, TableVersion]:
        before = {} if self.first_run is None else self.first_run.at(self.checkpoint.end(batch))
        chosen = {}
        for name, table in self.tables.items():
            version = before.get(name) or noted.get(name)
            if version is None or (self.newest and not table.can_read(version)):
                version = table.newest()
            chosen[name] = version
        return chosen

    def noted(self, batch: int) -> dict[str, TableVersion]:
        """The versions of the tables that a batch has looked up; none of a table that its plan does not read."""
        return self._of_batch(self.file.read(), batch)

    def _of_batch(self, found: Found | None, batch: int) -> dict[str, TableVersion]:
        """The versions in the file, if they are of this batch."""
        if found is None:
            return {}

        def of_batch(value: dict[str, Any]) -> dict[str, TableVersion]:
            noted = {name: TableVersion(*each) for name, each in value["versions"].items()}
            return noted if (value["generation"], value["batch"]) == (self.generation, batch) else {}

        return parsed_record(self.file, found, of_batch, partial(_damaged, self.file))


def _damaged(file: ObjectHandle, error: Exception) -> PermanentError:
    return PermanentError(
        f"the versions of the tables that the newest batch looks up cannot be read ({file}): {error}",
        "put the file back from a copy; without it, a batch that was killed may look up newer versions",
    )


# The frames that the stream's function gets.


@dataclass(frozen=True, kw_only=True)
class LookupReading(TableReading):
    """The content of a table at the version of the batch that is planned; without `pins` it can only be analysed."""

    pins: LookupPins | None

    @property
    def schema(self) -> StructType:
        """The columns of the lookup; a table may have null in any of them."""
        columns: StructType = nullable(self.blocks.declared.columns)
        return columns

    def parts(self) -> Sequence[InputPartition]:
        assert self.pins is not None, "this frame is for the analysis of a plan"
        table = self.pins.tables[self.source]
        content = table.content(self.pins.versions()[self.source])
        files = [FileToRead(content.number, content.at, file) for file in content.files]
        return [FilesPartition(part) for part in tasks(files, self.workers) or [[]]]  # Spark takes no empty list

    def read(self, part: InputPartition) -> Iterator[pa.RecordBatch]:
        assert isinstance(part, FilesPartition)
        schema = to_arrow_schema(self.schema, timezone="UTC")
        for each in part.files:
            try:
                for columns in self.blocks.columns_of(each.file):
                    yield pa.RecordBatch.from_arrays(columns, schema=schema)
            except OffsetsLost as error:
                raise LookupVersionGone(error.found, error.next_step) from None


@dataclass(frozen=True)
class LookupFrames:
    """The frames of a query's lookups by the function's parameters, and what chooses their versions."""

    frames: Mapping[str, DataFrame]
    pins: LookupPins

    def plan_anew(self) -> None:
        """Let Spark plan the scans of the next batch anew.

        It asks a data source in Python once for the parts of a batch frame, and keeps them with the source
        (`PythonDataSourceV2.readInfo` of Spark 4.2), which would be those of the first batch for ever.
        """
        for frame in self.frames.values():
            for relation in _leaves(frame._jdf.queryExecution().analyzed()):
                source = relation.table().getClass().getDeclaredField("ds")
                source.setAccessible(True)
                source.get(relation.table()).setReadInfo(None)


def _leaves(plan: Any) -> Iterator[Any]:
    """The relations of an analysed plan of the JVM."""
    leaves = plan.collectLeaves()
    yield from (leaves.apply(index) for index in range(leaves.size()))


@dataclass(frozen=True)
class Lookups:
    """The lookups of one stream, with the location of each table; `settings` are those under which the tables lie."""

    stream: Stream
    settings: Settings

    def __bool__(self) -> bool:
        return bool(self.stream.lookups)

    def tables(self) -> dict[str, LookedUpTable]:
        """The tables as they are now, by name.

        Raises TableAwaited for a table that is not there, and PreflightRefused for one that no stream can read.
        """
        found = {}
        for lookup in self.stream.lookups.values():
            versions = self._versions(lookup)
            if (info := table_info(versions)) is None:
                raise awaited(self.stream.name, versions)
            found[lookup.name] = LookedUpTable(self.stream.name, versions, info.id)
        return found

    def frames(self, spark: SparkSession, pins: LookupPins | None = None) -> dict[str, DataFrame]:
        """A frame for each parameter; without `pins` frames that can only be analysed."""
        return {parameter: self._frame(spark, parameter, pins) for parameter in self.stream.lookups}

    def _frame(self, spark: SparkSession, parameter: str, pins: LookupPins | None) -> DataFrame:
        lookup = self.stream.lookups[parameter]
        declared = DeltaSource(lookup.name, schema=lookup.columns)
        blocks = RowBlocks(declared, self._versions(lookup), "all")
        reading = LookupReading(f"lookup-{self.stream.name}-{parameter}", {}, blocks=blocks, pins=pins)
        frame = load(spark, replace(reading, workers=int(spark.sparkContext.defaultParallelism)))
        return frame.hint("broadcast") if pins is not None and _is_small(pins.tables[lookup.name]) else frame

    def _versions(self, lookup: Lookup) -> TableVersions:
        path = lookup.path
        return TableVersions(self.settings.tables / lookup.name if path is None else self.settings.location(path))


def _is_small(table: LookedUpTable) -> bool:
    size = table.content(table.newest()).size
    if size > _BROADCAST_BYTES:
        log.info("a table that is looked up is too large for a broadcast", table=table.versions.name, bytes=size)
    return size <= _BROADCAST_BYTES
