"""The one commit that replaces a slice of a Delta table, relative to the version on which the slice was rebuilt.

The files of that version that hold rows of the slice are removed; their other rows and the rebuilt ones come in files
that were staged below `_slices`, as hard links. Later files stay as they are. The commit moves no
transaction: for the stream, nothing has happened. It is made by the one process that may write the table: the stream's
driver between two batches, or the rebuild itself while it holds the stream's lease.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from deltalake.exceptions import CommitFailedError
from deltalake.transaction import AddAction, RemoveAction

from streaming_jobs.errors import CommitRefused
from streaming_jobs.ledger.entry import LedgerEntry
from streaming_jobs.platform.failures import classify
from streaming_jobs.platform.files import link_as_new
from streaming_jobs.sinks.delta import unencoded_paths
from streaming_jobs.sinks.delta.commit_properties import noted
from streaming_jobs.sinks.delta.log import walk
from streaming_jobs.sinks.delta.table_files import TableFile, table_files
from streaming_jobs.sinks.sliced import SliceOutdated

if TYPE_CHECKING:
    from streaming_jobs.sinks.delta.sink import DeltaSink

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
        sink.refresh()
        if (done := _committed(sink, change, entry)) is not None:
            sink.sync()
            return done
        actions = _actions(sink, change, entry)
        at("slice_linked")
        version = sink.handle.version()
        try:
            sink.commit_actions(actions, noted(entry, retries=0))
        except CommitFailedError as error:
            sink.refresh()
            if sink.handle.version() == version:
                raise classify(error) from error
            continue
        at("slice_committed")
        return sink.committed()
    raise CommitRefused(f"table {sink.name} was committed to by others {_ATTEMPTS} times during one commit")


def _committed(sink: DeltaSink, change: SliceChange, entry: LedgerEntry) -> int | None:
    """The version that has the slice already; raises SliceOutdated if other commits than batches intervened."""
    if sink.table_id != change.table_id:
        raise SliceOutdated(f"table {sink.name} was made anew since the slice was rebuilt")
    if sink.handle.version() < change.version:
        raise SliceOutdated(f"version {change.version} of table {sink.name} is gone: a power cut had torn it")
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
    if not all(path.isascii() for path in change.removes) and unencoded_paths.rename(sink, entry.generation):
        raise SliceOutdated(f"files of table {sink.name} have got other names")
    live = table_files(sink.path, sink.handle.version())
    if gone := [path for path in change.removes if path not in live]:
        raise SliceOutdated(f"{len(gone)} files of table {sink.name} were compacted since the slice was rebuilt")
    for each in change.adds:
        source, target = sink.path / each.staged, sink.path / each.path
        if not source.exists() and not target.exists():
            raise SliceOutdated(f"the staged file {Path(each.staged).name} of table {sink.name} is gone")
        link_as_new(source if source.exists() else target, target)
    now = int(time.time() * 1000)
    return [*(live[path].remove(now) for path in change.removes), *(each.file.add(each.path) for each in change.adds)]
