"""Spark's checkpoint on disk, in step with the tables.

Spark writes its files beside and renames them (`CheckpointFileManager`), and syncs nothing. So the pipeline does, where
the order matters:

1. before a table gets batch N: `offsets/N`, or the table would hold a batch of which nobody knows what it read; and
   `commits/N-1`, without which Spark would not go on with N;
2. before the pipeline returns, which lets Spark write `commits/N`: the state files that batch N has made.

`commits/N` itself may be lost: then the batch is repeated, and the tables say that they have it.
"""

from __future__ import annotations

import os
from pathlib import Path

from streaming_jobs.files import sync_each, sync_tree
from streaming_jobs.state.checkpoint import Checkpoint


class CheckpointSync:
    """Has the files of one checkpoint on disk; one for each time that a query runs on it."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._folder = checkpoint.folder
        self._whole = False
        self._known: dict[Path, frozenset[str]] = {}

    def planned(self, batch: int) -> None:
        """Have on disk what Spark goes on from once the tables have this batch."""
        if not self._whole:  # whatever a driver before this one has left in memory only
            sync_tree(self._folder)
            self._whole = True
            return
        offsets, commits = self._folder / "offsets", self._folder / "commits"
        sync_each([offsets / str(batch), commits / str(batch - 1), offsets, commits])

    def state(self) -> None:
        """Have on disk the state files that came since the last call."""
        wanted: list[Path] = []
        for folder, below, names in os.walk(self._folder / "state"):
            here = Path(folder)
            if here.name == "SSTs":  # those of a snapshot are complete when the snapshot's own file is there
                continue
            now = frozenset((*names, *below))
            fresh = now - self._known.get(here, frozenset())
            self._known[here] = now
            if "SSTs" in below and any(name.endswith(".zip") for name in fresh):
                sync_tree(here / "SSTs")
            if fresh:
                wanted += [*(here / name for name in fresh), here]
        sync_each(wanted)
