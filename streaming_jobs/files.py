"""Writing small files so that a kill at any moment leaves the old content or the new one, never a part."""

from __future__ import annotations

import json
import os
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any


def write_atomic(path: Path, text: str, *, durable: bool = True) -> None:
    """Replace `path` by `text` (mode 0600); with `durable`, it is on disk when this returns."""
    descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(text)
            if durable:
                file.flush()
                os.fsync(file.fileno())
        Path(temporary).replace(path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
    if durable:
        sync(path.parent)


def write_json(path: Path, value: Any, *, durable: bool = True) -> None:
    """`write_atomic` for a JSON value."""
    write_atomic(path, json.dumps(value, indent=1, sort_keys=False), durable=durable)


def hard_link(source: Path, target: Path) -> None:
    """A second name for a file, below folders that are made; one that an attempt that was killed has made stays."""
    target.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    with suppress(FileExistsError):
        os.link(source, target)


def private_folder(path: Path) -> Path:
    """Make the folder, readable by its owner alone, and return it."""
    path.mkdir(parents=True, exist_ok=True, mode=0o700)
    return path


def sync(path: Path) -> None:
    """Have a file, or a folder's list of names, on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
