"""What later commits of a table made of rows that a reader reads, or has read: taken back, or replaced."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

from streaming_jobs.ledger import LedgerEntry
from streaming_jobs.platform.delta_log import UNREAD, commit_actions

if TYPE_CHECKING:
    from streaming_jobs.sinks.stored import Commit


def undone_after(table: Path, writer: str, number: int) -> tuple[set[str], bool]:
    """The files that other programs removed after a version and before the writer's next commit; True if it came.

    Compaction removes no rows, and upkeep goes on also while the writer waits for a person.
    """
    removed: set[str] = set()
    while commit := _commit(table, number := number + 1):
        entry = LedgerEntry.decode(info_of(commit).get("userMetadata"))
        if entry is None or entry.stream != writer:
            removed |= _removed(commit)
        elif entry.kind != "upkeep":
            return removed, True
    return removed, False


def replaced_since(table: Path, writer: str | None, start: int) -> list[tuple[int, str]]:
    """The commits from a version on that replaced or removed rows, newest first: (version, by whom).

    A reader of versions passes over what they have made of rows that it read before. `writer` is None for a table
    that no stream of ours writes.
    """
    found = []
    for commit in whole_walk(table):
        if commit.version < start:
            break
        entry = commit.entry
        if not commit.changes_data:
            continue
        if entry is None or writer not in (None, entry.stream):
            if _rewrites(table, commit.version):
                found.append((commit.version, "another program"))
        elif entry.kind in ("publish", "slice"):
            found.append((commit.version, f"plan {entry.plan}" if entry.plan else f"a {entry.kind}"))
    return found


def whole_walk(table: Path, version: int | None = None) -> Iterator[Commit]:
    """`walk`, and after it the commits that are kept for readers only."""
    from streaming_jobs.sinks.delta.log import walk

    before = None if version is None else version + 1
    for root in (table, table / UNREAD):
        for commit in walk(root, None if before is None else before - 1):
            if root != table and before is not None and commit.version != before - 1:
                return
            before = commit.version
            yield commit


def info_of(commit: Iterable[Mapping[str, Any]]) -> Mapping[str, Any]:
    """The action `commitInfo` of a commit; empty without one."""
    return next((action["commitInfo"] for action in commit if action.get("commitInfo")), {})


def name_on_disk(path: str) -> str:
    """A path of the log as a name on disk; writers differ in how often they percent-encode it."""
    return unquote(unquote(path))


def _rewrites(table: Path, number: int) -> bool:
    try:
        return bool(_removed(commit_actions(table, number)))
    except FileNotFoundError:  # cleaned up since it was listed
        return False


def _commit(table: Path, number: int) -> list[dict[str, Any]]:
    try:
        return commit_actions(table, number)
    except FileNotFoundError:
        return []


def _removed(commit: Iterable[Mapping[str, Any]]) -> set[str]:
    """The files whose rows a commit removed."""
    removes = (action["remove"] for action in commit if action.get("remove"))
    return {name_on_disk(each["path"]) for each in removes if each.get("dataChange", True)}
