"""Slices of a stream's tables that were rebuilt, as their files beside the state say: their rows came by no batch.

A rebuilt slice holds what the function makes of its records, so a truth of the user's own still holds for every row.
What the batches' entries say of the table changes: its number of rows, by that of each slice before and after.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class RebuiltSlice:
    """One slice: the numbers of its rows before and after, and the code that made them.

    `version` is that of the table with it; `waits`: not committed yet.
    """

    table: str
    generation: int
    code: str
    before: int
    after: int
    waits: bool = False
    version: int | None = None

    def is_in(self, version: int) -> bool:
        """False if it came after this version of the table."""
        return self.version is None or self.version <= version


def rebuilt_slices(folder: Path) -> Iterator[RebuiltSlice]:
    """Yields the slices that were committed, and those that wait; raises ValueError for a file that cannot be read."""
    for path in sorted([*folder.glob("*.json"), *folder.glob("waiting/*.json")]):
        try:
            value = json.loads(path.read_text(encoding="utf-8"))
            entry = json.loads(value["entry"])
            if value["state"] in ("committed", "waiting"):
                yield RebuiltSlice(
                    str(value["table"]),
                    int(entry["generation"]),
                    str(entry["code"]["hash"]),
                    int(entry["rows"]["before"]),
                    int(entry["rows"]["after"]),
                    value["state"] == "waiting",
                    value.get("version"),
                )
        except FileNotFoundError:  # it was committed since the folder was listed
            continue
        except (KeyError, TypeError) as error:
            raise ValueError(f"{path} has no {error}") from error


def uncounted(slices: Sequence[RebuiltSlice], generation: int | None) -> str:
    """The reason why the rows of a table with these slices cannot be counted; empty if they can be."""
    if any(one.waits for one in slices):
        return "a slice of it waits for its commit"
    if any(one.generation != generation for one in slices):
        return "slices of it were rebuilt before a recovery"
    return ""


def by_other_code(slices: Sequence[RebuiltSlice], codes: set[str]) -> bool:
    """True if the rows of a slice may be other rows than the batches' code made."""
    return bool(slices) and codes != {one.code for one in slices}
