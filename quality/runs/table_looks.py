"""The checks of a suite that are no expectations on rows, evaluated one by one on one version of the table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from quality.history import newest_numbers
from quality.runs.results import error_outcome
from quality.suites import Suite
from quality.table_checks.base import CheckedTable, Past
from quality.validation import Outcome
from streaming_jobs.settings import Settings


@dataclass(frozen=True)
class SuitePast:
    """The history of a suite's outcomes, as its checks ask for it."""

    settings: Settings
    suite: str

    def newest(self, expectation: str, limit: int) -> Sequence[Past]:
        """The newest outcomes of one check that had no error, newest first."""
        return self._read(expectation, limit)

    def passed(self, expectation: str, limit: int) -> Sequence[Past]:
        """The newest outcomes of one check that passed, newest first."""
        return self._read(expectation, limit, passed=True)

    def _read(self, expectation: str, limit: int, *, passed: bool | None = None) -> Sequence[Past]:
        past = newest_numbers(self.settings, self.suite, expectation, limit, passed=passed)
        return [Past(each.number, each.started_at.timestamp(), each.observed) for each in past]


def outcomes_of_checks(suite: Suite, checked: CheckedTable) -> list[Outcome]:
    """The outcome of each check; one that raises an exception has not passed and hides no other."""
    outcomes = []
    for check in suite.checks:
        try:
            outcomes.append(check.look(checked))
        except Exception as error:  # noqa: BLE001 - of a user's check: its outcome says so
            outcomes.append(error_outcome(check.name, type(check).__name__, error))
    return outcomes
