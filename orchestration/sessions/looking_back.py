"""What a report of a session adds to its status: unread records, and what has happened to the stream lately."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import TYPE_CHECKING

import dagster as dg
import structlog

from reprocessing.planning.instants import instant_words
from reprocessing.timeline.marks import Mark, events_of
from streaming_jobs.settings import Settings
from streaming_jobs.state.status import read_status
from streaming_jobs.stream import Stream

if TYPE_CHECKING:
    from streaming_jobs.runtime.lag import Unread

log = structlog.get_logger()

_LINES = 8
_CHARACTERS = 160


def unread(settings: Settings, stream: Stream) -> Unread | None:
    """What a stream has not read; None if no broker answers, which its driver then shows by the age of the lag."""
    from streaming_jobs.runtime.lag import unread_now  # it loads the Kafka client

    status = read_status(settings, stream.name)
    answered = status is not None and status.lag_at is not None and time.time() - status.lag_at < 30.0
    return unread_now(settings, [stream]).get(stream.name) if answered else None


def recent(settings: Settings, stream: Stream) -> Mapping[str, dg.MetadataValue]:
    """The last deploys, starts and recoveries of a stream as a small table, and the command for more."""
    try:
        events = events_of(settings, stream.name)
    except (OSError, ValueError, KeyError, TypeError) as error:  # figures are reported without it
        log.info("the timeline of a stream cannot be read", stream=stream.name, reason=repr(error))
        return {}
    lines = ["| time | |", "|---|---|", *map(_line, reversed(events[-_LINES:]))]
    more = f"All of it: `recourse streams history {stream.name} --plot history.html`"
    return {"timeline": dg.MetadataValue.md("\n".join([*lines, "", more]))}


def _line(mark: Mark) -> str:
    words = " ".join(mark.text.split())[:_CHARACTERS]
    for sign in "\\|`<>[]*_":
        words = words.replace(sign, f"\\{sign}")
    return f"| {instant_words(mark.at)} | {words} |"
