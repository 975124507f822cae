"""What code locations of tests have in place of the shipped one: the fake driver's command line, quick sensors."""

from __future__ import annotations

import sys
from collections.abc import Sequence

import dagster as dg


def fake_command(arguments: Sequence[str]) -> list[str]:
    """The fake driver's command line."""
    return [sys.executable, "-m", "tests.dagster.fakes.driver", *arguments]


def quickened(defs: dg.Definitions) -> dg.Definitions:
    """The definitions, whose sensors are ticked each time that Dagster's daemon looks."""
    for sensor in defs.sensors or ():
        sensor._min_interval = 1  # type: ignore[union-attr]
    return defs
