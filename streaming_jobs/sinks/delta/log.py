"""A table's log, read from the newest commit backwards, with its ledger entries. Needs no JVM."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from streaming_jobs.errors import PreflightRefused
from streaming_jobs.ledger.entry import LedgerEntry
from streaming_jobs.platform.delta_log import actions
from streaming_jobs.sinks import stored
from streaming_jobs.sinks.stored import Commit


def walk(table: Path, version: int | None = None) -> Iterator[Commit]:
    """The commits of a table's log up to a version (None: all), newest first, as far back as it has no gap.

    Raises PreflightRefused for a damaged commit.
    """
    log = table / "_delta_log"
    if not log.is_dir():
        return
    numbers = (int(f.stem) for f in log.glob("*.json") if f.stem.isdigit() and len(f.stem) == 20)
    versions = sorted((each for each in numbers if version is None or each <= version), reverse=True)
    for position, number in enumerate(versions):
        if position and versions[position - 1] != number + 1:
            return
        try:
            commit = _commit(number, log / f"{number:020d}.json")
        except FileNotFoundError:  # cleaned up since the folder was listed
            return
        except (ValueError, TypeError, AttributeError, KeyError) as error:
            raise PreflightRefused(
                f"version {number} in {log} cannot be read: {error}", "put the table's log back from a copy"
            ) from error
        yield commit


def newest(table: Path, stream: str, version: int | None = None) -> tuple[Commit | None, list[Commit]]:
    """The stream's newest entry on the table, up to a version, and later commits that change data and are not ours.

    Without an entry in the log, None and every such commit that the log still holds.
    """
    return stored.newest(walk(table, version), stream)


def _commit(version: int, file: Path) -> Commit:
    at, operation, changes, entry = 0, "", False, None
    for line in actions(file):
        (kind, action), *_ = line.items()
        if kind == "commitInfo":
            at = int(action.get("timestamp", 0))
            operation = str(action.get("operation", ""))
            entry = LedgerEntry.decode(action.get("userMetadata"))
        elif kind in ("add", "remove", "cdc"):
            changes = changes or bool(action.get("dataChange", True))
    return Commit(version, at, operation, changes, entry)
