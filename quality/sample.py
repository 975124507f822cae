"""The rows that a run of a suite reads: new rows, or all; of a partition, or of a range of times.

A sample has the files of one fixed version of the table.

New rows are in the files that commits after a version have added with `dataChange`. A commit that changes rows and
removes such a file again (an upsert, a delete, a recovery) adds the rows that are left of it in other files. A
compaction changes no rows: of a file that it has rewritten, the rows are read as they were written, from the file
itself as long as it is on disk. Where the log or such a file is gone, the sample is the whole table.

File statistics only leave files out: a file without them, or without bounds of the column, is read.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

from quality.suites import SampleKind
from streaming_jobs.errors import PreflightRefused, UsageError
from streaming_jobs.state.provenance import Change, changes
from streaming_jobs.storage.locations import Location, delta_table, opened_for_reading
from streaming_jobs.text import commands
from streaming_jobs.text.spelling import counted, instead

if TYPE_CHECKING:
    import pyarrow as pa
    from deltalake import DeltaTable

_ROUNDING = timedelta(milliseconds=1)
"""Delta's statistics have milliseconds, the greatest cut off like the least."""


@dataclass(frozen=True)
class TimeRange:
    """Rows whose `column`, a date or a time, is at or after `begin` and before `end`; None is open."""

    column: str
    begin: datetime | None = None
    end: datetime | None = None

    @classmethod
    def parse(cls, column: str | None, begin: str | None, end: str | None) -> TimeRange | None:
        """The range of a command's options, None without any; times without a zone are UTC."""
        if begin is None and end is None and column is None:
            return None
        if column is None or (begin is None and end is None):
            raise UsageError("a time range needs a column and an end", "--column sched_dep --from 2013-01-01")
        first, last = (_time(text) if text is not None else None for text in (begin, end))
        if first is not None and last is not None and first >= last:
            raise UsageError(f"the range from {begin} to {end} is empty", "`to` is exclusive, and after `from`")
        return cls(column, first, last)

    @property
    def words(self) -> str:
        begin = f" from {self.begin:%Y-%m-%d %H:%M:%S}" if self.begin else ""
        end = f" to before {self.end:%Y-%m-%d %H:%M:%S}" if self.end else ""
        return f"{self.column}{begin}{end} UTC"


@dataclass(frozen=True)
class SampleRequest:
    """The requested rows of a run; a partition and a range of times exclude others.

    `since`: the version after which rows are new, None for the first run.
    """

    kind: SampleKind = "new"
    since: int | None = None
    partition: Mapping[str, str] = field(default_factory=dict)
    times: TimeRange | None = None

    @property
    def narrowed(self) -> bool:
        """True if new rows may be left out; the next run then begins where the run before began."""
        return bool(self.partition) or self.times is not None


def parse_partition(texts: list[str]) -> dict[str, str]:
    """The values of partition columns from `column=value` texts."""
    values = {}
    for text in texts:
        column, equals, value = text.partition("=")
        if not column or not equals:
            raise UsageError(f"--partition {text} is not column=value", "such as --partition month=2013-01")
        values[column] = value
    return values


def _time(text: str) -> datetime:
    try:
        at = datetime.fromisoformat(text)
    except ValueError:
        raise UsageError(f"'{text}' is not a time", "write 2013-01-31, or 2013-01-31T08:00:00+00:00") from None
    return at.replace(tzinfo=UTC) if at.tzinfo is None else at.astimezone(UTC)


@dataclass(frozen=True)
class SampleFile:
    """One file: its path on disk, the text of its partition values, its statistics as the log has them.

    `modified`: milliseconds since 1970.
    """

    path: Location
    partition: Mapping[str, str | None]
    stats: Mapping[str, Any]
    modified: int

    @property
    def rows(self) -> int:
        """The number of its rows, from the statistics or else from the file itself; 0 if that is gone."""
        if (count := self.stats.get("numRecords")) is not None:
            return int(count)
        import pyarrow.parquet as pq

        with suppress(FileNotFoundError):
            return int(pq.read_metadata(opened_for_reading(self.path)).num_rows)
        return 0


@dataclass(frozen=True)
class SuiteSample:
    """The files to read of a version, oldest first, with the version's columns; `rows` is before the filter by time.

    `since`: the version after which its rows came, None for all. `whole`: every row of the version is in it.
    """

    table: Location
    table_id: str
    version: int
    since: int | None
    files: tuple[SampleFile, ...]
    files_in_table: int
    rows: int
    words: str
    schema: pa.Schema
    times: TimeRange | None = None
    whole: bool = False


