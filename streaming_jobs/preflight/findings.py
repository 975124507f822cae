"""What preflight finds, and the error that it becomes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from streaming_jobs.errors import OffsetsLost, PreflightRefused, TableAwaited


@dataclass(frozen=True)
class Finding:
    """One problem that preflight has found, and the next step."""

    severity: Literal["refuse", "lost", "await", "warn"]
    found: str
    next_step: str


def enforce(findings: list[Finding]) -> list[str]:
    """Raise PreflightRefused, OffsetsLost or TableAwaited for findings that forbid a start; return the warnings."""
    blocking = [f for f in findings if f.severity != "warn"]
    if blocking:
        kinds = {f.severity for f in blocking}
        error = OffsetsLost if kinds == {"lost"} else TableAwaited if kinds == {"await"} else PreflightRefused
        steps = list(dict.fromkeys(f.next_step for f in blocking))
        raise error("; ".join(f.found for f in blocking), "; or ".join(steps))
    return [f"{f.found}: {f.next_step}" for f in findings]
