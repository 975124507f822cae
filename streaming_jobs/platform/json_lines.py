"""Lists of JSON objects, one per line, that grow at the end.

In a file that is appended to (`append`), a kill costs at most the line that was being written. An object (`add`) is
replaced as a whole, under the tag of its last content: it holds few lines, and loses none.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from streaming_jobs.errors import TransientError
from streaming_jobs.storage.files import sync
from streaming_jobs.storage.object_files import AlreadyThere, Changed, ObjectHandle

ATTEMPTS = 20
"""How often a line is added anew because another writer has added one in between."""


def append(path: Path, values: Iterable[Mapping[str, Any]], *, durable: bool = True) -> None:
    """Append a line for each value; with `durable`, the lines are on disk when this returns.

    If a kill has cut off the last line, the first new one still begins a line of its own.
    """
    text = encoded(values)
    with open(path, "ab+", opener=partial(os.open, mode=0o600)) as file:
        new = file.tell() == 0
        if not new:
            file.seek(-1, os.SEEK_END)
            text = text if file.read(1) == b"\n" else b"\n" + text
        file.write(text)
        if durable:
            file.flush()
            os.fsync(file.fileno())
    if durable and new:
        sync(path.parent)


def add(handle: ObjectHandle, *values: Mapping[str, Any], limit: int | None = None, attempts: int = ATTEMPTS) -> None:
    """Add lines to an object; they are durable when this returns.

    Beyond `limit` bytes, the older half of the lines is left out. Raises TransientError if other writers have added
    lines during all attempts.
    """
    for _ in range(attempts):
        found = handle.read()
        data = found.data if found is not None else b""
        data += (b"\n" if data and not data.endswith(b"\n") else b"") + encoded(values)
        if limit is not None and len(data) > limit:
            lines = data.splitlines(keepends=True)
            data = b"".join(lines[len(lines) // 2 :])
        with suppress(AlreadyThere, Changed):
            if found is None:
                handle.create(data)
            else:
                handle.replace(data, found.tag)
            return
    raise TransientError(f"{handle} is being written by another process", "try again")


def read(handle: ObjectHandle) -> list[dict[str, Any]]:
    """The values in an object, oldest first, without lines that a kill has truncated; none without an object."""
    found = handle.read()
    values = []
    for text in found.data.decode(errors="replace").split("\n") if found is not None else ():
        try:
            value = json.loads(text)
        except ValueError:
            continue
        if isinstance(value, dict):
            values.append(value)
    return values


def encoded(values: Iterable[Mapping[str, Any]]) -> bytes:
    return "".join(json.dumps(value, separators=(",", ":")) + "\n" for value in values).encode()
