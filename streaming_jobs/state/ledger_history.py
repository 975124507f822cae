"""A table's ledger as far back as it is known: the table's log, then the ledger file beside the state.

A table's log is retained for an hour or 500 versions, the file for days. The file has the batches of the primary table
only; fences and publishes, which are few, are in the log alone.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from itertools import islice

from streaming_jobs.ledger import LedgerEntry, Txn
from streaming_jobs.sinks.stored import Commit, entries
from streaming_jobs.state.ledger_file import LedgerFile, RawLine

FROM_FILE = "LEDGER FILE"
"""The operation of a commit that was read from the file beside the state."""

_CODE = re.compile(rb'"code":(\[[^\]]*\])')
_ALL = 1 << 60

Entry = tuple[Commit, LedgerEntry]


def newest_entries(commits: Iterable[Commit], table: str, file: LedgerFile, stream: str, limit: int) -> list[Entry]:
    """The newest entries of the stream's primary table, newest first; `commits` are those of its log."""
    in_log = entries(commits, limit)
    return [*in_log, *(_entry(line, table) for line in islice(_older(in_log, file, stream), limit - len(in_log)))]


def code_changes(commits: Iterable[Commit], table: str, file: LedgerFile, stream: str) -> list[Entry]:
    """The first batch of each version of the code, newest first, back to the oldest batch that is known."""
    log = [entry for entry in entries(commits, _ALL) if entry[1].kind == "batch"]
    firsts: list[Entry] = []
    for entry in log:
        _put(firsts, entry)
    last: tuple[bytes, RawLine] | None = None
    for line in _older(log, file, stream):
        code = match[1] if (match := _CODE.search(line.text)) else b""
        if last is not None and last[0] != code:
            _put(firsts, _entry(last[1], table))
        last = (code, line)
    if last is not None:
        _put(firsts, _entry(last[1], table))
    return firsts


def _put(firsts: list[Entry], entry: Entry) -> None:
    if firsts and firsts[-1][1].code == entry[1].code:
        firsts[-1] = entry
    else:
        firsts.append(entry)


def _older(newer: list[Entry], file: LedgerFile, stream: str) -> Iterator[RawLine]:
    """Yields the file's lines before the `newer` entries, newest first; of a batch written twice the newer line."""
    reached = min((entry.txn for _, entry in newer), default=Txn(1 << 31, 0))
    for day in file.days(stream):
        for line in reversed(day):
            if line.txn < reached:
                reached = line.txn
                yield line


def _entry(line: RawLine, table: str) -> Entry:
    read = line.read()
    return Commit(read.versions.get(table, -1), int(read.at * 1000), FROM_FILE, True, read.entry), read.entry
