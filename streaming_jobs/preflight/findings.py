"""What preflight finds, and the error that it becomes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from streaming_jobs.errors import OffsetsLost, PreflightRefused, RecourseError, TableAwaited, TopicUnknown


@dataclass(frozen=True)
class Finding:
    """One problem that preflight has found, and the next step.

    `await` and `unknown` may pass: a table that does not exist yet, a topic that the broker does not know at present.
    """

    severity: Literal["refuse", "lost", "await", "unknown", "warn"]
    found: str
    next_step: str


def enforce(findings: list[Finding]) -> list[str]:
    """Raise the error for findings that forbid a start; return the warnings."""
    blocking = [f for f in findings if f.severity != "warn"]
    if blocking:
        steps = list(dict.fromkeys(f.next_step for f in blocking))
        raise _kind({f.severity for f in blocking})("; ".join(f.found for f in blocking), "; or ".join(steps))
    return [f"{f.found}: {f.next_step}" for f in findings]


def _kind(severities: set[str]) -> type[RecourseError]:
    if severities == {"lost"}:
        return OffsetsLost
    if severities <= {"await", "unknown"}:
        return TopicUnknown if "unknown" in severities else TableAwaited
    return PreflightRefused
