"""Reads every version of a table as it appears, and checks that it consists of whole batches.

This is an ordinary reader: it opens each version by number through deltalake while the streams write the next ones
and are killed. It compares the rows with the ledger entries of the commits up to that version.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pyarrow as pa
from deltalake.exceptions import DeltaError

from streaming_jobs.verification.delta_log import Commit, Entry, commit_file, read_commit, versions
from streaming_jobs.verification.ledger_chain import Chain, Fault
from streaming_jobs.verification.offset_ranges import Span
from streaming_jobs.verification.rows import VersionRows, all_places
from streaming_jobs.verification.subject import Subject
from streaming_jobs.verification.table_rules import Covered, Rule, of_spans

_LOOK_EVERY = 0.1


@dataclass
class TableReader:
    """Reads one table, version after version.

    `unseen` counts versions that the log clean-up took before they could be read; `unjudged` those before the first
    entry of a log that does not go back to the table's beginning.
    """

    subject: Subject
    tables: Path
    next: int = 0
    seen: int = 0
    unseen: int = 0
    unjudged: int = 0
    faults: list[Fault] = field(default_factory=list)
    chain: Chain = field(init=False)
    _rows: VersionRows = field(init=False)
    _before: pa.Table | None = None

    def __post_init__(self) -> None:
        self.chain = Chain(self.subject.stream, self.subject.table)
        self._rows = VersionRows(self.path, self._rule.columns)

    @property
    def path(self) -> Path:
        return self.tables / self.subject.table

    @property
    def _rule(self) -> Rule:
        assert self.subject.rule is not None, "the kill loop knows its streams"
        return self.subject.rule

    def advance(self, stop: threading.Event | None = None) -> bool:
        """Read every version that is there and was not read yet; returns True if there was one."""
        begun = self.next
        while not (stop is not None and stop.is_set()) and self._skip_to_next():
            self._read(self.next)
            self.next += 1
        return self.next > begun

    def _skip_to_next(self) -> bool:
        if commit_file(self.path, self.next).exists():
            return True
        later = [version for version in versions(self.path) if version > self.next]
        if not later:
            return False
        if commit_file(self.path, self.next).exists():  # it was committed since
            return True
        self.unseen += later[0] - self.next
        self.next = later[0]
        self._before = None
        return True

    def _read(self, version: int) -> None:
        table = self.subject.table
        try:
            commit = read_commit(self.path, version)
            self._begin(commit)
            self.faults += self.chain.take(commit)
            if self.unseen and self.chain.first is None:
                self.unjudged += 1
                return
            rows = self._rows.at(version)
        except FileNotFoundError as error:
            if not commit_file(self.path, version).exists():  # cleaned up before it was read
                self.unseen += 1
            else:
                self.faults.append(Fault(table, version, "unreadable", f"{error.filename} is missing"))
            return
        except (DeltaError, OSError, ValueError, pa.ArrowException) as error:
            self.faults.append(Fault(table, version, "unreadable", f"cannot be read: {str(error)[:300]}"))
            return
        self.seen += 1
        for finding in self._rule.findings(rows, self._covered()):
            of = f" (after {commit.entry})" if commit.entry else ""
            self.faults.append(Fault(table, version, "rows", f"{finding.text}{of}"))
        self._before = rows

    def _begin(self, commit: Commit) -> None:
        """Without the log's beginning, count the offsets before the first entry as covered once."""
        entry = commit.entry
        if self.unseen and self.chain.first is None and entry is not None and entry.kind == "batch":
            self.chain.spans += assumed(entry)

    def _covered(self) -> Covered:
        """Covered records without those in other tables, which are read after this version: they may be newer."""
        places = np.setdiff1d(of_spans(self.chain.spans), all_places(self.tables, self.subject.elsewhere))
        written = None if self.unseen else self.chain.written
        return Covered(self.subject.topic, places, written, before=self._before, dropped=self.chain.dropped)


def assumed(first: Entry, *, ended: bool = False) -> list[Span]:
    """The offsets that lie before the first entry of a cut log; with `ended`, those of the entry too."""
    return [
        Span(r.topic, partition, 0, offset)
        for r in first.ranges
        for partition, offset in (r.end if ended else r.start).items()
    ]


class ConcurrentReader:
    """A thread that keeps reading all tables until it is stopped; `finish` raises an error that occurred in it."""

    def __init__(self, subjects: Sequence[Subject], tables: Path) -> None:
        self.readers = [TableReader(subject, tables) for subject in subjects]
        self._ended = threading.Event()
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._run, name="version-reader", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def finish(self) -> None:
        """Stop the thread, then read the remaining versions in the caller's thread, so that none is left out."""
        self.stop()
        if self._error is not None:
            raise self._error
        for reader in self.readers:
            reader.advance()

    def stop(self) -> None:
        """End the thread between two versions."""
        self._ended.set()
        if self._thread.is_alive():
            self._thread.join()

    @property
    def seen(self) -> int:
        """Versions read of all tables."""
        return sum(reader.seen for reader in self.readers)

    @property
    def unseen(self) -> int:
        """Versions that clean-up took before they were read."""
        return sum(reader.unseen for reader in self.readers)

    @property
    def faults(self) -> list[Fault]:
        return [fault for reader in self.readers for fault in reader.faults]

    def _run(self) -> None:
        try:
            while not self._ended.is_set():
                advanced = [reader.advance(self._ended) for reader in self.readers]
                if not any(advanced):
                    self._ended.wait(_LOOK_EVERY)
        except Exception as error:  # noqa: BLE001 - raised by `finish` in the caller's thread
            self._error = error
