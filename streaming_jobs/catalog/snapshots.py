"""Versions of all tables that belong together, chosen from the tables' own logs; needs no JVM and takes no lease.

For a stream with several tables, the versions are those of one batch: the entry of the primary table names the
positions of the others. For streams that one recovery spans, all of them have its rows, or none has. The stages of a
plan make that visible in the logs:

    every table of every stream gets the plan's fence, before the first one is published
    then each table is published, in the generation of the fence; streams start only after the last one
    an abort publishes the rows from before, in a later generation

So a plan's streams are those with its fence. While it is published by some of them only, the snapshot has the versions
from before it.

A redrive, or a slice with what its quarantine has of it, comes to one table of a stream after the other, to the one in
its name last, and no batch begins in between. So it is in all versions of its tables, or the snapshot has those from
before it.

The logs are read one after the other, while streams write. Versions are chosen among the commits of a first reading.
What plans there are is taken from a second one, since all fences of a plan that the first reading saw published are on
disk by then.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile
from typing import TYPE_CHECKING

from streaming_jobs.errors import PreflightRefused, UsageError
from streaming_jobs.ledger.entry import LedgerEntry, Txn, last_table_of
from streaming_jobs.sinks.stored import Commit

if TYPE_CHECKING:
    import pyarrow as pa
    from deltalake import DeltaTable
    from pyspark.sql import DataFrame, SparkSession

    from streaming_jobs.catalog.topology import Topology
    from streaming_jobs.settings import Settings
    from streaming_jobs.storage.locations import Location
    from streaming_jobs.stream import Stream


@dataclass(frozen=True)
class TableLog:
    """The commits of one table up to the time of the snapshot, newest first; a second reading adds those `since`."""

    table: str
    commits: Sequence[Commit]
    since: Sequence[Commit] = ()


@dataclass(frozen=True)
class StreamLogs:
    """The logs of one stream's tables that exist, its primary table first."""

    stream: str
    tables: Sequence[TableLog]


@dataclass(frozen=True)
class ChosenVersion:
    """A version of a table, and the batch of its stream whose rows are its newest; None before the first one."""

    stream: str
    version: int
    txn: Txn | None


@dataclass(frozen=True)
class _State:
    """The stretch of a stream's primary log that begins with a commit that moves it, and ends before the next one.

    `entry` is the newest one with rows, None before the first; `corrected` are the plans whose rows it has.
    """

    last: int
    entry: LedgerEntry | None
    corrected: frozenset[str]


def chosen(logs: Sequence[StreamLogs]) -> dict[str, ChosenVersion]:
    """The version of each table, by name; raises PreflightRefused if a log no longer reaches back to it."""
    states = {each.stream: _states(each) for each in logs}
    plans = {each.stream: _plans(each) for each in logs}
    at = {stream: len(each) - 1 for stream, each in states.items()}
    moved = True
    while moved:
        moved = False
        for plan in {plan for each in plans.values() for plan in each}:
            members = [stream for stream, each in plans.items() if plan in each]
            having = [stream for stream in members if plan in states[stream][at[stream]].corrected]
            for stream in having if len(having) < len(members) else ():
                at[stream] = _before(stream, states[stream], at[stream], plan)
                moved = True
    versions: dict[str, ChosenVersion] = {}
    for each in logs:
        of_stream = dict(_of_stream(each, states[each.stream][at[each.stream]]))
        while _held_back(each, of_stream):
            pass  # each time, versions from before a change
        versions.update(of_stream)
    return versions


