"""Which batch, and so which code, wrote a file of a table: the commit that added the file, and its ledger entry.

A compaction puts the rows of several batches into one file: of all files that it replaced in the same partition.
A commit that the log no longer has is looked up in the ledger beside the state, by the time at which the file was
written: a batch writes its files before its line, and after the line of the batch before.
"""

from __future__ import annotations

import json
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import unquote

from streaming_jobs.errors import PreflightRefused
from streaming_jobs.ledger.entry import CodeVersion, LedgerEntry
from streaming_jobs.platform.delta_log import changes_rows, read_commit
from streaming_jobs.state.ledger_file import LedgerFile
from streaming_jobs.storage.locations import Location

_CLOCK = 0.002
"""Seconds by which the time of a file and that of a ledger line may differ, as their clocks are rounded."""


@dataclass(frozen=True)
class Change:
    """One commit: the added files by their paths on disk, and the removed paths, each with `dataChange` apart.

    `rewritten` and `gone` are what a commit that changes no rows adds and removes, such as a compaction. `at` in ms
    since 1970.
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


def rows_of(add: Mapping[str, Any]) -> int | None:
    """The rows of an added file by its statistics; None if these do not say."""
    try:
        count = json.loads(add.get("stats") or "{}").get("numRecords")
    except (ValueError, AttributeError):
        return None
    return None if count is None else int(count)


def read_change(table: Location, version: int) -> Change | None:
    """One commit of the log; None if the log no longer holds it. Raises PreflightRefused for a damaged one."""
    try:
        commit = read_commit(table, version)
        return Change(
            version,
            commit.at,
            added={unquote(add["path"]): add for add in commit.adds if changes_rows(add)},
            removed=frozenset(unquote(remove["path"]) for remove in commit.removes if changes_rows(remove)),
            rewritten={unquote(add["path"]): add for add in commit.adds if not changes_rows(add)},
            gone=frozenset(unquote(remove["path"]) for remove in commit.removes if not changes_rows(remove)),
            entry=LedgerEntry.decode(commit.user_metadata),
        )
    except FileNotFoundError:
        return None
    except (ValueError, TypeError, AttributeError, KeyError) as error:
        raise PreflightRefused(
            f"version {version} in {table / '_delta_log'} cannot be read: {error}",
            "put the table's log back from a copy",
        ) from error


def changes(table: Location, after: int, version: int) -> Sequence[Change] | None:
    """The commits after one version up to another, oldest first; None if the log no longer holds all of them."""
    read = []
    for number in range(after + 1, version + 1):
        if (change := read_change(table, number)) is None:
            return None
        read.append(change)
    return read


class TableLog:
    """The commits of a table's log, read on demand from a version backwards."""

    def __init__(self, table: Location, version: int) -> None:
        self.table = table
        self._next = version
        self._adding: dict[str, Change] = {}

    def adding(self, path: str) -> Change | None:
        """The newest commit that added a file, or rewrote others into it; None if the log no longer has it."""
        while path not in self._adding and self._next >= 0:
            if (change := read_change(self.table, self._next)) is None:
                self._next = -1
                break
            self._next -= 1
            for each in (*change.added, *change.rewritten):
                self._adding.setdefault(each, change)
        return self._adding.get(path)

    def originals(self, path: str) -> list[tuple[str, Change]] | None:
        """The files that commits with new rows added and whose rows are in a file, oldest first.

        That is the file itself, unless a compaction made it. None if the log no longer shows all of them.
        """
        change = self.adding(path)
        if change is None:
            return None
        if path in change.added:
            return [(path, change)]
        partition = change.rewritten[path].get("partitionValues")
        files: list[tuple[str, Change]] = []
        for replaced in change.gone:
            adding = self.adding(replaced)
            if adding is None:
                return None
            if {**adding.added, **adding.rewritten}[replaced].get("partitionValues") != partition:
                continue
            if (before := self.originals(replaced)) is None:
                return None
            files += before
        return sorted(files, key=lambda each: each[1].version)


def batch_during(ledger: LedgerFile, stream: str, written: int, rows: int) -> LedgerEntry | None:
    """The batch during which a file of so many rows was written (ms since 1970); None if the ledger does not show it.

    A compaction is between batches.
    """
    at = written / 1000
    for line in (raw.read() for day in ledger.days(stream) for raw in reversed(day)):
        if line.at + _CLOCK < at:
            return None
        begun = None if line.seconds is None else line.at - line.seconds - _CLOCK
        if begun is not None and begun <= at and rows <= sum(line.entry.rows.values()):
            return line.entry
    return None


Codes = frozenset[CodeVersion]
"""Several for a file that mixes their rows, none if the writer is unknown."""


def codes_by_time(
    files: Sequence[tuple[int, int | None]],
    batches: Sequence[tuple[int, LedgerEntry]],
    newest: CodeVersion | None,
    rows_of: Callable[[LedgerEntry], int],
) -> dict[int, Codes]:
    """The codes of files by the times at which they were written; `files` have a time in ms, and rows.

    `batches` have the time (ms) of their lines. Between the lines of two batches the files of the later one were
    written, and those of a compaction before it. If there are as many rows as that batch wrote (`rows_of`), they are
    its own. Otherwise the files are ambiguous where the code changed, and of no known code in the time of the newest
    one, since they may have older rows.
    """
    ordered = sorted(batches, key=lambda each: (each[0], each[1].txn))
    at = [time for time, _ in ordered]
    rows: dict[int, int] = {}
    positions = {time: bisect_left(at, time) for time, _ in files}
    for time, count in files:
        rows[positions[time]] = rows.get(positions[time], 0) + (count or 0)
    codes: dict[int, Codes] = {}
    for time, position in positions.items():
        if not 0 < position < len(ordered):  # before the first known line, an older batch may have written it
            continue
        before, entry = ordered[position - 1][1], ordered[position][1]
        if rows[position] == rows_of(entry):
            codes[time] = frozenset({entry.code})
        elif before.code != entry.code:
            codes[time] = frozenset({before.code, entry.code})
        elif entry.code != newest:
            codes[time] = frozenset({entry.code})
    return codes
