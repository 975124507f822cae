"""The files of a table on a store that savepoints keep, by their names: maintenance does not delete them.

    <tables>/<table>/_savepoints/<stream>-g0001-b000000041.json.gz

A data file never changes and its name is never used again, so a savepoint is a list of names. Nothing locks the table
meanwhile: maintenance chooses files that no version has listed for an hour or more, and then reads these lists, so it
sees each list that was written while one of its files was still in a version.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Sequence

from streaming_jobs.errors import PreflightRefused
from streaming_jobs.sinks.delta.table_files import TableFile, on_disk
from streaming_jobs.sinks.stored import SavedAs
from streaming_jobs.storage.locations import StorePath, files_below, path_below

_FOLDER, _ENDING = "_savepoints", ".json.gz"


def write(table: StorePath, saved: SavedAs, files: Sequence[TableFile]) -> None:
    """Keep these files; raises PreflightRefused if one of them is gone: the version was too old."""
    paths = [path_below(on_disk(table, file.path), table) for file in files]
    data = gzip.compress(json.dumps(paths).encode())
    (table / _FOLDER / f"{saved.stream}-{saved.name}{_ENDING}").write_bytes(data)
    there = {name for name, _ in files_below(table)}
    if gone := [path for path in paths if "://" not in path and path not in there]:
        raise PreflightRefused(
            f"{len(gone)} files of table {table.name} are gone, such as {gone[0]}",
            "take a savepoint of a newer version",
        )


def names(table: StorePath) -> frozenset[str]:
    """The files that savepoints keep, by their paths below the table."""
    kept: set[str] = set()
    for name, _ in files_below(table / _FOLDER):
        if name.endswith(_ENDING):
            try:
                kept.update(json.loads(gzip.decompress((table / _FOLDER / name).read_bytes())))
            except FileNotFoundError:  # released since it was listed
                continue
    return frozenset(kept)


def release(tables: StorePath, saved: SavedAs) -> None:
    """Keep the files of a savepoint no longer, in any table."""
    for table in tables.iterdir():
        (table / _FOLDER / f"{saved.stream}-{saved.name}{_ENDING}").unlink(missing_ok=True)
