"""A checkpoint cut: a checkpoint that ends after batch K, made from a later one of the same query.

To continue from K, Spark needs the log entries of K and just before it, the first offsets of the sources, and the state
files that lead to state version K+1 (version = batch + 1). Log entries are copied; state files, which Spark never
changes once they are written, are hard links. The cut has a new query id.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import uuid
import zipfile
from collections.abc import Iterator
from pathlib import Path

from streaming_jobs.errors import UsageError
from streaming_jobs.files import hard_link, sync, sync_tree
from streaming_jobs.positions import TopicOffsets
from streaming_jobs.state.checkpoint import Checkpoint

_VERSIONED = re.compile(r"(\d+)(?:_[^.]+)?\.(changelog|zip|delta|snapshot)(?:\.crc)?")
_FULL = ("zip", "snapshot")
_BEFORE = 2
"""Number of entries before the one of the batch: Spark needs one; preflight also checks the start of the one before."""


def cuttable(checkpoint: Checkpoint) -> range:
    """The batches after which a cut can be made: their log entries and those just before still exist."""
    committed = _entries(checkpoint.folder / "commits")
    planned = _entries(checkpoint.folder / "offsets")
    last = max(committed & planned, default=-1)
    first = last
    while first - 1 in committed and first - 1 in planned:
        first -= 1
    return range(first if first == 0 else first + _BEFORE, last + 1)


def cut(checkpoint: Checkpoint, batch: int, target: Path) -> None:
    """Make `target` a checkpoint that ends after `batch`; an existing cut is left as it is.

    Raises UsageError when Spark's log no longer holds what the cut needs. A kill leaves a folder `target`.partial.
    """
    if target.exists():
        return
    possible = cuttable(checkpoint)
    if batch not in possible:
        choice = f"batches {possible[0]} to {possible[-1]}" if possible else "no batch"
        raise UsageError(
            f"the checkpoint {checkpoint.folder.name} can be cut after {choice}, not after batch {batch}",
            "choose one of them, or a savepoint (`recourse savepoints list`)",
        )
    partial = target.with_name(f"{target.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    for log in ("offsets", "commits"):
        (partial / log).mkdir(parents=True, mode=0o700)
        for number in range(batch - _BEFORE, batch + 1):
            if number >= 0:
                shutil.copy2(checkpoint.folder / log / str(number), partial / log / str(number))
    shutil.copytree(checkpoint.folder / "sources", partial / "sources")
    (partial / "metadata").write_text(json.dumps({"id": str(uuid.uuid4())}), encoding="utf-8")
    state = checkpoint.folder / "state"
    for file in needed_state(state, batch + 1):
        hard_link(file, partial / "state" / file.relative_to(state))
    _placed(partial, target)


def copy(source: Path, target: Path, *, ends: TopicOffsets | None = None) -> None:
    """A second checkpoint like the cut `source`, for a query to run on; state files are hard links.

    With `ends`, its last batch ends there: the query skips the records in between.
    """
    partial = target.with_name(f"{target.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    for file in (f for f in source.rglob("*") if f.is_file()):
        to = partial / file.relative_to(source)
        if file.is_relative_to(source / "state"):
            hard_link(file, to)
        else:
            to.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            shutil.copy2(file, to)
    made = Checkpoint(partial)
    if ends is not None and (last := made.last_planned) is not None:
        (partial / "offsets" / str(last)).write_text(made.entry_ending_at(last, ends), encoding="utf-8")
    _placed(partial, target)


def _placed(folder: Path, target: Path) -> None:
    """Sync the folder, then give it its name; Spark has synced none of the linked files."""
    sync_tree(folder)
    folder.replace(target)
    sync(target.parent)


def needed_state(state: Path, version: int) -> Iterator[Path]:
    """The state files that lead to a version, of every operator, partition and store below `state`.

    From the version downwards: its changes, then those before it, down to the second full snapshot. The first snapshot
    is not enough, because an attempt that died may have left it. Then the RocksDB files that these snapshots name.
    """
    for folder, names, files in os.walk(state):
        here = Path(folder)
        if here.name == "SSTs":
            names.clear()
            continue
        versioned = [(int(match[1]), match[2], here / name) for name in files if (match := _VERSIONED.fullmatch(name))]
        fulls = sorted({number for number, kind, _ in versioned if kind in _FULL and number <= version}, reverse=True)
        oldest = fulls[1] if len(fulls) > 1 else 0
        chosen = [path for number, _, path in versioned if oldest <= number <= version]
        yield from chosen
        yield from (here / name for name in files if not _VERSIONED.fullmatch(name) and not name.startswith("."))
        for name in sorted({name for path in chosen if path.suffix == ".zip" for name in _tables_of(path)}):
            yield from (path for path in (here / "SSTs" / name, here / "SSTs" / f"{name}.crc") if path.exists())


def _tables_of(snapshot: Path) -> Iterator[str]:
    """Yields the names of a snapshot's RocksDB files, which are in `SSTs` beside it (Spark's RocksDBFileManager)."""
    with zipfile.ZipFile(snapshot) as packed:
        _, _, text = packed.read("metadata").decode().partition("\n")
    for file in json.loads(text)["sstFiles"]:
        yield file["dfsSstFileName"]


def _entries(log: Path) -> set[int]:
    return {int(file.name) for file in log.iterdir() if file.name.isdigit()} if log.is_dir() else set()
