"""The reason of a session's failure, from its streams' status files or else from the end of its driver's log."""

from __future__ import annotations

import re
from collections.abc import Iterable

from streaming_jobs.state.status import Status

_FIELD = re.compile(r'(\w+)=("(?:[^"\\]|\\.)*"|\S*)')
_EXCEPTION = re.compile(r"[A-Za-z_][\w.]*(?:Error|Exception|Exit|Interrupt)(?::.*)?")
LONGEST = 500
"""Characters of one line."""


def failure_text(status: Status) -> str:
    """One failed stream in words, with the next step."""
    error = status.error or {}
    text = f"stream {status.stream} failed: {error.get('code', '')} {error.get('found', 'no reason was written')}"
    return f"{text}\n  next: {error['next']}" if error.get("next") else text


def of_streams(statuses: Iterable[Status | None]) -> list[str]:
    """The reason of each failed stream, with its next step."""
    return [failure_text(status) for status in statuses if status and status.state == "failed"]


def of_log(text: str) -> str:
    """The driver's own reason in its log: its line `session failed`, or its last exception; empty if there is none."""
    for line in reversed(text.split("\n")):
        fields = {key: _unquoted(value) for key, value in _FIELD.findall(line)}
        if fields.get("event") == "session failed":
            reason = f"{fields.get('code', '')} {fields.get('found', '')}".strip()
            return f"{reason}\n  next: {fields['next']}" if fields.get("next") else reason
        if _EXCEPTION.fullmatch(line):
            return line
    return ""


def one_line(text: str) -> str:
    """The first sentence of the reasons without line breaks, cut at `LONGEST`."""
    line = " ".join(text.split())
    return line if len(line) <= LONGEST else f"{line[: LONGEST - 1]}…"


def _unquoted(value: str) -> str:
    if not value.startswith('"'):
        return value
    return re.sub(r"\\(.)", lambda match: "\n" if match[1] == "n" else match[1], value[1:-1])