def _held_back(logs: StreamLogs, versions: dict[str, ChosenVersion]) -> bool:
    """Put tables back before a redrive or a slice that others of its tables do not have; False if there is none."""
    changes: dict[str, dict[str, Commit]] = {}
    for log in logs.tables:
        for commit in (*log.since, *log.commits):
            if commit.entry is not None and commit.entry.kind in ("redrive", "slice") and commit.entry.plan is not None:
                changes.setdefault(commit.entry.plan, {})[log.table] = commit
    oldest = {log.table: log.commits[-1] for log in logs.tables if log.commits}
    newest = {log.table: (*log.since, *log.commits)[0] for log in logs.tables if log.commits}
    for change, commits in changes.items():
        tables = {*commits, last_table_of(change)} & versions.keys()
        having = {t for t in tables & commits.keys() if commits[t].version <= versions[t].version}
        first = min(commit.at for commit in commits.values())
        lacking = tables - commits.keys()
        cleaned = {t for t in lacking if oldest[t].at > first}
        # Nothing comes between the commits of a slice: a table with a later one will not get it.
        given_up = {t for t in lacking if _is_slice(commits.values()) and newest[t].at > first}
        if having and having | cleaned | given_up != tables:
            for table in having:
                versions[table] = replace(versions[table], version=commits[table].version - 1)
            return True
    return False


def _is_slice(commits: Iterable[Commit]) -> bool:
    return any(each.entry is not None and each.entry.kind == "slice" for each in commits)


def _before(stream: str, states: Sequence[_State], at: int, plan: str) -> int:
    for index in range(at - 1, -1, -1):
        if plan not in states[index].corrected:
            return index
    raise _not_in_log(stream, f"the rows from before plan {plan}, which other streams have not published yet")


def _states(logs: StreamLogs) -> list[_State]:
    """The states of a stream, oldest first; the first one is that before the oldest commit which moves it, if known."""
    primary = logs.tables[0]
    commits = list(reversed(primary.commits))
    fences: dict[str, int] = {}
    corrected: frozenset[str] = frozenset()
    entry: LedgerEntry | None = None
    states: list[_State] = []
    begins: list[int] = []
    if commits and commits[0].version == 0:
        states.append(_State(commits[0].version, None, corrected))
        begins.append(0)
    for commit in commits:
        here = commit.entry
        if here is None or not commit.moves(logs.stream):
            continue
        if here.plan is not None and here.kind == "fence":
            fences[here.plan] = here.generation
        elif here.plan is not None:  # an abort publishes in a later generation than that of the fence, if there is one
            cut = not states and here.kind == "publish"
            recovered = cut or fences.get(here.plan) == here.generation
            corrected = corrected | {here.plan} if recovered else corrected - {here.plan}
        entry = entry if here.kind == "fence" else here
        if states and begins[-1] == commit.version:
            states.pop()
            begins.pop()
        states.append(_State(commit.version, entry, corrected))
        begins.append(commit.version)
    if not states:
        return [_State(commits[-1].version if commits else 0, None, corrected)]
    ends = [*(begin - 1 for begin in begins[1:]), commits[-1].version]
    return [_State(end, each.entry, each.corrected) for end, each in zip(ends, states, strict=True)]


def _plans(logs: StreamLogs) -> set[str]:
    """The plans that have fenced or published a table of the stream."""
    return {
        commit.entry.plan
        for table in logs.tables
        for commit in (*table.commits, *table.since)
        if commit.entry is not None and commit.entry.plan is not None and commit.moves(logs.stream)
    }


def _of_stream(logs: StreamLogs, state: _State) -> Iterator[tuple[str, ChosenVersion]]:
    primary, *others = logs.tables
    yield primary.table, ChosenVersion(logs.stream, state.last, None if state.entry is None else state.entry.txn)
    for log in others:
        listed = None if state.entry is None else state.entry.txns.get(log.table)
        wanted = None if listed is None else Txn.of(listed)
        if log.commits:  # else it was made after the time of the snapshot
            yield log.table, ChosenVersion(logs.stream, _at(logs.stream, log, wanted), wanted)


def _at(stream: str, log: TableLog, wanted: Txn | None) -> int:
    """The last version of a table with the rows of this position; None: before its first batch."""
    last = log.commits[0].version
    for commit in log.commits:
        entry = commit.entry
        if entry is None or not commit.moves(stream) or entry.kind == "fence":
            continue
        if entry.txn == wanted:
            return last
        last = commit.version - 1
    if log.commits[-1].version == 0 and (wanted is None or wanted.batch < 0):
        return max(last, 0)  # as it was made
    raise _not_in_log(log.table, f"the rows of {wanted or 'no batch'}")


