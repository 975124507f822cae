"""Files of a partitioned table whose paths are in the log unencoded, as delta-spark writes text that is not ASCII.

deltalake percent-encodes the path when it removes such a file. Every reader takes that for the removal of another file:
the old one stays in the table, with its rows a second time. New files do not get such paths (the property
`delta.randomizeFilePrefixes`); older ones are renamed here, before deltalake removes them.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from streaming_jobs.errors import CommitRefused
from streaming_jobs.ledger.entry import LedgerEntry
from streaming_jobs.platform.files import link_as_new, sync
from streaming_jobs.sinks.delta.table_files import TableFile, on_disk, table_files

if TYPE_CHECKING:
    from streaming_jobs.sinks.delta.sink import DeltaSink

FOLDER = "renamed"


def rename(sink: DeltaSink, generation: int) -> int:
    """Give the live files with such paths a second name (a hard link), and list them under it; returns their number.

    One commit that changes no rows. It is written here because deltalake cannot express the removal of such a path.
    Raises CommitRefused, with nothing changed, if another writer's commit comes first.
    """
    paths = sink.handle.get_add_actions()["path"].to_pylist()
    if all(path.isascii() for path in paths):  # deltalake shows some of the encoded ones decoded
        return 0
    version = sink.handle.version()
    raw = [file for path, file in table_files(sink.path, version).items() if not path.isascii()]
    if not raw:
        return 0
    note = f"renamed {len(raw)} files whose paths were not encoded"
    entry = LedgerEntry("upkeep", sink.stream, sink.name, generation, -1, note=note)
    now = int(time.time() * 1000)
    info = {"timestamp": now, "operation": "RENAME FILES", "operationParameters": {}, "userMetadata": entry.encode()}
    actions: list[Mapping[str, Any]] = [{"commitInfo": info}]
    for file in raw:
        name = f"{FOLDER}/{hashlib.sha256(file.path.encode()).hexdigest()[:32]}.parquet"
        link_as_new(on_disk(sink.path, file.path), sink.path / name)
        actions += _actions(file, name, now)
    _commit(sink.path / "_delta_log", version + 1, actions)
    sink.refresh()
    sink.sync()
    return len(raw)


def _actions(file: TableFile, name: str, now: int) -> Iterable[Mapping[str, Any]]:
    same = {"partitionValues": dict(file.partition), "size": file.size, "dataChange": False}
    yield {"remove": {"path": file.path, "deletionTimestamp": now, "extendedFileMetadata": True, **same}}
    stats = {} if file.stats is None else {"stats": file.stats}
    yield {"add": {"path": name, "modificationTime": file.modified, **same, **stats}}


def _commit(log: Path, version: int, actions: Iterable[Mapping[str, Any]]) -> None:
    """Write a commit, whole or not at all; raises CommitRefused if another writer has made that version."""
    written = log / f"_commit_{uuid4().hex}.json.tmp"
    try:
        written.write_text("".join(json.dumps(action) + "\n" for action in actions), encoding="utf-8")
        sync(written)
        os.link(written, log / f"{version:020d}.json")
    except FileExistsError as error:
        raise CommitRefused(
            f"version {version} of the table of {log} was written by somebody else meanwhile"
        ) from error
    finally:
        written.unlink(missing_ok=True)
