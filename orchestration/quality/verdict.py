"""A suite's validation as Dagster shows it: passed or not, in words, failing rows as tables, numbers as plots."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

import dagster as dg

from orchestration.recoveries.launchpad import LOCATION, link_to_plan
from quality.validation import MOST_ROWS, Outcome, Validation
from streaming_jobs.errors import RecourseError

ERROR, WARN = dg.AssetCheckSeverity.ERROR, dg.AssetCheckSeverity.WARN
MOST_TABLES = 10
"""Failing expectations whose rows are shown: an event of Dagster is stored whole."""
MOST_NAMED = 5
"""Failing expectations that the description names."""
RUN = "run"
"""Metadata with the run that an outcome is of."""
COMMAND = "command to put it right"
"""Metadata with the command that plans the repair."""
_MOST_COLUMNS, _LONGEST_CELL = 10, 40
"""What is wider makes the whole page wider, and its text runs out of the window."""
_LONGEST_TEXT = 2000
_EXACT = 2**53
"""JavaScript, so the UI, rounds integers above it."""


@dataclass(frozen=True)
class SuiteVerdict:
    """The outcome of a check."""

    passed: bool
    severity: dg.AssetCheckSeverity
    text: str
    metadata: Mapping[str, dg.MetadataValue] = field(default_factory=dict)

    def result(self, key: dg.AssetCheckKey, run: str) -> dg.AssetCheckResult:
        """The outcome as a step returns it; it names the run that it is of."""
        return dg.AssetCheckResult(asset_key=key.asset_key, check_name=key.name, **self._fields(run))

    def evaluation(self, key: dg.AssetCheckKey, run: str) -> dg.AssetCheckEvaluation:
        """The outcome as it is stored without a run; it names the run that it is of."""
        return dg.AssetCheckEvaluation(asset_key=key.asset_key, check_name=key.name, **self._fields(run))

    def _fields(self, run: str) -> dict[str, Any]:
        return {
            "passed": self.passed,
            "severity": self.severity,
            "description": self.text,
            "metadata": {**self.metadata, RUN: dg.MetadataValue.dagster_run(run)},
        }


def of_validation(validation: Validation, *, location: str = LOCATION, show_rows: bool = True) -> SuiteVerdict:
    """The verdict of a suite's run; only warnings failed: a warning, anything else that failed: an error.

    `location`: the code location with the job `recover`. Without `show_rows`, failing rows are left out: Dagster keeps
    events for long, and its UI shows them to everybody.
    """
    failed = [outcome for outcome in validation.outcomes if not outcome.passed]
    severity = WARN if failed and all(_only_warns(outcome) for outcome in failed) else ERROR
    return SuiteVerdict(
        validation.passed, severity, _in_words(validation, failed), _metadata(validation, failed, location, show_rows)
    )


def of_exception(suite: str, error: BaseException) -> SuiteVerdict:
    """The verdict of a run that raised: failed, never passed, because nothing is known of the table."""
    text = str(error) if isinstance(error, RecourseError) else f"{type(error).__name__}: {error}"
    return SuiteVerdict(
        passed=False,
        severity=ERROR,
        text=f"Suite {suite} could not be run: {_short(text, _LONGEST_TEXT)}",
        metadata={"error": dg.MetadataValue.text(_short(text, _LONGEST_TEXT))},
    )


def _only_warns(outcome: Outcome) -> bool:
    """An expectation that could not be evaluated is an error, whatever its severity."""
    return outcome.severity != "critical" and not outcome.error


def _in_words(validation: Validation, failed: Sequence[Outcome]) -> str:
    count, where = len(validation.outcomes), f"{_rows(validation.rows)}: {validation.slice}"
    if not failed:
        # A suite sees its slice: wrong rows that it has found before may still be in the table.
        earlier = "" if validation.since is None else " Rows that came before were not looked at again."
        return f"{count} of {count} expectations passed on {where}.{earlier}"
    named = [_failure(outcome) for outcome in _worst_first(failed)[:MOST_NAMED]]
    further = len(failed) - len(named)
    tail = f"; and {further} more" if further else ""
    return f"{len(failed)} of {count} expectations failed on {where}. {'; '.join(named)}{tail}."


def _failure(outcome: Outcome) -> str:
    if outcome.error:
        return f"{outcome.expectation} could not be evaluated: {_short(outcome.error, 300)}"
    if outcome.failing is not None:
        words = f"{outcome.failing:,} of {_rows(outcome.rows or 0)}"
    else:
        words = f"observed {_short(outcome.observed, 100)}" if outcome.observed else "failed"
    kind = "" if outcome.severity == "critical" else f" ({outcome.severity})"
    return f"{outcome.expectation}{kind}: {words}"


def _worst_first(outcomes: Iterable[Outcome]) -> list[Outcome]:
    """Errors and critical ones first, then by the number of failing rows."""
    return sorted(outcomes, key=lambda outcome: (_only_warns(outcome), -(outcome.failing or 0)))


def _metadata(
    validation: Validation, failed: Sequence[Outcome], location: str, show_rows: bool
) -> dict[str, dg.MetadataValue]:
    """The page sorts it by name, so the names are such that what to do stands above the tables of failing rows."""
    with_rows = [outcome for outcome in _worst_first(failed) if outcome.sample and show_rows]
    tables = {
        f"failing rows: {outcome.expectation}": table(outcome.sample[:MOST_ROWS]) for outcome in with_rows[:MOST_TABLES]
    }
    found: dict[str, dg.MetadataValue] = {}
    if validation.first_failing is not None:
        first = validation.first_failing
        found["batch of the first failing row"] = dg.MetadataValue.text(
            f"batch {first.batch} of generation {first.generation}, by {first.expectation}"
        )
        found["code that wrote it"] = dg.MetadataValue.text(first.code)
        if first.command:
            found[COMMAND] = dg.MetadataValue.text(first.command)
            path = link_to_plan(location, validation.stream, first.expectation)
            found["by one click"] = dg.MetadataValue.md(
                f"[plan the repair]({path}) opens the Launchpad, filled in; nothing happens before *Launch Run*"
            )
    found |= tables
    if len(with_rows) > MOST_TABLES:
        found["further failing"] = dg.MetadataValue.text(", ".join(o.expectation for o in with_rows[MOST_TABLES:]))
    if validation.docs:
        found["data docs"] = dg.MetadataValue.path(validation.docs)
    since = "" if validation.since is None else f", rows that came after version {validation.since}"
    found |= {
        "stream": dg.MetadataValue.text(validation.stream),
        "slice": dg.MetadataValue.text(validation.slice),
        "version": dg.MetadataValue.text(f"{validation.version}{since}"),
        "files": dg.MetadataValue.text(validation.files_read),
        "engine": dg.MetadataValue.text(validation.engine),
        "expectations failed": dg.MetadataValue.int(len(failed)),
        "rows": dg.MetadataValue.int(validation.rows),
        "seconds": dg.MetadataValue.float(round(validation.seconds, 3)),
    }
    for outcome in validation.outcomes:
        if outcome.number is not None and math.isfinite(outcome.number):
            found[f"observed: {outcome.expectation}"] = dg.MetadataValue.float(float(outcome.number))
        elif outcome.failing is not None:  # one plot for each expectation
            found[f"failing: {outcome.expectation}"] = dg.MetadataValue.int(outcome.failing)
    return found


def table(rows: Sequence[Mapping[str, Any]]) -> dg.TableMetadataValue:
    """Rows as a table: the first columns, a null as `null` (the page would show nothing), other values as text."""
    columns = list(dict.fromkeys(name for row in rows for name in row))[:_MOST_COLUMNS]
    records = [{name: _cell(row.get(name)) for name in columns} for row in rows]
    return dg.MetadataValue.table(
        [dg.TableRecord(record) for record in records],
        dg.TableSchema([dg.TableColumn(name, _type(record[name] for record in records)) for name in columns]),
    )


def _cell(value: Any) -> str | int | float | bool:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return value
    if isinstance(value, int) and abs(value) <= _EXACT:
        return int(value)
    if isinstance(value, float) and math.isfinite(value):
        return float(value)
    text = value.isoformat(sep=" ") if isinstance(value, datetime) else str(value)
    return _short(text, _LONGEST_CELL)


def _type(cells: Iterable[object]) -> str:
    kinds = {type(cell).__name__ for cell in cells if cell != "null"}
    return kinds.pop() if len(kinds) == 1 else "str"


def _rows(count: int) -> str:
    return f"{count:,} row" if count == 1 else f"{count:,} rows"


def _short(text: str, longest: int) -> str:
    return text if len(text) <= longest else f"{text[: longest - 3]}..."
