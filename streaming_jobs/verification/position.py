"""The version of a table that belongs to a position of its stream."""

from __future__ import annotations

from pathlib import Path

from streaming_jobs.verification.delta_log import read_commit, versions
from streaming_jobs.verification.lineage import Batch


class VersionGone(Exception):
    """A running stream has cleaned up the version that belongs to the position."""

    def __init__(self) -> None:
        super().__init__("its version at the position that is judged is cleaned up already: verify again")


def version_at(table: Path, position: Batch | None) -> int | None:
    """The newest version of a table that has nothing after a position; None when there is no such table.

    Raises VersionGone when the log holds only newer ones.
    """
    there = versions(table)
    if not there:
        return None
    newest = there[-1]
    for version in reversed(there):
        try:
            entry = read_commit(table, version).entry
        except FileNotFoundError:  # cleaned up since the folder was listed
            if newest <= version:
                raise VersionGone from None
            break
        if entry is None or entry.kind not in ("batch", "publish", "fence"):
            continue
        if position is not None and (entry.generation, entry.batch) <= position:
            break
        newest = version - 1
    if newest < there[0] and there[0] > 0:
        raise VersionGone
    return max(newest, there[0])


def still(table: Path, version: int) -> int | None:
    """The version that was noted before the topics were read; None for -1, which stands for no table.

    Raises VersionGone when the log no longer has it.
    """
    there = versions(table)
    if there and 0 <= version < there[0]:
        raise VersionGone
    return version if version >= 0 else None
