"""The end of a table's log as a power cut leaves it: truncated commits, and what relies on them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from streaming_jobs.ledger.entry import Txn


@dataclass(frozen=True)
class ReliedOn:
    """The facts that others rely on about a table whose last commits may be truncated.

    `at`: the position that the table had reached, as others recorded it. `accepted`: versions that a person accepted.
    `bound`: the stream's record names the table. `generation`: the one the stream is in. `recovering`: the caller is
    the recovery that was writing it.
    """

    at: Txn
    accepted: frozenset[int]
    bound: bool
    generation: int
    recovering: bool


@dataclass(frozen=True)
class TruncatedEnd:
    """The end of a table's log after a power cut: files to remove, in order, and the newest whole version.

    `whole` is -1 if no version is.
    """

    files: Sequence[Path]
    whole: int
