"""A table's ledger as far back as it is known: its own log, then the ledger file beside the state.

A table's log is kept for an hour or 500 versions, the file for days. The file has the batches of the primary table
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
    found = entries(commits, limit)
    return [*found, *(_entry(line, table) for line in islice(_older(found, file, stream), limit - len(found)))]


def code_changes(commits: Iterable[Commit], table: str, file: LedgerFile, stream: str) -> list[Entry]:
    """The first batch that each version of the code wrote, newest first; back to the oldest batch that is known."""
    log = [found for found in entries(commits, _ALL) if found[1].kind == "batch"]
    firsts: list[Entry] = []
    for found in log:
        if firsts and firsts[-1][1].code == found[1].code:
            firsts[-1] = found
        else:
            firsts.append(found)
    last: tuple[bytes, RawLine] | None = None
    for line in _older(log, file, stream):
        code = match[1] if (match := _CODE.search(line.text)) else b""
        if last is not None and last[0] != code:
            _put(firsts, _entry(last[1], table))
        last = (code, line)
    if last is not None:
        _put(firsts, _entry(last[1], table))
    return firsts


def _put(firsts: list[Entry], found: Entry) -> None:
    if firsts and firsts[-1][1].code == found[1].code:
        firsts[-1] = found
    else:
        firsts.append(found)


def _older(found: list[Entry], file: LedgerFile, stream: str) -> Iterator[RawLine]:
    """The file's lines of batches before those found, newest first; of a batch written twice the newer one."""
    reached = min((entry.txn for _, entry in found), default=Txn(1 << 31, 0))
    for day in file.days(stream):
        for line in reversed(day):
            if line.txn < reached:
                reached = line.txn
                yield line


def _entry(line: RawLine, table: str) -> Entry:
    read = line.read()
    return Commit(read.versions.get(table, -1), int(read.at * 1000), FROM_FILE, True, read.entry), read.entry
