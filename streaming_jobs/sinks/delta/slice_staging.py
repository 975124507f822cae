"""A rebuilt slice of a Delta table, staged beside it until it is committed (`sinks/sliced.py`).

    <tables>/<table>/_slices/<id>/touched   the files that hold rows of the slice (hard links), as a table of their own
                                 /before    the rows of the slice as they are
                                 /rest      the other rows of these files
                                 /after     the rebuilt rows
                                 /aside     the rows that rules of today set aside, in the columns of a quarantine

Each is an ordinary Delta table; all but the last one have the columns, partitions and bounds of the real one, so their
files can become files of that one. Readers skip the folder.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, date, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from deltalake import CommitProperties, DeltaTable, QueryBuilder, Schema, write_deltalake
from deltalake.exceptions import CommitFailedError, DeltaError
from deltalake.transaction import AddAction, RemoveAction
from pyspark.sql import functions as F

from streaming_jobs.declare.rules import RowRules
from streaming_jobs.declare.slices import SliceRange
from streaming_jobs.errors import CommitRefused, PreflightRefused
from streaming_jobs.ledger.entry import LedgerEntry
from streaming_jobs.platform import table_rows
from streaming_jobs.platform.failures import classify, larger_than_the_driver_takes
from streaming_jobs.sinks.delta import column_bounds
from streaming_jobs.sinks.delta.content import DeltaContent, make_table
from streaming_jobs.sinks.delta.fitting import fitted
from streaming_jobs.sinks.delta.log import noted, walk
from streaming_jobs.sinks.delta.replace_rows import rename_unencoded
from streaming_jobs.sinks.delta.sink import DeltaSink
from streaming_jobs.sinks.delta.table_files import TableFile, on_disk, table_files
from streaming_jobs.sinks.delta.writers import prepare_write
from streaming_jobs.sinks.schemas import quarantine_of
from streaming_jobs.sinks.sliced import Rebuilt, SliceOutdated
from streaming_jobs.storage.locations import (
    Location,
    delta_options,
    delta_table,
    made_folder,
    opened_for_reading,
    path_below,
    placed,
    remove_tree,
    sync_location,
)
from streaming_jobs.stream import DeltaTable as Declared
from streaming_jobs.text.sql import quoted

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

    from streaming_jobs.sinks.base import PendingWrite

_ROUNDING = timedelta(milliseconds=1)
"""Bounds in the log have milliseconds, the greatest cut off like the least."""


class DeltaSlices:
    def __init__(self, sink: DeltaSink) -> None:
        self.sink = sink

    def stage(self, name: str) -> DeltaStagedSlice:
        return DeltaStagedSlice(self.sink, name)

    def remove_staged(self, needed: Collection[str]) -> None:
        for folder in (self.sink.path / STAGED).glob("*"):
            if folder.name not in needed:
                remove_tree(folder)

    def check(self, change: Mapping[str, Any], entry: LedgerEntry) -> None:
        check_slice(self.sink, SliceChange.decode(change), entry)

    def replace(self, change: Mapping[str, Any], entry: LedgerEntry, at: Callable[[str], None]) -> int:
        try:
            return replace_slice(self.sink, SliceChange.decode(change), entry, at)
        except DeltaError as error:
            raise classify(error) from error


class DeltaStagedSlice:
    """The files of one rebuilt slice."""

    def __init__(self, sink: DeltaSink, name: str) -> None:
        self.sink, self.name = sink, name
        self.version = int(sink.handle.version())
        self.folder = sink.path / STAGED / name
        self._removes: tuple[str, ...] = ()
        made_folder(self.folder.parent)

    def split(self, chosen: SliceRange) -> int:
        """Stage the rows of the slice as they are, and the other rows of their files."""
        touched = {path: file for path, file in self._files().items() if self._holds(file, chosen)}
        self._removes = tuple(touched)
        before, rest = self._empty("before"), self._empty("rest")
        if not touched:
            return 0
        parts = tuple(self.sink.handle.metadata().partition_columns)
        content = DeltaContent(touched, self.sink.path, self.sink.handle.schema().to_json(), parts)
        make_table(self.folder / "touched", self.sink.name, content, self.sink.stream, CommitProperties())
        inside, names = sql_condition(chosen), ", ".join(quoted(f.name, "datafusion") for f in self.sink.schema.fields)
        data = QueryBuilder().register("t", delta_table(self.folder / "touched"))
        written = column_bounds.writer_properties(self.sink.schema)
        for target, condition in ((before, inside), (rest, f"({inside}) IS NOT TRUE")):
            rows = data.execute(f"SELECT {names} FROM t WHERE {condition}")  # noqa: S608 - names are quoted
            write_deltalake(target, rows, mode="append", writer_properties=written)
        return sum(self.before().get_add_actions()["num_records"].to_pylist())

    def write(self, rows: DataFrame, chosen: SliceRange, topics: Sequence[str], rules: RowRules) -> Rebuilt:
        """Compute the rows and stage the slice's rows: through the driver, or the executors if they are too many.

        Rows that rules set aside are staged apart (`quarantined`): the quarantine has its rows since their batch.
        """
        target = DeltaSink(self.folder / "after", self.sink.declared, self.sink.stream, self._empty("after"))
        quarantine = None
        if rules.bits("quarantine"):
            columns = Schema.from_json(quarantine_of(self.sink.name, self.sink.schema).json())
            aside = self._empty("aside", columns, partition_by=())
            quarantine = DeltaSink(self.folder / "aside", Declared(self.sink.name), self.sink.stream, aside)
        frame = fitted(self.sink.declared, self.sink.schema, rows, topics, rules).where(_condition(chosen))

        def prepared(*, driver: bool) -> PendingWrite:
            return prepare_write(
                target,
                frame,
                driver=driver,
                spark_commits=False,
                batch=(0, 0),
                topics=topics,
                rules=rules,
                quarantine=quarantine,
            )

        try:
            pending = prepared(driver=True)
        except Exception as error:
            if not larger_than_the_driver_takes(error):
                raise
            pending = prepared(driver=False)
        refused = pending.rejected.num_rows if pending.rejected is not None else 0
        for write in (*pending.before, pending):
            write.commit(LedgerEntry("batch", self.sink.stream, self.sink.name, 1, 0))
        return Rebuilt(pending.rows, pending.outcome.dropped + sum(each.rows for each in pending.before), refused)

    def put(self, rows: pa.Table) -> None:
        written = column_bounds.writer_properties(self.sink.schema)
        write_deltalake(self._empty("after"), rows, mode="append", writer_properties=written)

    def before(self) -> DeltaTable:
        return delta_table(self.folder / "before")

    def held(self, most: int) -> pa.Table:
        return _bounded(self.folder / "before", most)

    def after(self) -> DeltaTable:
        return delta_table(self.folder / "after")

    def quarantined(self, most: int) -> pa.Table | None:
        folder = self.folder / "aside"
        if not DeltaTable.is_deltatable(str(folder), delta_options(folder)):
            return None
        return _bounded(folder, most)

    def change(self) -> Mapping[str, Any]:
        """The files to remove and to add; they are on disk when this returns."""
        remove_tree(self.folder / "touched")
        sync_location(self.folder)
        adds = []
        for part in ("rest", "after"):
            table = self.folder / part
            for path, file in table_files(table, delta_table(table).version()).items():
                place = path_below(on_disk(table, path), table)
                staged = f"{STAGED}/{self.name}/{part}/{place}"
                adds.append(StagedFile(staged, f"s-{self.name}/{part}/{place}", file))
        return SliceChange(self.sink.table_id, self.version, self._removes, tuple(adds)).encode()

    def remove(self) -> None:
        remove_tree(self.folder)

    def _files(self) -> dict[str, TableFile]:
        return table_files(self.sink.path, self.version)

    def _empty(self, part: str, columns: Schema | None = None, partition_by: Sequence[str] | None = None) -> DeltaTable:
        """A table without rows, with the columns and partitions of the real one unless others are named."""
        bounded = self.sink.handle.metadata().configuration.get(column_bounds.PROPERTY)
        path = self.folder / part
        parts = self.sink.handle.metadata().partition_columns if partition_by is None else partition_by
        return DeltaTable.create(
            str(path),
            columns or Schema.from_json(self.sink.handle.schema().to_json()),
            partition_by=list(parts) or None,
            configuration={column_bounds.PROPERTY: bounded} if bounded is not None else None,
            raise_if_key_not_exists=False,
            storage_options=delta_options(path),
        )

    def _holds(self, file: TableFile, chosen: SliceRange) -> bool:
        """True if a row of the file is in the slice: by its bounds in the log, then by the column itself."""
        low, high = chosen.bounds
        if chosen.column in file.partition:
            text = file.partition[chosen.column]
            value = _bound(text, chosen.kind)
            return value is not None and low <= value < high
        if any(_outside(file, chosen)):
            return False
        data = pq.ParquetFile(opened_for_reading(on_disk(self.sink.path, file.path)))
        if chosen.column not in data.schema_arrow.names:
            return False
        return bool(pc.any(_inside(data.read(columns=[chosen.column])[chosen.column], chosen)).as_py())


def _bounded(table: Location, most: int) -> pa.Table:
    number = sum(delta_table(table).get_add_actions()["num_records"].to_pylist())
    if number > most:
        raise PreflightRefused(
            f"{number:,} rows of the slice are quarantined, and {most:,} can be compared in memory",
            "rebuild a shorter slice",
        )
    return table_rows.rows(table)


def _outside(file: TableFile, chosen: SliceRange) -> Iterator[bool]:
    """True if the bounds of a file prove that it lies before the slice, or after it."""
    stats = json.loads(file.stats or "{}")
    low, high = chosen.bounds
    rounding = timedelta(days=0) if chosen.kind == "date" else _ROUNDING
    least = _bound((stats.get("minValues") or {}).get(chosen.column), chosen.kind)
    greatest = _bound((stats.get("maxValues") or {}).get(chosen.column), chosen.kind)
    yield least is not None and least - rounding >= high
    yield greatest is not None and greatest + rounding < low


def _bound(text: object, kind: str) -> Any:
    """A bound or a partition value as the column has it; None if it is missing or not a time of Python's years."""
    if not isinstance(text, str):
        return None
    try:
        if kind == "date":
            return date.fromisoformat(text[:10])
        at = datetime.fromisoformat(unquote(text))
        return at.replace(tzinfo=None) if kind == "timestamp_ntz" else at.replace(tzinfo=at.tzinfo or UTC)
    except ValueError:
        return None


