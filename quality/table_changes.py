"""The files that the commits of a table's log add and remove, in order. Needs no JVM."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from streaming_jobs.errors import PreflightRefused
from streaming_jobs.ledger.entry import LedgerEntry
from streaming_jobs.platform.delta_log import actions


@dataclass(frozen=True)
class Change:
    """One commit: the added files by their paths on disk, and the removed paths, each with `dataChange` apart.

    `rewritten` and `gone` are what a commit that changes no rows adds and removes, such as a compaction.
    """

    version: int
    at: int
    added: Mapping[str, Mapping[str, Any]]
    removed: frozenset[str]
    rewritten: Mapping[str, Mapping[str, Any]]
    gone: frozenset[str]
    entry: LedgerEntry | None

    @property
    def upkeep(self) -> bool:
        """True if it rewrote files without changing rows."""
        return bool(self.rewritten or self.gone)


def read_change(table: Path, version: int) -> Change | None:
    """One commit of the log; None if the log no longer holds it. Raises PreflightRefused for a damaged one."""
    file = table / "_delta_log" / f"{version:020d}.json"
    added: dict[str, Mapping[str, Any]] = {}
    rewritten: dict[str, Mapping[str, Any]] = {}
    removed: set[str] = set()
    gone: set[str] = set()
    at, entry = 0, None
    try:
        for line in actions(file):
            (kind, action), *_ = line.items()
            if kind == "add":
                (added if action.get("dataChange", True) else rewritten)[unquote(action["path"])] = action
            elif kind == "remove":
                (removed if action.get("dataChange", True) else gone).add(unquote(action["path"]))
            elif kind == "commitInfo":
                at, entry = int(action.get("timestamp", 0)), LedgerEntry.decode(action.get("userMetadata"))
    except FileNotFoundError:
        return None
    except (ValueError, TypeError, AttributeError, KeyError) as error:
        raise PreflightRefused(
            f"version {version} in {file.parent} cannot be read: {error}", "put the table's log back from a copy"
        ) from error
    return Change(version, at, added, frozenset(removed), rewritten, frozenset(gone), entry)


def changes(table: Path, after: int, version: int) -> Sequence[Change] | None:
    """The commits after one version up to another, oldest first; None if the log no longer holds all of them."""
    read = []
    for number in range(after + 1, version + 1):
        if (change := read_change(table, number)) is None:
            return None
        read.append(change)
    return read
