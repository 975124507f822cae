"""The checks of a suite that are no expectations on rows, evaluated one by one."""

from __future__ import annotations

from dataclasses import dataclass

from quality.results import error_outcome
from quality.slices import Slice
from quality.suite_set import Output
from quality.suites import Suite
from quality.validation import Outcome
from streaming_jobs.settings import Settings
from streaming_jobs.topology import Topology


@dataclass(frozen=True)
class TableLook:
    """What a table check is given: the table at a fixed version, and its surroundings."""

    settings: Settings
    topology: Topology
    output: Output
    chosen: Slice
    started_at: float


def outcomes_of_checks(suite: Suite, look: TableLook) -> list[Outcome]:
    """The outcome of each check; one that raises an exception has not passed and hides no other."""
    outcomes = []
    for check in suite.checks:
        try:
            outcomes.append(check.look(look))
        except Exception as error:  # noqa: BLE001 - of a user's check: its outcome says so
            outcomes.append(error_outcome(check.name, type(check).__name__, error))
    return outcomes