def _not_in_log(name: str, what: str) -> PreflightRefused:
    return PreflightRefused(
        f"the log of {name} no longer shows {what}", "name a later time, or read the tables once the plan is over"
    )


@dataclass(frozen=True)
class TableSnapshot:
    """One table of a snapshot: its location, its version, and the batch whose rows are its newest."""

    table: str
    stream: str
    location: Location
    version: int
    generation: int | None
    batch: int | None

    def open(self) -> DeltaTable:
        from streaming_jobs.storage.locations import delta_table

        return delta_table(self.location, self.version)

    def rows(self, columns: Sequence[str] | None = None) -> pa.Table:
        """The rows as Arrow, in these columns or all."""
        from streaming_jobs.platform.table_rows import rows

        return rows(self.location, self.version, columns)

    def frame(self, spark: SparkSession) -> DataFrame:
        """The rows as a frame of a Spark session that has Delta."""
        from streaming_jobs.platform.spark_on_store import hadoop_path

        return spark.read.format("delta").option("versionAsOf", self.version).load(hadoop_path(self.location))


class Snapshot(dict[str, TableSnapshot]):
    """The tables of a snapshot, by name."""


def read_snapshot(
    settings: Settings | None = None,
    topology: Topology | None = None,
    *,
    streams: Iterable[str] | None = None,
    at: float | None = None,
) -> Snapshot:
    """The versions of the streams' tables that belong together, now or `at` a time in seconds since 1970.

    Without `settings` and `topology`, those of the project in the working directory. Name the `streams` only if no
    recovery spans them and others: the versions of streams that are left out are not compared. Raises UsageError
    without any table, PreflightRefused if a table's log no longer reaches back that far.
    """
    from streaming_jobs.catalog.topology import Topology
    from streaming_jobs.settings import load

    settings = settings or load().settings
    topology = topology or Topology.of_settings(settings)
    every = topology.select(streams if streams is not None else topology.streams)
    logs = [each for stream in every if (each := _read(settings, stream, at)).tables]
    if not logs:
        raise UsageError("no stream had written a table", "name a later time, or run a stream")
    again = [_with_later(settings, topology[each.stream], each) for each in logs]
    found = chosen(again)
    return Snapshot(
        {
            name: TableSnapshot(
                name,
                each.stream,
                settings.tables / name,
                each.version,
                None if each.txn is None else each.txn.generation,
                None if each.txn is None else each.txn.batch,
            )
            for name, each in sorted(found.items())
        }
    )


def _read(settings: Settings, stream: Stream, at: float | None) -> StreamLogs:
    tables: list[TableLog] = []
    for name, commits in _commits(settings, stream):
        until = [each for each in commits if at is None or each.at <= at * 1000]
        if until or not tables:
            tables.append(TableLog(name, until))
    return StreamLogs(stream.name, tables if tables and tables[0].commits else ())


def _with_later(settings: Settings, stream: Stream, logs: StreamLogs) -> StreamLogs:
    known: Mapping[str, TableLog] = {log.table: log for log in logs.tables}
    again = []
    for name, commits in _commits(settings, stream):
        if (log := known.get(name)) is not None:
            newest = log.commits[0].version if log.commits else -1
            later = takewhile(lambda commit, newest=newest: commit.version > newest, commits)  # type: ignore[misc]
            again.append(TableLog(name, log.commits, tuple(later)))
    return StreamLogs(logs.stream, again)


def _commits(settings: Settings, stream: Stream) -> Iterator[tuple[str, Iterable[Commit]]]:
    from streaming_jobs.sinks.tables import all_tables, open_table

    for declared, _ in all_tables(stream):
        if (table := open_table(settings, declared, stream.name)) is not None:
            yield declared.name, table.commits()