def choose_sample(handle: DeltaTable, table: Location, request: SampleRequest) -> SuiteSample:
    """The sample of the version that the handle has loaded; `table` is the table's folder.

    Raises UsageError for a partition or a range that the table cannot have, and for a table whose rows are not those of
    its files (deletion vectors, column mapping).
    """
    import pyarrow as pa

    _refuse_indirect(handle, table)
    version, live = int(handle.version()), _live(table, int(handle.version()))
    files, since, words = list(live.values()), None, "all rows"
    if request.kind == "new":
        files, since, words = _new_files(table, request.since, version, live)
    parts = list(handle.metadata().partition_columns)
    schema: pa.Schema = pa.schema(handle.schema().to_arrow())
    if request.partition:
        files = _of_partition(table, parts, files, request.partition)
        words += "".join(f", {column}={value}" for column, value in request.partition.items())
    if request.times is not None:
        _check_range(table, schema, request.times)
        files = [file for file in files if request.times.column in parts or _may_hold(file, request.times)]
        words += f", {request.times.words}"
    return SuiteSample(
        table=table,
        table_id=str(handle.metadata().id),
        version=version,
        since=since,
        files=tuple(sorted(files, key=lambda file: (file.modified, str(file.path)))),
        files_in_table=len(live),
        rows=sum(file.rows for file in files),
        words=words,
        schema=schema,
        times=request.times,
        whole=since is None and not request.narrowed,
    )


def _new_files(
    table: Location, since: int | None, version: int, live: Mapping[str, SampleFile]
) -> tuple[list[SampleFile], int | None, str]:
    """The files with the rows after a version, that version, and words; the whole table where they are not known."""
    everything = list(live.values())
    if since is None:
        return everything, None, "all rows: no run of this suite has looked at the table before"
    if since > version:
        return everything, None, f"all rows: the last run looked at version {since}, and the table is at {version}"
    commits = changes(table, since, version)
    if commits is None:
        return everything, None, f"all rows: the table's log no longer holds the versions after {since}"
    files, doubted = _replayed(table, commits)
    lost = [path for path, file in files.items() if path not in live and not file.path.exists()]
    if lost:
        gone = counted(len(lost), "file")
        return everything, None, f"all rows: {gone} with rows after version {since} were rewritten and are gone"
    words = f"rows that came after version {since}" if since < version else f"nothing came after version {since}"
    if doubted:
        words += ", with older ones that a compaction has put into the same files"
    return list(files.values()), since, words


def _replayed(table: Location, commits: Sequence[Change]) -> tuple[dict[str, SampleFile], bool]:
    """The files with new rows after these commits; and True if some of them have older rows too."""
    files: dict[str, SampleFile] = {}
    into: dict[str, tuple[str, ...]] = {}  # a rewritten file, and the files of the commit that rewrote it
    outputs: dict[str, SampleFile] = {}
    doubted = False
    for commit in commits:
        for path in commit.gone & files.keys():
            into[path] = tuple(commit.rewritten)
        if commit.gone & files.keys() or commit.gone & outputs.keys():
            outputs.update({p: _file(table, a) for p, a in commit.rewritten.items()})
        for path in commit.removed:
            files.pop(path, None)
        if commit.removed & outputs.keys():
            files, more = _without(files, into, outputs, commit)
            doubted = doubted or more
        files.update({p: _file(table, a) for p, a in commit.added.items()})
    return files, doubted


def _without(
    files: Mapping[str, SampleFile],
    into: Mapping[str, tuple[str, ...]],
    outputs: Mapping[str, SampleFile],
    commit: Change,
) -> tuple[dict[str, SampleFile], bool]:
    """The files without the rows of compacted ones that a commit removes; the other files of that compaction stay.

    What is left of a removed file's rows, the commit has added. Which of a compaction's files has the rows of one that
    it rewrote is not known, so the others are read instead.
    """
    left: dict[str, SampleFile] = {}
    instead_of: dict[str, SampleFile] = {}
    for path, file in files.items():
        ends = _ends(path, into)
        if not commit.removed & ends:
            left[path] = file
        else:
            instead_of.update({end: outputs[end] for end in ends - commit.removed if end in outputs})
    return {**left, **instead_of}, bool(instead_of)


