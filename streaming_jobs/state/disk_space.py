"""The free space of the disks of home and tables, judged before they are full: a full one stops everything at once."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from streaming_jobs.settings import Settings

_RED = 4
"""Red is a fourth of the bound for yellow."""


@dataclass(frozen=True)
class Space:
    """The least free space of these disks, and what it means."""

    colour: Literal["green", "yellow", "red"]
    text: str


def disk_space(settings: Settings) -> Space:
    """The disk with the least free space, of home, state and tables; the bound is `quality.free_disk_mb`."""
    bound = settings.quality.free_disk_mb
    folders = (settings.home, settings.state, settings.tables)
    free, folder = min((shutil.disk_usage(_existing(each)).free // 2**20, str(each)) for each in folders)
    text = f"{free:,} MB are free on the disk of {folder}; yellow below {bound:,}, red below {bound // _RED:,}"
    return Space("green" if free >= bound else "yellow" if free >= bound // _RED else "red", text)


def _existing(folder: Path) -> Path:
    """The folder, or the nearest one above it that exists."""
    return next(each for each in (folder, *folder.parents) if each.exists())
