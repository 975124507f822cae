"""The checks of a suite that are no expectations on rows, evaluated one by one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from quality.history import history
from quality.results import error_outcome
from quality.suites import Suite
from quality.validation import Outcome
from streaming_jobs.declared_table import DeclaredTable
from streaming_jobs.settings import Settings
from streaming_jobs.stream import Stream

if TYPE_CHECKING:
    from deltalake import DeltaTable


@dataclass(frozen=True)
class PastNumber:
    """An earlier outcome of a check: its number, its time in seconds since 1970, and its text."""

    number: float | None
    at: float
    observed: str


@dataclass(frozen=True)
class SuitePast:
    """The history of a suite's outcomes, as its checks ask for it."""

    settings: Settings
    suite: str

    def newest(self, expectation: str, limit: int) -> Sequence[PastNumber]:
        """The newest outcomes of one check that had no error, newest first."""
        past = (each for each in history(self.settings, self.suite, expectation) if not each.error)
        return [PastNumber(each.number, each.started_at.timestamp(), each.observed) for each in past][:limit]


@dataclass(frozen=True)
class TableLook:
    """What a table check is given: the table at a fixed version, and what is around it.

    `since` is the version of the suite's last run, None if there was none; `now` is in seconds since 1970.
    """

    settings: Settings
    stream: Stream
    declared: DeclaredTable
    table: DeltaTable
    version: int
    since: int | None
    now: float
    past: SuitePast
    key: Sequence[str]


def outcomes_of_checks(suite: Suite, look: TableLook) -> list[Outcome]:
    """The outcome of each check; one that raises an exception has not passed and hides no other."""
    outcomes = []
    for check in suite.checks:
        try:
            outcomes.append(check.look(look))
        except Exception as error:  # noqa: BLE001 - of a user's check: its outcome says so
            outcomes.append(error_outcome(check.name, type(check).__name__, error))
    return outcomes
