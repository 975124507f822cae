"""Notes of supervisors: `<home>/supervisors/<job>.json` says which streams a job would start, and what it does now.

A supervisor (Dagster's keepalive) renews its note at every look, so that a command can say who will start a stream, or
why none does. A note is a report, not a lock: it is lost in a power cut, and written again.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass

from streaming_jobs.errors import TransientError
from streaming_jobs.settings import Settings
from streaming_jobs.state.records import json_bytes
from streaming_jobs.storage.object_files import LocalFiles, ObjectFiles

FRESH = 60.0
"""Seconds after which a note is that of a supervisor that no longer looks."""


@dataclass(frozen=True)
class Note:
    """A note: the job, its streams, its last verdict in words, and the time `at` (seconds since 1970).

    `starts`: it starts the session, or waits to do so; False if it leaves that to a person.
    """

    job: str
    streams: tuple[str, ...]
    verdict: str
    at: float
    starts: bool = False


def note(settings: Settings, job: str, streams: Sequence[str], verdict: str, *, starts: bool) -> None:
    """Renew the note of a job; on a full disk it is missing, which must not keep its supervisor from working."""
    with suppress(OSError, TransientError):
        value = asdict(Note(job, tuple(streams), verdict, time.time(), starts))
        _files(settings).put(f"{job}.json", json_bytes(value), durable=False)


def notes(settings: Settings, stream: str) -> list[Note]:
    """The fresh notes of jobs with this stream."""
    found, files = [], _files(settings)
    for name in files.names():
        try:
            there = files.read(name)
            value = json.loads(there.data if there is not None else "")
            starts = bool(value.get("starts", False))
            each = Note(str(value["job"]), tuple(value["streams"]), str(value["verdict"]), float(value["at"]), starts)
        except (OSError, ValueError, KeyError, TypeError):  # being replaced, or written by hand
            continue
        if stream in each.streams and abs(time.time() - each.at) <= FRESH:
            found.append(each)
    return found


def newest(settings: Settings, stream: str) -> Note | None:
    """The newest fresh note of a job with this stream."""
    return max(notes(settings, stream), key=lambda each: each.at, default=None)


def _files(settings: Settings) -> ObjectFiles:
    return LocalFiles(settings.home / "supervisors")
