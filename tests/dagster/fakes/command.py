"""The command line of the fake driver."""

from __future__ import annotations

import sys
from collections.abc import Sequence


def fake_command(arguments: Sequence[str]) -> list[str]:
    """The fake driver's command line."""
    return [sys.executable, "-m", "tests.dagster.fakes.driver", *arguments]
