"""How old the newest rows of a table are, and how far its stream is behind its topics."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta

from quality.table_checks.base import Check, CheckedTable, checked_column, checked_number, quoted, seconds_of
from quality.validation import CheckOutcome, Severity
from streaming_jobs.errors import UsageError
from streaming_jobs.state.status import read_status
from streaming_jobs.text import commands
from streaming_jobs.text.durations import format_duration
from streaming_jobs.text.spelling import counted

_TIMES = ("timestamp", "timestamp_ntz", "date")


@dataclass(frozen=True)
class Freshness(Check):
    """The newest commit with rows is at most `within` old; with `column`, the newest value of that column is.

    Times without a zone are UTC; a date is its midnight. Values after now do not count, and are named.
    """

    within: str
    column: str | None = None
    severity: Severity = "critical"

    kind = "freshness"

    @property
    def name(self) -> str:
        """One per column."""
        return self.kind if self.column is None else f"{self.kind} of {self.column}"

    def _validate(self) -> None:
        seconds_of(self.kind, "within", self.within)
        if self.column is not None:
            checked_column(self.kind, "column", self.column)

    def _judge(self, checked: CheckedTable) -> CheckOutcome:
        newest, note = self._of_commit(checked) if self.column is None else self._of_column(checked, self.column)
        what = "commit with rows" if self.column is None else f"value of {self.column}"
        if newest is None:
            return self.outcome(passed=False, observed=f"there is no {what}{note}")
        age = max(checked.now - newest, 0.0)
        text = f"the newest {what} is {span(age)} old, at most {self.within} is allowed{note}"
        return self.outcome(passed=age <= seconds_of(self.kind, "within", self.within), observed=text, number=age)

    @staticmethod
    def _of_commit(checked: CheckedTable) -> tuple[float | None, str]:
        for commit in checked.commits:
            entry = commit.entry
            with_rows = commit.changes_data if entry is None or entry.kind != "batch" else checked.written(entry) > 0
            if with_rows:
                return commit.at / 1000, ""
        # The log is shortened after an hour; the ledger beside the state has days.
        older = (commit.at / 1000 for commit, entry in checked.batches if checked.written(entry) > 0)
        return next(older, None), ""

    def _of_column(self, checked: CheckedTable, column: str) -> tuple[float | None, str]:
        if (kind := checked.column(column)) not in _TIMES:
            raise UsageError(f"column {column} has the type {kind}, which is no time", "name a timestamp or a date")
        name, now = quoted(column), f"to_timestamp_micros({round(checked.now * 1e6)})"
        [row] = checked.sql(
            f"SELECT max({name}) FILTER (WHERE {name} <= {now}) AS newest, "
            f'count(*) FILTER (WHERE {name} > {now}) AS ahead FROM "t"'
        )
        note = f"; {counted(row['ahead'], 'value')} after now not counted" if row["ahead"] else ""
        return (None if row["newest"] is None else seconds_since_1970(row["newest"])), note


@dataclass(frozen=True)
class Lag(Check):
    """The stream is at most so many records, and so many seconds, behind its topics, by its status file.

    Seconds are counted from now, so that they grow while nothing runs. Records are those of the last look at the
    topics; if that look is older than `dagster.stale_after`, records cannot be evaluated.
    """

    records: int | None = None
    seconds: float | None = None
    severity: Severity = "critical"

    kind = "lag"

    def _validate(self) -> None:
        if self.records is None and self.seconds is None:
            raise UsageError("lag: it has no bound", "write Lag(records=...), Lag(seconds=...) or both")
        for option, value in (("records", self.records), ("seconds", self.seconds)):
            if value is not None:
                checked_number(self.kind, option, value, least=0)

    def _judge(self, checked: CheckedTable) -> CheckOutcome:
        name = checked.stream.name
        status = read_status(checked.settings, name)
        if status is None or status.lag_at is None:
            raise UsageError(f"stream {name} has not seen the end of its topics yet", commands.status(name))
        age = max(checked.now - status.lag_at, 0.0)
        behind, records = age + (status.lag_s or 0.0), status.lag_records or 0
        if self.records is not None and age > checked.settings.dagster.stale_after.total_seconds():
            raise UsageError(
                f"stream {name} last saw the end of its topics {span(age)} ago: its lag in records is not known",
                commands.status(name),
            )
        wrong = [
            text
            for bad, text in (
                (self.records is not None and records > self.records, f"more than {self.records or 0:,} records"),
                (self.seconds is not None and behind > self.seconds, f"more than {self.seconds or 0:g} seconds"),
            )
            if bad
        ]
        text = f"{counted(records, 'record')} and up to {span(behind)} behind" + (
            f": {' and '.join(wrong)}" * bool(wrong)
        )
        return self.outcome(passed=not wrong, observed=text, number=behind if self.records is None else float(records))


def seconds_since_1970(value: date) -> float:
    """A time or a date in seconds; without a zone it is UTC."""
    if not isinstance(value, datetime):
        return datetime(value.year, value.month, value.day, tzinfo=UTC).timestamp()
    return (value if value.tzinfo else value.replace(tzinfo=UTC)).timestamp()


def span(seconds: float) -> str:
    """A time as text, to a readable precision."""
    return format_duration(timedelta(seconds=round(seconds) if seconds >= 1 else round(seconds, 3)))
