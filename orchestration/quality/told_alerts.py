"""The alerts and notifications of jobs that were told, in the file `<state>/alerts.jsonl`, for the table of events.

The sensors note them before they send them, so an alert is here whether or not its receivers have taken it.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass

import structlog

from orchestration.quality.transitions import Transition
from streaming_jobs.errors import RecourseError
from streaming_jobs.platform import json_lines
from streaming_jobs.settings import Settings
from streaming_jobs.state.stream_folder import state_files
from streaming_jobs.state.stream_history import LIMIT
from streaming_jobs.storage.object_files import ObjectHandle


@dataclass(frozen=True)
class ToldAlert:
    """An alert that was told at `at` (seconds since 1970), which may be long after the outcome of its check."""

    id: str
    at: float
    stream: str
    table: str
    check: str
    state: str
    text: str


def note_alerts(settings: Settings, told: Sequence[Transition]) -> None:
    """Note each alert once, by its `id`: a tick that was killed tells of it again. A failure is only logged."""
    if not told:
        return
    now = time.time()
    try:
        known = {one.id for one in told_alerts(settings)}
        new = [
            # A millisecond apart: two runs of a job that have failed are two events.
            ToldAlert(
                id=one.id,
                at=round(now + number / 1000, 3),
                stream=one.stream,
                table=one.table,
                check=one.check,
                state=one.state,
                text=f"{one.headline}: {one.text}",
            )
            for number, one in enumerate(told)
            if one.id not in known
        ]
        if new:
            json_lines.add(_file(settings), *map(asdict, new), limit=LIMIT)
    except (OSError, RecourseError) as error:
        structlog.get_logger().warning("an alert could not be noted", reason=str(error))


def told_alerts(settings: Settings) -> list[ToldAlert]:
    """The alerts in the file, oldest first; several hundred stay in it."""
    found = []
    for line in json_lines.read(_file(settings)):
        with suppress(KeyError, TypeError, ValueError):  # written by another version, or by hand
            found.append(ToldAlert(**{**line, "at": float(line["at"])}))
    return found


def _file(settings: Settings) -> ObjectHandle:
    return ObjectHandle(state_files(settings), "alerts.jsonl")
