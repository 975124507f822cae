"""The commits of a recovery on the stream's own tables: the fence, and the one commit that replaces the rows.

Each is made through `DeltaSink.commit`, so it is there once however often it is tried, and refused when somebody else
has changed the table. A file that the table has already stays where it is; others come as hard links in the folder
`r-<plan>`. Secondary tables go first and the primary last; its entry names where the others are.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from deltalake import CommitProperties, DeltaTable, Schema
from deltalake.transaction import AddAction, RemoveAction

from reprocessing.journal import next_step
from streaming_jobs.errors import ForeignWrite, LedgerConflict, PreflightRefused
from streaming_jobs.files import hard_link
from streaming_jobs.ledger import CodeVersion, LedgerEntry, Txn
from streaming_jobs.positions import OffsetRange
from streaming_jobs.preflight.take_snapshot import all_tables
from streaming_jobs.settings import Settings
from streaming_jobs.sinks.delta import column_bounds, unencoded_paths
from streaming_jobs.sinks.delta.log import newest, walk
from streaming_jobs.sinks.delta.sink import DeltaSink, open_sink
from streaming_jobs.sinks.delta.table_files import TableFile, on_disk, table_files
from streaming_jobs.state import savepoints
from streaming_jobs.state.savepoints import Savepoint
from streaming_jobs.state.stream_record import StreamRecord
from streaming_jobs.stream import Stream


@dataclass(frozen=True)
class Content:
    """What a table is to hold: files by their paths, where these lie, and the columns (Delta's JSON)."""

    files: Mapping[str, TableFile]
    root: Path
    schema: str


@dataclass(frozen=True)
class Published:
    """One table's publish: its version, files that came, went and stayed, and how long the commit took."""

    table: str
    version: int
    came: int
    went: int
    stayed: int
    seconds: float


def sinks(settings: Settings, stream: Stream) -> list[DeltaSink]:
    """The stream's tables in the order in which they are published: the primary last."""
    primary, *secondary = [open_sink(settings, declared, stream.name) for declared, _ in all_tables(stream)]
    return [sink for sink in (*secondary, primary) if sink is not None]


def fence(settings: Settings, stream: Stream, plan: str, generation: int, *, passed: bool = False) -> None:
    """Open the generation on every table for this plan alone: nobody else starts the stream, no old driver writes.

    With `passed`, a table that is in a later generation is left alone: an abort that was killed has come further there.
    Raises PreflightRefused for a table that another plan has fenced.
    """
    for sink in sinks(settings, stream):
        if passed and (at := sink.position) is not None and at.generation > generation:
            continue
        entry = LedgerEntry("fence", stream.name, sink.name, generation, -1, plan=plan)
        sink.commit(entry, lambda *_: None)
        commit, _ = newest(sink.path, stream.name)
        if commit is not None and commit.entry is not None and commit.entry.plan != plan:
            other = commit.entry.plan
            raise PreflightRefused(
                f"table {sink.name} is fenced by plan {other}", next_step(other or "PLAN", "applying")
            )


def fenced_by(settings: Settings, stream: Stream, plan: str) -> bool:
    """True if the plan has fenced a table, or come further there."""
    found = (newest(sink.path, stream.name)[0] for sink in sinks(settings, stream))
    return any(commit is not None and commit.entry is not None and commit.entry.plan == plan for commit in found)


def publish(
    settings: Settings,
    stream: Stream,
    contents: Mapping[str, Content],
    *,
    record: StreamRecord,
    plan: str,
    at: Txn,
    offsets: Sequence[OffsetRange],
    code: CodeVersion,
    between: Callable[[str], None] = lambda _: None,
) -> list[Published]:
    """Make each table hold what `contents` says, at the position `at`; a table that does already is passed over.

    `between` is called with a table's name after its commit. Raises LedgerConflict when a table holds something else
    afterwards, ForeignWrite when somebody else has changed one since the stream's newest commit and it is not accepted.
    """
    done = []
    found = sinks(settings, stream)  # before the look at who has changed them: what comes later, the commit notices
    refuse_foreign(settings, stream, record)
    for sink in found:
        primary = sink.name == stream.primary.name
        entry = LedgerEntry(
            kind="publish",
            stream=stream.name,
            table=sink.name,
            generation=at.generation,
            batch=at.batch,
            offsets=tuple(offsets),
            txns={other.name: at.version for other in found if other is not sink} if primary else {},
            code=code,
            plan=plan,
        )
        # A table of remembered deletes may be younger than the savepoint: then nothing was remembered.
        none = Content({}, sink.path, sink.handle.schema().to_json())
        began_later = sink.name in {table.name for table in stream.deletes}
        content = contents.get(sink.name, none) if began_later else contents[sink.name]
        done.append(_publish(sink, content, entry, f"r-{plan}"))
        between(sink.name)
    return done


def refuse_foreign(settings: Settings, stream: Stream, record: StreamRecord) -> None:
    """Raise ForeignWrite when somebody else has changed a table since the stream's newest commit, unaccepted."""
    for sink in sinks(settings, stream):
        _, foreign = newest(sink.path, stream.name)
        for commit in foreign:
            if commit.version not in record.accepts(sink.name):
                raise ForeignWrite(
                    f"version {commit.version} of table {sink.name} ({commit.operation}) changed rows and was not "
                    f"written by stream {stream.name}",
                    "a recovery would drop that change: undo it, or accept it with `recourse streams accept`",
                )


def misfit(table: Path, staged: Path) -> list[str]:
    """Why staged files cannot become the table's, in words: a column that is gone or of another type, partitions."""
    one, other = DeltaTable(table), DeltaTable(staged)
    here = {f["name"]: f["type"] for f in json.loads(one.schema().to_json())["fields"]}
    there = {f["name"]: f["type"] for f in json.loads(other.schema().to_json())["fields"]}
    said = [
        f"column {name} of table {table.name} is {kind}, in the rebuilt one {there.get(name, 'gone')}"
        for name, kind in here.items()
        if there.get(name) != kind
    ]
    if one.metadata().partition_columns != other.metadata().partition_columns:
        said.append(f"table {table.name} is partitioned by other columns than the rebuilt one")
    return said


def content_of(table: Path) -> Content:
    """What a table holds now."""
    handle = DeltaTable(table)
    return Content(table_files(table, handle.version()), table, handle.schema().to_json())


def contents_of(settings: Settings, savepoint: Savepoint) -> dict[str, Content]:
    """What each table held at a savepoint."""
    files = savepoints.files_of(settings, savepoint)
    return {
        saved.name: Content(
            {file.path: file for file in files[saved.name]},
            savepoints.links(settings, savepoint.stream, saved.name, savepoint.id),
            saved.schema,
        )
        for saved in savepoint.tables
    }


def same_content(table: Path, content: Content, version: int | None = None) -> bool:
    """True if a version of a table (None: the newest) holds just these files, told by what they are on disk.

    A hard link is the same file.
    """
    live = table_files(table, DeltaTable(table).version() if version is None else version)
    return sorted(_inodes(table, live)) == sorted(_inodes(content.root, content.files))


def _publish(sink: DeltaSink, content: Content, entry: LedgerEntry, place: str) -> Published:
    if sink.holds(entry):  # a kill may have come between the commit and the look at what it made
        version = _published_in(sink, entry)
        _refuse_other_content(sink, content, version)
        return Published(sink.name, version or sink.handle.version(), 0, 0, len(content.files), 0.0)
    _widen(sink, content)
    _narrow(sink, content)
    unencoded_paths.rename(sink, entry.generation)
    live = table_files(sink.path, sink.handle.version())
    here = dict(zip(_inodes(sink.path, live), live, strict=True))
    adds: list[AddAction | RemoveAction] = []
    stayed = set()
    for inode, (path, file) in zip(_inodes(content.root, content.files), content.files.items(), strict=True):
        if inode in here:
            stayed.add(here[inode])
            continue
        source = on_disk(content.root, path)
        name = f"{place}/{source.relative_to(content.root).as_posix()}"
        hard_link(source, sink.path / name)
        adds.append(file.add(name))
    at = int(time.time() * 1000)
    removes = [file.remove(at) for path, file in live.items() if path not in stayed]
    began = time.monotonic()

    def write(_: DeltaTable, properties: CommitProperties) -> None:
        sink.commit_actions([*removes, *adds], properties)

    version = sink.commit(entry, write)
    seconds = time.monotonic() - began
    _refuse_other_content(sink, content, version)
    assert version is not None
    return Published(sink.name, version, len(adds), len(removes), len(stayed), round(seconds, 3))


def _published_in(sink: DeltaSink, entry: LedgerEntry) -> int | None:
    """The version whose commit carries the entry; None where the log does not show it any more."""
    for commit in walk(sink.path):
        found = commit.entry
        if found is not None and (found.kind, found.plan, found.txn) == (entry.kind, entry.plan, entry.txn):
            return commit.version
    return None


def _refuse_other_content(sink: DeltaSink, content: Content, version: int | None) -> None:
    if version is None or not same_content(sink.path, content, version):
        raise LedgerConflict(
            f"table {sink.name} does not hold the files that were published to it",
            "its rows are not those of the plan: compare "
            f"{'the table' if version is None else f'version {version}'} with the plan's staging table before "
            "anything else is done",
        )


def has_published(settings: Settings, stream: Stream, plan: str) -> bool:
    """True if the plan's commit is in the primary table, which is the last one: from there on there is no way back."""
    commit, _ = newest(settings.tables / stream.primary.name, stream.name)
    entry = commit.entry if commit else None
    return entry is not None and entry.kind == "publish" and entry.plan == plan


def _widen(sink: DeltaSink, content: Content) -> None:
    """Add the columns that the published rows have and the table has not; columns are never taken away."""
    wanted = json.loads(content.schema)["fields"]
    here = {field["name"] for field in json.loads(sink.handle.schema().to_json())["fields"]}
    added = [field for field in wanted if field["name"] not in here]
    if not added:
        return
    entry = LedgerEntry("schema", sink.stream, sink.name, 0, -1, note=f"added {', '.join(f['name'] for f in added)}")
    fields = Schema.from_json(json.dumps({"type": "struct", "fields": added})).fields
    sink.handle.alter.add_columns(
        fields, commit_properties=CommitProperties(custom_metadata={"userMetadata": entry.encode()})
    )
    sink.refresh()


def _narrow(sink: DeltaSink, content: Content) -> None:
    """Take columns whose bounds a published file has not got off the table's list: older files may lack them."""
    statistics = (json.loads(file.stats or "{}") for file in content.files.values())
    bounded = column_bounds.bounded_in(statistics, sink.bounded)
    if bounded != sink.bounded:
        entry = LedgerEntry("schema", sink.stream, sink.name, 0, -1, note=f"set {column_bounds.PROPERTY}")
        sink.handle.alter.set_table_properties(
            {column_bounds.PROPERTY: column_bounds.encode(bounded)},
            commit_properties=CommitProperties(custom_metadata={"userMetadata": entry.encode()}),
        )
        sink.refresh()


def _inodes(root: Path, files: Mapping[str, TableFile]) -> list[tuple[int, int]]:
    return [((status := on_disk(root, path).stat()).st_dev, status.st_ino) for path in files]