def sql_condition(chosen: SliceRange) -> str:
    """DataFusion's condition for the rows of the slice."""
    low, high = (_literal(bound, chosen.kind) for bound in chosen.bounds)
    name = quoted(chosen.column, "datafusion")
    return f"{name} >= {low} AND {name} < {high}"


def _literal(value: Any, kind: str) -> str:
    if kind == "date":
        return f"DATE '{value.isoformat()}'"
    zone = "None" if kind == "timestamp_ntz" else 'Some("UTC")'
    micros = _micros(value if value.tzinfo else value.replace(tzinfo=UTC))
    return f"arrow_cast(arrow_cast({micros}, 'Int64'), 'Timestamp(Microsecond, {zone})')"


def _micros(at: datetime) -> int:
    return (at - datetime(1970, 1, 1, tzinfo=UTC)) // timedelta(microseconds=1)


def _inside(column: pa.ChunkedArray, chosen: SliceRange) -> Any:
    low, high = (pc.cast(pa.scalar(value), column.type) for value in chosen.bounds)
    return pc.and_(pc.greater_equal(column, low), pc.less(column, high))


def _condition(chosen: SliceRange) -> Column:
    """Spark's condition for the rows of the slice."""
    column = F.col(f"`{chosen.column}`")
    low, high = chosen.bounds
    if chosen.kind == "date":
        return (column >= F.lit(low)) & (column < F.lit(high))
    begin, end = (F.timestamp_micros(F.lit(_micros(at))) for at in (chosen.begin, chosen.end))
    moment = column.cast("timestamp")  # a time without a zone is UTC
    return (moment >= begin) & (moment < end)


