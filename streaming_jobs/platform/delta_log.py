"""The actions of a commit file of a Delta log, read in one way by everything here that reads logs.

Delta's protocol, section "Delta Log Entries": one JSON object per line. The lines end at a line feed. `str.splitlines`
would also split at U+2028, U+2029, U+0085 and others, which writers do not escape in statistics and partition values.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any


def actions(commit: Path, containing: str = "") -> Iterator[dict[str, Any]]:
    """The actions of one commit file, in order.

    With `containing`, lines without that text are skipped unparsed. Raises FileNotFoundError, and ValueError for
    a file that is not UTF-8 or a line that is not JSON.
    """
    wanted = containing.encode()
    for line in commit.read_bytes().split(b"\n"):
        if line.strip() and wanted in line:
            yield json.loads(line)
