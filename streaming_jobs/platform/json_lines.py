"""Append-only files of JSON objects, one per line: a kill costs at most the line that was being written."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from streaming_jobs.platform.files import sync


def append(path: Path, values: Iterable[Mapping[str, Any]], *, durable: bool = True) -> None:
    """Append a line for each value; with `durable`, the lines are on disk when this returns.

    If a kill has cut off the last line, the first new one still begins a line of its own.
    """
    text = "".join(json.dumps(value, separators=(",", ":")) + "\n" for value in values)
    with open(path, "ab+", opener=partial(os.open, mode=0o600)) as file:
        new = file.tell() == 0
        if not new:
            file.seek(-1, os.SEEK_END)
            text = text if file.read(1) == b"\n" else f"\n{text}"
        file.write(text.encode())
        if durable:
            file.flush()
            os.fsync(file.fileno())
    if durable and new:
        sync(path.parent)


def read(path: Path) -> list[dict[str, Any]]:
    """The objects in the file, oldest first, without lines that a kill has truncated; none without a file."""
    try:
        texts = path.read_text(encoding="utf-8", errors="replace").split("\n")
    except FileNotFoundError:
        return []
    values = []
    for text in texts:
        try:
            value = json.loads(text)
        except ValueError:
            continue
        if isinstance(value, dict):
            values.append(value)
    return values
