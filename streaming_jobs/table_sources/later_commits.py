"""What later commits of a table made of rows that a reader reads, or has read: taken back, or replaced."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from streaming_jobs.ledger import LedgerEntry
from streaming_jobs.platform.delta_log import actions


def undone_after(table: Path, writer: str, number: int) -> tuple[set[str], bool]:
    """The files that other programs removed after a version and before the writer's next commit; True if it came.

    Compaction removes no rows, and upkeep goes on also while the writer waits for a person.
    """
    removed: set[str] = set()
    while (file := commit_file(table, number := number + 1)).exists():
        commit = list(actions(file))
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
    from streaming_jobs.sinks.delta.log import walk

    found = []
    for commit in walk(table):
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


def commit_file(table: Path, number: int) -> Path:
    """The file of a version's commit."""
    return table / "_delta_log" / f"{number:020d}.json"


def info_of(commit: Iterable[Mapping[str, Any]]) -> Mapping[str, Any]:
    """The action `commitInfo` of a commit; empty without one."""
    return next((action["commitInfo"] for action in commit if action.get("commitInfo")), {})


def name_on_disk(path: str) -> str:
    """A path of the log as a name on disk; writers differ in how often they percent-encode it."""
    return unquote(unquote(path))


def _rewrites(table: Path, number: int) -> bool:
    try:
        return bool(_removed(actions(commit_file(table, number))))
    except FileNotFoundError:  # cleaned up since it was listed
        return False


def _removed(commit: Iterable[Mapping[str, Any]]) -> set[str]:
    """The files whose rows a commit removed."""
    removes = (action["remove"] for action in commit if action.get("remove"))
    return {name_on_disk(each["path"]) for each in removes if each.get("dataChange", True)}
