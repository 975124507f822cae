"""The actions of a commit file of a Delta log, read in one way by everything here that reads logs.

Delta's protocol, section "Delta Log Entries": one JSON object per line. The lines end at a line feed. `str.splitlines`
would also split at U+2028, U+2029, U+0085 and others, which writers do not escape in statistics and partition values.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

UNREAD = "_unread"
"""The folder below a table with commits that have left its log, and that streams have not read (`unread_log.py`)."""


def commit_actions(table: Path, number: int) -> list[dict[str, Any]]:
    """The actions of a version, also of one that is kept for readers only. Raises as `actions` does.

    A commit may be moved at any moment, so the log comes first.
    """
    name = f"_delta_log/{number:020d}.json"
    try:
        return list(actions(table / name))
    except FileNotFoundError:
        return list(actions(table / UNREAD / name))


def actions(commit: Path, containing: str = "") -> Iterator[dict[str, Any]]:
    """The actions of one commit file, in order.

    With `containing`, lines without that text are skipped unparsed. Raises FileNotFoundError, and ValueError for
    a file that is not UTF-8 or a line that is not JSON.
    """
    wanted = containing.encode()
    for line in commit.read_bytes().split(b"\n"):
        if line.strip() and wanted in line:
            yield json.loads(line)
