"""A table's log, read from the newest commit backwards, with its ledger entries. Needs no JVM."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from streaming_jobs.errors import PreflightRefused
from streaming_jobs.ledger.entry import LedgerEntry
from streaming_jobs.platform.delta_log import read_commit, versions_in_log
from streaming_jobs.sinks import stored
from streaming_jobs.sinks.stored import Commit


def walk(table: Path, version: int | None = None) -> Iterator[Commit]:
    """The commits of a table's log up to a version (None: all), newest first, as far back as it has no gap.

    Raises PreflightRefused for a damaged commit.
    """
    versions = [number for number in reversed(versions_in_log(table)) if version is None or number <= version]
    for position, number in enumerate(versions):
        if position and versions[position - 1] != number + 1:
            return
        try:
            read = read_commit(table, number)
            commit = Commit(number, read.at, read.operation, read.changes_data, LedgerEntry.decode(read.user_metadata))
        except FileNotFoundError:  # cleaned up since the folder was listed
            return
        except (ValueError, TypeError, AttributeError, KeyError) as error:
            raise PreflightRefused(
                f"version {number} in {table / '_delta_log'} cannot be read: {error}",
                "put the table's log back from a copy",
            ) from error
        yield commit


def newest(table: Path, stream: str, version: int | None = None) -> tuple[Commit | None, list[Commit]]:
    """The stream's newest entry on the table, up to a version, and later commits that change data and are not ours.

    Without an entry in the log, None and every such commit that the log still holds.
    """
    return stored.newest(walk(table, version), stream)
