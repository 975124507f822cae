"""Reads every version of a table as it appears, and checks that it consists of whole batches.

This is an ordinary reader: it opens each version by number through deltalake while the streams write the next ones
and are killed. It compares the rows with the ledger entries of the commits up to that version, by one rule per kind of
table:

| rule      | for a table with                    | says                                                             |
|-----------|-------------------------------------|------------------------------------------------------------------|
| `Places`  | one row per record, with its place  | every covered record is one row                                  |
| `Newest`  | a row per key, with its place       | no key twice, none goes back, each is a covered record           |
| `Total`   | a running count per key             | the counts add up to the covered records                         |
| `Windows` | a row per window, once it is over   | no window twice, none counts more than there is, none ever lost  |

A record may have its row elsewhere: in the dead letters, in a quarantine, or in another table of its stream. Those
tables commit before the primary one, so the rows of all covered records are there already. Or a row rule has dropped
its row: of these the entries have the number only.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from deltalake import DeltaTable
from deltalake.exceptions import DeltaError

from streaming_jobs.platform.table_rows import plain_text
from streaming_jobs.storage.locations import Location, StorePath, delta_options, delta_table, opened_for_reading
from streaming_jobs.text.spelling import counted
from streaming_jobs.verification.chaos.background import Background
from streaming_jobs.verification.delta_log import LoggedCommit, commit_file, read_commit, versions
from streaming_jobs.verification.ledger_chain import Chain, TableFault, assumed
from streaming_jobs.verification.offset_ranges import Packed, of_spans, packed, shown, unpacked

_LOOK_EVERY = 0.1


@dataclass(frozen=True)
class Elsewhere:
    """A further table of a stream whose rows are records, with the columns that name their place in the topic."""

    table: str
    partition: str
    offset: str


@dataclass(frozen=True)
class WatchedStream:
    """A stream whose every version is read: its primary table with the rule for its rows, its topic, its other tables.

    A stream without a `rule` is killed and not watched.
    """

    stream: str
    table: str
    topic: str
    rule: VersionRule | None = None
    secondary: tuple[Elsewhere, ...] = ()

    @property
    def elsewhere(self) -> tuple[Elsewhere, ...]:
        """The further tables in which a record of the stream may have its row."""
        return (*self.secondary, Elsewhere(f"{self.stream}_dead_letters", "partition", "offset"))


@dataclass(frozen=True)
class Covered:
    """The records that a table's entries cover and that are in no other table: their places, each once and in order.

    `written` is the number of rows that the entries count; None when some of them are gone. `before` are the rows of
    the version before, if it was read. `dropped` is the number of rows that row rules have dropped, by the entries.
    """

    topic: str
    places: Packed
    written: int | None
    before: pa.Table | None = field(default=None, repr=False)
    dropped: int = 0

    def shown(self, places: Packed) -> str:
        return shown(unpacked(self.topic, places.tolist()))


class VersionRule(Protocol):
    """Judges the rows of one version of a table."""

    @property
    def columns(self) -> Sequence[str]:
        """The columns that the rule reads."""

    def faults(self, rows: pa.Table, covered: Covered) -> list[str]:
        """The faults of these rows, in words."""


@dataclass(frozen=True)
class Places:
    """Every record is one row, which names its place."""

    partition: str
    offset: str

    @property
    def columns(self) -> Sequence[str]:
        return (self.partition, self.offset)

    def faults(self, rows: pa.Table, covered: Covered) -> list[str]:
        unique, counts = np.unique(packed(rows[self.partition], rows[self.offset]), return_counts=True)
        faults = []
        if len(twice := unique[counts > 1]):
            faults.append(f"{_offsets(twice)} in more than one row: {covered.shown(twice)}")
        if len(absent := np.setdiff1d(covered.places, unique)) != covered.dropped:
            text = f"{_offsets(absent)} covered by an entry and in no row: {covered.shown(absent)}"
            text += f"; the entries dropped {counted(covered.dropped, 'row')}" if covered.dropped else ""
            faults.append(text)
        if len(extra := np.setdiff1d(unique, covered.places)):
            faults.append(f"{_offsets(extra)} in a row and covered by no entry: {covered.shown(extra)}")
        return faults


@dataclass(frozen=True)
class Newest:
    """Of each key one covered record, never an older one than in the version before.

    `key` are the columns whose values, written one after the other, are the key.
    """

    partition: str
    offset: str
    key: tuple[str, ...]

    @property
    def columns(self) -> Sequence[str]:
        return (self.partition, self.offset, *self.key)

    def faults(self, rows: pa.Table, covered: Covered) -> list[str]:
        faults = _doubled(rows, self.key, "key")
        now = self._by_key(rows)
        if len(extra := np.setdiff1d(list(now.values()), covered.places)):
            places = covered.shown(extra.astype(np.int64))
            faults.append(f"{_offsets(extra)} in a row and covered by no entry, or set aside: {places}")
        before = self._by_key(covered.before) if covered.before is not None else {}
        if back := sorted(key for key, place in before.items() if now.get(key, -1) < place):
            many = counted(len(back), "key", "is", "are")
            faults.append(f"{many} older than in the version before, or gone, first {back[0]}")
        return faults

    def _by_key(self, rows: pa.Table) -> dict[str, int]:
        keys = pc.binary_join_element_wise(*(pc.cast(rows[name], pa.string()) for name in self.key), "")
        return dict(zip(keys.to_pylist(), packed(rows[self.partition], rows[self.offset]).tolist(), strict=True))


@dataclass(frozen=True)
class Total:
    """The counts of all keys add up to the covered records, and no key has two rows."""

    key: str
    count: str

    @property
    def columns(self) -> Sequence[str]:
        return (self.key, self.count)

    def faults(self, rows: pa.Table, covered: Covered) -> list[str]:
        faults = _doubled(rows, (self.key,), "key")
        total = pc.sum(rows[self.count]).as_py() or 0
        if total != len(covered.places):
            faults.append(f"the sum of {self.count} is {total:,}, the entries cover {len(covered.places):,} records")
        return faults


@dataclass(frozen=True)
class Windows:
    """One row per closed window: none twice, as many as the entries say, and none that disappears or changes."""

    key: tuple[str, ...]
    count: str

    @property
    def columns(self) -> Sequence[str]:
        return (*self.key, self.count)

    def faults(self, rows: pa.Table, covered: Covered) -> list[str]:
        faults = _doubled(rows, self.key, "window")
        if covered.written is not None and rows.num_rows != covered.written:
            faults.append(f"{counted(rows.num_rows, 'row', 'is', 'are')} there, the entries wrote {covered.written:,}")
        total = pc.sum(rows[self.count]).as_py() or 0
        if total > len(covered.places):
            most = f"more than the {len(covered.places):,} records covered"
            faults.append(f"the sum of {self.count} is {total:,}, {most}")
        if covered.before is not None and (gone := _distinct(covered.before) - _distinct(rows)):
            first = ", ".join(str(value) for value in sorted(gone)[0])
            faults.append(f"gone or changed since the version before: {counted(len(gone), 'row')}, first {first}")
        return faults


def _offsets(places: Packed) -> str:
    return counted(len(places), "offset", "is", "are")


def _doubled(rows: pa.Table, key: Sequence[str], what: str) -> list[str]:
    groups = rows.group_by(list(key)).aggregate([([], "count_all")])
    twice = groups.filter(pc.field("count_all") > 1)
    if not twice.num_rows:
        return []
    first = ", ".join(str(value) for value in twice.select(list(key)).slice(0, 1).to_pylist()[0].values())
    return [f"{counted(twice.num_rows, what, 'is', 'are')} in more than one row, first {first}"]


def _distinct(rows: pa.Table) -> set[tuple[Any, ...]]:
    return set(zip(*(column.to_pylist() for column in rows.columns), strict=True))


@dataclass
class VersionRows:
    """Reads some columns of a table by version. A file is read once: it never changes, only its listing does."""

    table: Location
    columns: Sequence[str]
    _files: dict[str, pa.Table] = field(default_factory=dict, repr=False)

    def at(self, version: int | None = None) -> pa.Table:
        """The rows of that version, or of the newest; raises the errors of deltalake and pyarrow where unreadable."""
        listed = delta_table(self.table, version).file_uris()
        self._files = {uri: self._files[uri] if uri in self._files else self._read(uri) for uri in listed}
        empty = pa.table({name: pa.array([], pa.null()) for name in self.columns})
        return pa.concat_tables(self._files.values(), promote_options="permissive") if self._files else empty

    def _read(self, uri: str) -> pa.Table:
        place = StorePath(uri, self.table.options) if isinstance(self.table, StorePath) else Path(uri)
        rows = pq.ParquetFile(opened_for_reading(place)).read(columns=list(self.columns))
        return rows.cast(pa.schema([field.with_type(plain_text(field.type)) for field in rows.schema]))


def _all_places(tables: Location, every: Iterable[Elsewhere]) -> Packed:
    return np.concatenate([packed([], []), *(_places(tables, one) for one in every)])


def _places(tables: Location, elsewhere: Elsewhere) -> Packed:
    """Positions of all rows of the table now; none if there is no such table."""
    table = tables / elsewhere.table
    if not DeltaTable.is_deltatable(str(table), delta_options(table)):
        return packed([], [])
    rows = VersionRows(table, (elsewhere.partition, elsewhere.offset)).at()
    # A row without its key is a dead letter too, and may not name the record that it was made from.
    rows = rows.filter(pc.is_valid(rows[elsewhere.offset]))
    return packed(rows[elsewhere.partition], rows[elsewhere.offset])


@dataclass
class TableReader:
    """Reads one table, version after version.

    `unseen` counts versions that the log clean-up took before they could be read; `unjudged` those before the first
    entry of a log that does not go back to the table's beginning.
    """

    subject: WatchedStream
    tables: Location
    next: int = 0
    seen: int = 0
    unseen: int = 0
    unjudged: int = 0
    faults: list[TableFault] = field(default_factory=list)
    chain: Chain = field(init=False)
    _rule: VersionRule = field(init=False)
    _rows: VersionRows = field(init=False)
    _before: pa.Table | None = None

    def __post_init__(self) -> None:
        assert self.subject.rule is not None
        self.chain, self._rule = Chain(self.subject.stream, self.subject.table), self.subject.rule
        self._rows = VersionRows(self.path, self._rule.columns)

    @property
    def path(self) -> Location:
        return self.tables / self.subject.table

    def advance(self, stop: threading.Event | None = None) -> bool:
        """Read every version that is there and was not read yet; returns True if there was one."""
        begun = self.next
        while not (stop is not None and stop.is_set()) and self._skip_to_next():
            self._read(self.next)
            self.next += 1
        return self.next > begun

    def _skip_to_next(self) -> bool:
        if commit_file(self.path, self.next).is_file():
            return True
        later = [version for version in versions(self.path) if version > self.next]
        if not later:
            return False
        if commit_file(self.path, self.next).is_file():  # it was committed since
            return True
        self.unseen += later[0] - self.next
        self.next = later[0]
        self._before = None
        return True

    def _read(self, version: int) -> None:
        table = self.subject.table
        try:
            commit = read_commit(self.path, version)
            self._begin(commit)
            self.faults += self.chain.take(commit)
            if self.unseen and self.chain.first is None:
                self.unjudged += 1
                return
            rows = self._rows.at(version)
        except FileNotFoundError as error:
            if not commit_file(self.path, version).exists():  # cleaned up before it was read
                self.unseen += 1
            else:
                self.faults.append(TableFault(table, version, "unreadable", f"{error.filename} is missing"))
            return
        except (DeltaError, OSError, ValueError, pa.ArrowException) as error:
            self.faults.append(TableFault(table, version, "unreadable", f"cannot be read: {str(error)[:300]}"))
            return
        self.seen += 1
        of = f" (after {commit.entry})" if commit.entry else ""
        for text in self._rule.faults(rows, self._covered()):
            self.faults.append(TableFault(table, version, "rows", f"{text}{of}"))
        self._before = rows

    def _begin(self, commit: LoggedCommit) -> None:
        """Without the log's beginning, count the offsets before the first entry as covered once."""
        entry = commit.entry
        if self.unseen and self.chain.first is None and entry is not None and entry.kind == "batch":
            self.chain.spans += assumed(entry)

    def _covered(self) -> Covered:
        """Covered records without those in other tables, which are read after this version: they may be newer."""
        places = np.setdiff1d(of_spans(self.chain.spans), _all_places(self.tables, self.subject.elsewhere))
        written = None if self.unseen else self.chain.written
        return Covered(self.subject.topic, places, written, self._before, self.chain.dropped)


class ConcurrentReader(Background):
    """Keeps reading all tables until it is stopped."""

    def __init__(self, subjects: Sequence[WatchedStream], tables: Location) -> None:
        super().__init__("version-reader")
        self.readers = [TableReader(subject, tables) for subject in subjects]

    def finish(self) -> None:
        """Stop the thread, then read the remaining versions in the caller's thread, so that none is left out."""
        self.stop()
        self.check()
        for reader in self.readers:
            reader.advance()

    @property
    def seen(self) -> int:
        return sum(reader.seen for reader in self.readers)

    @property
    def unseen(self) -> int:
        """Versions that clean-up took before they were read."""
        return sum(reader.unseen for reader in self.readers)

    @property
    def faults(self) -> list[TableFault]:
        return [fault for reader in self.readers for fault in reader.faults]

    def work(self) -> None:
        while not self.ended.is_set():
            advanced = [reader.advance(self.ended) for reader in self.readers]
            if not any(advanced):
                self.ended.wait(_LOOK_EVERY)