# The one commit that replaces a slice of a Delta table, relative to the version on which the slice was rebuilt.
#
# The files of that version that hold rows of the slice are removed; their other rows and the rebuilt ones come in files
# that were staged below `_slices`, as hard links. Files that came later stay as they are. The commit moves no
# transaction: for the stream, nothing has happened. It is made by the one process that may write the table: the
# stream's driver between two batches, or the rebuild itself while it holds the stream's lease.

STAGED = "_slices"
"""The folder of a table below which slices are staged; readers skip it."""

_ATTEMPTS = 20
_MAY_COME_BETWEEN = ("batch", "upkeep")


@dataclass(frozen=True)
class StagedFile:
    """A staged file: where it lies and the path it gets, both below the table's folder, and its entry in the log."""

    staged: str
    path: str
    file: TableFile


@dataclass(frozen=True)
class SliceChange:
    """The change that a slice makes to a version of a table. `removes` are paths as the log has them."""

    table_id: str
    version: int
    removes: tuple[str, ...]
    adds: tuple[StagedFile, ...]

    def encode(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def decode(cls, value: Mapping[str, Any]) -> SliceChange:
        adds = tuple(StagedFile(a["staged"], a["path"], TableFile(**a["file"])) for a in value["adds"])
        return cls(value["table_id"], value["version"], tuple(value["removes"]), adds)


def replace_slice(
    sink: DeltaSink, change: SliceChange, entry: LedgerEntry, at: Callable[[str], None] = lambda _: None
) -> int:
    """Commit a change once, with its entry (kind `slice`, `plan` is the slice's id); returns the table's version.

    `at` is called at each crash point. Raises SliceOutdated, with nothing changed, if the table is another one by now.
    """
    for _ in range(_ATTEMPTS):
        sink.update()
        if (done := _committed(sink, change, entry)) is not None:
            sink.sync()
            return done
        actions = _actions(sink, change, entry)
        at("slice_linked")
        version = sink.handle.version()
        try:
            sink.commit_actions(actions, noted(entry, retries=0))
        except CommitFailedError as error:
            sink.update()
            if sink.handle.version() == version:
                raise classify(error) from error
            continue
        at("slice_committed")
        return sink.committed()
    raise CommitRefused(f"table {sink.name} was committed to by others {_ATTEMPTS} times during one commit")


def check_slice(sink: DeltaSink, change: SliceChange, entry: LedgerEntry) -> None:
    """Raise SliceOutdated for a change that `replace_slice` would not commit now."""
    sink.update()
    if _committed(sink, change, entry) is None:
        _refuse_outdated(sink, change, entry)


def _committed(sink: DeltaSink, change: SliceChange, entry: LedgerEntry) -> int | None:
    """The version that has the slice already; raises SliceOutdated if other commits than batches came between."""
    if sink.table_id != change.table_id:
        raise SliceOutdated(f"table {sink.name} was made anew since the slice was rebuilt")
    if sink.handle.version() < change.version:
        raise SliceOutdated(f"version {change.version} of table {sink.name} is gone: a power cut had truncated it")
    for commit in walk(sink.path):
        if commit.version <= change.version:
            return None
        there = commit.entry
        if there is not None and (there.kind, there.plan) == ("slice", entry.plan):
            return commit.version
        if commit.changes_data and (
            there is None or there.kind not in _MAY_COME_BETWEEN or there.stream != sink.stream
        ):
            what = commit.operation if there is None else there.kind
            raise SliceOutdated(f"version {commit.version} of table {sink.name} ({what}) came since it was rebuilt")
        if there is not None and there.kind in ("fence", "publish"):
            raise SliceOutdated(f"a recovery of stream {sink.stream} has begun since the slice was rebuilt")
    raise SliceOutdated(f"the log of table {sink.name} no longer shows what came after version {change.version}")


def _actions(sink: DeltaSink, change: SliceChange, entry: LedgerEntry) -> list[AddAction | RemoveAction]:
    """The actions; the staged files get their names in the table."""
    live = _refuse_outdated(sink, change, entry)
    for each in change.adds:
        source, target = sink.path / each.staged, sink.path / each.path
        placed(source if source.exists() else target, target)
    now = int(time.time() * 1000)
    return [*(live[path].remove(now) for path in change.removes), *(each.file.add(each.path) for each in change.adds)]


def _refuse_outdated(sink: DeltaSink, change: SliceChange, entry: LedgerEntry) -> dict[str, TableFile]:
    """The files of the table by their paths; raises SliceOutdated if one that the change removes or adds is gone."""
    if not all(path.isascii() for path in change.removes) and rename_unencoded(sink, entry.generation):
        raise SliceOutdated(f"files of table {sink.name} have got other names")
    live = table_files(sink.path, sink.handle.version())
    if gone := [path for path in change.removes if path not in live]:
        raise SliceOutdated(f"{len(gone)} files of table {sink.name} were compacted since the slice was rebuilt")
    for each in change.adds:
        if not (sink.path / each.staged).exists() and not (sink.path / each.path).exists():
            raise SliceOutdated(f"the staged file {Path(each.staged).name} of table {sink.name} is gone")
    return live
