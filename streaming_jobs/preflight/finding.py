"""What preflight finds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Finding:
    """One problem that preflight has found, and the next step."""

    severity: Literal["refuse", "lost", "warn"]
    found: str
    next_step: str
