"""The deploys of a stream: `<state>/<stream>/deploys.jsonl`, one JSON object per line, the oldest first.

    {"at": 1795440000.0, "from": "0a1b2c3d4e5f", "to": "5f4e3d2c1b0a", "by": "anna"}

`at` in seconds since 1970, `from` and `to` the hashes of the code. A line is written before the start that it is about,
so that none is missing; a deploy that is repeated after a kill writes no second one.
"""

from __future__ import annotations

import json
import os
import time
from dataclasses import dataclass
from typing import Any

from streaming_jobs.platform.files import sync
from streaming_jobs.settings import Settings
from streaming_jobs.state.stream_folder import StreamFolder


@dataclass(frozen=True)
class Deploy:
    """One line of the file."""

    at: float
    before: str
    after: str
    by: str


def record(settings: Settings, stream: str, before: str, after: str, by: str) -> None:
    """Append a deploy, on disk when this returns; the same one once more changes nothing."""
    last = deploys(settings, stream)[-1:]
    if last and (last[0].before, last[0].after) == (before, after):
        return
    path = StreamFolder.of(settings, stream).make().deploys
    line = json.dumps({"at": round(time.time(), 3), "from": before, "to": after, "by": by})
    new = not path.exists()
    torn = not new and not path.read_bytes().endswith(b"\n")  # by a kill in the middle of a line
    descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        os.write(descriptor, f"{chr(10) if torn else ''}{line}\n".encode())
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    if new:
        sync(path.parent)


def deploys(settings: Settings, stream: str) -> list[Deploy]:
    """All deploys of a stream, oldest first; a torn line is left out."""
    try:
        lines = StreamFolder.of(settings, stream).deploys.read_text(encoding="utf-8").splitlines()
    except FileNotFoundError:
        return []
    return [deploy for line in lines if (deploy := _parsed(line)) is not None]


def _parsed(line: str) -> Deploy | None:
    try:
        value: dict[str, Any] = json.loads(line)
        return Deploy(float(value["at"]), str(value["from"]), str(value["to"]), str(value["by"]))
    except (ValueError, KeyError, TypeError):
        return None
