"""Whether the number of new rows, or the growth of a column's sum, is usual.

Two ways to look at it:

    UsualRows()                             rows per hour since the last validation, against earlier validations
    UsualRows(time="at", window="1 hour")   rows per hour of the column `at`, against the hours before in the table

Only numbers that passed are what a later number is compared with, so an outage stays red until rows come as usual. A
change that is meant to last is declared: `since="2026-11-24T09:00Z"` leaves out everything before that time.

With `time`, the newest window with rows is still being filled: the one before it is judged. Windows without rows
between two others count as 0. Seasons are not known: if nights are quiet, a night is compared with days too.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import pairwise
from typing import Any

from quality.table_checks.base import Check, CheckedTable, checked_column, checked_number, quoted, seconds_of
from quality.table_checks.freshness import span
from quality.table_checks.statistics import usual
from quality.validation import CheckOutcome, Past, Severity
from streaming_jobs.errors import UsageError

_TIMES = ("timestamp", "timestamp_ntz", "date")
_NUMBERS = ("byte", "short", "integer", "long", "float", "double")
_SHORTEST = 1.0
"""Seconds between two validations below which a rate says nothing."""
_HOUR = 3600.0


@dataclass(frozen=True, kw_only=True)
class _Against(Check):
    """The options and the judgement that rows and totals share."""

    time: str | None = None
    window: str = "1 hour"
    threshold: float = 5.0
    tolerance: float = 0.1
    at_least: int = 8
    at_most: int = 60
    since: str | None = None
    severity: Severity = "critical"

    def _validate(self) -> None:
        if self.time is not None:
            checked_column(self.kind, "time", self.time)
        seconds_of(self.kind, "window", self.window)
        checked_number(self.kind, "threshold", self.threshold, least=0, above=True)
        checked_number(self.kind, "tolerance", self.tolerance, least=0)
        checked_number(self.kind, "at_least", self.at_least, least=2)
        checked_number(self.kind, "at_most", self.at_most, least=self.at_least)
        self._begin()

    def _begin(self) -> float:
        """The time from which on numbers are compared, in seconds since 1970."""
        if self.since is None:
            return -math.inf
        try:
            begin = datetime.fromisoformat(self.since)
        except (TypeError, ValueError):
            raise UsageError(
                f"{self.kind}: since is {self.since!r}, not a time", "write since='2026-11-24T09:00Z'"
            ) from None
        return (begin if begin.tzinfo else begin.replace(tzinfo=UTC)).timestamp()

    def _passed(self, checked: CheckedTable, limit: int) -> list[tuple[float, float]]:
        """Time and number of the newest outcomes that passed, newest first."""
        begin, past = self._begin(), checked.past.passed(self.name, limit)
        return [(each.at, each.number) for each in past if each.number is not None and each.at >= begin]

    def _judged(self, number: float, past: Sequence[float], what: str, plotted: float) -> CheckOutcome:
        """The outcome for a number among earlier ones, newest first."""
        history = [each for each in past if math.isfinite(each)][: self.at_most]
        said = f"{what}: {_short(number)}"
        if not math.isfinite(number):
            return self.outcome(passed=False, observed=f"{said}, which is no number")
        if len(history) < self.at_least:
            text = f"{said}; not judged yet: {len(history)} earlier of {self.at_least} that are needed"
            return self.outcome(passed=True, observed=text, number=plotted)
        known = usual(history)
        score = known.score(number, self.tolerance)
        text = (
            f"{said}, usually {_short(known.median)} (median of {known.points}); "
            f"{'all of them equal' if math.isinf(score) else f'{score:.1f} deviations away'}, "
            f"{self.threshold:g} are allowed"
        )
        if (passed := score <= self.threshold) is False:
            now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%MZ")
            text += f"; if that is what is usual from now on, declare it: since='{now}'"
        return self.outcome(passed=passed, observed=text, number=plotted)

    def _by_window(self, checked: CheckedTable, time: str, value: str, noun: str) -> CheckOutcome:
        """Judge the newest complete window; `value` is an aggregate in SQL."""
        if (kind := checked.column(time)) not in _TIMES:
            raise UsageError(f"column {time} has the type {kind}, which is no time", "name a timestamp or a date")
        seconds = seconds_of(self.kind, "window", self.window)
        # The epoch of a date_part is a float: exact to the microsecond for the years that tables have.
        number = f"floor(date_part('epoch', {quoted(time)}) / {seconds!r})"
        rows = checked.sql(
            f'SELECT w, n FROM (SELECT {number} AS w, {value} AS n FROM "t" GROUP BY {number}) AS t '
            f"WHERE w IS NOT NULL AND w * {seconds!r} <= {checked.now!r} ORDER BY w DESC LIMIT {self.at_most + 2}"
        )
        counts = {int(row["w"]): float(row["n"] or 0) for row in rows}
        if len(counts) < 2:
            return self.outcome(passed=True, observed=f"not judged yet: no complete window of {self.window} in {time}")
        newest, oldest = max(counts), min(counts)
        if self.since is not None:
            oldest = max(oldest, min(newest - 1, math.ceil(self._begin() / seconds)))
        first = max(oldest, newest - 1 - self.at_most)
        series = [counts.get(window, 0.0) for window in range(newest - 1, first - 1, -1)]
        begin = datetime.fromtimestamp((newest - 1) * seconds, UTC)
        what = f"{noun} in the {self.window} from {begin:%Y-%m-%d %H:%M:%S} UTC"
        return self._judged(series[0], series[1:], what, series[0])


@dataclass(frozen=True)
class UsualRows(_Against):
    """The number of new rows is usual; the module's text describes both methods.

    A number is unusual if it is more than `threshold` deviations (median and MAD) and more than the part `tolerance`
    away from the median of the `at_most` numbers before it. With fewer than `at_least` of them it passes and says so.
    Without `time`, rows are those that the ledger says were written: of an upsert also the updated ones.
    """

    kind = "usual_rows"

    @property
    def name(self) -> str:
        """One per column of time."""
        return self.kind if self.time is None else f"{self.kind} by {self.time}"

    def _judge(self, checked: CheckedTable) -> CheckOutcome:
        if self.time is not None:
            return self._by_window(checked, self.time, "count(*)", "rows")
        if checked.since is None:
            return self.outcome(passed=True, observed="not judged yet: there was no earlier validation")
        past = checked.past.newest(self.name, self.at_most)
        began = _validated_at(checked, checked.since, past)
        if began is None or checked.now - began < _SHORTEST:
            return self.outcome(passed=True, observed="not judged: the last validation was only just now")
        if any(c.version > checked.since and e.kind == "publish" for c, e in checked.entries):
            return self.outcome(passed=True, observed="not judged: a recovery has replaced rows since then")
        rate = _new_rows(checked, checked.since) * _HOUR / (checked.now - began)
        what = f"rows per hour in the {span(checked.now - began)} since the last validation"
        return self._judged(rate, [number for _, number in self._passed(checked, self.at_most)], what, rate)


@dataclass(frozen=True)
class UsualTotal(_Against):
    """The sum of `column` per window is as usual; without `time`, its growth per hour since the last validation.

    Growth is that of the whole table's sum, so it holds for upserts too; the sum is the number that is plotted. Nulls
    count as 0; a sum that is no number (NaN, infinity) fails.
    """

    column: str

    kind = "usual_total"

    @property
    def name(self) -> str:
        """One per column."""
        return f"{self.kind} of {self.column}" + (f" by {self.time}" if self.time else "")

    def _validate(self) -> None:
        super()._validate()
        checked_column(self.kind, "column", self.column)

    def _judge(self, checked: CheckedTable) -> CheckOutcome:
        kind = checked.column(self.column)
        if kind not in _NUMBERS and not kind.startswith("decimal"):
            raise UsageError(f"column {self.column} has the type {kind}, which has no sum", "name a column of numbers")
        # As double: a sum of long columns would overflow without a word.
        value = f"sum(CAST({quoted(self.column)} AS DOUBLE))"
        if self.time is not None:
            return self._by_window(checked, self.time, value, f"sum of {self.column}")
        total = float(_first(checked.sql(f'SELECT {value} AS n FROM "t"')) or 0.0)
        last = [(each.at, each.number) for each in checked.past.newest(self.name, 1) if each.number is not None]
        if not last or checked.now - last[0][0] < _SHORTEST:
            text = f"the sum of {self.column} is {_short(total)}; not judged yet: there was no earlier validation"
            passed = math.isfinite(total)
            return self.outcome(passed=passed, observed=text, number=total if passed else None)
        usual_growth = _growth(self._passed(checked, self.at_most + 1))
        growth = _growth([(checked.now, total), *last])
        return self._judged(growth[0], usual_growth, f"growth per hour of the sum of {self.column}", total)


def _growth(points: Sequence[tuple[float, float]]) -> list[float]:
    """The growth per hour between neighbours of times and sums, newest first."""
    return [
        (value - before) * _HOUR / (at - then)
        for (at, value), (then, before) in pairwise(points)
        if at - then >= _SHORTEST
    ]


def _new_rows(checked: CheckedTable, since: int) -> int:
    """The rows that batches wrote after a version; raises UsageError if not all of them are known."""
    in_log = min((commit.version for commit in checked.commits), default=checked.version + 1)
    known = min((commit.version for commit, _ in checked.entries if commit.version >= 0), default=in_log)
    if min(in_log, known) > since + 1:
        raise UsageError(
            f"the rows since version {since} cannot be counted: log and ledger go back to version {min(in_log, known)}",
            "validate more often, or keep more: table.log_retention, table.log_versions, table.ledger_retention",
        )
    return sum(checked.written(entry) for commit, entry in checked.batches if commit.version > since)


def _validated_at(checked: CheckedTable, since: int, past: Sequence[Past]) -> float | None:
    """The time, in seconds since 1970, of the validation that looked at version `since`; None if it is not known.

    Later outcomes may be of runs on a part of the table, which do not count as validated: the time is that of the
    newest outcome before the next commit. Without one, the time of the version itself.
    """
    known = [c for c in (*checked.commits, *(commit for commit, _ in checked.entries)) if c.version >= 0]
    after = min((commit.at / 1000 for commit in known if commit.version > since), default=checked.now)
    before = max((commit.at / 1000 for commit in known if commit.version <= since), default=None)
    return next((each.at for each in past if each.at <= after), before)


def _first(rows: list[dict[str, Any]]) -> Any:
    return rows[0]["n"]


def _short(number: float) -> str:
    if not math.isfinite(number):
        return str(number)
    return f"{number:,.0f}" if abs(number) >= 100 or number == int(number) else f"{number:,.2f}"
