"""The commits of a Delta log: how their files are split into actions, and what one commit says.

Delta's protocol, section "Delta Log Entries": one JSON object per line. The lines end at a line feed. `str.splitlines`
would also split at U+2028, U+2029, U+0085 and others, which writers do not escape in statistics and partition values.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import unquote

from streaming_jobs.storage.locations import Location

UNREAD = "_unread"
"""The folder below a table with commits that its log has done with and streams have not read (`log_cleanup.py`)."""


@dataclass(frozen=True)
class CommitActions:
    """What one commit says. `info` is its `commitInfo`, None without one; the other fields hold actions as written."""

    version: int
    info: Mapping[str, Any] | None
    adds: tuple[Mapping[str, Any], ...]
    removes: tuple[Mapping[str, Any], ...]
    changes_data: bool
    txns: Mapping[str, int]
    """The transaction versions that it sets, by application."""

    @classmethod
    def of(cls, version: int, lines: Iterable[Mapping[str, Any]]) -> CommitActions:
        """The commit of these lines. Raises TypeError, AttributeError or KeyError for lines other than actions."""
        by_kind: dict[str, list[Mapping[str, Any]]] = {}
        for line in lines:
            for kind, action in line.items():
                if action is not None:
                    by_kind.setdefault(kind, []).append(action)
        files = (action for kind in ("add", "remove", "cdc") for action in by_kind.get(kind, ()))
        return cls(
            version,
            next(iter(by_kind.get("commitInfo", ())), None),
            tuple(by_kind.get("add", ())),
            tuple(by_kind.get("remove", ())),
            any(map(changes_rows, files)),
            {str(action["appId"]): int(action["version"]) for action in by_kind.get("txn", ())},
        )

    @property
    def at(self) -> int:
        """The time of the commit in milliseconds since 1970; 0 if it does not say."""
        return int((self.info or {}).get("timestamp", 0))

    @property
    def operation(self) -> str:
        return str((self.info or {}).get("operation", ""))

    @property
    def user_metadata(self) -> str | None:
        """The text that its writer left; of a commit of ours, the ledger entry."""
        text = (self.info or {}).get("userMetadata")
        return text if isinstance(text, str) else None


def read_commit(table: Location, version: int) -> CommitActions:
    """A version of the log. Raises as `actions` and `CommitActions.of` do, and ValueError for an empty action."""
    lines = list(actions(commit_file(table, version)))
    if not all(line and None not in line.values() for line in lines):
        raise ValueError("an action is empty")
    return CommitActions.of(version, lines)


def read_kept_commit(table: Location, version: int) -> CommitActions:
    """A version, also a version that is kept for readers only. Raises as `read_commit` does.

    A commit may move at any moment, so the log is read first.
    """
    try:
        return read_commit(table, version)
    except FileNotFoundError:
        return read_commit(table / UNREAD, version)


def versions_in_log(table: Location) -> list[int]:
    """The versions whose commits the log has, in order; one listing."""
    files = (table / "_delta_log").glob("*.json")
    return sorted(int(file.stem) for file in files if file.stem.isdigit() and len(file.stem) == 20)


def commit_file(table: Location, version: int) -> Location:
    return table / "_delta_log" / f"{version:020d}.json"


def actions(commit: Location, containing: str = "") -> Iterator[dict[str, Any]]:
    """The actions of one commit file, in order.

    With `containing`, lines without that text are skipped unparsed. Raises FileNotFoundError, and ValueError for
    a file that is not UTF-8 or a line that is not JSON.
    """
    wanted = containing.encode()
    for line in commit.read_bytes().split(b"\n"):
        if line.strip() and wanted in line:
            yield json.loads(line)


def changes_rows(action: Mapping[str, Any]) -> bool:
    """True for an added or removed file whose rows are new or gone, false if compaction has rewritten the file."""
    return bool(action.get("dataChange", True))


def names_on_disk(path: str) -> tuple[str, ...]:
    """The names that a path of the log may have on disk: writers differ in how often they percent-encode it."""
    return (path, unquote(path), unquote(unquote(path))) if "%" in path else (path,)
