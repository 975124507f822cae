"""The sync of Spark's checkpoint to disk, in step with the tables.

Spark writes its files under another name and renames them (`CheckpointFileManager`), but does not sync them. So the
pipeline syncs them where the order matters:

1. before a table gets batch N: `offsets/N`, or the offsets of a batch in the table would be unknown; and
   `commits/N-1`, without which Spark would not continue with N;
2. before the pipeline returns, which lets Spark write `commits/N`: the state files that batch N has written.

`commits/N` itself may be lost: then the batch is repeated, and the tables show that they have it.
"""

from __future__ import annotations

import os
from pathlib import Path

from streaming_jobs.files import sync_each, sync_tree
from streaming_jobs.state.checkpoint import Checkpoint


class CheckpointSync:
    """Syncs the files of one checkpoint; made anew each time that a query starts on it."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._folder = checkpoint.folder
        self._whole = False
        self._known: dict[Path, frozenset[str]] = {}

    def planned(self, batch: int) -> None:
        """Sync the entries from which Spark continues once the tables have this batch."""
        if not self._whole:  # an earlier driver may have left files that are not synced
            sync_tree(self._folder)
            self._whole = True
            return
        offsets, commits = self._folder / "offsets", self._folder / "commits"
        sync_each([offsets / str(batch), commits / str(batch - 1), offsets, commits])

    def state(self) -> None:
        """Sync the state files that are new since the last call."""
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