def _ends(path: str, into: Mapping[str, tuple[str, ...]]) -> set[str]:
    """The files that hold a file's rows now, after any number of compactions."""
    if path not in into:
        return {path}
    return {end for each in into[path] for end in _ends(each, into)}


def _live(table: Location, version: int) -> dict[str, SampleFile]:
    from streaming_jobs.sinks.delta.table_files import table_files

    listed = table_files(table, version)
    return {
        unquote(path): SampleFile(_place(table, path), f.partition, _stats(f.stats), f.modified)
        for path, f in listed.items()
    }


def _file(table: Location, add: Mapping[str, Any]) -> SampleFile:
    return SampleFile(
        _place(table, add["path"]),
        dict(add.get("partitionValues") or {}),
        _stats(add.get("stats")),
        int(add.get("modificationTime") or 0),
    )


def _place(table: Location, path: str) -> Location:
    """Where a file of the log lies; also of one that is gone, which its reader finds."""
    from streaming_jobs.sinks.delta.table_files import on_disk

    with suppress(PreflightRefused):
        return on_disk(table, path)
    return table / unquote(path)


def _stats(text: str | None) -> Mapping[str, Any]:
    with suppress(ValueError):
        value = json.loads(text or "{}")
        return value if isinstance(value, dict) else {}
    return {}


def _of_partition(
    table: Location, columns: Sequence[str], files: Sequence[SampleFile], wanted: Mapping[str, str]
) -> list[SampleFile]:
    for column in wanted:
        if column not in columns:
            by = f"is partitioned by {', '.join(columns)}" if columns else "has no partitions; give a range of times"
            raise UsageError(f"table {table.name} has no partition column '{column}'", f"it {by}")
    return [f for f in files if all(f.partition.get(column) == value for column, value in wanted.items())]


def _check_range(table: Location, schema: pa.Schema, times: TimeRange) -> None:
    import pyarrow as pa

    if times.column not in schema.names:
        raise UsageError(f"table {table.name} has no column '{times.column}'", instead(times.column, schema.names))
    kind = schema.field(times.column).type
    if not (pa.types.is_timestamp(kind) or pa.types.is_date(kind)):
        raise UsageError(f"column {times.column} of table {table.name} is {kind}", "name a column of dates or times")


def _may_hold(file: SampleFile, times: TimeRange) -> bool:
    """False only if the statistics prove that no row of the file is in the range."""
    least = _bound((file.stats.get("minValues") or {}).get(times.column))
    greatest = _bound((file.stats.get("maxValues") or {}).get(times.column))
    if least is None or greatest is None:
        return True
    after = times.end is not None and least - _ROUNDING >= times.end
    before = times.begin is not None and greatest + _ROUNDING < times.begin
    return not (after or before)


def _bound(bound: object) -> datetime | None:
    """A bound of the statistics; None if it is missing or outside of Python's years."""
    try:
        at = datetime.fromisoformat(str(bound)) if isinstance(bound, str) else None
        return None if at is None else at.replace(tzinfo=at.tzinfo or UTC).astimezone(UTC)
    except (ValueError, OverflowError):
        return None


def _refuse_indirect(handle: DeltaTable, table: Location) -> None:
    features = set(handle.protocol().reader_features or ())
    mapping = handle.metadata().configuration.get("delta.columnMapping.mode", "none") != "none"
    if mapping or "deletionVectors" in features:
        what = "column mapping" if mapping else "deletion vectors"
        raise UsageError(
            f"table {table.name} has {what}: its rows are not those of its files",
            "a suite reads tables as Recourse makes them; rewrite the table without that feature",
        )


def open_newest(table: Location, stream: str, *, seen: Callable[[], bool]) -> DeltaTable:
    """The newest version of a table; raises UsageError if there is none yet.

    Raises PreflightRefused for one that cannot be read, and for one that is gone although it was `seen` before.
    """
    from deltalake.exceptions import DeltaError, TableNotFoundError

    try:
        return delta_table(table)
    except (TableNotFoundError, FileNotFoundError) as error:
        if seen():
            raise PreflightRefused(
                f"table {table.name} is gone from {table.parent}", "put it back from a copy"
            ) from error
        raise UsageError(
            f"table {table.name} does not exist yet in {table.parent}",
            f"run stream {stream} first: `{commands.up()}`, or `{commands.run(stream)}`",
        ) from error
    except (DeltaError, OSError) as error:
        raise PreflightRefused(
            f"table {table.name} cannot be read: {str(error)[:300]}", f"`{commands.status()}` shows its stream"
        ) from error
