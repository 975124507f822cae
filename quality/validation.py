"""The result of a suite's run: one outcome per expectation and table check, on a sample of one version of a table."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

Severity = Literal["critical", "warning", "info"]
Engine = Literal["pandas", "spark", "none"]
"""What evaluated the expectations; `none`: there were none, or no rows."""

MOST_ROWS = 20
"""Failing rows that an outcome shows, at most."""


def result_word(severity: str, *, passed: bool) -> str:
    """A result in a word: `ok`, or what its severity makes of a failure: `failed`, `warning`, `info`."""
    return "ok" if passed else {"critical": "failed"}.get(severity, severity)


def worst_word(words: Iterable[str]) -> str:
    """The result of several outcomes, by their words: `failed`, else `warning` if one did not pass, else `ok`."""
    found = set(words)
    return "failed" if "failed" in found else "ok" if found <= {"ok"} else "warning"


@dataclass(frozen=True)
class Past:
    """An earlier outcome of a check: its number, its time in seconds since 1970, and its text."""

    number: float | None
    at: float
    observed: str = ""


@dataclass(frozen=True)
class CheckOutcome:
    """The outcome of one expectation.

    `expectation` names it within its suite; `kind` is Great Expectations' type, or the word of a table check. `rows` is
    the number of rows that were looked at, `failing` of those that failed; None where it is not about rows. `sample`
    has failing rows, `MOST_ROWS` at most, the key's columns first. `error`: why it could not be evaluated; it has not
    passed then. `number` is what was observed, as far as it is a number.
    """

    expectation: str
    kind: str
    passed: bool
    severity: Severity = "critical"
    observed: str = ""
    number: float | None = None
    rows: int | None = None
    failing: int | None = None
    sample: tuple[Mapping[str, Any], ...] = ()
    error: str = ""

    @property
    def word(self) -> str:
        """Its result: `ok`, `failed`, `warning` or `info`."""
        return result_word(self.severity, passed=self.passed)


@dataclass(frozen=True)
class FirstFailing:
    """The batch that wrote the first failing row, the code that wrote it, and the command that goes before it.

    `command` is empty if only warnings failed, which do not justify a recovery.
    """

    expectation: str
    generation: int
    batch: int
    code: str
    command: str


@dataclass(frozen=True)
class Validation:
    """One run of a suite; times in seconds, `started_at` since 1970.

    `version` is the table's version that was looked at; `since` the version after which its rows came, None for all.
    `files` of the `files_in_table` files were read, with `rows` rows; `slice` describes the sample. `narrowed`: only a
    partition or a range of times was read, so the next run begins where the run before began. `code` is that of the
    newest batch in the version.
    """

    id: str
    suite: str
    table: str
    stream: str
    table_id: str
    version: int
    since: int | None
    slice: str
    files: int
    files_in_table: int
    rows: int
    engine: Engine
    started_at: float
    seconds: float
    outcomes: tuple[CheckOutcome, ...]
    first_failing: FirstFailing | None = None
    docs: str = ""
    """The path of the Data Docs page; empty without one."""
    first_failing_note: str = ""
    """Why rows failed without a known first failing batch, or how certain that batch is."""
    narrowed: bool = False
    code: str = ""

    @property
    def passed(self) -> bool:
        """True if every expectation passed."""
        return all(outcome.passed for outcome in self.outcomes)

    @property
    def files_read(self) -> str:
        """How many files were read. New rows may be in more files than the table has after a compaction."""
        if self.files > self.files_in_table:
            return f"{self.files:,} files, of which the table has made {self.files_in_table:,} since"
        return f"{self.files:,} of {self.files_in_table:,} files"

    @property
    def word(self) -> str:
        """The result of the run: `ok`, `warning` or `failed`."""
        return worst_word(outcome.word for outcome in self.outcomes)

    @property
    def broken(self) -> bool:
        """True if a critical expectation failed."""
        return any(not outcome.passed and outcome.severity == "critical" for outcome in self.outcomes)
